"""The gradient of a bias in Triton, over the transposed layout, summed over what the bias broadcasts in a fixed order.

A program has the keys of one row block for one batch entry and head of the bias. It goes through the batch entries and
heads that share the bias one after the other, and computes the gradients of their scores once more: as an output of the
other kernels they would be one of Sq x Skv for each batch entry and head.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.backward_common import (
    Inputs,
    block_rows,
    chunk_tiles,
    head_of,
    kept_by_dropout,
    key_rows,
    load_bias,
    load_queries,
    pattern_row_block,
    tile_score_gradients,
    tile_weights,
)
from stof.kernels.triton.dropout_mask import load_seed
from stof.kernels.triton.tile_bits import kept_scores
from stof.runtime.pdl import launch_next_and_wait


@triton.jit
@no_type_check
def _bias_tile(
    summed,  # [BLOCK_M] sums over queries, unless BY_QUERY
    columns,  # [BLOCK_N] queries
    words,
    rows,  # `KeyRows`
    head,  # of `head_of`
    d_bias_base,  # [Sq, Skv] float32, contiguous
    kv_len,
    problem,
    PARTIAL: tl.constexpr,
    BY_QUERY: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add one tile's gradients to those of the bias, in memory where each query has its own, else to `summed`."""
    q, d_out, lse, delta, share = load_queries(head, columns, problem, CONFIG)
    keep = kept_scores(words, CONFIG.block_m, CONFIG.block_n) if PARTIAL else True
    bias = load_bias(head, columns[None, :], rows.row[:, None], rows.row_ok[:, None], problem)
    s = tl.dot(rows.k, tl.trans(q), input_precision=CONFIG.precision)  # [BLOCK_M, BLOCK_N]: rows are keys
    p, _ = tile_weights(s, lse, bias, keep, problem, PARTIAL, CONFIG)
    d_p = tl.dot(rows.v, tl.trans(d_out), input_precision=CONFIG.precision)
    if CONFIG.has_dropout:
        kept = kept_by_dropout(head, columns[None, :], rows.row[:, None], problem)
        d_p = tl.where(kept, d_p * problem.dropout_scale, 0.0)
    d_s = tile_score_gradients(p, d_p, delta, share, keep, PARTIAL, CONFIG)
    if BY_QUERY:
        # Columns that no row keeps repeat another one: no two threads may write to one element.
        written = rows.row_ok[:, None] & keep if PARTIAL else rows.row_ok[:, None]
        ptrs = d_bias_base + columns.to(tl.int64)[None, :] * kv_len + rows.row[:, None]
        tl.store(ptrs, tl.load(ptrs, mask=written, other=0.0) + d_s, mask=written)
    else:
        summed += tl.sum(d_s, 1)
    return summed


@triton.jit
@no_type_check
def bias_gradient_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, Hkv, Skv, D]
    v_ptr,  # [B, Hkv, Skv, Dv]
    d_out_ptr,  # [B, H, Sq, Dv]
    stats_ptr,  # of `row_stats_kernel`
    bias_ptr,  # broadcast to [B, H, Sq, Skv] by strides of 0
    seed_ptr,  # [2] int64
    d_bias_ptr,  # [bias batch, bias heads, Sq if BY_QUERY else 1, Skv] float32, zeros, contiguous
    tiles,  # `TileLists` of the transposed layout
    problem,  # `Problem`
    row_blocks,  # of a pattern
    stat_size,  # B * H * Sq
    bias_heads,
    shared_batch,  # batch entries that share a bias
    shared_heads,  # query heads that share one
    kv_len,
    BY_QUERY: tl.constexpr,  # the bias has a value for every query
    CONFIG: tl.constexpr,  # `BlockWiseConfig`, with 64-bit offsets
    USE_PDL: tl.constexpr,
):
    """Gradients of a bias at the keys of one row block."""
    launch_next_and_wait(USE_PDL)
    program = tl.program_id(0)
    row_block = program % row_blocks
    bias_group = program // row_blocks
    row, row_ok = block_rows(row_block, tiles.row_order, kv_len, CONFIG.block_r, CONFIG.block_m, CONFIG.permuted)
    row = row.to(tl.int64)
    d_bias_base = d_bias_ptr + bias_group.to(tl.int64) * kv_len * (problem.q_len if BY_QUERY else 1)
    summed = tl.full([CONFIG.block_m], 0.0, tl.float32)
    inputs = Inputs(
        q=q_ptr, k=k_ptr, v=v_ptr, d_out=d_out_ptr, stats=stats_ptr, stat_size=stat_size, bias=bias_ptr,
        seed=load_seed(seed_ptr, CONFIG.has_dropout),
    )  # fmt: skip

    n = tl.arange(0, CONFIG.block_n)
    r = tl.minimum(tl.arange(0, CONFIG.block_m), CONFIG.block_r - 1)
    words_ptr = tiles.bitmaps + r[:, None] * 4 + tl.arange(0, 4)[None, :]
    for sharing in range(shared_batch * shared_heads):
        b = bias_group // bias_heads + sharing // shared_heads
        q_head = bias_group % bias_heads + sharing % shared_heads
        number = pattern_row_block(row_block, row_blocks, tiles, b, q_head, problem)
        begin, partial_end, full_begin, end = chunk_tiles(tiles, number, 0, 1)
        head = head_of(inputs, b, q_head, q_head // problem.heads_per_group, problem, CONFIG)
        rows = key_rows(head, row, row_ok, problem, CONFIG)
        if CONFIG.has_partial:
            for tile in tl.range(begin, partial_end, num_stages=CONFIG.stages):
                columns = tl.load(tiles.columns + tile * CONFIG.block_n + n)
                words = tl.load(words_ptr + tl.load(tiles.tile_bitmap + tile) * (CONFIG.block_r * 4))
                summed = _bias_tile(
                    summed, columns, words, rows, head, d_bias_base, kv_len, problem, True, BY_QUERY, CONFIG
                )
        if CONFIG.has_full:
            for tile in tl.range(full_begin, end, num_stages=CONFIG.stages):
                columns = tl.load(tiles.columns + tile * CONFIG.block_n + n)
                summed = _bias_tile(
                    summed, columns, 0, rows, head, d_bias_base, kv_len, problem, False, BY_QUERY, CONFIG
                )
        # The next batch entry or head adds to the same elements, in other threads: its tiles may be others.
        tl.debug_barrier()
    if not BY_QUERY:
        tl.store(d_bias_base + row, summed, mask=row_ok)
