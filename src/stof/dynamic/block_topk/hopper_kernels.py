"""Triton kernels that write the Hopper kernel's tile lists from blocks chosen on the GPU."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels import packed_integers
from stof.kernels.hopper.refresh_work import (
    RANGE_BEGIN,
    RANGE_BITMAP,
    RANGE_END,
    RANGE_NAN_OR_ZERO,
    RANGE_PARTIAL_END,
    RANGE_SIZE,
)
from stof.kernels.triton.packed_integers import run_column

NAN_BITS = tl.constexpr(packed_integers.NAN_BITS)


@triton.jit
@no_type_check
def fill_tiles(
    chosen_ptr,  # [P, query blocks, k] int32, ascending
    count_ptr,  # [P, query blocks] int32
    bad_ptr,  # [P] int32, not 0 where nothing is computed
    first_item_ptr,  # [P * R + 1] int32, items of each row block
    columns_ptr,  # [P * R * slots + 2, 8 where PAIRED, else 1] int32, see `TileLists.tile_columns`
    ranges_ptr,  # [I, RANGE_SIZE] int32
    row_blocks,
    query_blocks,
    k,
    slots,  # tiles that a row block has room for: one partial one, then full ones
    nothing,  # a tile that keeps nothing
    q_len,
    kv_len,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a tile, or of half a one
    PAIRED: tl.constexpr,  # tiles are made of two halves, from anywhere
    COPY: tl.constexpr,  # tiles, or halves, written at once
):
    """Tiles of one row block from its chosen key blocks, and what part of them each of its items takes."""
    # So a row block has one partial tile or half: of causal masks the one that holds its last rows' own keys, else the
    # one at the end of the keys.
    tl.static_assert(BLOCK_M <= WIDTH and WIDTH <= BLOCK_SIZE)
    PER: tl.constexpr = BLOCK_SIZE // WIDTH
    TILE: tl.constexpr = 2 if PAIRED else 1
    EVERYTHING: tl.constexpr = 1
    BITMAPS: tl.constexpr = 3 + 2 * (WIDTH // BLOCK_M)
    pid = tl.program_id(0)
    pattern = pid // row_blocks
    q0 = (pid % row_blocks) * BLOCK_M
    last_row = tl.minimum(q0 + BLOCK_M, q_len) - 1
    query_block = pattern * query_blocks + q0 // BLOCK_SIZE
    bad = tl.load(bad_ptr + pattern) != 0
    count = tl.where(bad, 0, tl.load(count_ptr + query_block) * PER)
    base = pid * slots
    n_partial, n_full = 0, 0
    partial_bitmap, partial_column, last_column = 0, 0, 0
    for start in range(0, count, COPY):
        x = start + tl.arange(0, COPY)
        ok = x < count
        block = tl.load(chosen_ptr + query_block.to(tl.int64) * k + x // PER, mask=ok, other=0)
        begin = block * BLOCK_SIZE + (x % PER) * WIDTH
        ok = ok & (begin < kv_len)
        bitmap_of_block = EVERYTHING + (begin + WIDTH > kv_len).to(tl.int32)
        if CAUSAL:
            ok = ok & (begin <= last_row)
            bitmap_of_block += tl.where(begin + WIDTH > q0, 2 * ((begin - q0 + WIDTH) // BLOCK_M), 0)
        full = ok & (bitmap_of_block == EVERYTHING)
        partial = ok & (bitmap_of_block != EVERYTHING)
        _store_columns(
            columns_ptr, (base + 1) * TILE + n_full + tl.cumsum(full.to(tl.int32), 0) - 1, begin, full, PAIRED
        )
        n_full += tl.sum(full.to(tl.int32), 0)
        n_partial += tl.sum(partial.to(tl.int32), 0)
        partial_bitmap += tl.sum(tl.where(partial, bitmap_of_block, 0), 0)
        partial_column += tl.sum(tl.where(partial, begin, 0), 0)
        last_column = tl.maximum(last_column, tl.max(tl.where(full, begin, 0), 0))
    bitmap = partial_bitmap
    half = tl.arange(0, TILE)
    if PAIRED:
        # A full half too many joins the partial one, or one that keeps nothing of the same columns.
        odd = n_full % 2
        right = tl.where(odd != 0, EVERYTHING, partial_bitmap)
        bitmap = tl.where(odd != 0, partial_bitmap, 0) * BITMAPS + right
        right_column = tl.where(odd != 0, last_column, partial_column)
        first_columns = tl.where((half == 0) & (n_partial != 0), partial_column, right_column)
        n_partial = tl.maximum(n_partial, odd)
        n_full = n_full // 2
    else:
        first_columns = half + partial_column
    _store_columns(columns_ptr, base * TILE + half, first_columns, (half + n_partial) > half, PAIRED)
    tiles = n_partial + n_full
    first = base + 1 - n_partial
    item = tl.load(first_item_ptr + pid)
    parts = tl.load(first_item_ptr + pid + 1) - item
    for part in range(parts):
        begin = first + part * tiles // parts
        end = first + (part + 1) * tiles // parts
        partial_end = tl.minimum(tl.maximum(first + n_partial, begin), end)
        # Those of other tiles are never applied, since all of them are full.
        full_bitmap = EVERYTHING * BITMAPS + EVERYTHING if PAIRED else EVERYTHING
        first_bitmap = tl.where(begin < partial_end, bitmap, full_bitmap)
        store_range(ranges_ptr, item + part, begin, partial_end, end, first_bitmap, nothing, bad)


@triton.jit
@no_type_check
def store_range(ranges_ptr, item, begin, partial_end, end, bitmap, nothing, bad):
    """Store the tiles of an item; one without tiles gets `nothing`, a tile that keeps nothing. Where bad, add NaN."""
    empty = begin == end
    range_ptr = ranges_ptr + item * RANGE_SIZE
    tl.store(range_ptr + RANGE_BEGIN, tl.where(empty, nothing, begin))
    tl.store(range_ptr + RANGE_PARTIAL_END, tl.where(empty, nothing + 1, partial_end))
    tl.store(range_ptr + RANGE_END, tl.where(empty, nothing + 1, end))
    tl.store(range_ptr + RANGE_BITMAP, tl.where(empty, 0, bitmap))
    tl.store(range_ptr + RANGE_NAN_OR_ZERO, tl.where(bad, NAN_BITS, 0))


@triton.jit
@no_type_check
def _store_columns(columns_ptr, place, column, ok, PAIRED: tl.constexpr):
    """First columns of tiles, or of halves: a run in the place of each of the four slabs of 16."""
    if PAIRED:
        at = place[:, None] * 4 + tl.arange(0, 4)[None, :]
        value = run_column(column)[:, None] + tl.zeros([1, 4], tl.int32)
        tl.store(columns_ptr + at, value, mask=ok[:, None])
    else:
        tl.store(columns_ptr + place, column, mask=ok)
