"""Triton kernels that write the block-wise kernel's work from dense masks."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.fill import store_item, store_nan_item, store_words

# How a mask is stored: a byte for each score, or words with the bits of 32 columns, or of 32 rows.
BYTES, COLUMN_BITS, ROW_BITS = (tl.constexpr(form) for form in range(3))


@triton.jit
@no_type_check
def _dense_at(keep_ptr, row, column, stride_q, stride_k, ok, FORM: tl.constexpr):
    """int32, 1 where a dense mask keeps a score."""
    row, column = row.to(tl.int64), column.to(tl.int64)
    if FORM == BYTES:
        return (tl.load(keep_ptr + row * stride_q + column * stride_k, mask=ok, other=0) != 0).to(tl.int32)
    if FORM == COLUMN_BITS:
        word = tl.load(keep_ptr + row * stride_q + (column >> 5) * stride_k, mask=ok, other=0)
        return (word >> (column & 31).to(tl.int32)) & 1
    word = tl.load(keep_ptr + (row >> 5) * stride_q + column * stride_k, mask=ok, other=0)
    return (word >> (row & 31).to(tl.int32)) & 1


@triton.jit
@no_type_check
def dense_classes(
    keep_ptr,  # [B, H, Sq, Skv], int32 words where FORM says so
    classes_ptr,  # [P, row blocks, Skv] int8
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    row_blocks,
    column_blocks,
    q_len,
    kv_len,
    FORM: tl.constexpr,  # one of those above
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """How many rows of a row block keep each column: 0 none, 1 some, 2 all."""
    pid = tl.program_id(0)
    row_program = pid // column_blocks
    pattern = row_program // row_blocks
    row_block = row_program % row_blocks
    keep_ptr += (pattern // mask_heads).to(tl.int64) * stride_b + (pattern % mask_heads).to(tl.int64) * stride_h
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (pid % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    ok = (row < q_len)[:, None] & (column < kv_len)[None, :]
    count = tl.sum(_dense_at(keep_ptr, row[:, None], column[None, :], stride_q, stride_k, ok, FORM), 0)
    rows = tl.minimum(BLOCK_M, q_len - row_block * BLOCK_M)
    column_class = tl.where(count == rows, 2, tl.where(count > 0, 1, 0))
    at = row_program.to(tl.int64) * kv_len + column
    tl.store(classes_ptr + at, column_class.to(tl.int8), mask=column < kv_len)


@triton.jit
@no_type_check
def dense_fill(
    row_block_ptr,  # [P * R + 1] int32, as the others of `BackwardTiles`
    partial_count_ptr,
    place_ptr,  # [P, R] int32, where items go
    classes_ptr,  # [P, R, Skv] int8
    items_ptr,
    first_columns_ptr,
    columns_ptr,
    bitmap_ptr,
    owner_ptr,  # [T, 2] int32, row block and number of columns of each partial tile
    row_blocks,
    kv_len,
    IN_WORK: tl.constexpr,  # whether items are written
    BLOCK_N: tl.constexpr,
    COPY: tl.constexpr,
):
    """Columns of one row block's tiles: those all rows keep fill full tiles, the rest of them join the others."""
    pid = tl.program_id(0)
    row_block = pid % row_blocks
    place = 0
    if IN_WORK:
        place = pid - row_block + tl.load(place_ptr + pid)
    n_partial = tl.load(partial_count_ptr + pid)
    if n_partial < 0:
        if IN_WORK:
            store_nan_item(items_ptr, place, row_block)
        return
    partial_begin = tl.load(row_block_ptr + pid)
    full_begin = partial_begin + n_partial
    n_full = tl.load(row_block_ptr + pid + 1) - full_begin
    # Positions in the column list; what is left over of the full columns comes first among the partial ones.
    partial_at = partial_begin.to(tl.int64) * BLOCK_N
    full_at = full_begin.to(tl.int64) * BLOCK_N
    full_room = n_full * BLOCK_N
    n_all, n_some = 0, 0
    for start in range(0, kv_len, COPY):
        column = start + tl.arange(0, COPY)
        column_class = tl.load(classes_ptr + pid.to(tl.int64) * kv_len + column, mask=column < kv_len, other=0)
        all_rows = (column_class == 2).to(tl.int32)
        rank = n_all + tl.cumsum(all_rows, 0) - 1
        in_full = (all_rows != 0) & (rank < full_room)
        tl.store(columns_ptr + full_at + rank, column, mask=in_full)
        other = ((column_class != 0) & ~in_full).to(tl.int32)
        tl.store(columns_ptr + partial_at + n_some + tl.cumsum(other, 0) - 1, column, mask=other != 0)
        n_all += tl.sum(all_rows, 0)
        n_some += tl.sum(other, 0)
    tl.debug_barrier()
    n = tl.arange(0, BLOCK_N)
    for i in range(n_partial):
        x = i * BLOCK_N + n
        stand_in = tl.load(columns_ptr + partial_at + i * BLOCK_N)
        # Places past the last column repeat one of the tile, and keep nothing.
        tl.store(columns_ptr + partial_at + x, tl.zeros([BLOCK_N], tl.int32) + stand_in, mask=x >= n_some)
        tile = partial_begin + i
        tl.store(bitmap_ptr + tile, tile)
        tl.store(owner_ptr + tile * 2, pid)
        tl.store(owner_ptr + tile * 2 + 1, tl.minimum(BLOCK_N, n_some - i * BLOCK_N))
    if IN_WORK:
        tl.debug_barrier()
        store_item(items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block, partial_begin, full_begin,
                   full_begin, full_begin + n_full, BLOCK_N)  # fmt: skip


@triton.jit
@no_type_check
def dense_bitmaps(
    keep_ptr,  # as for `dense_classes`
    owner_ptr,  # [T, 2] int32, row block (-1: not a partial tile) and number of columns
    columns_ptr,
    bitmaps_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    row_blocks,
    q_len,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bits of one partial tile; there is a thread block for every tile that there is room for."""
    tile = tl.program_id(0)
    owner = tl.load(owner_ptr + tile * 2)
    if owner < 0:
        return
    count = tl.load(owner_ptr + tile * 2 + 1)
    pattern = owner // row_blocks
    keep_ptr += (pattern // mask_heads).to(tl.int64) * stride_b + (pattern % mask_heads).to(tl.int64) * stride_h
    n = tl.arange(0, BLOCK_N)
    column = tl.load(columns_ptr + tile.to(tl.int64) * BLOCK_N + n)
    row = (owner % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok = (row < q_len)[:, None] & (n < count)[None, :]
    keep = _dense_at(keep_ptr, row[:, None], column[None, :], stride_q, stride_k, ok, FORM)
    store_words(bitmaps_ptr + tile.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)
