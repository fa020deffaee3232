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
    block_rows,
    chunk_tiles,
    load_block,
    load_rows,
    tile_score_gradients,
    tile_weights,
)
from stof.kernels.triton.dropout_mask import kept_weights, load_seed
from stof.kernels.triton.tile_bits import kept_scores
from stof.runtime.pdl import launch_next_and_wait


@triton.jit
@no_type_check
def _bias_tile(
    k,  # [BLOCK_M, BLOCK_D]
    v,  # [BLOCK_M, BLOCK_V]
    summed,  # [BLOCK_M] sums over queries, unless BY_QUERY
    columns,  # [BLOCK_N] queries
    words,
    q_base,
    d_out_base,
    stats,
    bias_base,
    d_bias_base,  # [Sq, Skv] float32, contiguous
    row,  # int64
    row_ok,
    stride_qs,
    stride_gs,
    stride_bq,
    stride_bk,
    stat_size,
    kv_len,
    scale,
    softcap,
    head_dim,
    value_dim,
    head_number,  # b * H + h
    seed,
    offset,
    threshold,
    dropout_scale,
    PARTIAL: tl.constexpr,
    BY_QUERY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add one tile's gradients to those of the bias, in memory where each query has its own, else to `summed`."""
    at = columns.to(tl.int64)
    q = load_rows(q_base, at * stride_qs, head_dim, BLOCK_D, PAD_D)
    d_out = load_rows(d_out_base, at * stride_gs, value_dim, BLOCK_V, PAD_V)
    lse = tl.load(stats + columns)
    delta = tl.load(stats + stat_size + columns)
    share = delta
    if HAS_SINKS:
        share = tl.load(stats + 2 * stat_size + columns)
    keep = kept_scores(words, BLOCK_M, BLOCK_N) if PARTIAL else True
    bias_at = at[None, :] * stride_bq + row[:, None] * stride_bk
    bias = tl.load(bias_base + bias_at, mask=row_ok[:, None], other=0.0).to(tl.float32)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]: rows are keys
    p, _ = tile_weights(s, lse[None, :], bias, keep, scale, softcap, PARTIAL, True, HAS_SOFTCAP, True)
    d_p = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    if HAS_DROPOUT:
        kept = kept_weights(seed, offset, threshold, head_number, columns[None, :], row[:, None])
        d_p = tl.where(kept, d_p * dropout_scale, 0.0)
    d_s = tile_score_gradients(p, d_p, delta[None, :], share[None, :], keep, PARTIAL, HAS_SINKS)
    if BY_QUERY:
        # Columns that no row keeps repeat another one: no two threads may write to one element.
        written = row_ok[:, None] & keep if PARTIAL else row_ok[:, None]
        ptrs = d_bias_base + at[None, :] * kv_len + row[:, None]
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
    d_bias_ptr,  # [bias batch, bias heads, Sq if BY_QUERY else 1, Skv] float32, zeros, contiguous
    seed_ptr,  # [2] int64
    pattern_ptr,  # fields of `BackwardTiles` of the transposed layout
    row_block_ptr,
    partial_count_ptr,
    columns_ptr,
    tile_bitmap_ptr,
    bitmaps_ptr,
    row_order_ptr,
    stride_qb,  # strides of q, k, v and d_out count UNIT elements
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_bk,
    mask_stride_b,
    mask_stride_h,
    bias_heads,
    shared_batch,  # batch entries that share a bias
    shared_heads,  # query heads that share one
    heads,
    heads_per_group,  # query heads per key head
    q_len,
    kv_len,
    head_dim,  # counts UNIT elements, as value_dim
    value_dim,
    row_blocks,
    stat_size,
    scale,
    softcap,
    threshold,  # of dropout
    dropout_scale,  # 1 / (1 - p)
    BLOCK_R: tl.constexpr,  # rows of a row block
    BLOCK_M: tl.constexpr,  # rows of the matrix products, at least BLOCK_R
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    BY_QUERY: tl.constexpr,  # the bias has a value for every query
    HAS_PARTIAL: tl.constexpr,
    HAS_FULL: tl.constexpr,
    PERMUTED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Gradients of a bias at the keys of one row block."""
    launch_next_and_wait(USE_PDL)
    head_dim = head_dim * UNIT
    value_dim = value_dim * UNIT
    program = tl.program_id(0)
    row_block = program % row_blocks
    bias_group = program // row_blocks
    row, row_ok = block_rows(row_block, row_order_ptr, kv_len, BLOCK_R, BLOCK_M, PERMUTED)
    row = row.to(tl.int64)
    d_bias_base = d_bias_ptr + bias_group.to(tl.int64) * kv_len * (q_len if BY_QUERY else 1)
    summed = tl.zeros([BLOCK_M], tl.float32)
    seed, offset = load_seed(seed_ptr, HAS_DROPOUT)

    n = tl.arange(0, BLOCK_N)
    r = tl.minimum(tl.arange(0, BLOCK_M), BLOCK_R - 1)
    words_ptr = bitmaps_ptr + r[:, None] * 4 + tl.arange(0, 4)[None, :]
    for sharing in range(shared_batch * shared_heads):
        b = bias_group // bias_heads + sharing // shared_heads
        head = bias_group % bias_heads + sharing % shared_heads
        b64, head64, kv_head64 = b.to(tl.int64), head.to(tl.int64), (head // heads_per_group).to(tl.int64)
        number = tl.load(pattern_ptr + b * mask_stride_b + head * mask_stride_h) * row_blocks + row_block
        begin, partial_end, full_begin, end = chunk_tiles(row_block_ptr, partial_count_ptr, number, 0, 1)
        k_base = k_ptr + (b64 * stride_kb + kv_head64 * stride_kh) * UNIT
        v_base = v_ptr + (b64 * stride_vb + kv_head64 * stride_vh) * UNIT
        k = load_block(k_base, row * stride_ks * UNIT, row_ok, head_dim, BLOCK_D)
        v = load_block(v_base, row * stride_vs * UNIT, row_ok, value_dim, BLOCK_V)
        q_base = q_ptr + (b64 * stride_qb + head64 * stride_qh) * UNIT
        d_out_base = d_out_ptr + (b64 * stride_gb + head64 * stride_gh) * UNIT
        stats = stats_ptr + (b64 * heads + head) * q_len
        bias_base = bias_ptr + b64 * stride_bb + head64 * stride_bh
        if HAS_PARTIAL:
            for tile in tl.range(begin, partial_end, num_stages=STAGES):
                columns = tl.load(columns_ptr + tile * BLOCK_N + n)
                words = tl.load(words_ptr + tl.load(tile_bitmap_ptr + tile) * (BLOCK_R * 4))
                summed = _bias_tile(
                    k, v, summed, columns, words, q_base, d_out_base, stats, bias_base, d_bias_base, row, row_ok,
                    stride_qs * UNIT, stride_gs * UNIT, stride_bq, stride_bk, stat_size, kv_len, scale, softcap,
                    head_dim, value_dim, b * heads + head, seed, offset, threshold, dropout_scale, True, BY_QUERY,
                    HAS_SOFTCAP, HAS_SINKS, PAD_D, PAD_V, PRECISION, HAS_DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
                )  # fmt: skip
        if HAS_FULL:
            for tile in tl.range(full_begin, end, num_stages=STAGES):
                columns = tl.load(columns_ptr + tile * BLOCK_N + n)
                summed = _bias_tile(
                    k, v, summed, columns, 0, q_base, d_out_base, stats, bias_base, d_bias_base, row, row_ok,
                    stride_qs * UNIT, stride_gs * UNIT, stride_bq, stride_bk, stat_size, kv_len, scale, softcap,
                    head_dim, value_dim, b * heads + head, seed, offset, threshold, dropout_scale, False, BY_QUERY,
                    HAS_SOFTCAP, HAS_SINKS, PAD_D, PAD_V, PRECISION, HAS_DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
                )  # fmt: skip
        # The next batch entry or head adds to the same elements, in other threads: its tiles may be others.
        tl.debug_barrier()
    if not BY_QUERY:
        tl.store(d_bias_base + row, summed, mask=row_ok)
