"""Triton kernels that write the Hopper kernel's tiles from vertical columns and slash distances.

A row block sees the columns of each slash distance at the same place relative to its first row. So these tiles, their
columns following each other, and their bitmaps are made once for all row blocks of a pattern; a row block lists those
that reach a key. Vertical columns lie scattered: calls put them side by side first, which makes tiles of them, and each
row block has bitmaps of its own for these, without what its slash distances keep already.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.block_topk.hopper_kernels import store_ranges
from stof.dynamic.fill import store_columns
from stof.dynamic.vertical_slash.tables import TABLES
from stof.dynamic.vertical_slash.triton_kernels import seen_rows, window
from stof.kernels.triton.packed_integers import compacted_column


@triton.jit
@no_type_check
def _run_at(distances_ptr, x, n, runs, BLOCK: tl.constexpr):
    """Distances, those before them, and runs of them whose columns touch: where each begins, its number, its end."""
    ok = x < n
    d = tl.load(distances_ptr + x, mask=ok, other=-1)
    ok = ok & (d >= 0)
    before = tl.load(distances_ptr + x - 1, mask=ok & (x > 0), other=-(2**30))
    after = tl.load(distances_ptr + x + 1, mask=ok & (x + 1 < n), other=-1)
    begins = ok & (d - before > BLOCK)
    ends = ok & ((after < 0) | (after - d > BLOCK))
    return d, before, ok, begins, ends, runs + tl.cumsum(begins.to(tl.int32), 0) - 1


@triton.jit
@no_type_check
def slash_columns(
    distances_ptr,  # [P, n] int32, ascending, -1 in unused places at the end
    bad_ptr,  # [P] int32, not 0 where distances may be anything
    runs_ptr,  # [P, 2, n] int32, first and last distance of each run
    tiles_ptr,  # [P, 2, n] int32, first column of each tile less its row block's first row, and how many are its own
    number_ptr,  # [P] int32, tiles; none of a bad pattern
    n,
    BLOCK: tl.constexpr,  # rows, and columns of a tile
    COPY: tl.constexpr,
):
    """Tiles that hold the columns of all slash distances, nearest first.

    Distance d is seen in columns -d .. BLOCK - 1 - d. Runs are cut into tiles from their near end; the last tile of a
    run ends where the run does, and shares columns with the one before, so that none holds a column that no row sees.
    """
    pattern = tl.program_id(0)
    distances_ptr += pattern * n
    runs_ptr += pattern * 2 * n
    tiles_ptr += pattern * 2 * n
    # Runs of distances that do not ascend begin and end anywhere, and so would what is read for them.
    listed = tl.where(tl.load(bad_ptr + pattern) != 0, 0, n)
    runs = 0
    for start in range(0, listed, COPY):
        x = start + tl.arange(0, COPY)
        d, before, ok, begins, ends, run = _run_at(distances_ptr, x, n, runs, BLOCK)
        tl.store(runs_ptr + run, d, mask=begins)
        tl.store(runs_ptr + n + run, d, mask=ends)
        runs += tl.sum(begins.to(tl.int32), 0)
    tl.debug_barrier()
    runs, tiles = 0, 0
    for start in range(0, listed, COPY):
        x = start + tl.arange(0, COPY)
        d, before, ok, begins, ends, run = _run_at(distances_ptr, x, n, runs, BLOCK)
        nearest = tl.load(runs_ptr + run, mask=ok, other=0)
        farthest = tl.load(runs_ptr + n + run, mask=ok, other=0)
        # Tiles of the run up to this distance: the one that is one more than before is this distance's to write.
        count = (d - nearest + 2 * BLOCK - 1) // BLOCK
        count_before = tl.where(begins, 0, (before - nearest + 2 * BLOCK - 1) // BLOCK)
        writes = ok & (count > count_before)
        past = (2 - count) * BLOCK - nearest  # the column behind the tile's own
        first = tl.maximum(past - BLOCK, -farthest)
        place = tiles + tl.cumsum(writes.to(tl.int32), 0) - 1
        tl.store(tiles_ptr + place, first, mask=writes)
        tl.store(tiles_ptr + n + place, past - first, mask=writes)
        runs += tl.sum(begins.to(tl.int32), 0)
        tiles += tl.sum(writes.to(tl.int32), 0)
    tl.store(number_ptr + pattern, tiles)


@triton.jit
@no_type_check
def slash_bitmaps(
    tables_ptr,  # [P, 7, words + 1] int32, see `slash_tables.py`
    tiles_ptr,  # [P, 2, n] int32
    number_ptr,  # [P] int32
    bitmaps_ptr,  # [U, BLOCK, 4] int32; of tile t of pattern p, 1 + 2 (p n + t), and behind it the one for a row block
    words,  # whose first tile column lies before the keys
    n,
    offset,
    SIDE: tl.constexpr,  # thread blocks of a pattern
    BLOCK: tl.constexpr,
):
    """Bitmaps of the tiles of `slash_columns`."""
    pattern = tl.program_id(0) // SIDE
    tables_ptr += pattern * TABLES * (words + 1)
    tiles_ptr += pattern * 2 * n
    x = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0) % SIDE, tl.load(number_ptr + pattern), SIDE):
        first = tl.load(tiles_ptr + tile)
        not_shared = x < tl.load(tiles_ptr + n + tile)
        low, high = window(tables_ptr, -first - x)
        at = bitmaps_ptr + (1 + 2 * (pattern * n + tile)).to(tl.int64) * (BLOCK * 4)
        store_columns(at, tl.where(not_shared, low, 0), tl.where(not_shared, high, 0), BLOCK, BLOCK)
        # One row block at most begins so near to the first key that some columns of the tile, but not all, lie before.
        not_shared = not_shared & (x >= (-(first + offset) & (BLOCK - 1)))
        store_columns(at + BLOCK * 4, tl.where(not_shared, low, 0), tl.where(not_shared, high, 0), BLOCK, BLOCK)


@triton.jit
@no_type_check
def slash_fill(
    columns_ptr,  # [P, n_columns] int32, vertical columns, ascending, -1 in unused places at the end
    bad_ptr,  # [P] int32
    tables_ptr,  # [P, 7, words + 1] int32
    slash_tiles_ptr,  # [P, 2, n] int32
    number_ptr,  # [P] int32
    first_item_ptr,  # [P * R + 1] int32
    tiles_ptr,  # [P * R * slots + 2] int32, see `TileLists.tile_columns`
    tile_bitmap_ptr,  # [P * R * slots + 3] int32
    bitmaps_ptr,  # [U, BLOCK, 4] int32, those of vertical tiles from own_bitmaps on
    ranges_ptr,  # [I, RANGE_SIZE] int32
    n_columns,
    words,
    n,
    row_blocks,
    slots,  # tiles that a row block has room for
    own_bitmaps,
    nothing,  # a tile that keeps nothing
    offset,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
):
    """Tiles of one row block, all of them partial, and what part of them each of its items takes."""
    pid = tl.program_id(0)
    pattern = pid // row_blocks
    q0 = (pid % row_blocks) * BLOCK + offset
    columns_ptr += pattern * n_columns
    tables_ptr += pattern * TABLES * (words + 1)
    slash_tiles_ptr += pattern * 2 * n
    bad = tl.load(bad_ptr + pattern) != 0
    listed = tl.where(bad, 0, tl.load(number_ptr + pattern))
    base = pid * slots
    slash_bitmap = 1 + 2 * pattern * n
    n_slash = 0
    for start in range(0, listed, COPY):
        t = start + tl.arange(0, COPY)
        first = q0 + tl.load(slash_tiles_ptr + t, mask=t < listed, other=0)
        # They come nearest first, and none shares columns of its own: those that reach a key are the first ones.
        reaches = (t < listed) & (first + tl.load(slash_tiles_ptr + n + t, mask=t < listed, other=0) > 0)
        tl.store(tiles_ptr + base + t, first, mask=reaches)
        tl.store(tile_bitmap_ptr + base + t, slash_bitmap + 2 * t + (first < 0).to(tl.int32), mask=reaches)
        n_slash += tl.sum(reaches.to(tl.int32), 0)
    vertical_bitmap = own_bitmaps + pid * (n_columns // BLOCK)
    n_vertical = 0
    for start in range(0, tl.where(bad, 0, n_columns), BLOCK):
        column = tl.load(columns_ptr + start + tl.arange(0, BLOCK))
        exists = (column >= 0) & (column < q0 + BLOCK)
        if tl.max(exists.to(tl.int32), 0) > 0:  # else there are no more
            low, high = seen_rows(tables_ptr, tl.where(exists, column, 0), True, q0, BLOCK)
            number = vertical_bitmap + start // BLOCK
            store_columns(
                bitmaps_ptr + number.to(tl.int64) * (BLOCK * 4), tl.where(exists, low, 0), tl.where(exists, high, 0),
                BLOCK, BLOCK,
            )  # fmt: skip
            tile = base + n_slash + start // BLOCK
            tl.store(tiles_ptr + tile, compacted_column(start))
            tl.store(tile_bitmap_ptr + tile, number)
            n_vertical += 1
    tiles = n_slash + n_vertical
    store_ranges(ranges_ptr, first_item_ptr, tile_bitmap_ptr, base, tiles, tiles, nothing, bad)
