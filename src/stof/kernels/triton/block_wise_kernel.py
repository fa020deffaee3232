"""Block-wise attention in Triton: tensor cores over the tiles of one row block, split row blocks merged in place.

A program owns one work item: some partial and some full tiles of one row block, for one batch entry and one head (or
one key head with its query heads packed into rows). Partial tiles come first. Row blocks that are cut into several
items leave unnormalised partial results in float32; whichever item finishes last merges them in chunk order, so
results do not depend on timing.

Source: STOF (arXiv 2506.06095), section 4.1; online softmax as FlashAttention-2 (arXiv 2307.08691), section 3.1;
split and merge as Flash-Decoding.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

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


@triton.jit
@no_type_check
def _step(
    q,  # [BLOCK_M, BLOCK_D]
    acc,  # [BLOCK_M, BLOCK_V] float32
    m_i,  # [BLOCK_M] running maximum, in units of log 2, `bounded`
    l_i,  # [BLOCK_M] running sum
    columns,  # [BLOCK_N] key columns
    words,  # [BLOCK_M, 4] bitmap words, unused when not PARTIAL
    k_ptr,
    v_ptr,
    bias_row_ptr,  # [BLOCK_M] pointers to the bias row of each query
    row,  # [BLOCK_M], as row_ok and head_number
    row_ok,
    head_number,  # b * H + h
    stride_ks,
    stride_vs,
    stride_bk,
    scale,
    softcap,
    head_dim,
    value_dim,
    seed,
    offset,
    threshold,
    PARTIAL: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_VECTORS: tl.constexpr,  # the bias is loaded in whole vectors of 16 bytes
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    UNIT: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    SAME_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One tile: scores, mask, online softmax, dropout, accumulate."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    at = columns.to(tl.int64) if INT64_OFFSETS else columns
    k_at = at[:, None] * stride_ks * UNIT
    # One multiplication serves both where K and V lie alike, as they nearly always do.
    v_at = k_at if SAME_STRIDE else at[:, None] * stride_vs * UNIT
    if PAD_D:
        k = tl.load(k_ptr + k_at + d[None, :], mask=(d < head_dim)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + k_at + d[None, :])
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if HAS_SCORE_MOD:
        s = s * scale
        if HAS_SOFTCAP:
            s = softcapped(s / softcap, softcap)
        if HAS_BIAS:
            if BIAS_VECTORS:
                # Whole vectors: also columns that no row sees, whose scores are dropped.
                vector_columns = columns // VECTOR * VECTOR + tl.arange(0, BLOCK_N) % VECTOR
                bias_at = tl.max_contiguous(tl.multiple_of(vector_columns, VECTOR), VECTOR)
            else:
                bias_at = at * stride_bk
            bias = tl.load(bias_row_ptr[:, None] + bias_at[None, :], mask=row_ok[:, None], other=0.0)
            s += bias.to(tl.float32)
        s *= LOG2E
    if PARTIAL:
        s = tl.where(kept_scores(words, BLOCK_M, BLOCK_N), s, float("-inf"))
    if HAS_SCORE_MOD:
        m_new = bounded(tl.maximum(m_i, tl.max(s, 1)))
        p = tl.exp2(s - m_new[:, None])
    else:
        m_new = bounded(tl.maximum(m_i, tl.max(s, 1) * scale))
        p = tl.exp2(s * scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if HAS_DROPOUT:
        # After the sum: the softmax's denominator counts what is dropped.
        kept = kept_weights(seed, offset, threshold, head_number[:, None], row[:, None], columns[None, :])
        p = tl.where(kept, p, 0.0)
    if PAD_V:
        v = tl.load(v_ptr + v_at + dv[None, :], mask=(dv < value_dim)[None, :], other=0.0)
    else:
        v = tl.load(v_ptr + v_at + dv[None, :])
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, l_i


@triton.jit
@no_type_check
def _store(
    acc,  # [BLOCK_M, BLOCK_V]
    m_i,
    l_i,
    row,
    head,
    row_ok,
    out_base,  # of the batch entry
    lse_base,  # of the batch entry
    sinks_ptr,
    stride_oh,
    stride_os,
    q_len,
    value_dim,
    dropout_scale,
    HAS_SINKS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PAD_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Normalise and write the output and the log-sum-exp (natural, sinks not counted)."""
    some = l_i != 0.0  # or NaN
    total = tl.where(some, l_i, 1.0)
    lse = tl.where(some, (m_i + tl.log2(total)) * LN2, float("-inf"))
    if HAS_SINKS:
        # softmax over keys and sink = softmax over keys / (1 + exp(sink - lse))
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=0.0).to(tl.float32)
        total = tl.where(some, total * (1.0 + tl.exp2((sink - lse) * LOG2E)), 1.0)
    factor = tl.where(some, 1.0 / total, 0.0)
    if HAS_DROPOUT:
        factor *= dropout_scale
    dv = tl.arange(0, BLOCK_V)
    out_ptrs = out_base + (head.to(tl.int64) * stride_oh + row * stride_os)[:, None] + dv[None, :]
    out_ok = row_ok[:, None] & (dv < value_dim)[None, :] if PAD_V else row_ok[:, None]
    tl.store(out_ptrs, (acc * factor[:, None]).to(out_base.dtype.element_ty), mask=out_ok)
    tl.store(lse_base + head * q_len + row, lse, mask=row_ok)


@triton.jit
@no_type_check
def _rows(
    row_block,
    first_head,
    pattern,
    row_order_ptr,
    q_len,
    heads_per_group,
    BLOCK_Q: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PERMUTED: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Query row (64-bit when INT64_OFFSETS), head, and existence of each row of a row block's tiles."""
    r = tl.arange(0, BLOCK_M)
    in_block = r // PACK
    position = row_block * BLOCK_Q + in_block
    row_ok = position < q_len
    if BLOCK_M > BLOCK_Q * PACK:
        row_ok = row_ok & (in_block < BLOCK_Q)
    if PACK > 1:
        row_ok = row_ok & (r % PACK < heads_per_group)
        head = first_head + r % PACK
    else:
        head = first_head + tl.zeros([BLOCK_M], tl.int32)
    if PERMUTED:
        row = tl.load(row_order_ptr + pattern * q_len + position, mask=row_ok, other=0)
    else:
        row = position
    if INT64_OFFSETS:
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
    chunk_out_ptr,  # [groups, chunks, BLOCK_M, BLOCK_V] float32
    chunk_ml_ptr,  # [groups, chunks, 2, BLOCK_M] float32
    counters_ptr,  # [groups, split row blocks] int32, zero before and after
    seed_ptr,  # [2] int64
    pattern_ptr,  # [mask_batch, mask_heads] int32
    items_ptr,  # [P, items, ITEM_SIZE] int32
    first_columns_ptr,  # [P, items, BLOCK_N or 1] int32, columns of each item's first tile; 1 if CONTIGUOUS_TILES
    partial_columns_ptr,  # [partial tiles, BLOCK_N] int32, or [partial tiles, 1]
    partial_bitmap_ptr,  # [partial tiles] int32, row of bitmaps
    bitmaps_ptr,  # [U, BLOCK_Q, 4] int32
    full_columns_ptr,  # [full tiles, BLOCK_N] int32 when FULL_GATHERED; else full tiles of an item follow each other
    row_order_ptr,  # [P, Sq] int32, when PERMUTED
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_os,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_bk,
    mask_stride_b,
    mask_stride_h,
    groups,  # programs that share an item list: batch entries times groups_per_batch
    heads,
    groups_per_batch,  # programs per batch entry: heads, or key heads when packed
    heads_per_group,  # query heads per key head
    q_len,
    head_dim,
    value_dim,
    items,
    heads_at_once,  # neighbouring groups that run the same item at the same time, for the L2 cache
    chunks,
    splits,
    scale,  # times log2(e) unless HAS_SCORE_MOD
    softcap,
    threshold,  # of dropout
    dropout_scale,  # 1 / (1 - p)
    BLOCK_Q: tl.constexpr,  # query rows of a row block
    PACK: tl.constexpr,  # query heads in the rows of a tile, rounded up to a power of two
    BLOCK_M: tl.constexpr,  # rows of the matrix product, >= BLOCK_Q * PACK
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    PATTERNS: tl.constexpr,  # several masks: look up which
    HAS_PARTIAL: tl.constexpr,
    HAS_FULL: tl.constexpr,
    FULL_GATHERED: tl.constexpr,
    PERMUTED: tl.constexpr,
    SPLIT: tl.constexpr,
    NAN_ITEMS: tl.constexpr,  # items may ask for NaN
    SHARED: tl.constexpr,  # items begin with tiles that others use too, relative to their rows
    CONTIGUOUS_TILES: tl.constexpr,  # lists of columns hold the first one of each tile, the others follow it
    HAS_SCORE_MOD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FULL_BIAS_VECTORS: tl.constexpr,  # of full tiles, see `Work.bias_vectors`, at aligned offsets
    PARTIAL_BIAS_VECTORS: tl.constexpr,  # of partial tiles, and none reaches past the last key
    HAS_SINKS: tl.constexpr,
    UNIT: tl.constexpr,  # elements; head_dim, value_dim and the strides of K and V count these
    INT64_OFFSETS: tl.constexpr,
    SAME_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    launch_next_and_wait(USE_PDL)
    # Products with a constant: the compiler knows then that rows begin and end at multiples of it.
    head_dim = head_dim * UNIT
    value_dim = value_dim * UNIT
    program = tl.program_id(0)
    batch_of_groups = items * heads_at_once
    item = (program % batch_of_groups) // heads_at_once
    group = (program // batch_of_groups) * heads_at_once + program % heads_at_once
    if group >= groups:
        return
    b = group // groups_per_batch
    g = group % groups_per_batch
    if PACK > 1:
        first_head = g * heads_per_group
        kv_head = g
    else:
        first_head = g
        kv_head = g // heads_per_group
    if PATTERNS:
        pattern = tl.load(pattern_ptr + b * mask_stride_b + first_head * mask_stride_h)
        item += pattern * items
    else:
        pattern = 0
    # Everything the first products need is one load away from the program's number: each further link in a chain
    # of loads would delay every program by a trip to memory.
    n = tl.arange(0, BLOCK_N)
    WIDTH: tl.constexpr = 1 if CONTIGUOUS_TILES else BLOCK_N
    lane = 0 if CONTIGUOUS_TILES else n
    next_columns = tl.load(first_columns_ptr + item * WIDTH + lane)
    item_ptr = items_ptr + item * ITEM_SIZE
    row_block = tl.load(item_ptr + ROW_BLOCK)
    nan_or_zero = 0.0
    if NAN_ITEMS:
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
    if SHARED:
        own_partial = tl.load(item_ptr + OWN_PARTIAL)
        to_partial = tl.load(item_ptr + PARTIAL_SHIFT)
        own_full = tl.load(item_ptr + OWN_FULL)
        to_full = tl.load(item_ptr + FULL_SHIFT)
        q0 = tl.load(item_ptr + ORIGIN)

    r = tl.arange(0, BLOCK_M)
    row, head, row_ok = _rows(
        row_block,
        first_head,
        pattern,
        row_order_ptr,
        q_len,
        heads_per_group,
        BLOCK_Q,
        PACK,
        BLOCK_M,
        PERMUTED,
        INT64_OFFSETS,
    )
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    b64 = b.to(tl.int64)
    q_base = q_ptr + b64 * stride_qb
    out_base = out_ptr + b64 * stride_ob
    q_ptrs = q_base + (head.to(tl.int64) * stride_qh + row * stride_qs)[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=row_ok[:, None] & (d < head_dim)[None, :] if PAD_D else row_ok[:, None], other=0.0)
    k_base = k_ptr + (b64 * stride_kb + kv_head.to(tl.int64) * stride_kh) * UNIT
    v_base = v_ptr + (b64 * stride_vb + kv_head.to(tl.int64) * stride_vh) * UNIT
    bias_row = b64 * stride_bb + head.to(tl.int64) * stride_bh + row.to(tl.int64) * stride_bq
    if FULL_BIAS_VECTORS:
        # Strides that are multiples of 8 but not of 16 do not tell by themselves.
        bias_row = tl.multiple_of(bias_row, VECTOR)
    bias_row_ptr = bias_ptr + bias_row

    head_number = b * heads + head
    seed, offset = load_seed(seed_ptr, HAS_DROPOUT)

    m_i = tl.full([BLOCK_M], LOWEST, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if NAN_ITEMS:
        l_i += nan_or_zero
    word = tl.arange(0, 4)
    # Rows past BLOCK_Q * PACK repeat the last bitmap row: their scores are dropped, but reads must stay inside.
    words_ptr = bitmaps_ptr + tl.minimum(r // PACK, BLOCK_Q - 1)[:, None] * 4 + word[None, :]

    if HAS_FULL and HAS_PARTIAL and FULL_GATHERED:
        # Loaded before the partial tiles, used after them.
        full_columns = tl.load(full_columns_ptr + _place(full_begin, own_full, to_full, SHARED) * WIDTH + lane)
    if HAS_PARTIAL:
        # Columns and bitmap words are loaded one tile ahead into registers: left to the pipeliner they would make
        # every load of K and V an indirect one, at the price of a stage.
        next_words = tl.load(words_ptr + bitmap * (BLOCK_Q * 4))
        if not SHARED:
            bitmap = tl.load(partial_bitmap_ptr + partial_begin + 1)
        for tile in tl.range(partial_begin, partial_end, num_stages=STAGES):
            columns, words = next_columns, next_words
            next_place = _place(tile + 1, own_partial, to_partial, SHARED)
            next_columns = tl.load(partial_columns_ptr + next_place * WIDTH + lane)
            if SHARED:
                # Added a step late: the pipeliner carries a plain load from step to step, but would copy one that is
                # computed with to shared memory, at the price of all its stages for K and V.
                columns += tl.where(tile < own_partial, q0, 0)
                bitmap = next_place
            if CONTIGUOUS_TILES:
                # Columns that no row sees are not read.
                columns = tl.minimum(columns + n, last_column)
            next_words = tl.load(words_ptr + bitmap * (BLOCK_Q * 4))
            if not SHARED:
                bitmap = tl.load(partial_bitmap_ptr + tile + 2)
            acc, m_i, l_i = _step(
                q, acc, m_i, l_i, columns, words, k_base, v_base, bias_row_ptr, row, row_ok, head_number,
                stride_ks, stride_vs, stride_bk, scale, softcap, head_dim, value_dim, seed, offset, threshold, True,
                HAS_SCORE_MOD, HAS_SOFTCAP, HAS_BIAS, PARTIAL_BIAS_VECTORS, PAD_D, PAD_V, UNIT, INT64_OFFSETS,
                SAME_STRIDE, PRECISION, HAS_DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip
        if HAS_FULL and FULL_GATHERED:
            next_columns = full_columns
    if HAS_FULL:
        for tile in tl.range(full_begin, full_end, num_stages=STAGES):
            if FULL_GATHERED:
                columns = next_columns
                next_place = _place(tile + 1, own_full, to_full, SHARED)
                next_columns = tl.load(full_columns_ptr + next_place * WIDTH + lane)
                if SHARED:
                    columns += tl.where(tile < own_full, q0, 0)
                if CONTIGUOUS_TILES:
                    columns += n
            else:
                columns = first_full + (tile - full_begin) * BLOCK_N + n
            acc, m_i, l_i = _step(
                q, acc, m_i, l_i, columns, 0, k_base, v_base, bias_row_ptr, row, row_ok, head_number,
                stride_ks, stride_vs, stride_bk, scale, softcap, head_dim, value_dim, seed, offset, threshold, False,
                HAS_SCORE_MOD, HAS_SOFTCAP, HAS_BIAS, FULL_BIAS_VECTORS, PAD_D, PAD_V, UNIT, INT64_OFFSETS,
                SAME_STRIDE, PRECISION, HAS_DROPOUT, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip

    if SPLIT:
        n_chunks = tl.load(item_ptr + PARTS)
        if n_chunks > 1:
            first_chunk = tl.load(item_ptr + FIRST_CHUNK)
            chunk = tl.load(item_ptr + CHUNK)
            split = tl.load(item_ptr + SPLIT_ROW_BLOCK)
            slot = group.to(tl.int64) * chunks + first_chunk
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
    _store(
        acc, m_i, l_i, row, head, row_ok, out_base, lse_ptr + b64 * heads * q_len, sinks_ptr,
        stride_oh, stride_os, q_len, value_dim, dropout_scale, HAS_SINKS, HAS_DROPOUT, PAD_V, BLOCK_V,
    )  # fmt: skip
