"""Triton kernels that write the block-wise kernel's work from block scores."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.fill import (
    ALL_BITS,
    bits_from,
    store_columns,
    store_item,
    store_nan_item,
)
from stof.kernels.triton.block_wise_kernel import FULL_COLUMN, ITEM_SIZE


@triton.jit
@no_type_check
def select_blocks(
    scores_ptr,  # [B | 1, H | 1, query blocks, key blocks]
    chosen_ptr,  # [P, query blocks, k] int32, ascending
    count_ptr,  # [P, query blocks] int32
    bad_ptr,  # [P] int32, zero before
    flags_ptr,  # [P] int32, what was wrong gathered over updates
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    query_blocks,
    key_blocks,
    k,
    NAN_BIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,  # key blocks rounded up to a power of two
):
    """The k best key blocks of one query block; of equal scores the first."""
    pid = tl.program_id(0)
    pattern = pid // query_blocks
    query_block = pid % query_blocks
    x = tl.arange(0, BLOCK)
    at = (pattern // mask_heads).to(tl.int64) * stride_b + (pattern % mask_heads).to(tl.int64) * stride_h
    at += query_block.to(tl.int64) * stride_q + x * stride_k
    ok = x < key_blocks
    score = tl.load(scores_ptr + at, mask=ok, other=float("-inf")).to(tl.float32)
    is_nan = (score != score).to(tl.int32)
    if tl.max(is_nan, 0) > 0:
        tl.atomic_or(bad_ptr + pattern, NAN_BIT)
        tl.atomic_or(flags_ptr + pattern, NAN_BIT)
    if CAUSAL:
        ok = ok & (x <= query_block)
    ok = ok & (score > float("-inf"))
    # As unsigned integers, floats order like their values once the negative ones are turned over. Adding 0.0 makes
    # the two zeros equal.
    pattern_bits = (score + 0.0).to(tl.int32, bitcast=True)
    turned = tl.where(pattern_bits < 0, ~pattern_bits, pattern_bits ^ -2147483648)
    key = tl.where(ok, turned.to(tl.uint32, bitcast=True), 0)
    # The k-th largest key, bit by bit, until that many are no smaller than what is known of it.
    limit = tl.full([], 0, tl.uint32)
    bit = tl.full([], 2**31, tl.uint32)
    above_limit = tl.sum(ok.to(tl.int32), 0)
    while (above_limit > k) & (bit != 0):
        trial = limit | bit
        count = tl.sum((key >= trial).to(tl.int32), 0)
        limit = tl.where(count >= k, trial, limit)
        above_limit = tl.where(count >= k, count, above_limit)
        bit = bit >> 1
    above = ok & (key > limit)
    level = ok & (key == limit)
    room = k - tl.sum(above.to(tl.int32), 0)
    taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + pid.to(tl.int64) * k + place, x, mask=taken)
    tl.store(count_ptr + pid, tl.sum(taken.to(tl.int32), 0))


@triton.jit
@no_type_check
def block_fill(
    chosen_ptr,  # [P, query blocks, k] int32
    count_ptr,  # [P, query blocks] int32
    bad_ptr,  # [P] int32
    items_ptr,
    first_columns_ptr,
    columns_ptr,
    bitmap_ptr,
    bitmaps_ptr,
    row_blocks,
    query_blocks,
    k,
    slots,  # tiles that a row block has room for: two partial ones, then full ones
    q_len,
    kv_len,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPY: tl.constexpr,  # tiles written at once
):
    """Work of one row block from its chosen key blocks."""
    pid = tl.program_id(0)
    pattern = pid // row_blocks
    row_block = pid % row_blocks
    # Under a causal mask the last row blocks have most to do.
    place = pattern * row_blocks + (row_blocks - 1 - row_block)
    if tl.load(bad_ptr + pattern) != 0:
        store_nan_item(items_ptr, place, row_block)
        return
    PER: tl.constexpr = BLOCK_SIZE // BLOCK_N
    query_block = pattern * query_blocks + row_block * BLOCK_M // BLOCK_SIZE
    count = tl.load(count_ptr + query_block) * PER
    q0 = row_block * BLOCK_M
    last_row = tl.minimum(q0 + BLOCK_M, q_len) - 1
    partial_begin = pid * slots
    full_begin = partial_begin + 2
    partial_end, full_end = partial_begin, full_begin
    for start in range(0, count, COPY):
        x = start + tl.arange(0, COPY)
        ok = x < count
        block = tl.load(chosen_ptr + query_block.to(tl.int64) * k + x // PER, mask=ok, other=0)
        begin = block * BLOCK_SIZE + (x % PER) * BLOCK_N
        ok = ok & (begin < kv_len)
        full = ok & (begin + BLOCK_N <= kv_len)
        if CAUSAL:
            ok = ok & (begin <= last_row)
            full = full & (begin + BLOCK_N - 1 <= q0)
        partial = ok & ~full
        tile = tl.where(
            full,
            full_end + tl.cumsum(full.to(tl.int32), 0) - 1,
            partial_end + tl.cumsum(partial.to(tl.int32), 0) - 1,
        )
        tl.store(columns_ptr + tile, begin, mask=ok)
        full_end += tl.sum(full.to(tl.int32), 0)
        partial_end += tl.sum(partial.to(tl.int32), 0)
    tl.debug_barrier()
    n = tl.arange(0, BLOCK_N)
    for tile in range(partial_begin, partial_end):
        column = tl.load(columns_ptr + tile) + n
        from_row = tl.maximum(column - q0, 0) if CAUSAL else tl.zeros_like(column)
        low, high = bits_from(tl.where(column < kv_len, tl.minimum(from_row, BLOCK_M), BLOCK_M))
        past_low, past_high = bits_from(tl.zeros_like(column) + (last_row + 1 - q0))
        bitmap = pid * 2 + tile - partial_begin
        tl.store(bitmap_ptr + tile, bitmap)
        store_columns(
            bitmaps_ptr + bitmap.to(tl.int64) * (BLOCK_M * 4),
            low & (past_low ^ ALL_BITS), high & (past_high ^ ALL_BITS), BLOCK_M, BLOCK_N,
        )  # fmt: skip
    tl.debug_barrier()
    store_item(items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block,
                partial_begin, partial_end, full_begin, full_end, 1)  # fmt: skip
    last_column = tl.minimum(last_row, kv_len - 1) if CAUSAL else kv_len - 1
    tl.store(items_ptr + place * ITEM_SIZE + FULL_COLUMN, last_column)


@triton.jit
@no_type_check
def list_tiles(
    kinds_ptr,  # [P, R, C] int8, contiguous, see `backward.py`
    last_column_ptr,  # [R] int32, the last column that some row of a row block may keep
    row_block_ptr,  # [P * R + 1] int32, as the others of `BackwardTiles`
    partial_count_ptr,
    columns_ptr,
    tile_bitmap_ptr,
    row_blocks,
    column_blocks,
    FULL: tl.constexpr,
    FIRST_BITMAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPY: tl.constexpr,  # tiles looked at once
):
    """Tiles of one row block, partial ones first, of which there are as many as was counted."""
    pid = tl.program_id(0)
    kinds_ptr += pid.to(tl.int64) * column_blocks
    partial_end = tl.load(row_block_ptr + pid)
    n_partial = tl.load(partial_count_ptr + pid)
    full_end = partial_end + n_partial
    last_column = tl.load(last_column_ptr + pid % row_blocks)
    n = tl.arange(0, BLOCK_N)
    # A row block that could not be listed has fewer than none.
    for start in range(0, tl.where(n_partial < 0, 0, column_blocks), COPY):
        x = start + tl.arange(0, COPY)
        kind = tl.load(kinds_ptr + x, mask=x < column_blocks, other=0).to(tl.int32)
        full = (kind == FULL).to(tl.int32)
        partial = (kind >= FIRST_BITMAP).to(tl.int32)
        tile = tl.where(full != 0, full_end + tl.cumsum(full, 0) - 1, partial_end + tl.cumsum(partial, 0) - 1)
        listed = kind != 0
        # Columns that no row keeps repeat one of the tile.
        column = tl.minimum(x[:, None] * BLOCK_N + n[None, :], last_column)
        tl.store(columns_ptr + tile.to(tl.int64)[:, None] * BLOCK_N + n[None, :], column, mask=listed[:, None])
        tl.store(tile_bitmap_ptr + tile, tl.where(full != 0, -1, kind - FIRST_BITMAP), mask=listed)
        full_end += tl.sum(full, 0)
        partial_end += tl.sum(partial, 0)
