"""Triton kernels that write the block-wise kernel's work from masks whose numbers only the device knows.

Every list has a fixed place; what the numbers do not fill stays unused. Nothing here waits for the host, so all of it
can be captured in a CUDA graph. `runtime.py` launches these kernels and says how large the lists are.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.work import ITEM_FIELDS

ITEM_STRIDE = tl.constexpr(ITEM_FIELDS)
# Slash distances stand at this bit of their table, so that windows may begin before distance 0.
SLASH_BASE = tl.constexpr(64)
# Integers that describe a row block to `vertical_slash_fill`.
ROW_FIELDS = tl.constexpr(10)


@triton.jit
@no_type_check
def _store_words(words_ptr, keep, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Bits of a tile `[BLOCK_M, BLOCK_N]` in accumulator order: bit `2 j + b` of word `q` is column `8 j + 2 q + b`."""
    c = tl.arange(0, BLOCK_N)
    shifted = keep.to(tl.int32) << (2 * (c // 8) + c % 2)[None, :]
    parts = tl.reshape(shifted, (BLOCK_M, BLOCK_N // 8, 4, 2))
    words = tl.sum(tl.sum(parts, 3), 1)  # distinct bits: the sum is their union
    r = tl.arange(0, BLOCK_M)
    tl.store(words_ptr + r[:, None] * 4 + tl.arange(0, 4)[None, :], words)


@triton.jit
@no_type_check
def _store_item(
    items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block,
    partial_begin, partial_end, full_begin, full_end, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A work item, and the columns of its first tile; what it refers to must have been written before."""
    n = tl.arange(0, BLOCK_N)
    some = partial_begin < partial_end
    first = tl.where(some, partial_begin, full_begin)
    columns = tl.load(columns_ptr + first.to(tl.int64) * BLOCK_N + n)
    # An item without tiles reads its columns and bitmap, and uses neither.
    tl.store(first_columns_ptr + place.to(tl.int64) * BLOCK_N + n, columns)
    item_ptr = items_ptr + place * ITEM_STRIDE
    tl.store(item_ptr, row_block)
    tl.store(item_ptr + 1, partial_begin)
    tl.store(item_ptr + 2, partial_end)
    tl.store(item_ptr + 3, full_begin)
    tl.store(item_ptr + 4, full_end)
    tl.store(item_ptr + 9, tl.load(bitmap_ptr + partial_begin))


@triton.jit
@no_type_check
def _store_poison(items_ptr, place, row_block):
    """An item whose rows become NaN: a wrong mask must not look like an answer."""
    field = tl.arange(0, 4)
    tl.store(items_ptr + place * ITEM_STRIDE, -2 - row_block)
    tl.store(items_ptr + place * ITEM_STRIDE + 1 + field, tl.zeros([4], tl.int32))
    tl.store(items_ptr + place * ITEM_STRIDE + 9, 0)


@triton.jit
@no_type_check
def _slash_window(table_ptr, d):
    """For each distance of `d`, whether distances d .. d + 63 are slash: 64 bits as two words."""
    start = d + SLASH_BASE
    word = start >> 5
    shift = (start & 31).to(tl.uint32)
    w0 = tl.load(table_ptr + word).to(tl.uint32, bitcast=True)
    w1 = tl.load(table_ptr + word + 1).to(tl.uint32, bitcast=True)
    w2 = tl.load(table_ptr + word + 2).to(tl.uint32, bitcast=True)
    # Shifted twice: a shift by 32 is undefined.
    low = (w0 >> shift) | ((w1 << 1) << (31 - shift))
    high = (w1 >> shift) | ((w2 << 1) << (31 - shift))
    return low, high


@triton.jit
@no_type_check
def _slash_bits(low, high, BLOCK_M: tl.constexpr):
    """The windows of some columns as `[BLOCK_M, columns]`, 1 where row r of the row block is at a slash distance."""
    r = tl.arange(0, BLOCK_M)[:, None]
    word = tl.where(r < 32, low[None, :], high[None, :])
    return ((word >> (r & 31).to(tl.uint32)) & 1).to(tl.int32)


@triton.jit
@no_type_check
def slash_bitmaps(
    table_ptr,  # [P, table_words] int32, slash distances as bits
    list_ptr,  # [P, list_size] int32, distances of columns that some row sees, ascending
    count_ptr,  # [P] int32, how many there are
    bitmaps_ptr,  # [U, BLOCK_M, 4] int32
    table_words,
    list_size,
    chunks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bitmaps of the tiles of slash columns: the same for every row block of a pattern."""
    program = tl.program_id(0)
    pattern = program // chunks
    chunk = program % chunks
    count = tl.load(count_ptr + pattern)
    if chunk * BLOCK_N >= count:
        return
    x = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.load(list_ptr + pattern * list_size + x, mask=x < count, other=0)
    low, high = _slash_window(table_ptr + pattern * table_words, d)
    keep = tl.where((x < count)[None, :], _slash_bits(low, high, BLOCK_M), 0)
    _store_words(bitmaps_ptr + program.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)


@triton.jit
@no_type_check
def _copy_columns(list_ptr, target_ptr, begin, count, q0, COPY: tl.constexpr):
    """Columns `q0 - d` of `count` distances of a list."""
    for start in range(0, count, COPY):
        x = start + tl.arange(0, COPY)
        d = tl.load(list_ptr + begin + x, mask=x < count, other=0)
        tl.store(target_ptr + x, q0 - d, mask=x < count)


@triton.jit
@no_type_check
def _cut_tile(
    table_ptr, list_ptr, columns_ptr, bitmap_ptr, bitmaps_ptr,
    chunk, low_end, high_end, q0, rows, tile, own, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of slash columns some of which, or some rows of which, do not exist; 1 when any score is left, else 0."""
    x = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = (x >= low_end) & (x < high_end)
    d = tl.load(list_ptr + x, mask=ok, other=0)
    low, high = _slash_window(table_ptr, d)
    r = tl.arange(0, BLOCK_M)
    keep = tl.where(ok[None, :] & (r < rows)[:, None], _slash_bits(low, high, BLOCK_M), 0)
    live = tl.max(keep, 0) > 0
    column = q0 - d
    # Columns that no row sees are not read: another one stands in for them.
    stand_in = tl.max(tl.where(live, column, -1), 0)
    if stand_in >= 0:
        tl.store(columns_ptr + tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N), tl.where(live, column, stand_in))
        tl.store(bitmap_ptr + tile, own)
        _store_words(bitmaps_ptr + own.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)
    return tl.where(stand_in >= 0, 1, 0)


@triton.jit
@no_type_check
def vertical_slash_fill(
    rows_ptr,  # [P, R, ROW_FIELDS] int32
    vertical_ptr,  # [P, verticals] int32, ascending
    table_ptr,  # [P, table_words] int32, slash distances as bits
    before_ptr,  # [P, befores] int32, how many slash distances stand before a bit of the table
    full_list_ptr,  # [P, list_size] int32, distances of columns that all rows see
    some_list_ptr,  # [P, list_size] int32, of those that some but not all see
    items_ptr,
    first_columns_ptr,
    columns_ptr,  # [T + 2, BLOCK_N] int32, for tiles of both kinds
    bitmap_ptr,  # [T + 2] int32
    bitmaps_ptr,
    row_blocks,
    verticals,
    table_words,
    befores,
    list_size,
    chunks,
    q_len,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPY: tl.constexpr,
):
    """Work of one row block: columns at slash distances, then vertical columns where no slash distance keeps them."""
    program = tl.program_id(0)
    pattern = program // row_blocks
    row_block = program % row_blocks
    row_ptr = rows_ptr + program * ROW_FIELDS
    place = pattern * row_blocks + tl.load(row_ptr)
    tile = tl.load(row_ptr + 1)
    own = tl.load(row_ptr + 2)
    full_begin = tl.load(row_ptr + 3)
    full_low = tl.load(row_ptr + 4)
    full_high = tl.load(row_ptr + 5)
    some_low = tl.load(row_ptr + 6)
    some_high = tl.load(row_ptr + 7)
    n_vertical = tl.load(row_ptr + 8)
    if tl.load(row_ptr + 9) != 0:
        _store_poison(items_ptr, place, row_block)
        return
    q0 = row_block * BLOCK_M + offset
    rows = tl.minimum(BLOCK_M, q_len - row_block * BLOCK_M)
    table_ptr += pattern * table_words
    full_list_ptr += pattern * list_size
    some_list_ptr += pattern * list_size
    partial_begin = tile

    whole_begin = (full_low + BLOCK_N - 1) // BLOCK_N
    whole_full = tl.maximum(full_high // BLOCK_N - whole_begin, 0)
    _copy_columns(
        full_list_ptr, columns_ptr + full_begin.to(tl.int64) * BLOCK_N, whole_begin * BLOCK_N,
        whole_full * BLOCK_N, q0, COPY,
    )  # fmt: skip
    # Tiles at either end of the distances that exist; with one at both ends, once.
    if full_low < full_high:
        first, last = full_low // BLOCK_N, (full_high - 1) // BLOCK_N
        if first < whole_begin or whole_full == 0:
            found = _cut_tile(table_ptr, full_list_ptr, columns_ptr, bitmap_ptr, bitmaps_ptr, first, full_low,
                              full_high, q0, rows, tile, own, BLOCK_M, BLOCK_N)  # fmt: skip
            tile += found
            own += found
        if last > first and last >= whole_begin + whole_full:
            found = _cut_tile(table_ptr, full_list_ptr, columns_ptr, bitmap_ptr, bitmaps_ptr, last, full_low,
                              full_high, q0, rows, tile, own, BLOCK_M, BLOCK_N)  # fmt: skip
            tile += found
            own += found

    if some_low < some_high:
        first, last = some_low // BLOCK_N, (some_high - 1) // BLOCK_N
        whole_begin = (some_low + BLOCK_N - 1) // BLOCK_N
        # Of the last row block, columns may be seen only by rows that do not exist: no tile of it is whole.
        whole = tl.where(rows < BLOCK_M, 0, tl.maximum(some_high // BLOCK_N - whole_begin, 0))
        _copy_columns(
            some_list_ptr, columns_ptr + tile.to(tl.int64) * BLOCK_N, whole_begin * BLOCK_N, whole * BLOCK_N, q0, COPY
        )
        for start in range(0, whole, COPY):
            x = start + tl.arange(0, COPY)
            tl.store(bitmap_ptr + tile + x, pattern * chunks + whole_begin + x, mask=x < whole)
        tile += whole
        for i in range(last - first + 1 - whole):
            chunk = tl.where(first + i < whole_begin, first + i, first + i + whole)
            found = _cut_tile(table_ptr, some_list_ptr, columns_ptr, bitmap_ptr, bitmaps_ptr, chunk, some_low,
                              some_high, q0, rows, tile, own, BLOCK_M, BLOCK_N)  # fmt: skip
            tile += found
            own += found

    # Vertical columns that some row sees at no slash distance, side by side.
    target_ptr = columns_ptr + tile.to(tl.int64) * BLOCK_N
    before_ptr += pattern * befores + SLASH_BASE
    count = 0
    for start in range(0, n_vertical, COPY):
        x = start + tl.arange(0, COPY)
        ok = x < n_vertical
        column = tl.load(vertical_ptr + pattern * verticals + x, mask=ok, other=0)
        d = q0 - column
        seen = rows - tl.maximum(-d, 0)
        slash = tl.load(before_ptr + d + rows, mask=ok, other=0) - tl.load(before_ptr + d, mask=ok, other=0)
        live = (ok & (seen > slash)).to(tl.int32)
        rank = tl.cumsum(live, 0) - 1
        tl.store(target_ptr + count + rank, column, mask=live != 0)
        count += tl.sum(live, 0)
    tl.debug_barrier()
    r = tl.arange(0, BLOCK_M)
    for start in range(0, count, BLOCK_N):
        x = start + tl.arange(0, BLOCK_N)
        ok = x < count
        column = tl.load(target_ptr + x, mask=ok, other=0)
        stand_in = tl.load(target_ptr + start)
        column = tl.where(ok, column, stand_in)
        low, high = _slash_window(table_ptr, q0 - column)
        causal = (q0 + r)[:, None] >= column[None, :]
        keep = tl.where(causal & ok[None, :] & (r < rows)[:, None], 1 - _slash_bits(low, high, BLOCK_M), 0)
        tl.store(target_ptr + x, column)
        tl.store(bitmap_ptr + tile, own)
        _store_words(bitmaps_ptr + own.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)
        tile += 1
        own += 1
    tl.debug_barrier()
    _store_item(items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block, partial_begin, tile,
                full_begin, full_begin + whole_full, BLOCK_N)  # fmt: skip
