"""dK and dV in Triton: a program goes through the tiles of queries of one row block of keys, or of a chunk of it.

It does so for each query head of its key head in turn, and adds all up in that order.
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
    nan_or_zero,
    store_sums,
    tile_score_gradients,
    tile_weights,
    times_slope,
)
from stof.kernels.triton.backward_tiles import ITEM
from stof.kernels.triton.dropout_mask import kept_weights, load_seed
from stof.kernels.triton.tile_bits import kept_scores
from stof.runtime.pdl import launch_next_and_wait

# Triton's cache keys hold constants of a module that are named, not fields of an object.
ROW_BLOCK, CHUNK, CHUNKS, SLOT = (tl.constexpr(field) for field in ITEM)
ITEM_SIZE = tl.constexpr(len(ITEM))


@triton.jit
@no_type_check
def _dkv_tile(
    k,  # [BLOCK_M, BLOCK_D]
    v,  # [BLOCK_M, BLOCK_V]
    dk,  # [BLOCK_M, BLOCK_D] float32
    dv,  # [BLOCK_M, BLOCK_V] float32
    columns,  # [BLOCK_N] queries
    words,
    q_base,
    d_out_base,
    stats,  # of the batch entry and head
    bias_base,
    row,
    row_ok,
    stride_qs,
    stride_gs,
    stride_bq,
    stride_bk,
    stat_size,
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
    HAS_SCORE_MOD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add one tile of queries to dk and dv."""
    at = columns.to(tl.int64) if INT64_OFFSETS else columns
    q = load_rows(q_base, at * stride_qs, head_dim, BLOCK_D, PAD_D)
    d_out = load_rows(d_out_base, at * stride_gs, value_dim, BLOCK_V, PAD_V)
    lse = tl.load(stats + columns)
    delta = tl.load(stats + stat_size + columns)
    share = delta
    if HAS_SINKS:
        share = tl.load(stats + 2 * stat_size + columns)
    keep = kept_scores(words, BLOCK_M, BLOCK_N) if PARTIAL else True
    bias = 0.0
    if HAS_BIAS:
        bias_at = at.to(tl.int64)[None, :] * stride_bq + row.to(tl.int64)[:, None] * stride_bk
        bias = tl.load(bias_base + bias_at, mask=row_ok[:, None], other=0.0).to(tl.float32)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]: rows are keys
    # Before the weights: this product runs while they are computed.
    d_p = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    p, slope = tile_weights(s, lse[None, :], bias, keep, scale, softcap, PARTIAL, HAS_SCORE_MOD, HAS_SOFTCAP, HAS_BIAS)
    w = p * share[None, :] if HAS_SINKS else p
    if HAS_DROPOUT:
        kept = kept_weights(seed, offset, threshold, head_number, columns[None, :], row[:, None])
        w = tl.where(kept, w * dropout_scale, 0.0)
    dv = tl.dot(w.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
    if HAS_DROPOUT:
        d_p = tl.where(kept, d_p * dropout_scale, 0.0)
    d_s = tile_score_gradients(p, d_p, delta[None, :], share[None, :], keep, PARTIAL, HAS_SINKS)
    if HAS_SOFTCAP:
        d_s = times_slope(d_s, slope, keep, PARTIAL)
    dk = tl.dot(d_s.to(q.dtype), q, dk, input_precision=PRECISION)
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
    dk_ptr,  # [B, Hkv, Skv, D]
    dv_ptr,  # [B, Hkv, Skv, Dv]
    dk_chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_D] float32
    dv_chunk_ptr,  # [groups, slots, BLOCK_M, BLOCK_V] float32
    seed_ptr,  # [2] int64
    pattern_ptr,  # fields of `BackwardTiles` of the transposed layout
    items_ptr,
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
    stride_dkb,
    stride_dkh,
    stride_dks,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_bk,
    mask_stride_b,
    mask_stride_h,
    groups,  # batch entries times key heads
    kv_heads,
    heads_per_group,  # query heads per key head
    q_len,
    kv_len,
    head_dim,  # counts UNIT elements, as value_dim
    value_dim,
    items,
    heads_at_once,  # neighbouring groups that run the same item at the same time, for the L2 cache
    row_blocks,
    slots,
    stat_size,
    score_scale,  # times log2(e) unless HAS_SCORE_MOD
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
    PATTERNS: tl.constexpr,  # several masks: look up which
    HAS_PARTIAL: tl.constexpr,
    HAS_FULL: tl.constexpr,
    FULL_CONTIGUOUS: tl.constexpr,
    PERMUTED: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NAN: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UNIT: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Gradients of the keys and values of one row block, or a chunk's part of them."""
    launch_next_and_wait(USE_PDL)
    head_dim = head_dim * UNIT
    value_dim = value_dim * UNIT
    program = tl.program_id(0)
    item = program % (items * heads_at_once) // heads_at_once
    group = program // (items * heads_at_once) * heads_at_once + program % heads_at_once
    if group >= groups:
        return
    b = group // kv_heads
    kv_head = group % kv_heads
    row_block = tl.load(items_ptr + item * ITEM_SIZE + ROW_BLOCK)
    chunk = tl.load(items_ptr + item * ITEM_SIZE + CHUNK)
    chunks = tl.load(items_ptr + item * ITEM_SIZE + CHUNKS)
    row, row_ok = block_rows(row_block, row_order_ptr, kv_len, BLOCK_R, BLOCK_M, PERMUTED)
    b64, kv_head64 = b.to(tl.int64), kv_head.to(tl.int64)
    row = row.to(tl.int64) if INT64_OFFSETS else row
    k_base = k_ptr + (b64 * stride_kb + kv_head64 * stride_kh) * UNIT
    v_base = v_ptr + (b64 * stride_vb + kv_head64 * stride_vh) * UNIT
    k = load_block(k_base, row * stride_ks * UNIT, row_ok, head_dim, BLOCK_D)
    v = load_block(v_base, row * stride_vs * UNIT, row_ok, value_dim, BLOCK_V)
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    seed, offset = load_seed(seed_ptr, HAS_DROPOUT)

    n = tl.arange(0, BLOCK_N)
    r = tl.minimum(tl.arange(0, BLOCK_M), BLOCK_R - 1)
    words_ptr = bitmaps_ptr + r[:, None] * 4 + tl.arange(0, 4)[None, :]
    for head_in_group in range(heads_per_group):
        head = kv_head * heads_per_group + head_in_group
        number = row_block
        if PATTERNS:
            number += tl.load(pattern_ptr + b * mask_stride_b + head * mask_stride_h) * row_blocks
        begin, partial_end, full_begin, end = chunk_tiles(row_block_ptr, partial_count_ptr, number, chunk, chunks)
        if HAS_NAN:
            nan = nan_or_zero(partial_count_ptr, number)
            dk += nan
            dv += nan
        head64 = head.to(tl.int64)
        q_base = q_ptr + (b64 * stride_qb + head64 * stride_qh) * UNIT
        d_out_base = d_out_ptr + (b64 * stride_gb + head64 * stride_gh) * UNIT
        stats = stats_ptr + (b64 * kv_heads * heads_per_group + head) * q_len
        bias_base = bias_ptr + b64 * stride_bb + head64 * stride_bh
        head_number = b * kv_heads * heads_per_group + head
        if HAS_PARTIAL:
            # Columns and bitmap words are loaded one tile ahead, as in the forward: see `block_wise_kernel`.
            next_columns = tl.load(columns_ptr + begin * BLOCK_N + n)
            next_words = tl.load(words_ptr + tl.maximum(tl.load(tile_bitmap_ptr + begin), 0) * (BLOCK_R * 4))
            bitmap = tl.maximum(tl.load(tile_bitmap_ptr + begin + 1), 0)
            for tile in tl.range(begin, partial_end, num_stages=STAGES):
                columns, words = next_columns, next_words
                next_columns = tl.load(columns_ptr + (tile + 1) * BLOCK_N + n)
                next_words = tl.load(words_ptr + bitmap * (BLOCK_R * 4))
                bitmap = tl.maximum(tl.load(tile_bitmap_ptr + tile + 2), 0)
                dk, dv = _dkv_tile(
                    k, v, dk, dv, columns, words, q_base, d_out_base, stats, bias_base, row, row_ok,
                    stride_qs * UNIT, stride_gs * UNIT, stride_bq, stride_bk, stat_size, score_scale, softcap,
                    head_dim, value_dim, head_number, seed, offset, threshold, dropout_scale, True, HAS_SCORE_MOD,
                    HAS_SOFTCAP, HAS_BIAS, HAS_SINKS, PAD_D, PAD_V, INT64_OFFSETS, PRECISION, HAS_DROPOUT,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
                )  # fmt: skip
        if HAS_FULL:
            lane = 0 if FULL_CONTIGUOUS else n
            further = n if FULL_CONTIGUOUS else 0
            next_columns = tl.load(columns_ptr + full_begin * BLOCK_N + lane)
            for tile in tl.range(full_begin, end, num_stages=STAGES):
                columns = next_columns + further
                next_columns = tl.load(columns_ptr + (tile + 1) * BLOCK_N + lane)
                dk, dv = _dkv_tile(
                    k, v, dk, dv, columns, 0, q_base, d_out_base, stats, bias_base, row, row_ok,
                    stride_qs * UNIT, stride_gs * UNIT, stride_bq, stride_bk, stat_size, score_scale, softcap,
                    head_dim, value_dim, head_number, seed, offset, threshold, dropout_scale, False, HAS_SCORE_MOD,
                    HAS_SOFTCAP, HAS_BIAS, HAS_SINKS, PAD_D, PAD_V, INT64_OFFSETS, PRECISION, HAS_DROPOUT,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
                )  # fmt: skip

    slot = group.to(tl.int64) * slots + tl.load(items_ptr + item * ITEM_SIZE + SLOT)
    store_sums(
        dk, dk_ptr + b64 * stride_dkb + kv_head64 * stride_dkh, dk_chunk_ptr, slot, chunks, row, row_ok, stride_dks,
        head_dim, scale, SPLIT, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    store_sums(
        dv, dv_ptr + b64 * stride_dvb + kv_head64 * stride_dvh, dv_chunk_ptr, slot, chunks, row, row_ok, stride_dvs,
        value_dim, 1.0, SPLIT, BLOCK_M, BLOCK_V,
    )  # fmt: skip
