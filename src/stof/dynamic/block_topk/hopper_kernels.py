"""Triton kernels that write the Hopper kernel's tile lists from blocks chosen on the GPU."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.block_topk import bitmaps
from stof.dynamic.block_topk.triton_kernels import EVERYTHING, list_blocks, store_columns_of
from stof.kernels import packed_integers
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK
from stof.kernels.hopper.backward_order import FIRST_BITMAP
from stof.kernels.hopper.refresh_work import (
    RANGE_BEGIN,
    RANGE_BITMAP,
    RANGE_END,
    RANGE_NAN_OR_ZERO,
    RANGE_PARTIAL_END,
    RANGE_SIZE,
)
from stof.layout.fill.bitmap_kernels import EMPTY, FULL
from stof.layout.fill.count_kernels import state_pointers

NAN_BITS = tl.constexpr(packed_integers.NAN_BITS)
_KEYS, _OFFSETS = tl.constexpr(KEYS_OF_BLOCK), tl.constexpr(len(bitmaps.OFFSETS))
# Tiles looked at together.
_CHUNK = tl.constexpr(256)


@triton.jit
@no_type_check
def fill_tiles(
    chosen_ptr,  # [P, query blocks, k] int32, ascending
    count_ptr,  # [P, query blocks] int32
    bad_ptr,  # [P] int32, not 0 where nothing is computed
    first_item_ptr,  # [P * R + 1] int32, items of each row block
    columns_ptr,  # [P * R * slots + 2, 8 where PAIRED, else 1] int32, see `TileLists.tile_columns`
    tile_bitmap_ptr,  # [P * R * slots + 3] int32, written for partial tiles
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
    TILE: tl.constexpr = 2 if PAIRED else 1
    BITMAPS: tl.constexpr = 3 + 2 * (WIDTH // BLOCK_M)
    pid = tl.program_id(0)
    base = pid * slots
    bad, n_full, last_column, n_partial, partial_column, partial_bitmap = list_blocks(
        chosen_ptr, count_ptr, bad_ptr, columns_ptr, (base + 1) * TILE, row_blocks, query_blocks, k, q_len, kv_len,
        BLOCK_SIZE, CAUSAL, BLOCK_M, WIDTH, PAIRED, COPY,
    )  # fmt: skip
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
    store_columns_of(columns_ptr, base * TILE + half, first_columns, (half + n_partial) > half, PAIRED)
    tl.store(tile_bitmap_ptr + base, bitmap)
    first = base + 1 - n_partial
    store_ranges(ranges_ptr, first_item_ptr, tile_bitmap_ptr, first, n_partial, n_partial + n_full, nothing, bad)


@triton.jit
@no_type_check
def store_ranges(ranges_ptr, first_item_ptr, tile_bitmap_ptr, first, n_partial, tiles, nothing, bad):
    """Divide this row block's tiles among its items, after their bitmaps were stored.

    An item without tiles gets `nothing`, a tile that keeps nothing. Where bad, results become NaN.
    """
    tl.debug_barrier()
    item = tl.load(first_item_ptr + tl.program_id(0))
    parts = tl.load(first_item_ptr + tl.program_id(0) + 1) - item
    for part in range(parts):
        begin = first + part * tiles // parts
        end = first + (part + 1) * tiles // parts
        empty = begin == end
        range_ptr = ranges_ptr + (item + part) * RANGE_SIZE
        partial_end = tl.minimum(tl.maximum(first + n_partial, begin), end)
        tl.store(range_ptr + RANGE_BEGIN, tl.where(empty, nothing, begin))
        tl.store(range_ptr + RANGE_PARTIAL_END, tl.where(empty, nothing + 1, partial_end))
        tl.store(range_ptr + RANGE_END, tl.where(empty, nothing + 1, end))
        tl.store(range_ptr + RANGE_BITMAP, tl.where(empty, 0, tl.load(tile_bitmap_ptr + begin)))
        tl.store(range_ptr + RANGE_NAN_OR_ZERO, tl.where(bad, NAN_BITS, 0))


@triton.jit(do_not_specialize=["patterns", "row_blocks", "q_tiles", "q_len", "kv_len"])
@no_type_check
def code_tiles(
    taken_ptr,  # int8 [P, ceil(q_len / 128), R + 1], 1 where a block of 128 is chosen; the last column is not read
    bad_ptr,  # int32 [P], not 0 where gradients become NaN
    row_block_ptr,  # int32 [P * R + 1]; the number of tiles of block n is written to n + 1
    state_ptr,  # int32, codes of tiles in it, see `state_pointers`
    patterns,
    row_blocks,  # of 128 keys, R
    q_tiles,  # tiles of QUERIES queries
    q_len,
    kv_len,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Write the codes of the tiles of a block of keys for `backward_order.py`, and count those that are not empty.

    In a bad pattern, each block of keys and each tile of queries has a full tile: the log-sum-exp of its queries is
    NaN, and so are all gradients.
    """
    pid = tl.program_id(0)
    pattern = pid // row_blocks
    row_block = pid % row_blocks
    query_blocks = (q_len + _KEYS - 1) // _KEYS
    _, _, _, _, _, code_ptr = state_pointers(state_ptr, patterns * row_blocks, patterns, q_tiles, 0, 0)
    code_ptr += pid.to(tl.int64) * q_tiles
    taken_ptr += pattern.to(tl.int64) * query_blocks * (row_blocks + 1) + row_block
    is_bad = tl.load(bad_ptr + pattern) != 0
    has_tail = ((row_block + 1) * _KEYS > kv_len).to(tl.int32)
    tiles = 0
    for first in range(0, q_tiles, _CHUNK):
        q = first + tl.arange(0, _CHUNK)
        exists = q < q_tiles
        is_tile = tl.load(taken_ptr + q * QUERIES // _KEYS * (row_blocks + 1), mask=exists, other=0) != 0
        offset = tl.zeros([_CHUNK], tl.int32)
        if CAUSAL:
            # The number of the tile's offset in `OFFSETS`, which is not negative: no later block is chosen.
            offset = tl.maximum(2 - (q * QUERIES - row_block * _KEYS) // 64, 0)
        bitmap = has_tail * _OFFSETS + offset
        code = tl.where(bitmap == 0, FULL, FIRST_BITMAP + bitmap)
        if is_bad:
            code = tl.full([_CHUNK], FULL, tl.int32)
            # Along the diagonal, so that every block and every tile of queries has one.
            is_tile = (q.to(tl.int64) * row_blocks // q_tiles == row_block) | (
                row_block.to(tl.int64) * q_tiles // row_blocks == q
            )
        is_tile = is_tile & exists
        tl.store(code_ptr + q, tl.where(is_tile, code, EMPTY).to(tl.int8), mask=exists)
        tiles += tl.sum(is_tile.to(tl.int32), 0)
    tl.store(row_block_ptr + pid + 1, tiles)
