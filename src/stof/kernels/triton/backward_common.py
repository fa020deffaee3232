"""What the backward kernels share: gradients of one tile, numbers of each query row, sums of split row blocks.

    delta = rowsum(d_out * out) - d_lse
    p = exp(s - lse); d_s = p * (d_out v^T - delta)
    d_v = p^T d_out; d_q = scale * d_s k; d_k = scale * d_s^T q

dQ is computed over the forward layout (`dq_kernel.py`), dK and dV over the transposed one (`dkv_kernel.py`), and so is
the gradient of a bias (`bias_gradient_kernel.py`). Each kernel keeps the rows of one row block in registers and goes
through the tiles of a layout, as the forward does, so nothing is added up by atomics: equal calls give equal bits.
Programs of a split row block leave partial sums in float32, which `merge_kernel` adds up in the order of the chunks.

With dropout, the weights of dV and `d_out v^T` are multiplied by `keep / (1 - p)`, where `keep` is computed anew
from the seed. delta needs no change: `out` has dropout in it.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2.
"""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton import backward_tiles
from stof.kernels.triton.dropout_mask import kept_weights
from stof.kernels.triton.softcap import softcapped
from stof.runtime.pdl import launch_next_and_wait

LOG2E = tl.constexpr(1.4426950408889634)
NAN_ROW_BLOCK = tl.constexpr(backward_tiles.NAN_ROW_BLOCK)
# Triton's cache keys hold constants of a module that are named, not fields of an object.
ROW_BLOCK, CHUNK, CHUNKS, SLOT = (tl.constexpr(field) for field in backward_tiles.ITEM)
ITEM_SIZE = tl.constexpr(len(backward_tiles.ITEM))

# What the kernels of gradients read: pointers to q [B, H, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv],
# d_out [B, H, Sq, Dv], the output of `row_stats_kernel`, whose parts have `stat_size` values, and a bias; both values
# of a seed.
Inputs = namedtuple("Inputs", "q k v d_out stats stat_size bias seed")
# A query head of a batch entry: pointers to its part of each tensor; its number b * H + h.
Head = namedtuple("Head", "q k v d_out lse delta share bias seed number")
# A row block of keys, which stays in registers: k [BLOCK_M, BLOCK_D], v [BLOCK_M, BLOCK_V], see `block_rows`.
KeyRows = namedtuple("KeyRows", "k v row row_ok")


@triton.jit
@no_type_check
def head_of(inputs, b, head, kv_head, problem, CONFIG: tl.constexpr):
    """Where a query head of a batch entry begins."""
    b64, head64, kv_head64 = b.to(tl.int64), head.to(tl.int64), kv_head.to(tl.int64)
    stats = inputs.stats + (b64 * problem.heads + head) * problem.q_len
    return Head(
        q=inputs.q + (b64 * problem.q_b + head64 * problem.q_h) * CONFIG.unit,
        k=inputs.k + (b64 * problem.k_b + kv_head64 * problem.k_h) * CONFIG.unit,
        v=inputs.v + (b64 * problem.v_b + kv_head64 * problem.v_h) * CONFIG.unit,
        d_out=inputs.d_out + (b64 * problem.out_b + head64 * problem.out_h) * CONFIG.unit,
        lse=stats,
        delta=stats + inputs.stat_size,
        share=stats + 2 * inputs.stat_size,
        bias=inputs.bias + b64 * problem.bias_b + head64 * problem.bias_h,
        seed=inputs.seed,
        number=b * problem.heads + head,
    )


@triton.jit
@no_type_check
def pattern_row_block(row_block, row_blocks, tiles, b, head, problem):
    """The number of a row block among those of all patterns, which have `row_blocks` each."""
    pattern = tl.load(tiles.pattern_of + b * problem.mask_b + head * problem.mask_h)
    return row_block + pattern * row_blocks


@triton.jit
@no_type_check
def block_rows(row_block, row_order_ptr, n_rows, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, PERMUTED: tl.constexpr):
    """Row and existence of each of a row block's rows, `[BLOCK_M]`; only the first BLOCK_R exist."""
    r = tl.arange(0, BLOCK_M)
    row = row_block * BLOCK_R + r
    row_ok = row < n_rows
    if BLOCK_M > BLOCK_R:
        row_ok = row_ok & (r < BLOCK_R)
    if PERMUTED:
        row = tl.load(row_order_ptr + row, mask=row_ok, other=0)
    return row, row_ok


@triton.jit
@no_type_check
def chunk_tiles(tiles, number, chunk, chunks):
    """Tiles of a chunk of a row block: the partial ones from `begin` to `partial_end`, the full ones to `end`."""
    first = tl.load(tiles.row_block_ptr + number)
    count = tl.load(tiles.row_block_ptr + number + 1) - first
    begin = first + chunk * count // chunks
    end = first + (chunk + 1) * count // chunks
    middle = first + tl.load(tiles.partial_count + number)
    return begin, tl.minimum(end, middle), tl.maximum(begin, middle), end


@triton.jit
@no_type_check
def add_tiles(step: tl.constexpr, sums, span, tiles, rows, head, problem, CONFIG: tl.constexpr):
    """`sums = step(sums, columns, words, rows, head, problem, PARTIAL, CONFIG)` for each tile of a chunk.

    Args:
        step: adds one tile, columns `[BLOCK_N]`, whose bitmap words are `[BLOCK_M, 4]` if it is PARTIAL.
        sums: of the tiles before.
        span: of `chunk_tiles`.
        tiles: `TileLists`.
        rows: those of the row block.
        head: of `head_of`.
    """
    begin, partial_end, full_begin, end = span
    n = tl.arange(0, CONFIG.block_n)
    if CONFIG.has_partial:
        # Columns and bitmap words are loaded one tile ahead, as in the forward: see `block_wise_kernel`.
        r = tl.minimum(tl.arange(0, CONFIG.block_m), CONFIG.block_r - 1)
        words_ptr = tiles.bitmaps + r[:, None] * 4 + tl.arange(0, 4)[None, :]
        next_columns = tl.load(tiles.columns + begin * CONFIG.block_n + n)
        next_words = tl.load(words_ptr + tl.maximum(tl.load(tiles.tile_bitmap + begin), 0) * (CONFIG.block_r * 4))
        bitmap = tl.maximum(tl.load(tiles.tile_bitmap + begin + 1), 0)
        for tile in tl.range(begin, partial_end, num_stages=CONFIG.stages):
            columns, words = next_columns, next_words
            next_columns = tl.load(tiles.columns + (tile + 1) * CONFIG.block_n + n)
            next_words = tl.load(words_ptr + bitmap * (CONFIG.block_r * 4))
            bitmap = tl.maximum(tl.load(tiles.tile_bitmap + tile + 2), 0)
            sums = step(sums, columns, words, rows, head, problem, True, CONFIG)
    if CONFIG.has_full:
        lane = 0 if CONFIG.full_contiguous else n
        further = n if CONFIG.full_contiguous else 0
        next_columns = tl.load(tiles.columns + full_begin * CONFIG.block_n + lane)
        for tile in tl.range(full_begin, end, num_stages=CONFIG.stages):
            columns = next_columns + further
            next_columns = tl.load(tiles.columns + (tile + 1) * CONFIG.block_n + lane)
            sums = step(sums, columns, 0, rows, head, problem, False, CONFIG)
    return sums


@triton.jit
@no_type_check
def nan_or_zero(tiles, number):
    """NaN where a row block has `NAN_ROW_BLOCK` partial tiles, else 0: its gradients must not look like an answer."""
    return tl.where(tl.load(tiles.partial_count + number) == NAN_ROW_BLOCK, float("nan"), 0.0)


@triton.jit
@no_type_check
def load_rows(base, at, stride, width, WIDTH: tl.constexpr, PAD: tl.constexpr, CONFIG: tl.constexpr):
    """Rows of a tile, `[len(at), WIDTH]`, zeros past `width`; every row exists."""
    d = tl.arange(0, WIDTH)
    at = at.to(tl.int64) if CONFIG.int64_offsets else at
    ptrs = base + (at * (stride * CONFIG.unit))[:, None] + d[None, :]
    if PAD:
        # A product with a constant: the compiler knows then that rows end at multiples of it.
        x = tl.load(ptrs, mask=(d < width * CONFIG.unit)[None, :], other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
@no_type_check
def load_block(base, row, stride, ok, width, WIDTH: tl.constexpr, CONFIG: tl.constexpr):
    """Rows of a row block, zeros where there are none."""
    d = tl.arange(0, WIDTH)
    ptrs = base + (row * stride * CONFIG.unit)[:, None] + d[None, :]
    return tl.load(ptrs, mask=ok[:, None] & (d < width * CONFIG.unit)[None, :], other=0.0)


@triton.jit
@no_type_check
def key_rows(head, row, row_ok, problem, CONFIG: tl.constexpr):
    """K and V of a row block of keys."""
    k = load_block(head.k, row, problem.k_s, row_ok, problem.head_dim, CONFIG.block_d, CONFIG)
    v = load_block(head.v, row, problem.v_s, row_ok, problem.value_dim, CONFIG.block_v, CONFIG)
    return KeyRows(k=k, v=v, row=row, row_ok=row_ok)


@triton.jit
@no_type_check
def load_queries(head, columns, problem, CONFIG: tl.constexpr):
    """Of the queries of a tile: q and d_out, and lse, delta and share of `row_stats_kernel`."""
    q = load_rows(head.q, columns, problem.q_s, problem.head_dim, CONFIG.block_d, CONFIG.pad_d, CONFIG)
    d_out = load_rows(head.d_out, columns, problem.out_s, problem.value_dim, CONFIG.block_v, CONFIG.pad_v, CONFIG)
    lse = tl.load(head.lse + columns)
    delta = tl.load(head.delta + columns)
    share = delta
    if CONFIG.has_sinks:
        share = tl.load(head.share + columns)
    return q, d_out, lse[None, :], delta[None, :], share[None, :]


@triton.jit
@no_type_check
def load_bias(head, query, key, ok, problem):
    """Of a tile, whose rows are queries or keys."""
    at = query.to(tl.int64) * problem.bias_q + key.to(tl.int64) * problem.bias_k
    return tl.load(head.bias + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def tile_weights(
    s,  # products of queries and keys, without the scale; rows are queries or keys
    lse,  # in units of log 2, +inf where a row keeps nothing; broadcast over keys
    bias,
    keep,  # which scores count, unused when not PARTIAL
    problem,
    PARTIAL: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Weights of a tile, without sinks, and the slope of the softcap, `[BLOCK_M, BLOCK_N]`."""
    slope = 1.0
    if CONFIG.has_score_mod:
        s = s * problem.scale
        if CONFIG.has_softcap:
            s = softcapped(s / problem.softcap, problem.softcap)
            slope = 1.0 - (s / problem.softcap) * (s / problem.softcap)
        if CONFIG.has_bias:
            s += bias
        p = tl.exp2(s * LOG2E - lse)
    else:
        p = tl.exp2(s * problem.scale - lse)
    if PARTIAL:
        p = tl.where(keep, p, 0.0)
    return p, slope


@triton.jit
@no_type_check
def kept_by_dropout(head, query, key, problem):
    """Which weights of a tile stay; see `kept_weights`."""
    return kept_weights(head.seed[0], head.seed[1], problem.threshold, head.number, query, key)


@triton.jit
@no_type_check
def tile_score_gradients(
    p,  # of `tile_weights`
    d_p,  # products of d_out and values
    delta,  # broadcast over keys, as share
    share,  # of the softmax's denominator that is the keys', used with sinks
    keep,
    PARTIAL: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Gradients of a tile's scores, before the softcap."""
    d_s = p * (share * d_p - delta) if CONFIG.has_sinks else p * (d_p - delta)
    if PARTIAL:
        d_s = tl.where(keep, d_s, 0.0)  # what is dropped may be NaN, and 0 * NaN is NaN
    return d_s


@triton.jit
@no_type_check
def times_slope(d_s, slope, keep, PARTIAL: tl.constexpr, CONFIG: tl.constexpr):
    """Gradients of scores before the softcap; where scores are dropped, the slope may be NaN."""
    if CONFIG.has_softcap:
        d_s = d_s * slope
        if PARTIAL:
            d_s = tl.where(keep, d_s, 0.0)
    return d_s


@triton.jit
@no_type_check
def row_stats_kernel(
    out_ptr,  # [B, H, Sq, Dv]
    d_out_ptr,  # [B, H, Sq, Dv]
    lse_ptr,  # [B, H, Sq] float32, contiguous, as d_lse and what is written
    d_lse_ptr,
    sinks_ptr,  # [H]
    stats_ptr,  # [4 or 2, B, H, Sq] float32: lse, delta, share, d_sink
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    heads,
    q_len,
    row_blocks,
    value_dim,
    stat_size,  # B * H * Sq
    HAS_D_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """What the other kernels read of each query row.

    lse is in units of log 2, and +inf where a row keeps nothing: its weights are 0 then. With sinks,
    `delta = share * rowsum(d_out * out) - d_lse`, where `share` is the keys' part of the denominator, and d_sink is
    minus the row's gradient of its sink.
    """
    launch_next_and_wait(USE_PDL)
    program = tl.program_id(0)
    group = program // row_blocks
    row = (program % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < q_len
    b = (group // heads).to(tl.int64)
    head = group % heads
    dv = tl.arange(0, BLOCK_V)
    ok = row_ok[:, None] & (dv < value_dim)[None, :]
    row64, dv64 = row.to(tl.int64)[:, None], dv.to(tl.int64)[None, :]
    out_at = b * stride_ob + head.to(tl.int64) * stride_oh + row64 * stride_os + dv64 * stride_od
    d_out_at = b * stride_gb + head.to(tl.int64) * stride_gh + row64 * stride_gs + dv64 * stride_gd
    out = tl.load(out_ptr + out_at, mask=ok, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + d_out_at, mask=ok, other=0.0).to(tl.float32)
    at = group.to(tl.int64) * q_len + row
    lse = tl.load(lse_ptr + at, mask=row_ok, other=0.0)
    some = lse != float("-inf")  # or NaN
    delta = tl.where(some, tl.sum(out * d_out, 1), 0.0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        share = tl.where(some, 1.0 / (1.0 + tl.exp2((sink - lse) * LOG2E)), 0.0)
        tl.store(stats_ptr + 2 * stat_size + at, share, mask=row_ok)
        # Not 1 - share, which loses a small sink's digits.
        of_sink = tl.where(some, 1.0 / (1.0 + tl.exp2((lse - sink) * LOG2E)), 0.0)
        tl.store(stats_ptr + 3 * stat_size + at, delta * of_sink, mask=row_ok)
        delta = delta * share
    if HAS_D_LSE:
        delta -= tl.where(some, tl.load(d_lse_ptr + at, mask=row_ok, other=0.0), 0.0)
    tl.store(stats_ptr + at, tl.where(some, lse * LOG2E, float("inf")), mask=row_ok)
    tl.store(stats_ptr + stat_size + at, delta, mask=row_ok)


@triton.jit
@no_type_check
def merge_kernel(
    out_ptr,  # [B, H, rows, D]
    chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_D] float32
    splits_ptr,  # [splits, 3] int32: row block, first slot, chunks
    row_order_ptr,
    stride,  # `Strides` of out
    heads,
    n_rows,
    width,
    splits,
    slots,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PERMUTED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Add up the partial sums of a split row block in the order of its chunks."""
    launch_next_and_wait(USE_PDL)
    program = tl.program_id(0)
    group = program // splits
    split_ptr = splits_ptr + program % splits * 3
    row, row_ok = block_rows(tl.load(split_ptr), row_order_ptr, n_rows, BLOCK_R, BLOCK_M, PERMUTED)
    slot = group.to(tl.int64) * slots + tl.load(split_ptr + 1)
    d = tl.arange(0, BLOCK_D)
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for chunk in range(tl.load(split_ptr + 2)):
        acc += tl.load(chunk_ptr + (slot + chunk) * (BLOCK_M * BLOCK_D) + at)
    base = out_ptr + (group // heads).to(tl.int64) * stride.b + (group % heads).to(tl.int64) * stride.h
    out = (acc * scale).to(out_ptr.dtype.element_ty)
    tl.store(base + row.to(tl.int64)[:, None] * stride.s + d[None, :], out, row_ok[:, None] & (d < width)[None, :])


@triton.jit
@no_type_check
def store_sums(
    acc,  # [BLOCK_M, BLOCK_D]
    out_ptr,
    stride,  # `Strides` of out
    b,
    head,
    chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_D] float32
    slot,
    chunks,
    row,
    row_ok,
    width,
    scale,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a gradient, or a chunk's partial sums of it without the scale."""
    d = tl.arange(0, BLOCK_D)
    unsplit = row_ok
    out_base = out_ptr + b.to(tl.int64) * stride.b + head.to(tl.int64) * stride.h
    if SPLIT:
        r = tl.arange(0, BLOCK_M)
        at = r[:, None] * BLOCK_D + d[None, :]
        tl.store(chunk_ptr + slot * (BLOCK_M * BLOCK_D) + at, acc, mask=((r >= 0) & (chunks > 1))[:, None])
        unsplit = row_ok & (chunks == 1)
    out = (acc * scale).to(out_base.dtype.element_ty)
    tl.store(out_base + row[:, None] * stride.s + d[None, :], out, mask=unsplit[:, None] & (d < width)[None, :])
