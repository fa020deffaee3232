"""Triton kernels that write the tile lists of a mask whose tiles `count_kernels.py` has counted."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.fill.program import program_bits, run_of_bits
from stof.layout.fill.tile_bits import PROGRAM, SIZES, start_of
from stof.layout.fill.count_kernels import CHUNK, FULL, PARTIAL, state_pointers

# Bitmaps that come before those of partial tiles.
NOTHING, EVERYTHING, KNOWN = (tl.constexpr(bitmap) for bitmap in range(3))


@triton.jit
@no_type_check
def _words_of(
    source_ptr, start, stride_q, stride_k, q0, first, kv0, least, q_len, kv_len,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bits `[ROWS, BLOCK_N / 32]` of rows from `first` on, of columns from `kv0` on, which may be below 0.

    Columns before `least` and past the last key are not kept, nor is anything of rows that do not exist.
    """
    row = first + tl.arange(0, ROWS)
    q = (q0 + row)[:, None]
    row_exists = (q < q_len) & (row < BLOCK_M)[:, None]
    word = kv0 + (tl.arange(0, BLOCK_N // 32) * 32)[None, :]
    if SOURCE == PROGRAM:
        # Programs look up tables by position: keys from 0 on are moved to their place.
        words = program_bits(source_ptr, start, tl.minimum(q, q_len - 1), tl.maximum(word, 0))
        moved = tl.maximum(-word, 0)
        words = tl.where(moved < 32, words << tl.minimum(moved, 31), 0)
        words &= run_of_bits(least - word, tl.minimum(kv_len - word, 32) - 1)
        words = tl.where(row_exists, words, 0)
    else:
        kv = kv0 + tl.arange(0, BLOCK_N)[None, :]
        exists = row_exists & (kv >= least) & (kv < kv_len)
        at = start + q.to(tl.int64) * stride_q + kv.to(tl.int64) * stride_k
        bits = (tl.load(source_ptr + at, mask=exists, other=0) != 0).to(tl.int32)
        # Distinct bits: the sum is their union.
        words = tl.sum(tl.reshape(bits, (ROWS, BLOCK_N // 32, 32)) << tl.arange(0, 32)[None, None, :], 2)
    return words


@triton.jit
@no_type_check
def _store_bitmap(bitmap_ptr, words, row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store words of rows in accumulator order: bit `2 j + b` of word `q` is column `8 j + 2 q + b`."""
    place = (tl.arange(0, BLOCK_N // 32) * 8)[None, :]
    for q in tl.static_range(4):
        pairs = (words >> (2 * q)) & 0x03030303
        packed = (pairs | (pairs >> 6) | (pairs >> 12) | (pairs >> 18)) & 0xFF
        tl.store(bitmap_ptr + row * 4 + q, tl.sum(packed << place, 1), mask=row < BLOCK_M)


@triton.jit(do_not_specialize=[*SIZES, "groups", "seen_words", "tiles", "entries"])
@no_type_check
def write_tiles(
    source_ptr,  # as for `count_tiles`; a bool tensor as bytes
    state_ptr,  # as `count_tiles` has left it
    pattern_of_ptr,  # [B, H] int32, written where there is one pattern
    pointers_ptr,  # [P * R + 1] int32
    partial_count_ptr,  # [P * R] int32
    columns_ptr,  # [T + 3, WIDTH] int32, from the first of each tile on
    tile_bitmap_ptr,  # [T + 3] int32
    bitmaps_ptr,  # [partial tiles + 2, BLOCK_M, 4] int32
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    q_len,
    kv_len,
    row_blocks,
    columns,
    patterns,
    first_number,
    first_start,
    groups,
    seen_words,
    tiles,  # T
    entries,  # B * H
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the tiles of a group, and their bitmaps: partial tiles by descending column, then full tiles.

    The last partial tile has the diagonal of causal masks: with it in front, most rows have a key in their first tile,
    which saves the Hopper kernel later rescaling. With WIDTH columns a tile, none is past the seen keys.
    """
    pid = tl.program_id(0)
    blocks = patterns * row_blocks
    unseen_ptr, _, _, begin_ptr, code_ptr = state_pointers(state_ptr, blocks, patterns, columns, seen_words)
    if pid == blocks * groups:
        _write_rest(
            state_ptr, begin_ptr, pattern_of_ptr, pointers_ptr, partial_count_ptr, columns_ptr, tile_bitmap_ptr,
            bitmaps_ptr, blocks, patterns, kv_len, tiles, entries, BLOCK_M, WIDTH,
        )  # fmt: skip
        return
    block = pid // groups
    first_column = pid % groups * GROUP
    pattern = block // row_blocks
    seen = kv_len - tl.load(unseen_ptr + pattern)
    partial_tiles = tl.load(state_ptr + block)
    begin = tl.load(begin_ptr + blocks + block)
    code_ptr += block.to(tl.int64) * columns
    partial_before = 0
    full_before = 0
    for first in range(0, first_column, CHUNK):
        column = first + tl.arange(0, CHUNK)
        code = tl.load(code_ptr + column, mask=column < first_column, other=0)
        partial_before += tl.sum((code == PARTIAL).to(tl.int32), 0)
        full_before += tl.sum((code == FULL).to(tl.int32), 0)
    column = first_column + tl.arange(0, GROUP)
    code = tl.load(code_ptr + column, mask=column < columns, other=0)
    partial = (code == PARTIAL).to(tl.int32)
    full = (code == FULL).to(tl.int32)
    partial_rank = partial_before + tl.cumsum(partial, 0) - 1
    full_rank = full_before + tl.cumsum(full, 0) - 1
    tile = begin + tl.where(partial != 0, partial_tiles - 1 - partial_rank, partial_tiles + full_rank)
    bitmap = KNOWN + tl.load(begin_ptr + block) + partial_rank
    listed = (partial | full) != 0
    kv0 = tl.minimum(column * BLOCK_N, seen - BLOCK_N)
    if WIDTH == 1:
        tl.store(columns_ptr + tile, kv0, mask=listed)
    else:
        n = tl.arange(0, WIDTH)[None, :]
        keys = tl.minimum(column[:, None] * BLOCK_N + n, seen - 1)
        tl.store(columns_ptr + tile.to(tl.int64)[:, None] * WIDTH + n, keys, mask=listed[:, None])
    tl.store(tile_bitmap_ptr + tile, tl.where(partial != 0, bitmap, EVERYTHING), mask=listed)

    start = start_of(state_ptr + first_start, pattern, stride_b, stride_h, mask_heads, SOURCE)
    if SOURCE == PROGRAM:
        source_ptr = state_ptr + first_number
    q0 = block % row_blocks * BLOCK_M
    # Partial tiles of the group have consecutive bitmaps, in the order of their columns.
    number = tl.load(begin_ptr + block) + partial_before + KNOWN
    for n in range(tl.minimum(GROUP, columns - first_column)):
        if tl.load(code_ptr + first_column + n) == PARTIAL:
            least = (first_column + n) * BLOCK_N
            # In a list of all columns, those past the seen keys are others, and their bits are 0.
            kv_begin = tl.minimum(least, seen - BLOCK_N) if WIDTH == 1 else least
            bitmap_ptr = bitmaps_ptr + number.to(tl.int64) * (BLOCK_M * 4)
            for first in range(0, BLOCK_M, ROWS):
                words = _words_of(source_ptr, start, stride_q, stride_k, q0, first, kv_begin, least, q_len, kv_len,
                                  SOURCE, BLOCK_M, BLOCK_N, ROWS)  # fmt: skip
                _store_bitmap(bitmap_ptr, words, first + tl.arange(0, ROWS), BLOCK_M, BLOCK_N)
            number += 1


@triton.jit
@no_type_check
def _write_rest(
    state_ptr, begin_ptr, pattern_of_ptr, pointers_ptr, partial_count_ptr, columns_ptr, tile_bitmap_ptr, bitmaps_ptr,
    blocks, patterns, kv_len, tiles, entries, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what is not of one group: pointers, the tiles past the end, and the bitmaps that every mask has."""
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        exists = block < blocks
        tl.store(pointers_ptr + block, tl.load(begin_ptr + blocks + block, mask=exists), mask=exists)
        tl.store(partial_count_ptr + block, tl.load(state_ptr + block, mask=exists), mask=exists)
    tl.store(pointers_ptr + blocks, tiles)
    if patterns == 1:
        for first in range(0, entries, CHUNK):
            entry = first + tl.arange(0, CHUNK)
            tl.store(pattern_of_ptr + entry, 0, mask=entry < entries)
    # TMA fills tiles past the last key with zeros; lists of all columns are read, and must name keys.
    n = tl.arange(0, WIDTH)
    for spare in tl.static_range(3):
        past = kv_len if WIDTH == 1 else 0
        tl.store(columns_ptr + (tiles + spare).to(tl.int64) * WIDTH + n, tl.zeros([WIDTH], tl.int32) + past)
        tl.store(tile_bitmap_ptr + tiles + spare, NOTHING)
    WORDS: tl.constexpr = (BLOCK_M & -BLOCK_M) * 4  # BLOCK_M may be three times a power of two
    for word in range(0, BLOCK_M * 4, WORDS):
        bitmap_ptr = bitmaps_ptr + word + tl.arange(0, WORDS)
        tl.store(bitmap_ptr, tl.zeros([WORDS], tl.int32))
        tl.store(bitmap_ptr + BLOCK_M * 4, tl.zeros([WORDS], tl.int32) - 1)


@triton.jit
@no_type_check
def rank_of(pointers_ptr, row_block, row_blocks, patterns):
    """How many row blocks come before this one, longest first; with several patterns, by the longest of them."""
    mine = 0
    for pattern in range(patterns):
        block_ptr = pointers_ptr + pattern * row_blocks + row_block
        mine = tl.maximum(mine, tl.load(block_ptr + 1) - tl.load(block_ptr))
    before = 0
    for first in range(0, row_blocks, CHUNK):
        other = first + tl.arange(0, CHUNK)
        exists = other < row_blocks
        tiles = tl.zeros([CHUNK], tl.int32)
        for pattern in range(patterns):
            block_ptr = pointers_ptr + pattern * row_blocks + other
            here = tl.load(block_ptr + 1, mask=exists, other=0) - tl.load(block_ptr, mask=exists, other=0)
            tiles = tl.maximum(tiles, here)
        earlier = (tiles > mine) | ((tiles == mine) & (other < row_block))
        before += tl.sum((exists & earlier).to(tl.int32), 0)
    return before
