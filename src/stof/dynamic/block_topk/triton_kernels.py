"""Triton kernels that choose blocks by their scores, and list their tiles for the Triton kernels."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.fill import store_item, store_nan_item
from stof.kernels.triton.backward_tiles import NAN_ROW_BLOCK
from stof.kernels.triton.block_wise_kernel import FULL_COLUMN, ITEM_SIZE
from stof.kernels.triton.packed_integers import run_column

# The bitmap of full tiles, see `kept_by_place`.
EVERYTHING = tl.constexpr(1)
_NAN_ROW_BLOCK = tl.constexpr(NAN_ROW_BLOCK)


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
def list_blocks(
    chosen_ptr, count_ptr, bad_ptr, columns_ptr, full_begin, row_blocks, query_blocks, k, q_len, kv_len,
    BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, PAIRED: tl.constexpr,
    COPY: tl.constexpr,
):  # fmt: skip
    """Write the columns of this row block's full tiles, or full halves of tiles, to the places from `full_begin` on.

    A row block has one partial tile or half at most: of causal masks the one that holds its last rows' own keys, else
    the one at the end of the keys.

    Returns:
        Whether its pattern is bad, and nothing is listed; how many full tiles there are, and the first column of the
        last; how many partial ones, its first column, and its bitmap.
    """
    tl.static_assert(BLOCK_M <= WIDTH and WIDTH <= BLOCK_SIZE)
    PER: tl.constexpr = BLOCK_SIZE // WIDTH
    pid = tl.program_id(0)
    pattern = pid // row_blocks
    q0 = (pid % row_blocks) * BLOCK_M
    last_row = tl.minimum(q0 + BLOCK_M, q_len) - 1
    query_block = pattern * query_blocks + q0 // BLOCK_SIZE
    bad = tl.load(bad_ptr + pattern) != 0
    count = tl.where(bad, 0, tl.load(count_ptr + query_block) * PER)
    n_full, last_column, n_partial, partial_column, partial_bitmap = 0, 0, 0, 0, 0
    for start in range(0, count, COPY):
        x = start + tl.arange(0, COPY)
        ok = x < count
        block = tl.load(chosen_ptr + query_block.to(tl.int64) * k + x // PER, mask=ok, other=0)
        begin = block * BLOCK_SIZE + (x % PER) * WIDTH
        ok = ok & (begin < kv_len)
        bitmap = EVERYTHING + (begin + WIDTH > kv_len).to(tl.int32)
        if CAUSAL:
            ok = ok & (begin <= last_row)
            bitmap += tl.where(begin + WIDTH > q0, 2 * ((begin - q0 + WIDTH) // BLOCK_M), 0)
        full = ok & (bitmap == EVERYTHING)
        partial = ok & (bitmap != EVERYTHING)
        store_columns_of(columns_ptr, full_begin + n_full + tl.cumsum(full.to(tl.int32), 0) - 1, begin, full, PAIRED)
        n_full += tl.sum(full.to(tl.int32), 0)
        last_column = tl.maximum(last_column, tl.max(tl.where(full, begin, 0), 0))
        n_partial += tl.sum(partial.to(tl.int32), 0)
        partial_column += tl.sum(tl.where(partial, begin, 0), 0)
        partial_bitmap += tl.sum(tl.where(partial, bitmap, 0), 0)
    return bad, n_full, last_column, n_partial, partial_column, partial_bitmap


@triton.jit
@no_type_check
def store_columns_of(columns_ptr, place, column, ok, PAIRED: tl.constexpr):
    """First columns of tiles, or of halves: a run in the place of each of the four slabs of 16."""
    if PAIRED:
        at = place[:, None] * 4 + tl.arange(0, 4)[None, :]
        value = run_column(column)[:, None] + tl.zeros([1, 4], tl.int32)
        tl.store(columns_ptr + at, value, mask=ok[:, None])
    else:
        tl.store(columns_ptr + place, column, mask=ok)


@triton.jit
@no_type_check
def fill_work(
    chosen_ptr,  # [P, query blocks, k] int32
    count_ptr,  # [P, query blocks] int32
    bad_ptr,  # [P] int32
    items_ptr,
    first_columns_ptr,
    columns_ptr,
    bitmap_ptr,
    row_blocks,
    query_blocks,
    k,
    slots,  # tiles that a row block has room for: a partial one, then full ones
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
    row_block = pid % row_blocks
    # Under a causal mask the last row blocks have most to do.
    place = pid - row_block + (row_blocks - 1 - row_block)
    begin = pid * slots
    bad, n_full, _, n_partial, column, bitmap = list_blocks(
        chosen_ptr, count_ptr, bad_ptr, columns_ptr, begin + 1, row_blocks, query_blocks, k, q_len, kv_len,
        BLOCK_SIZE, CAUSAL, BLOCK_M, BLOCK_N, False, COPY,
    )  # fmt: skip
    if bad:
        store_nan_item(items_ptr, place, row_block)
        return
    tl.store(columns_ptr + begin, column)
    tl.store(bitmap_ptr + begin, bitmap)
    tl.debug_barrier()
    store_item(items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block,
               begin, begin + n_partial, begin + 1, begin + 1 + n_full, 1)  # fmt: skip
    last_row = tl.minimum((row_block + 1) * BLOCK_M, q_len) - 1
    last_column = tl.minimum(last_row, kv_len - 1) if CAUSAL else kv_len - 1
    tl.store(items_ptr + place * ITEM_SIZE + FULL_COLUMN, last_column)


@triton.jit
@no_type_check
def list_tiles(
    taken_ptr,  # [P, blocks of rows, blocks of columns] int8, 1 where a block is chosen
    bad_ptr,  # [P] int32
    row_block_ptr,  # [P * R + 1] int32, as the others of `BackwardTiles`
    partial_count_ptr,
    columns_ptr,
    tile_bitmap_ptr,
    stride_p,
    stride_r,
    stride_c,
    row_blocks,
    rows,
    columns,
    PER_BLOCK: tl.constexpr,  # tiles along a block
    CAUSAL: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # rows are keys
    BLOCK: tl.constexpr,  # rows and columns of a tile
    COPY: tl.constexpr,  # tiles looked at once
    WRITE: tl.constexpr,
):
    """Count the tiles of one row block; with WRITE, when the counts were added up, list them, partial ones first."""
    pid = tl.program_id(0)
    row_block = pid % row_blocks
    taken_ptr += (pid // row_blocks).to(tl.int64) * stride_p + row_block // PER_BLOCK * stride_r
    first, end = 0, (columns + BLOCK - 1) // BLOCK
    last_column = columns - 1
    if CAUSAL and TRANSPOSED:
        first = row_block
    elif CAUSAL:
        end = tl.minimum(end, row_block + 1)
        last_column = tl.minimum(last_column, tl.minimum((row_block + 1) * BLOCK, rows) - 1)
    is_bad = tl.load(bad_ptr + pid // row_blocks) != 0
    partial_end, full_end = 0, 0
    if WRITE:
        partial_end = tl.load(row_block_ptr + pid)
        full_end = partial_end + tl.load(partial_count_ptr + pid)
    n = tl.arange(0, BLOCK)
    for start in range(first, tl.where(is_bad, first, end), COPY):
        x = start + tl.arange(0, COPY)
        listed = tl.load(taken_ptr + x // PER_BLOCK * stride_c, mask=x < end, other=0) != 0
        bitmap = EVERYTHING + ((x + 1) * BLOCK > columns).to(tl.int32)
        if CAUSAL:
            bitmap += tl.where(x == row_block, 2, 0)
        full = (listed & (bitmap == EVERYTHING)).to(tl.int32)
        partial = (listed & (bitmap != EVERYTHING)).to(tl.int32)
        if WRITE:
            tile = tl.where(full != 0, full_end + tl.cumsum(full, 0) - 1, partial_end + tl.cumsum(partial, 0) - 1)
            # Columns that no row keeps repeat one of the tile.
            column = tl.minimum(x[:, None] * BLOCK + n[None, :], last_column)
            tl.store(columns_ptr + tile.to(tl.int64)[:, None] * BLOCK + n[None, :], column, mask=listed[:, None])
            tl.store(tile_bitmap_ptr + tile, bitmap, mask=listed)
        full_end += tl.sum(full, 0)
        partial_end += tl.sum(partial, 0)
    if not WRITE:
        tl.store(row_block_ptr + pid + 1, partial_end + full_end)
        tl.store(partial_count_ptr + pid, tl.where(is_bad, _NAN_ROW_BLOCK, partial_end))
