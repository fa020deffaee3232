"""dQ in Triton: a program goes through the tiles of one row block of queries, or of a chunk of it."""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.arguments import item_of
from stof.kernels.triton.backward_common import (
    CHUNK,
    CHUNKS,
    ITEM_SIZE,
    ROW_BLOCK,
    SLOT,
    Inputs,
    add_tiles,
    block_rows,
    chunk_tiles,
    head_of,
    kept_by_dropout,
    load_bias,
    load_block,
    load_rows,
    nan_or_zero,
    pattern_row_block,
    store_sums,
    tile_score_gradients,
    tile_weights,
    times_slope,
)
from stof.kernels.triton.dropout_mask import load_seed
from stof.kernels.triton.tile_bits import kept_scores
from stof.runtime.pdl import launch_next_and_wait

# A row block of queries, which stays in registers: q [BLOCK_M, BLOCK_D], d_out [BLOCK_M, BLOCK_V], the others
# [BLOCK_M], of `row_stats_kernel` and `block_rows`.
QueryRows = namedtuple("QueryRows", "q d_out lse delta share row row_ok")


@triton.jit
@no_type_check
def _dq_step(dq, columns, words, rows, head, problem, PARTIAL: tl.constexpr, CONFIG: tl.constexpr):
    """Add one tile of keys to dq, float32 `[BLOCK_M, BLOCK_D]`; see `add_tiles`."""
    k = load_rows(head.k, columns, problem.k_s, problem.head_dim, CONFIG.block_d, CONFIG.pad_d, CONFIG)
    v = load_rows(head.v, columns, problem.v_s, problem.value_dim, CONFIG.block_v, CONFIG.pad_v, CONFIG)
    keep = kept_scores(words, CONFIG.block_m, CONFIG.block_n) if PARTIAL else True
    bias = 0.0
    if CONFIG.has_bias:
        bias = load_bias(head, rows.row[:, None], columns[None, :], rows.row_ok[:, None], problem)
    s = tl.dot(rows.q, tl.trans(k), input_precision=CONFIG.precision)  # [BLOCK_M, BLOCK_N]
    p, slope = tile_weights(s, rows.lse[:, None], bias, keep, problem, PARTIAL, CONFIG)
    d_p = tl.dot(rows.d_out, tl.trans(v), input_precision=CONFIG.precision)
    if CONFIG.has_dropout:
        kept = kept_by_dropout(head, rows.row[:, None], columns[None, :], problem)
        d_p = tl.where(kept, d_p * problem.dropout_scale, 0.0)
    d_s = tile_score_gradients(p, d_p, rows.delta[:, None], rows.share[:, None], keep, PARTIAL, CONFIG)
    d_s = times_slope(d_s, slope, keep, PARTIAL, CONFIG)
    return tl.dot(d_s.to(k.dtype), k, dq, input_precision=CONFIG.precision)


@triton.jit
@no_type_check
def dq_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, Hkv, Skv, D]
    v_ptr,  # [B, Hkv, Skv, Dv]
    d_out_ptr,  # [B, H, Sq, Dv]
    stats_ptr,  # of `row_stats_kernel`
    bias_ptr,  # broadcast to [B, H, Sq, Skv] by strides of 0
    seed_ptr,  # [2] int64
    dq_ptr,  # [B, H, Sq, D]
    chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_D] float32
    tiles,  # `TileLists` of the forward layout
    problem,  # `Problem`
    schedule,  # `Schedule`
    row_blocks,  # of a pattern
    stat_size,  # B * H * Sq
    scale,  # of the gradients
    stride_dq,  # `Strides`
    CONFIG: tl.constexpr,  # `BlockWiseConfig`
    USE_PDL: tl.constexpr,
):
    """Gradients of the queries of one row block, or a chunk's part of them."""
    launch_next_and_wait(USE_PDL)
    item, group = item_of(schedule)
    if group >= schedule.groups:
        return
    b = group // schedule.heads
    q_head = group % schedule.heads
    item_ptr = tiles.items + item * ITEM_SIZE
    number = tl.load(item_ptr + ROW_BLOCK)
    chunk = tl.load(item_ptr + CHUNK)
    chunks = tl.load(item_ptr + CHUNKS)
    row, row_ok = block_rows(number, tiles.row_order, problem.q_len, CONFIG.block_r, CONFIG.block_m, CONFIG.permuted)
    if CONFIG.patterns:
        number = pattern_row_block(number, row_blocks, tiles, b, q_head, problem)
    span = chunk_tiles(tiles, number, chunk, chunks)

    row = row.to(tl.int64) if CONFIG.int64_offsets else row
    inputs = Inputs(
        q=q_ptr, k=k_ptr, v=v_ptr, d_out=d_out_ptr, stats=stats_ptr, stat_size=stat_size, bias=bias_ptr,
        seed=load_seed(seed_ptr, CONFIG.has_dropout),
    )  # fmt: skip
    head = head_of(inputs, b, q_head, q_head // problem.heads_per_group, problem, CONFIG)
    lse = tl.load(head.lse + row, mask=row_ok, other=float("inf"))
    delta = tl.load(head.delta + row, mask=row_ok, other=0.0)
    share = delta
    if CONFIG.has_sinks:
        share = tl.load(head.share + row, mask=row_ok, other=0.0)
    # Rows that keep nothing may hold NaN.
    some = row_ok & (lse != float("inf"))
    q = load_block(head.q, row, problem.q_s, some, problem.head_dim, CONFIG.block_d, CONFIG)
    d_out = load_block(head.d_out, row, problem.out_s, some, problem.value_dim, CONFIG.block_v, CONFIG)
    rows = QueryRows(q=q, d_out=d_out, lse=lse, delta=delta, share=share, row=row, row_ok=row_ok)
    dq = tl.full([CONFIG.block_m, CONFIG.block_d], 0.0, tl.float32)
    if CONFIG.has_nan:
        dq += nan_or_zero(tiles, number)
    dq = add_tiles(_dq_step, dq, span, tiles, rows, head, problem, CONFIG)

    slot = group.to(tl.int64) * schedule.slots + tl.load(item_ptr + SLOT)
    store_sums(
        dq, dq_ptr, stride_dq, b, q_head, chunk_ptr, slot, chunks, row, row_ok, problem.head_dim * CONFIG.unit,
        scale, CONFIG.split, CONFIG.block_m, CONFIG.block_d,
    )  # fmt: skip
