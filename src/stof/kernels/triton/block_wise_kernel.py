"""Block-wise attention in Triton: tensor cores over the tiles of one row block, split row blocks merged in place.

A program owns one work item: some partial and some full tiles of one row block, for one batch entry and one head (or
one key head with its query heads packed into rows). Partial tiles come first. Row blocks that are cut into several
items leave unnormalised partial results in float32; whichever item finishes last merges them in chunk order, so
results do not depend on timing.

Source: STOF (arXiv 2506.06095), section 4.1; online softmax as FlashAttention-2 (arXiv 2307.08691), section 3.1;
split and merge as Flash-Decoding.
"""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.arguments import item_of
from stof.kernels.triton.dropout_mask import kept_weights, load_seed
from stof.kernels.triton.packed_integers import asks_for_nan, nan_row_block
from stof.kernels.triton.running_maximum import LOWEST, bounded
from stof.kernels.triton.softcap import softcapped
from stof.kernels.triton.tile_bits import kept_scores
from stof.kernels.triton.work_list import BIAS_VECTOR, WORK_ITEM
from stof.runtime.pdl import launch_next_and_wait

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Fields of a work item. Triton's cache keys hold constants of a module that are named, not fields of an object.
(
    ROW_BLOCK, PARTIAL_BEGIN, PARTIAL_END, FULL_BEGIN, FULL_END, PARTS, FIRST_CHUNK, CHUNK, SPLIT_ROW_BLOCK, BITMAP,
    FULL_COLUMN, OWN_PARTIAL, PARTIAL_SHIFT, OWN_FULL, FULL_SHIFT, ORIGIN,
) = (tl.constexpr(field) for field in WORK_ITEM)  # fmt: skip
ITEM_SIZE = tl.constexpr(len(WORK_ITEM))
VECTOR = tl.constexpr(BIAS_VECTOR)


# Rows of a row block: pointers to K and V of their key head, and [BLOCK_M] of each row: the bias, what `_rows` returns,
# and b * H + h; both values of a seed.
Rows = namedtuple("Rows", "k_ptr v_ptr bias_ptr row head row_ok head_number seed")


@triton.jit
@no_type_check
def _step(
    q,  # [BLOCK_M, BLOCK_D]
    acc,  # [BLOCK_M, BLOCK_V] float32
    m_i,  # [BLOCK_M] running maximum, in units of log 2, `bounded`
    l_i,  # [BLOCK_M] running sum
    columns,  # [BLOCK_N] key columns
    words,  # [BLOCK_M, 4] bitmap words, unused when not PARTIAL
    rows,  # `Rows`
    problem,
    PARTIAL: tl.constexpr,
    BIAS_VECTORS: tl.constexpr,  # the bias is loaded in whole vectors of 16 bytes
    CONFIG: tl.constexpr,
):
    """One tile: scores, mask, online softmax, dropout, accumulate."""
    d = tl.arange(0, CONFIG.block_d)
    dv = tl.arange(0, CONFIG.block_v)
    at = columns.to(tl.int64) if CONFIG.int64_offsets else columns
    k_at = at[:, None] * problem.k_s * CONFIG.unit
    # One multiplication serves both where K and V lie alike, as they nearly always do.
    v_at = k_at if CONFIG.same_stride else at[:, None] * problem.v_s * CONFIG.unit
    if CONFIG.pad_d:
        k = tl.load(rows.k_ptr + k_at + d[None, :], mask=(d < problem.head_dim * CONFIG.unit)[None, :], other=0.0)
    else:
        k = tl.load(rows.k_ptr + k_at + d[None, :])
    s = tl.dot(q, tl.trans(k), input_precision=CONFIG.precision)  # [BLOCK_M, BLOCK_N]
    if CONFIG.has_score_mod:
        s = s * problem.scale
        if CONFIG.has_softcap:
            s = softcapped(s / problem.softcap, problem.softcap)
        if CONFIG.has_bias:
            if BIAS_VECTORS:
                # Whole vectors: also columns that no row sees, whose scores are dropped.
                vector_columns = columns // VECTOR * VECTOR + tl.arange(0, CONFIG.block_n) % VECTOR
                bias_at = tl.max_contiguous(tl.multiple_of(vector_columns, VECTOR), VECTOR)
            else:
                bias_at = at * problem.bias_k
            bias = tl.load(rows.bias_ptr[:, None] + bias_at[None, :], mask=rows.row_ok[:, None], other=0.0)
            s += bias.to(tl.float32)
        s *= LOG2E
    if PARTIAL:
        s = tl.where(kept_scores(words, CONFIG.block_m, CONFIG.block_n), s, float("-inf"))
    if CONFIG.has_score_mod:
        m_new = bounded(tl.maximum(m_i, tl.max(s, 1)))
        p = tl.exp2(s - m_new[:, None])
    else:
        m_new = bounded(tl.maximum(m_i, tl.max(s, 1) * problem.scale))
        p = tl.exp2(s * problem.scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if CONFIG.has_dropout:
        # After the sum: the softmax's denominator counts what is dropped.
        seed, offset = rows.seed
        number, row = rows.head_number[:, None], rows.row[:, None]
        p = tl.where(kept_weights(seed, offset, problem.threshold, number, row, columns[None, :]), p, 0.0)
    if CONFIG.pad_v:
        v = tl.load(rows.v_ptr + v_at + dv[None, :], mask=(dv < problem.value_dim * CONFIG.unit)[None, :], other=0.0)
    else:
        v = tl.load(rows.v_ptr + v_at + dv[None, :])
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=CONFIG.precision)
    return acc, m_new, l_i


@triton.jit
@no_type_check
def _store(
    acc,  # [BLOCK_M, BLOCK_V]
    m_i,
    l_i,
    rows,  # `Rows`
    out_base,  # of the batch entry
    lse_base,  # of the batch entry
    sinks_ptr,
    problem,
    CONFIG: tl.constexpr,
):
    """Normalise and write the output and the log-sum-exp (natural, sinks not counted)."""
    some = l_i != 0.0  # or NaN
    total = tl.where(some, l_i, 1.0)
    lse = tl.where(some, (m_i + tl.log2(total)) * LN2, float("-inf"))
    if CONFIG.has_sinks:
        # softmax over keys and sink = softmax over keys / (1 + exp(sink - lse))
        sink = tl.load(sinks_ptr + rows.head, mask=rows.row_ok, other=0.0).to(tl.float32)
        total = tl.where(some, total * (1.0 + tl.exp2((sink - lse) * LOG2E)), 1.0)
    factor = tl.where(some, 1.0 / total, 0.0)
    if CONFIG.has_dropout:
        factor *= problem.dropout_scale
    dv = tl.arange(0, CONFIG.block_v)
    row_at = rows.head.to(tl.int64) * problem.out_h + rows.row * problem.out_s
    out_ok = rows.row_ok[:, None]
    if CONFIG.pad_v:
        out_ok = rows.row_ok[:, None] & (dv < problem.value_dim * CONFIG.unit)[None, :]
    out = (acc * factor[:, None]).to(out_base.dtype.element_ty)
    tl.store(out_base + row_at[:, None] + dv[None, :], out, mask=out_ok)
    tl.store(lse_base + rows.head * problem.q_len + rows.row, lse, mask=rows.row_ok)


@triton.jit
@no_type_check
def _rows(row_block, first_head, pattern, row_order_ptr, problem, CONFIG: tl.constexpr):
    """Query row (64-bit where offsets are), head, and existence of each row of a row block's tiles."""
    r = tl.arange(0, CONFIG.block_m)
    in_block = r // CONFIG.pack
    position = row_block * CONFIG.block_r + in_block
    row_ok = position < problem.q_len
    if CONFIG.block_m > CONFIG.block_r * CONFIG.pack:
        row_ok = row_ok & (in_block < CONFIG.block_r)
    if CONFIG.pack > 1:
        row_ok = row_ok & (r % CONFIG.pack < problem.heads_per_group)
        head = first_head + r % CONFIG.pack
    else:
        head = first_head + tl.full([CONFIG.block_m], 0, tl.int32)
    if CONFIG.permuted:
        row = tl.load(row_order_ptr + pattern * problem.q_len + position, mask=row_ok, other=0)
    else:
        row = position
    if CONFIG.int64_offsets:
        row = row.to(tl.int64)
    return row, head, row_ok


@triton.jit
@no_type_check
def _place(tile, first_own, to_shared, SHARED: tl.constexpr):
    """Where a tile lies in its list: those before an item's own are shared ones."""
    if SHARED:
        tile += tl.where(tile < first_own, to_shared, 0)
    return tile


@triton.jit
@no_type_check
def block_wise_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, Hkv, Skv, D]
    v_ptr,  # [B, Hkv, Skv, Dv]
    out_ptr,  # [B, H, Sq, Dv]
    lse_ptr,  # [B, H, Sq] float32, contiguous
    bias_ptr,  # broadcast to [B, H, Sq, Skv] by strides of 0
    sinks_ptr,  # [H]
    chunk_out_ptr,  # [groups, slots, BLOCK_M, BLOCK_V] float32
    chunk_ml_ptr,  # [groups, slots, 2, BLOCK_M] float32
    counters_ptr,  # [groups, split row blocks] int32, zero before and after
    seed_ptr,  # [2] int64
    work,  # `WorkLists`
    problem,  # `Problem`
    schedule,  # `Schedule`
    splits,  # split row blocks
    CONFIG: tl.constexpr,  # `BlockWiseConfig`
    USE_PDL: tl.constexpr,
):
    launch_next_and_wait(USE_PDL)
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    item, group = item_of(schedule)
    if group >= schedule.groups:
        return
    b = group // schedule.heads
    g = group % schedule.heads
    if CONFIG.pack > 1:
        first_head = g * problem.heads_per_group
        kv_head = g
    else:
        first_head = g
        kv_head = g // problem.heads_per_group
    if CONFIG.patterns:
        pattern = tl.load(work.pattern_of + b * problem.mask_b + first_head * problem.mask_h)
        item += pattern * schedule.items
    else:
        pattern = 0
    # Everything the first products need is one load away from the program's number: each further link in a chain
    # of loads would delay every program by a trip to memory.
    n = tl.arange(0, BLOCK_N)
    WIDTH: tl.constexpr = 1 if CONFIG.contiguous_tiles else BLOCK_N
    lane = 0 if CONFIG.contiguous_tiles else n
    next_columns = tl.load(work.first_columns + item * WIDTH + lane)
    item_ptr = work.items + item * ITEM_SIZE
    row_block = tl.load(item_ptr + ROW_BLOCK)
    nan_or_zero = 0.0
    if CONFIG.has_nan:
        nan_or_zero = tl.where(asks_for_nan(row_block), float("nan"), 0.0)
        row_block = tl.where(asks_for_nan(row_block), nan_row_block(row_block), row_block)
    if row_block < 0:  # patterns have different numbers of items
        return
    partial_begin = tl.load(item_ptr + PARTIAL_BEGIN)
    partial_end = tl.load(item_ptr + PARTIAL_END)
    full_begin = tl.load(item_ptr + FULL_BEGIN)
    full_end = tl.load(item_ptr + FULL_END)
    bitmap = tl.load(item_ptr + BITMAP)
    first_full = tl.load(item_ptr + FULL_COLUMN)
    last_column = first_full
    own_partial, own_full, to_partial, to_full, q0 = 0, 0, 0, 0, 0
    if CONFIG.shared:
        own_partial = tl.load(item_ptr + OWN_PARTIAL)
        to_partial = tl.load(item_ptr + PARTIAL_SHIFT)
        own_full = tl.load(item_ptr + OWN_FULL)
        to_full = tl.load(item_ptr + FULL_SHIFT)
        q0 = tl.load(item_ptr + ORIGIN)

    r = tl.arange(0, BLOCK_M)
    row, head, row_ok = _rows(row_block, first_head, pattern, work.row_order, problem, CONFIG)
    d = tl.arange(0, CONFIG.block_d)
    dv = tl.arange(0, BLOCK_V)
    b64, kv_head64 = b.to(tl.int64), kv_head.to(tl.int64)
    out_base = out_ptr + b64 * problem.out_b
    q_ptrs = q_ptr + b64 * problem.q_b + (head.to(tl.int64) * problem.q_h + row * problem.q_s)[:, None] + d[None, :]
    q_ok = row_ok[:, None]
    if CONFIG.pad_d:
        # A product with a constant: the compiler knows then that rows end at multiples of it.
        q_ok = row_ok[:, None] & (d < problem.head_dim * CONFIG.unit)[None, :]
    q = tl.load(q_ptrs, mask=q_ok, other=0.0)
    bias_row = b64 * problem.bias_b + head.to(tl.int64) * problem.bias_h + row.to(tl.int64) * problem.bias_q
    if CONFIG.full_bias_vectors:
        # Strides that are multiples of 8 but not of 16 do not tell by themselves.
        bias_row = tl.multiple_of(bias_row, VECTOR)
    rows = Rows(
        k_ptr=k_ptr + (b64 * problem.k_b + kv_head64 * problem.k_h) * CONFIG.unit,
        v_ptr=v_ptr + (b64 * problem.v_b + kv_head64 * problem.v_h) * CONFIG.unit,
        bias_ptr=bias_ptr + bias_row, row=row, row_ok=row_ok, head=head, head_number=b * problem.heads + head,
        seed=load_seed(seed_ptr, CONFIG.has_dropout),
    )  # fmt: skip

    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if CONFIG.has_nan:
        l_i += nan_or_zero
    word = tl.arange(0, 4)
    # Rows past those of a row block repeat the last bitmap row: their scores are dropped, but reads must stay inside.
    words_ptr = work.bitmaps + tl.minimum(r // CONFIG.pack, CONFIG.block_r - 1)[:, None] * 4 + word[None, :]

    if CONFIG.has_full and CONFIG.has_partial and CONFIG.full_gathered:
        # Loaded before the partial tiles, used after them.
        full_columns = tl.load(work.full_columns + _place(full_begin, own_full, to_full, CONFIG.shared) * WIDTH + lane)
    if CONFIG.has_partial:
        # Columns and bitmap words are loaded one tile ahead into registers: left to the pipeliner they would make
        # every load of K and V an indirect one, at the price of a stage.
        next_words = tl.load(words_ptr + bitmap * (CONFIG.block_r * 4))
        if not CONFIG.shared:
            bitmap = tl.load(work.partial_bitmap + partial_begin + 1)
        for tile in tl.range(partial_begin, partial_end, num_stages=CONFIG.stages):
            columns, words = next_columns, next_words
            next_place = _place(tile + 1, own_partial, to_partial, CONFIG.shared)
            next_columns = tl.load(work.partial_columns + next_place * WIDTH + lane)
            if CONFIG.shared:
                # Added a step late: the pipeliner carries a plain load from step to step, but would copy one that is
                # computed with to shared memory, at the price of all its stages for K and V.
                columns += tl.where(tile < own_partial, q0, 0)
                bitmap = next_place
            if CONFIG.contiguous_tiles:
                # Columns that no row sees are not read.
                columns = tl.minimum(columns + n, last_column)
            next_words = tl.load(words_ptr + bitmap * (CONFIG.block_r * 4))
            if not CONFIG.shared:
                bitmap = tl.load(work.partial_bitmap + tile + 2)
            acc, m_i, l_i = _step(
                q, acc, m_i, l_i, columns, words, rows, problem, True, CONFIG.partial_bias_vectors, CONFIG
            )
        if CONFIG.has_full and CONFIG.full_gathered:
            next_columns = full_columns
    if CONFIG.has_full:
        for tile in tl.range(full_begin, full_end, num_stages=CONFIG.stages):
            if CONFIG.full_gathered:
                columns = next_columns
                next_place = _place(tile + 1, own_full, to_full, CONFIG.shared)
                next_columns = tl.load(work.full_columns + next_place * WIDTH + lane)
                if CONFIG.shared:
                    columns += tl.where(tile < own_full, q0, 0)
                if CONFIG.contiguous_tiles:
                    columns += n
            else:
                columns = first_full + (tile - full_begin) * BLOCK_N + n
            acc, m_i, l_i = _step(q, acc, m_i, l_i, columns, 0, rows, problem, False, CONFIG.full_bias_vectors, CONFIG)

    if CONFIG.split:
        n_chunks = tl.load(item_ptr + PARTS)
        if n_chunks > 1:
            first_chunk = tl.load(item_ptr + FIRST_CHUNK)
            chunk = tl.load(item_ptr + CHUNK)
            split = tl.load(item_ptr + SPLIT_ROW_BLOCK)
            slot = group.to(tl.int64) * schedule.slots + first_chunk
            tile_at = r[:, None] * BLOCK_V + dv[None, :]
            tl.store(chunk_out_ptr + (slot + chunk) * (BLOCK_M * BLOCK_V) + tile_at, acc)
            tl.store(chunk_ml_ptr + (slot + chunk) * (2 * BLOCK_M) + r, m_i)
            tl.store(chunk_ml_ptr + (slot + chunk) * (2 * BLOCK_M) + BLOCK_M + r, l_i)
            # All threads' stores come before the one thread's release.
            tl.debug_barrier()
            counter_ptr = counters_ptr + group * splits + split
            done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
            if done < n_chunks - 1:
                return
            tl.debug_barrier()
            m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
            l_i = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            for c in range(n_chunks):
                # .cg: written by other multiprocessors
                m_c = tl.load(chunk_ml_ptr + (slot + c) * (2 * BLOCK_M) + r, cache_modifier=".cg")
                l_c = tl.load(chunk_ml_ptr + (slot + c) * (2 * BLOCK_M) + BLOCK_M + r, cache_modifier=".cg")
                acc_c = tl.load(chunk_out_ptr + (slot + c) * (BLOCK_M * BLOCK_V) + tile_at, cache_modifier=".cg")
                m_new = tl.maximum(m_i, m_c)
                old, new = tl.exp2(m_i - m_new), tl.exp2(m_c - m_new)
                l_i = l_i * old + l_c * new
                acc = acc * old[:, None] + acc_c * new[:, None]
                m_i = m_new
            tl.store(counter_ptr, 0)
    _store(acc, m_i, l_i, rows, out_base, lse_ptr + b64 * problem.heads * problem.q_len, sinks_ptr, problem, CONFIG)
