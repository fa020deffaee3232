"""dK and dV in Triton: a program goes through the tiles of queries of one row block of keys, or of a chunk of it.

It does so for each query head of its key head in turn, and adds all up in that order.
"""

from __future__ import annotations

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
    key_rows,
    load_bias,
    load_queries,
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


@triton.jit
@no_type_check
def _dkv_step(sums, columns, words, rows, head, problem, PARTIAL: tl.constexpr, CONFIG: tl.constexpr):
    """Add one tile of queries to dk `[BLOCK_M, BLOCK_D]` and dv `[BLOCK_M, BLOCK_V]`, float32; see `add_tiles`."""
    dk, dv = sums
    q, d_out, lse, delta, share = load_queries(head, columns, problem, CONFIG)
    keep = kept_scores(words, CONFIG.block_m, CONFIG.block_n) if PARTIAL else True
    bias = 0.0
    if CONFIG.has_bias:
        bias = load_bias(head, columns[None, :], rows.row[:, None], rows.row_ok[:, None], problem)
    s = tl.dot(rows.k, tl.trans(q), input_precision=CONFIG.precision)  # [BLOCK_M, BLOCK_N]: rows are keys
    # Before the weights: this product runs while they are computed.
    d_p = tl.dot(rows.v, tl.trans(d_out), input_precision=CONFIG.precision)
    p, slope = tile_weights(s, lse, bias, keep, problem, PARTIAL, CONFIG)
    w = p * share if CONFIG.has_sinks else p
    if CONFIG.has_dropout:
        kept = kept_by_dropout(head, columns[None, :], rows.row[:, None], problem)
        w = tl.where(kept, w * problem.dropout_scale, 0.0)
    dv = tl.dot(w.to(d_out.dtype), d_out, dv, input_precision=CONFIG.precision)
    if CONFIG.has_dropout:
        d_p = tl.where(kept, d_p * problem.dropout_scale, 0.0)
    d_s = tile_score_gradients(p, d_p, delta, share, keep, PARTIAL, CONFIG)
    d_s = times_slope(d_s, slope, keep, PARTIAL, CONFIG)
    dk = tl.dot(d_s.to(q.dtype), q, dk, input_precision=CONFIG.precision)
    return dk, dv


@triton.jit
@no_type_check
def dkv_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, Hkv, Skv, D]
    v_ptr,  # [B, Hkv, Skv, Dv]
    d_out_ptr,  # [B, H, Sq, Dv]
    stats_ptr,  # of `row_stats_kernel`
    bias_ptr,  # broadcast to [B, H, Sq, Skv] by strides of 0
    seed_ptr,  # [2] int64
    dk_ptr,  # [B, Hkv, Skv, D]
    dv_ptr,  # [B, Hkv, Skv, Dv]
    dk_chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_D] float32
    dv_chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_V] float32
    tiles,  # `TileLists` of the transposed layout
    problem,  # `Problem`
    schedule,  # `Schedule`
    row_blocks,  # of a pattern
    stat_size,  # B * H * Sq
    scale,  # of the gradients
    stride_dk,  # `Strides`
    stride_dv,  # `Strides`
    kv_len,
    CONFIG: tl.constexpr,  # `BlockWiseConfig`
    USE_PDL: tl.constexpr,
):
    """Gradients of the keys and values of one row block, or a chunk's part of them."""
    launch_next_and_wait(USE_PDL)
    item, group = item_of(schedule)
    if group >= schedule.groups:
        return
    b = group // schedule.heads
    kv_head = group % schedule.heads
    item_ptr = tiles.items + item * ITEM_SIZE
    row_block = tl.load(item_ptr + ROW_BLOCK)
    chunk = tl.load(item_ptr + CHUNK)
    chunks = tl.load(item_ptr + CHUNKS)
    row, row_ok = block_rows(row_block, tiles.row_order, kv_len, CONFIG.block_r, CONFIG.block_m, CONFIG.permuted)
    row = row.to(tl.int64) if CONFIG.int64_offsets else row
    inputs = Inputs(
        q=q_ptr, k=k_ptr, v=v_ptr, d_out=d_out_ptr, stats=stats_ptr, stat_size=stat_size, bias=bias_ptr,
        seed=load_seed(seed_ptr, CONFIG.has_dropout),
    )  # fmt: skip
    rows = key_rows(head_of(inputs, b, kv_head, kv_head, problem, CONFIG), row, row_ok, problem, CONFIG)
    dk = tl.full([CONFIG.block_m, CONFIG.block_d], 0.0, tl.float32)
    dv = tl.full([CONFIG.block_m, CONFIG.block_v], 0.0, tl.float32)
    for head_in_group in range(problem.heads_per_group):
        q_head = kv_head * problem.heads_per_group + head_in_group
        number = row_block
        if CONFIG.patterns:
            number = pattern_row_block(row_block, row_blocks, tiles, b, q_head, problem)
        span = chunk_tiles(tiles, number, chunk, chunks)
        if CONFIG.has_nan:
            nan = nan_or_zero(tiles, number)
            dk += nan
            dv += nan
        head = head_of(inputs, b, q_head, kv_head, problem, CONFIG)
        dk, dv = add_tiles(_dkv_step, (dk, dv), span, tiles, rows, head, problem, CONFIG)

    slot = group.to(tl.int64) * schedule.slots + tl.load(item_ptr + SLOT)
    store_sums(
        dk, dk_ptr, stride_dk, b, kv_head, dk_chunk_ptr, slot, chunks, row, row_ok, problem.head_dim * CONFIG.unit,
        scale, CONFIG.split, CONFIG.block_m, CONFIG.block_d,
    )  # fmt: skip
    store_sums(
        dv, dv_ptr, stride_dv, b, kv_head, dv_chunk_ptr, slot, chunks, row, row_ok, problem.value_dim * CONFIG.unit,
        1.0, CONFIG.split, CONFIG.block_m, CONFIG.block_v,
    )  # fmt: skip
