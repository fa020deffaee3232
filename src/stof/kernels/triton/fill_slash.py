"""Triton kernels that write the block-wise kernel's work from vertical columns and slash distances."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.fill import store_item, store_poison, store_words

# Slash distances stand at this bit of their table, so that windows may begin before distance 0.
SLASH_BASE = tl.constexpr(64)


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
    list_ptr,  # [P, span] int32, distances of columns that some but not all rows see, ascending
    before_ptr,  # [P, span + 1] int32; the last of a pattern is how many there are
    bitmaps_ptr,  # [U, BLOCK_M, 4] int32
    table_words,
    span,
    chunks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bitmaps of the tiles of slash columns: the same for every row block of a pattern."""
    program = tl.program_id(0)
    pattern = program // chunks
    chunk = program % chunks
    count = tl.load(before_ptr + pattern * (span + 1) + span)
    if chunk * BLOCK_N >= count:
        return
    x = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.load(list_ptr + pattern * span + x, mask=x < count, other=0)
    low, high = _slash_window(table_ptr + pattern * table_words, d)
    keep = tl.where((x < count)[None, :], _slash_bits(low, high, BLOCK_M), 0)
    store_words(bitmaps_ptr + program.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)


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
        store_words(bitmaps_ptr + own.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)
    return tl.where(stand_in >= 0, 1, 0)


@triton.jit
@no_type_check
def slash_lists(
    member_ptr,  # [P, size] int8, 1 at the places of slash distances
    table_ptr,  # [P, size / 32] int32, the same as bits
    before_ptr,  # [P, size + 1] int32, how many there are before each place
    full_list_ptr,  # [P, span] int32, distances of columns that all rows of a row block see, ascending
    some_list_ptr,  # [P, span] int32, of those that some but not all see
    full_before_ptr,  # [P, span + 1] int32, how many of the full list come before each distance
    some_before_ptr,  # [P, span + 1] int32
    size,
    span,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tables of the slash distances of one pattern: which columns, relative to a row block, its rows see."""
    pattern = tl.program_id(0)
    member_ptr += pattern * size
    table_ptr += pattern * (size // 32)
    before_ptr += pattern * (size + 1)
    full_list_ptr += pattern * span
    some_list_ptr += pattern * span
    full_before_ptr += pattern * (span + 1)
    some_before_ptr += pattern * (span + 1)
    bit = tl.arange(0, 32)
    total = 0
    for start in range(0, size, CHUNK):
        x = start + tl.arange(0, CHUNK)
        member = tl.load(member_ptr + x, mask=x < size, other=0).to(tl.int32)
        tl.store(before_ptr + x, total + tl.cumsum(member, 0) - member, mask=x < size)
        total += tl.sum(member, 0)
        words = tl.sum(tl.reshape(member, (CHUNK // 32, 32)) << bit[None, :], 1)
        w = start // 32 + tl.arange(0, CHUNK // 32)
        tl.store(table_ptr + w, words, mask=w < size // 32)
    tl.store(before_ptr + size, total)
    tl.debug_barrier()
    # The column at distance d from a row block's first row is seen by row r when d + r is a slash distance.
    before_ptr += SLASH_BASE - (BLOCK_M - 1)
    n_full, n_some = 0, 0
    for start in range(0, span, CHUNK):
        x = start + tl.arange(0, CHUNK)
        ok = x < span
        seen = tl.load(before_ptr + x + BLOCK_M, mask=ok, other=0) - tl.load(before_ptr + x, mask=ok, other=0)
        full = (seen == BLOCK_M).to(tl.int32)
        some = ((seen > 0) & (seen < BLOCK_M)).to(tl.int32)
        full_at = n_full + tl.cumsum(full, 0) - full
        some_at = n_some + tl.cumsum(some, 0) - some
        tl.store(full_before_ptr + x, full_at, mask=ok)
        tl.store(some_before_ptr + x, some_at, mask=ok)
        tl.store(full_list_ptr + full_at, x + 1 - BLOCK_M, mask=full != 0)
        tl.store(some_list_ptr + some_at, x + 1 - BLOCK_M, mask=some != 0)
        n_full += tl.sum(full, 0)
        n_some += tl.sum(some, 0)
    tl.store(full_before_ptr + span, n_full)
    tl.store(some_before_ptr + span, n_some)


@triton.jit
@no_type_check
def _slash_ends(before_ptr, q0, kv_len, ok, BLOCK_M: tl.constexpr):
    """The part of a list of distances whose columns exist for the row block at position q0."""
    low = tl.load(before_ptr + tl.maximum(q0 - kv_len + BLOCK_M, 0), mask=ok, other=0)
    return low, tl.load(before_ptr + q0 + BLOCK_M, mask=ok, other=0)


@triton.jit
@no_type_check
def _tile_counts(
    full_low, full_high, some_low, some_high, n_vertical, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Whole full tiles, other tiles at most, and bitmaps of its own that a row block needs at most."""
    whole = tl.maximum(full_high // BLOCK_N - (full_low + BLOCK_N - 1) // BLOCK_N, 0)
    cut = tl.where(full_low < full_high, (full_high + BLOCK_N - 1) // BLOCK_N - full_low // BLOCK_N - whole, 0)
    some = tl.where(some_low < some_high, (some_high + BLOCK_N - 1) // BLOCK_N - some_low // BLOCK_N, 0)
    vertical = (n_vertical + BLOCK_N - 1) // BLOCK_N
    own = cut + tl.where(rows < BLOCK_M, some, tl.minimum(some, 2)) + vertical
    return whole, cut + some + vertical, own


@triton.jit
@no_type_check
def vertical_slash_count(
    full_before_ptr,  # [P, span + 1] int32
    some_before_ptr,  # [P, span + 1] int32
    n_vertical_ptr,  # [P, R] int32, vertical columns that some row of the row block may see
    bad_ptr,  # [P] int32
    tiles_ptr,  # [P, R] int32
    own_ptr,  # [P, R] int32
    row_blocks,
    span,
    q_len,
    kv_len,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """How many tiles and bitmaps each row block needs at most."""
    chunks = (row_blocks + ROWS - 1) // ROWS
    pattern = tl.program_id(0) // chunks
    row_block = (tl.program_id(0) % chunks) * ROWS + tl.arange(0, ROWS)
    ok = row_block < row_blocks
    q0 = row_block * BLOCK_M + offset
    full_low, full_high = _slash_ends(full_before_ptr + pattern * (span + 1), q0, kv_len, ok, BLOCK_M)
    some_low, some_high = _slash_ends(some_before_ptr + pattern * (span + 1), q0, kv_len, ok, BLOCK_M)
    at = pattern * row_blocks + row_block
    n_vertical = tl.load(n_vertical_ptr + at, mask=ok, other=0)
    whole, other, own = _tile_counts(
        full_low, full_high, some_low, some_high, n_vertical, q_len - row_block * BLOCK_M, BLOCK_M, BLOCK_N
    )
    good = tl.load(bad_ptr + pattern) == 0
    tl.store(tiles_ptr + at, tl.where(good, whole + other, 0), mask=ok)
    tl.store(own_ptr + at, own, mask=ok)


@triton.jit
@no_type_check
def vertical_slash_fill(
    tiles_end_ptr,  # [P * R] int32, tiles of this and all earlier row blocks
    own_end_ptr,  # [P * R] int32, bitmaps of their own
    n_vertical_ptr,  # [P, R] int32
    bad_ptr,  # [P] int32
    flags_ptr,  # [P] int32
    vertical_ptr,  # [P, verticals] int32, ascending
    table_ptr,  # [P, table_words] int32, slash distances as bits
    before_ptr,  # [P, 32 table_words + 1] int32, how many slash distances stand before a bit of the table
    full_list_ptr,  # [P, span] int32, distances of columns that all rows see
    some_list_ptr,  # [P, span] int32, of those that some but not all see
    full_before_ptr,  # [P, span + 1] int32
    some_before_ptr,  # [P, span + 1] int32
    items_ptr,
    first_columns_ptr,
    columns_ptr,  # [T + 2, BLOCK_N] int32, for tiles of both kinds
    bitmap_ptr,  # [T + 2] int32
    bitmaps_ptr,
    row_blocks,
    verticals,
    table_words,
    span,
    chunks,
    shared,
    tiles,
    q_len,
    kv_len,
    offset,
    OVERFLOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPY: tl.constexpr,
):
    """Work of one row block: columns at slash distances, then vertical columns where no slash distance keeps them."""
    program = tl.program_id(0)
    pattern = program // row_blocks
    row_block = program % row_blocks
    # Later row blocks see no fewer columns, so the longest come first.
    place = pattern * row_blocks + (row_blocks - 1 - row_block)
    q0 = row_block * BLOCK_M + offset
    rows = tl.minimum(BLOCK_M, q_len - row_block * BLOCK_M)
    full_low, full_high = _slash_ends(full_before_ptr + pattern * (span + 1), q0, kv_len, True, BLOCK_M)
    some_low, some_high = _slash_ends(some_before_ptr + pattern * (span + 1), q0, kv_len, True, BLOCK_M)
    n_vertical = tl.load(n_vertical_ptr + program)
    whole_full, other, n_own = _tile_counts(
        full_low, full_high, some_low, some_high, n_vertical, rows, BLOCK_M, BLOCK_N
    )
    tiles_end = tl.load(tiles_end_ptr + program)
    bad = tl.load(bad_ptr + pattern)
    if (bad != 0) | (tiles_end > tiles):
        if bad == 0:
            tl.atomic_or(flags_ptr + pattern, OVERFLOW)
        store_poison(items_ptr, place, row_block)
        return
    full_begin = tiles_end - whole_full
    partial_begin = full_begin - other
    tile = partial_begin
    own = shared + tl.load(own_end_ptr + program) - n_own
    table_ptr += pattern * table_words
    full_list_ptr += pattern * span
    some_list_ptr += pattern * span

    whole_begin = (full_low + BLOCK_N - 1) // BLOCK_N
    _copy_columns(
        full_list_ptr, columns_ptr + full_begin.to(tl.int64) * BLOCK_N, whole_begin * BLOCK_N,
        whole_full * BLOCK_N, q0, COPY,
    )  # fmt: skip
    # Tiles at either end of the distances that exist.
    if full_low < full_high:
        first = full_low // BLOCK_N
        n_cut = (full_high + BLOCK_N - 1) // BLOCK_N - first - whole_full
        for i in range(n_cut):
            chunk = tl.where(first + i < whole_begin, first + i, first + i + whole_full)
            found = _cut_tile(table_ptr, full_list_ptr, columns_ptr, bitmap_ptr, bitmaps_ptr, chunk, full_low,
                              full_high, q0, rows, tile, own, BLOCK_M, BLOCK_N)  # fmt: skip
            tile += found
            own += found

    if some_low < some_high:
        first = some_low // BLOCK_N
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
        n_cut = (some_high + BLOCK_N - 1) // BLOCK_N - first - whole
        for i in range(n_cut):
            chunk = tl.where(first + i < whole_begin, first + i, first + i + whole)
            found = _cut_tile(table_ptr, some_list_ptr, columns_ptr, bitmap_ptr, bitmaps_ptr, chunk, some_low,
                              some_high, q0, rows, tile, own, BLOCK_M, BLOCK_N)  # fmt: skip
            tile += found
            own += found

    # Vertical columns that all rows see, and no row at a slash distance, fill full tiles, which go right before the
    # others. The rest, and what is left over, join the partial tiles where some row sees them at no slash distance.
    vertical_ptr += pattern * verticals
    before_ptr += pattern * (32 * table_words + 1) + SLASH_BASE
    clean_count = 0
    for start in range(0, n_vertical, COPY):
        x = start + tl.arange(0, COPY)
        column = tl.load(vertical_ptr + x, mask=x < n_vertical, other=0)
        slash = _slash_count(before_ptr, q0 - column, rows, x < n_vertical)
        clean_count += tl.sum(((x < n_vertical) & (slash == 0) & (column <= q0)).to(tl.int32), 0)
    n_clean = clean_count // BLOCK_N
    full_begin -= n_clean
    clean_ptr = columns_ptr + full_begin.to(tl.int64) * BLOCK_N
    target_ptr = columns_ptr + tile.to(tl.int64) * BLOCK_N
    count, clean_count = 0, 0
    for start in range(0, n_vertical, COPY):
        x = start + tl.arange(0, COPY)
        ok = x < n_vertical
        column = tl.load(vertical_ptr + x, mask=ok, other=0)
        slash = _slash_count(before_ptr, q0 - column, rows, ok)
        clean = (ok & (slash == 0) & (column <= q0)).to(tl.int32)
        rank = clean_count + tl.cumsum(clean, 0) - 1
        in_full = (clean != 0) & (rank < n_clean * BLOCK_N)
        tl.store(clean_ptr + rank, column, mask=in_full)
        clean_count += tl.sum(clean, 0)
        live = (ok & ~in_full & (rows - tl.maximum(column - q0, 0) > slash)).to(tl.int32)
        tl.store(target_ptr + count + tl.cumsum(live, 0) - 1, column, mask=live != 0)
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
        store_words(bitmaps_ptr + own.to(tl.int64) * (BLOCK_M * 4), keep, BLOCK_M, BLOCK_N)
        tile += 1
        own += 1
    tl.debug_barrier()
    store_item(items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block, partial_begin, tile,
                full_begin, full_begin + n_clean + whole_full, BLOCK_N)  # fmt: skip


@triton.jit
@no_type_check
def _slash_count(before_ptr, d, rows, ok):
    """How many of the distances d .. d + rows - 1 are slash."""
    return tl.load(before_ptr + d + rows, mask=ok, other=0) - tl.load(before_ptr + d, mask=ok, other=0)
