"""Kernels that order the tiles of a mask for the backward kernel of Hopper, where the device has filled them.

They do for codes of tiles (`stof.layout.fill.count_kernels`) what `backward_lists._ordered` does for layouts.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.backward_lists import FEWEST_TILES, KEYS_OF_BLOCK, MOST_OVER_MEAN, TILE
from stof.layout.fill.bitmap_kernels import EMPTY, FULL, PARTIAL
from stof.layout.fill.count_kernels import state_pointers
from stof.layout.fill.tiles import EVERYTHING

KEYS = tl.constexpr(KEYS_OF_BLOCK)
# Blocks of keys and blocks of queries that are handled together.
COLUMNS = 32
_ROWS, _COLUMNS, _CHUNK = (tl.constexpr(size) for size in (32, COLUMNS, 256))
_MOST, _FEWEST = tl.constexpr(MOST_OVER_MEAN), tl.constexpr(FEWEST_TILES)
# With `BY_CODE`, the code of tiles with the first bitmap; those of the others follow.
FIRST_BITMAP = tl.constexpr(FULL.value + 1)
# The bitmap of full tiles, and the first one of partial tiles: see `FilledTiles`.
_OF_FULL, _FIRST_PARTIAL = tl.constexpr(EVERYTHING), tl.constexpr(EVERYTHING + 1)
_Q_BLOCK, _BITMAP, _RANK, _SUM = (tl.constexpr(field) for field in TILE)
_TILE_SIZE = tl.constexpr(len(TILE))
_SIZES = ["patterns", "row_blocks", "q_blocks", "q_len", "kv_len", "seen_words"]


@triton.jit
@no_type_check
def _diagonal(row_block, q_len, kv_len, QUERIES: tl.constexpr):
    """The block of queries at the relative position of a block of keys."""
    return (row_block.to(tl.int64) * (q_len.to(tl.int64) * KEYS) // (kv_len.to(tl.int64) * QUERIES)).to(tl.int32)


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def count_additions(
    state_ptr,  # of `FilledTiles`, as the next one
    row_block_ptr,  # int32 [P * R + 1]
    turn_ptr,  # int32 [P, R, blocks of queries]: of each tile, how many add to its part of its queries before it
    sums_ptr,  # int32 [P, blocks of queries, 2]: sums of each part
    patterns,
    row_blocks,
    q_blocks,
    q_len,
    kv_len,
    seen_words,
    QUERIES: tl.constexpr,
):
    """Count what is added to each block of queries, from the last block of keys on; choose the number of its sums."""
    _, _, _, _, _, code_ptr = state_pointers(state_ptr, patterns * row_blocks, patterns, q_blocks, seen_words, 0)
    groups = (q_blocks + _COLUMNS - 1) // _COLUMNS
    pattern = tl.program_id(0) // groups
    q = tl.program_id(0) % groups * _COLUMNS + tl.arange(0, _COLUMNS)
    first_block = pattern * row_blocks
    from_diagonal = tl.zeros([_COLUMNS], tl.int32)
    up_to_diagonal = tl.zeros([_COLUMNS], tl.int32)
    chunks = (row_blocks + _ROWS - 1) // _ROWS
    for n in range(chunks):
        row_block = row_blocks - 1 - n * _ROWS - tl.arange(0, _ROWS)
        cell = (first_block + row_block).to(tl.int64)[:, None] * q_blocks + q[None, :]
        exists = (row_block >= 0)[:, None] & (q < q_blocks)[None, :]
        is_tile = (tl.load(code_ptr + cell, mask=exists, other=0) != EMPTY).to(tl.int32)
        is_before = q[None, :] < _diagonal(row_block, q_len, kv_len, QUERIES)[:, None]
        after = tl.where(is_before, 0, is_tile)
        before = tl.where(is_before, is_tile, 0)
        turn = tl.where(
            is_before,
            up_to_diagonal[None, :] + tl.cumsum(before, 0),
            from_diagonal[None, :] + tl.cumsum(after, 0),
        )
        tl.store(turn_ptr + cell, turn - 1, mask=exists & (is_tile != 0))
        from_diagonal += tl.sum(after, 0)
        up_to_diagonal += tl.sum(before, 0)
    tiles = tl.load(row_block_ptr + first_block + row_blocks) - tl.load(row_block_ptr + first_block)
    most = tl.maximum((tiles * _MOST + q_blocks - 1) // q_blocks, _FEWEST)
    place = sums_ptr + (pattern * q_blocks + q) * 2
    tl.store(place, (from_diagonal + most - 1) // most, mask=q < q_blocks)
    tl.store(place + 1, (up_to_diagonal + most - 1) // most, mask=q < q_blocks)


@triton.jit(do_not_specialize=_SIZES)
@no_type_check
def order_tiles(
    state_ptr,  # this and the next three: as for `count_additions`
    row_block_ptr,
    turn_ptr,
    sums_ptr,
    end_ptr,  # int32 [P, blocks of queries, 2]: sums of a pattern up to the end of each part
    bitmaps_ptr,  # int32 [n, 128, 4]
    tiles_ptr,  # int32 [T + 2, 4], fields as `TileFields`; the last two are padding
    seen_ptr,  # int8 [P, kv_len]: which keys some query sees
    flags_ptr,  # int32 [2], zero: whether some query sees nothing; whether a tile has a key that no query sees
    patterns,
    row_blocks,
    q_blocks,
    q_len,
    kv_len,
    seen_words,
    QUERIES: tl.constexpr,
    BY_CODE: tl.constexpr,  # codes tell the bitmaps of tiles; what is seen is not written
):
    """Write the tiles of a block of keys: from the diagonal on, then those before it."""
    blocks = patterns * row_blocks
    _, unseen_ptr, _, _, begin_ptr, code_ptr = state_pointers(state_ptr, blocks, patterns, q_blocks, seen_words, 0)
    block = tl.program_id(0)
    pattern = block // row_blocks
    row_block = block % row_blocks
    begin = tl.load(row_block_ptr + block)
    tiles = tl.load(row_block_ptr + block + 1) - begin
    first_bitmap = tl.load(begin_ptr + block) + _FIRST_PARTIAL
    diagonal = _diagonal(row_block, q_len, kv_len, QUERIES)
    cells = block.to(tl.int64) * q_blocks
    of_full = tl.where((row_block == row_blocks - 1) & (kv_len % KEYS > 0), _OF_FULL, -1)
    before_diagonal = 0
    for first in range(0, diagonal, _CHUNK):
        q = first + tl.arange(0, _CHUNK)
        code = tl.load(code_ptr + cells + q, mask=q < diagonal, other=0)
        before_diagonal += tl.sum((code != EMPTY).to(tl.int32), 0)
    tiles_before = 0
    partial_before = 0
    for first in range(0, q_blocks, _CHUNK):
        q = first + tl.arange(0, _CHUNK)
        code = tl.load(code_ptr + cells + q, mask=q < q_blocks, other=0)
        is_tile = code != EMPTY
        partial = (code == PARTIAL).to(tl.int32)
        is_before = q < diagonal
        number = tiles_before + tl.cumsum(is_tile.to(tl.int32), 0) - 1
        bitmap = tl.where(code == FULL, of_full, first_bitmap + partial_before + tl.cumsum(partial, 0) - 1)
        if BY_CODE:
            bitmap = tl.where(code == FULL, -1, code.to(tl.int32) - FIRST_BITMAP)
        place = (pattern * q_blocks + q) * 2 + is_before.to(tl.int32)
        sums = tl.load(sums_ptr + place, mask=is_tile, other=1)
        first_sum = tl.load(end_ptr + place, mask=is_tile, other=0) - sums
        turn = tl.load(turn_ptr + cells + q, mask=is_tile, other=0)
        at = begin + number + tl.where(is_before, tiles, 0) - before_diagonal
        fields_ptr = tiles_ptr + at.to(tl.int64) * _TILE_SIZE
        tl.store(fields_ptr + _Q_BLOCK, q, mask=is_tile)
        tl.store(fields_ptr + _BITMAP, bitmap, mask=is_tile)
        tl.store(fields_ptr + _RANK, turn // sums, mask=is_tile)
        tl.store(fields_ptr + _SUM, first_sum + turn % sums, mask=is_tile)
        tiles_before += tl.sum(is_tile.to(tl.int32), 0)
        partial_before += tl.sum(partial, 0)
    if block == blocks - 1:
        padding = tl.arange(0, 2 * _TILE_SIZE)
        tl.store(tiles_ptr + (begin + tiles).to(tl.int64) * _TILE_SIZE + padding, padding * 0)

    if not BY_CODE:
        key = tl.arange(0, KEYS)
        seen = (key * 0) + (tiles > partial_before).to(tl.int32)
        if tiles == partial_before:
            for n in range(partial_before):
                word = (first_bitmap + n).to(tl.int64) * (KEYS * 4) + key[:, None] * 4 + tl.arange(0, 4)[None, :]
                seen = seen | tl.max((tl.load(bitmaps_ptr + word) != 0).to(tl.int32), 1)
        position = row_block * KEYS + key
        tl.store(seen_ptr + pattern.to(tl.int64) * kv_len + position, seen.to(tl.int8), mask=position < kv_len)
        missing = tl.max(((position < kv_len) & (seen == 0)).to(tl.int32), 0)
        if (tiles > 0) & (missing > 0):
            tl.atomic_max(flags_ptr + 1, 1, sem="relaxed")
        if tl.load(unseen_ptr + pattern) > 0:
            tl.atomic_max(flags_ptr, 1, sem="relaxed")
