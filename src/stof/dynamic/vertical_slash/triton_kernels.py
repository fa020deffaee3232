"""Triton kernels that write the block-wise kernel's work from vertical columns and slash distances.

Which columns a row block sees by its slash distances depends on their distance from its first row alone. So their tiles
are made once for all row blocks of a pattern: columns as minus their distance, and one bitmap. A row block names the
run of these tiles that exists for it, and has tiles of its own for the rest: what whole shared tiles leave over at
either end, and the vertical columns.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.fill import ALL_BITS, bits_from, store_columns, store_nan_item
from stof.dynamic.vertical_slash.tables import (
    COVERED,
    FULL,
    FULL_BEFORE,
    SLASH_BASE,
    SOME,
    SOME_BEFORE,
    TABLES,
    TOUCHED,
    ones_of,
)
from stof.kernels.triton.block_wise_kernel import (
    BITMAP,
    FULL_BEGIN,
    FULL_END,
    FULL_SHIFT,
    ITEM_SIZE,
    ORIGIN,
    OWN_FULL,
    OWN_PARTIAL,
    PARTIAL_BEGIN,
    PARTIAL_END,
    PARTIAL_SHIFT,
    ROW_BLOCK,
)
from stof.kernels.triton.packed_integers import first_count, second_count, two_counts


@triton.jit
@no_type_check
def _place_of(bits_ptr, before_ptr, rank, words, steps):
    """Where the set bits of these ranks are: the word by halving, then the bit in it."""
    low, high = tl.zeros_like(rank), tl.zeros_like(rank) + words - 1
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        below = tl.load(before_ptr + middle) <= rank
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    word = tl.load(bits_ptr + low).to(tl.uint32, bitcast=True)
    rank -= tl.load(before_ptr + low)
    place = tl.zeros_like(rank)
    for exponent in tl.static_range(4, -1, -1):
        ones = ones_of((word >> place.to(tl.uint32)) & (2 ** (2**exponent) - 1))
        further = rank >= ones
        rank -= tl.where(further, ones, 0)
        place += tl.where(further, 2**exponent, 0)
    return low * 32 + place


@triton.jit
@no_type_check
def window(table_ptr, d):
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
def slash_tiles(
    tables_ptr,  # [P, 7, words + 1] int32
    columns_ptr,  # [T, BLOCK_N] int32, tiles that some rows see first, tiles that all rows see from full_base on
    bitmaps_ptr,  # [U, BLOCK_M, 4] int32
    words,
    steps,  # 2 ** steps >= words
    chunks,
    full_chunks,
    full_base,
    SIDE: tl.constexpr,  # thread blocks of a pattern
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of slash columns, the same for all row blocks of a pattern; the last of each kind may be less than full."""
    pattern = tl.program_id(0) // SIDE
    tables_ptr += pattern * TABLES * (words + 1)
    n_full = tl.load(tables_ptr + FULL_BEFORE * (words + 1) + words)
    n_some = tl.load(tables_ptr + SOME_BEFORE * (words + 1) + words)
    some_tiles = (n_some + BLOCK_N - 1) // BLOCK_N
    tiles = some_tiles + (n_full + BLOCK_N - 1) // BLOCK_N
    for number in range(tl.program_id(0) % SIDE, tiles, SIDE):
        is_some = number < some_tiles
        chunk = tl.where(is_some, number, number - some_tiles)
        count = tl.where(is_some, n_some, n_full)
        rank = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        table = tl.where(is_some, SOME, FULL)
        place = _place_of(
            tables_ptr + table * (words + 1), tables_ptr + (table + 2) * (words + 1), tl.minimum(rank, count - 1),
            words, steps,
        )  # fmt: skip
        d = place - SLASH_BASE
        tile = tl.where(is_some, pattern * chunks, full_base + pattern * full_chunks) + chunk
        tl.store(columns_ptr + tile * BLOCK_N + tl.arange(0, BLOCK_N), -d)
        if is_some:
            low, high = window(tables_ptr, d)
            low, high = tl.where(rank < count, low, 0), tl.where(rank < count, high, 0)
            store_columns(bitmaps_ptr + tile * (BLOCK_M * 4), low, high, BLOCK_M, BLOCK_N)


@triton.jit
@no_type_check
def _listed(bits_ptr, before_ptr, place):
    """How many bits are set before a place."""
    word = tl.load(bits_ptr + (place >> 5)).to(tl.uint32, bitcast=True)
    below = (tl.full([], 1, tl.uint32) << (place & 31).to(tl.uint32)) - 1
    return tl.load(before_ptr + (place >> 5)) + ones_of(word & below)


@triton.jit
@no_type_check
def _run(tables_ptr, q0, kv_len, words, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns of a kind that exist for the row block at position q0, as ranks, and the tiles that hold only such."""
    bits_ptr, before_ptr = tables_ptr + KIND * (words + 1), tables_ptr + (KIND + 2) * (words + 1)
    low = _listed(bits_ptr, before_ptr, tl.maximum(q0 - kv_len + 1 + SLASH_BASE, 0))
    high = _listed(bits_ptr, before_ptr, q0 + 1 + SLASH_BASE)
    begin = (low + BLOCK_N - 1) // BLOCK_N
    return low, high, begin, tl.maximum(high // BLOCK_N, begin)


@triton.jit
@no_type_check
def seen_rows(table_ptr, column, vertical, q0, rows):
    """Rows of a row block that see a column: those at slash distances, or of a vertical column all others after it."""
    low, high = window(table_ptr, q0 - column)
    after_low, after_high = bits_from(tl.maximum(column - q0, 0))
    past_low, past_high = bits_from(tl.zeros_like(column) + rows)
    low = tl.where(vertical, (low ^ ALL_BITS) & after_low, low) & (past_low ^ ALL_BITS)
    high = tl.where(vertical, (high ^ ALL_BITS) & after_high, high) & (past_high ^ ALL_BITS)
    return low, high


@triton.jit
@no_type_check
def _clean(tables_ptr, column, q0, rows, words, BLOCK_M: tl.constexpr):
    """Whether all rows see a vertical column, and none is at a slash distance of it; else whether some row sees it."""
    if rows < BLOCK_M:
        low, high = seen_rows(tables_ptr, column, True, q0, rows)
        past_low, past_high = bits_from(tl.zeros_like(column) + rows)
        clean = (low ^ past_low == ALL_BITS) & (high ^ past_high == ALL_BITS)
        other = (clean == 0) & ((low | high) != 0)
    else:
        # The same of whole row blocks, from one word each.
        place = q0 - column + SLASH_BASE
        touched = tl.load(tables_ptr + TOUCHED * (words + 1) + (place >> 5)) >> (place & 31)
        covered = tl.load(tables_ptr + COVERED * (words + 1) + (place >> 5)) >> (place & 31)
        clean = ((touched & 1) == 0) & (column <= q0)
        other = (clean == 0) & ((covered & 1) == 0)
    return clean, other


@triton.jit
@no_type_check
def vertical_slash_fill(
    vertical_ptr,  # [B | 1, H | 1, verticals] int32 or int64
    bad_ptr,  # [P] int32
    tables_ptr,  # [P, 7, words + 1] int32
    slots_ptr,  # [R + 1] int32, where the tiles of each row block begin, among those of its pattern
    items_ptr,
    first_columns_ptr,
    columns_ptr,  # [T, BLOCK_N] int32
    bitmaps_ptr,
    stride_b,
    stride_h,
    mask_heads,
    verticals,
    words,
    chunks,
    full_chunks,
    full_base,
    own_base,  # the first tile that belongs to a row block
    row_blocks,
    q_len,
    kv_len,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGES: tl.constexpr,
    COPY: tl.constexpr,
):
    """Work of one row block: runs of shared tiles, then columns of its own.

    Vertical columns that all rows see, and no row at a slash distance, fill full tiles from the first place of the row
    block on. All others fill partial tiles from the last place backwards, so that neither needs to know how many there
    are of the other.
    """
    pattern = tl.program_id(0) // row_blocks
    row_block = tl.program_id(0) % row_blocks
    # Later row blocks see no fewer columns, so the longest come first.
    place = pattern * row_blocks + (row_blocks - 1 - row_block)
    if tl.load(bad_ptr + pattern) != 0:
        store_nan_item(items_ptr, place, row_block)
        return
    q0 = row_block * BLOCK_M + offset
    rows = tl.minimum(BLOCK_M, q_len - row_block * BLOCK_M)
    pattern_base = own_base + pattern * tl.load(slots_ptr + row_blocks)
    own_begin = pattern_base + tl.load(slots_ptr + row_block)
    own_end = pattern_base + tl.load(slots_ptr + row_block + 1)
    tables_ptr += pattern * TABLES * (words + 1)
    vertical_ptr += (pattern // mask_heads) * stride_b + (pattern % mask_heads) * stride_h
    some_tiles, full_tiles = pattern * chunks, full_base + pattern * full_chunks
    full_low, full_high, full_first, full_last = _run(tables_ptr, q0, kv_len, words, FULL, BLOCK_N)
    some_low, some_high, some_first, some_last = _run(tables_ptr, q0, kv_len, words, SOME, BLOCK_N)
    # Of the last row block, columns may be seen only by rows that do not exist: no tile of it is whole.
    some_last = tl.where(rows < BLOCK_M, some_first, some_last)
    n_full, n_some = full_last - full_first, some_last - some_first

    # Slash columns outside whole shared tiles, marked by a complement.
    full_rest, some_rest = full_high - full_low - n_full * BLOCK_N, some_high - some_low - n_some * BLOCK_N
    rest_ptr = columns_ptr + own_end * BLOCK_N - 1
    count = 0
    for start in range(0, full_rest + some_rest, EDGES):
        y = start + tl.arange(0, EDGES)
        in_full = y < full_rest
        full_rank = full_low + y + tl.where(y >= full_first * BLOCK_N - full_low, n_full * BLOCK_N, 0)
        z = y - full_rest
        some_rank = some_low + z + tl.where(z >= some_first * BLOCK_N - some_low, n_some * BLOCK_N, 0)
        at = tl.where(in_full, full_tiles * BLOCK_N + full_rank, some_tiles * BLOCK_N + some_rank)
        live = y < full_rest + some_rest
        column = q0 + tl.load(columns_ptr + at, mask=live, other=0)
        if rows < BLOCK_M:
            low, high = seen_rows(tables_ptr, column, False, q0, rows)
            live = live & ((low | high) != 0)
        rank = count + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(rest_ptr - rank, ~column, mask=live)
        count += tl.sum(live.to(tl.int32), 0)

    clean_ptr = columns_ptr + own_begin * BLOCK_N
    n_clean = 0
    for start in range(0, verticals, COPY):
        first = tl.load(vertical_ptr + start)
        if (first >= 0) & (first < q0 + rows):  # else there are no more
            x = start + tl.arange(0, COPY)
            column = tl.load(vertical_ptr + x, mask=x < verticals, other=-1).to(tl.int32)
            exists = (column >= 0) & (column < q0 + rows)
            column = tl.where(exists, column, 0)
            clean, other = _clean(tables_ptr, column, q0, rows, words, BLOCK_M)
            clean, other = clean & exists, other & exists
            # Two sums at once.
            ranks = tl.cumsum(two_counts(clean.to(tl.int32), other.to(tl.int32)), 0)
            tl.store(clean_ptr + n_clean + first_count(ranks) - 1, column, mask=clean)
            tl.store(rest_ptr - (count + second_count(ranks) - 1), column, mask=other)
            both = tl.max(ranks, 0)  # the last one
            n_clean += first_count(both)
            count += second_count(both)
    tl.debug_barrier()
    # Clean columns that fill no tile join the others.
    n = tl.arange(0, BLOCK_N)
    clean_tiles = n_clean // BLOCK_N
    left = n < n_clean - clean_tiles * BLOCK_N
    column = tl.load(clean_ptr + clean_tiles * BLOCK_N + n, mask=left, other=0)
    tl.debug_barrier()
    tl.store(rest_ptr - (count + n), column, mask=left)
    count += n_clean - clean_tiles * BLOCK_N
    tl.debug_barrier()

    rest_tiles = (count + BLOCK_N - 1) // BLOCK_N
    for i in range(rest_tiles):
        tile = own_end - 1 - i
        ok = i * BLOCK_N + BLOCK_N - 1 - n < count
        column_ptr = columns_ptr + tile * BLOCK_N + n
        marked = tl.load(column_ptr, mask=ok, other=0)
        column = tl.where(marked < 0, ~marked, marked)
        low, high = seen_rows(tables_ptr, column, marked >= 0, q0, rows)
        # Places past the last column repeat one of the tile, and keep nothing.
        tl.store(column_ptr, tl.where(ok, column, tl.max(tl.where(ok, column, 0), 0)))
        store_columns(bitmaps_ptr + tile * (BLOCK_M * 4), tl.where(ok, low, 0), tl.where(ok, high, 0), BLOCK_M, BLOCK_N)
    tl.debug_barrier()

    own_partial = own_end - rest_tiles
    shared_partial, shared_full = some_tiles + some_last, full_tiles + full_last
    first_partial = tl.where(n_some > 0, shared_partial - n_some, own_partial)
    first_full = tl.where(n_full > 0, shared_full - n_full, own_begin)
    has_partial = n_some + rest_tiles > 0
    first = tl.where(has_partial, first_partial, first_full)
    # An item without tiles reads these columns, and uses none.
    tl.store(first_columns_ptr + place * BLOCK_N + n, tl.load(columns_ptr + first * BLOCK_N + n))
    item_ptr = items_ptr + place * ITEM_SIZE
    tl.store(item_ptr + ROW_BLOCK, row_block)
    tl.store(item_ptr + PARTIAL_BEGIN, own_partial - n_some)
    tl.store(item_ptr + PARTIAL_END, own_end)
    tl.store(item_ptr + FULL_BEGIN, own_begin - n_full)
    tl.store(item_ptr + FULL_END, own_begin + clean_tiles)
    tl.store(item_ptr + BITMAP, first_partial)
    tl.store(item_ptr + OWN_PARTIAL, own_partial)
    tl.store(item_ptr + PARTIAL_SHIFT, shared_partial - own_partial)
    tl.store(item_ptr + OWN_FULL, own_begin)
    tl.store(item_ptr + FULL_SHIFT, shared_full - own_begin)
    tl.store(item_ptr + ORIGIN, q0)
