"""Triton kernels that write the tiles of a mask that `count_kernels.py` has counted, as lists or as a `Layout`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.fill.bitmap_kernels import FULL, PARTIAL, table_pointers
from stof.layout.fill.count_kernels import CHUNK, state_pointers
from stof.layout.fill.tile_bits import PROGRAM, SIZES, bits_of, start_of

# Bitmaps that come before those of partial tiles.
NOTHING, EVERYTHING, KNOWN = (tl.constexpr(bitmap) for bitmap in range(3))


@triton.jit
@no_type_check
def _store_bitmap(bitmap_ptr, words, row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store words of rows in accumulator order: bit `2 j + b` of word `q` is column `8 j + 2 q + b`."""
    place = (tl.arange(0, BLOCK_N // 32) * 8)[None, :]
    for q in tl.static_range(4):
        pairs = (words >> (2 * q)) & 0x03030303
        packed = (pairs | (pairs >> 6) | (pairs >> 12) | (pairs >> 18)) & 0xFF
        tl.store(bitmap_ptr + row * 4 + q, tl.sum(packed << place, 1), mask=row < BLOCK_M)


@triton.jit(do_not_specialize=[*SIZES, "groups", "seen_words", "slots", "entries"])
@no_type_check
def write_tiles(
    source_ptr,  # as for `count_tiles`; a bool tensor as bytes
    state_ptr,  # as `count_tiles` has left it
    pattern_of_ptr,  # [B, H] int32, written where there is one pattern
    pointers_ptr,  # [P * R + 1] int32
    partial_count_ptr,  # [P * R] int32
    columns_ptr,  # [T + 3 or more, WIDTH] int32, from the first of each tile on; of a layout [T]
    tile_bitmap_ptr,  # [T + 3 or more] int32; of a layout [T]
    bitmaps_ptr,  # [partial tiles + 2 or more, BLOCK_M, 4] int32; of a layout [U, BLOCK_M, words]
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
    groups,
    seen_words,
    slots,
    entries,  # B * H
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Write the tiles of a group, and their bitmaps: partial tiles, then full tiles.

    A layout has partial tiles by ascending column, lists by descending column: the last partial tile has the diagonal
    of causal masks, and with it in front most rows have a key in their first tile, which saves the Hopper kernel later
    rescaling. In lists of WIDTH columns a tile, none is past the seen keys.
    """
    pid = tl.program_id(0)
    blocks = patterns * row_blocks
    count_ptr, unseen_ptr, _, _, begin_ptr, code_ptr = state_pointers(
        state_ptr, blocks, patterns, columns, seen_words, slots
    )
    if pid == blocks * groups:
        _write_rest(
            count_ptr, begin_ptr, pattern_of_ptr, pointers_ptr, partial_count_ptr, columns_ptr, tile_bitmap_ptr,
            bitmaps_ptr, blocks, patterns, kv_len, entries, BLOCK_M, WIDTH, LAYOUT,
        )  # fmt: skip
        return
    block = pid // groups
    first_column = pid % groups * GROUP
    pattern = block // row_blocks
    seen = kv_len - tl.load(unseen_ptr + pattern)
    partial_tiles = tl.load(count_ptr + block)
    begin = tl.load(begin_ptr + blocks + block)
    _, after_ptr, slot_ptr, number_ptr = table_pointers(state_ptr, code_ptr, blocks * columns, slots)
    slot_ptr += block * columns
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
    listed = (partial | full) != 0
    writes = partial
    if LAYOUT:
        place = partial_rank
        slot = tl.load(slot_ptr + column, mask=partial != 0, other=0)
        # The first tile of a slot writes its bitmap.
        after = tl.load(after_ptr + slot, mask=partial != 0, other=0)
        writes = partial & ((blocks - block) * columns - column == after).to(tl.int32)
        bitmap = tl.load(number_ptr + slot, mask=partial != 0, other=-1)
        kv0 = column * BLOCK_N
    else:
        place = partial_tiles - 1 - partial_rank
        bitmap = tl.where(partial != 0, KNOWN + tl.load(begin_ptr + block) + partial_rank, EVERYTHING)
        kv0 = tl.minimum(column * BLOCK_N, seen - BLOCK_N)
    tile = begin + tl.where(partial != 0, place, partial_tiles + full_rank)
    if WIDTH == 1:
        tl.store(columns_ptr + tile, kv0, mask=listed)
    else:
        n = tl.arange(0, WIDTH)[None, :]
        keys = tl.minimum(column[:, None] * BLOCK_N + n, seen - 1)
        tl.store(columns_ptr + tile.to(tl.int64)[:, None] * WIDTH + n, keys, mask=listed[:, None])
    tl.store(tile_bitmap_ptr + tile, bitmap, mask=listed)

    start = start_of(state_ptr + first_number, pattern, stride_b, stride_h, mask_heads, SOURCE)
    if SOURCE == PROGRAM:
        source_ptr = state_ptr + first_number
    q0 = block % row_blocks * BLOCK_M
    to_write = tl.sum(writes.to(tl.int64) << tl.arange(0, GROUP), 0)
    # In lists, partial tiles of the group have consecutive bitmaps, in the order of their columns.
    number = tl.load(begin_ptr + block) + partial_before + KNOWN
    for n in range(GROUP):
        if (to_write >> n) & 1 != 0:
            least = (first_column + n) * BLOCK_N
            if LAYOUT:
                number = tl.load(number_ptr + tl.load(slot_ptr + first_column + n))
            # In a list of all columns, those past the seen keys are others, and their bits are 0.
            kv_begin = tl.minimum(least, seen - BLOCK_N) if WIDTH == 1 and not LAYOUT else least
            for first in range(0, BLOCK_M, ROWS):
                words = bits_of(source_ptr, start, stride_q, stride_k, q0, first, kv_begin, least, q_len, kv_len,
                                SOURCE, BLOCK_M, BLOCK_N, ROWS, not LAYOUT)  # fmt: skip
                row = first + tl.arange(0, ROWS)
                if LAYOUT:
                    WORDS: tl.constexpr = (BLOCK_N + 31) // 32
                    at = (number.to(tl.int64) * BLOCK_M + row[:, None]) * WORDS + tl.arange(0, WORDS)[None, :]
                    tl.store(bitmaps_ptr + at, words, mask=(row < BLOCK_M)[:, None])
                else:
                    _store_bitmap(bitmaps_ptr + number.to(tl.int64) * (BLOCK_M * 4), words, row, BLOCK_M, BLOCK_N)
            if not LAYOUT:
                number += 1


@triton.jit
@no_type_check
def _write_rest(
    count_ptr, begin_ptr, pattern_of_ptr, pointers_ptr, partial_count_ptr, columns_ptr, tile_bitmap_ptr, bitmaps_ptr,
    blocks, patterns, kv_len, entries, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Write what is not of one group: pointers; of lists, also the tiles past the end and bitmaps of every mask."""
    tl.store(pointers_ptr, 0)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        exists = block < blocks
        partial = tl.load(count_ptr + block, mask=exists)
        tl.store(partial_count_ptr + block, partial, mask=exists)
        begin = tl.load(begin_ptr + blocks + block, mask=exists)
        end = begin + partial + tl.load(count_ptr + blocks + block, mask=exists)
        tl.store(pointers_ptr + block + 1, end, mask=exists)
    if patterns == 1:
        for first in range(0, entries, CHUNK):
            entry = first + tl.arange(0, CHUNK)
            tl.store(pattern_of_ptr + entry, 0, mask=entry < entries)
    if not LAYOUT:
        # TMA fills tiles past the last key with zeros; lists of all columns are read, and must name keys.
        n = tl.arange(0, WIDTH)
        last = blocks - 1
        tiles = tl.load(begin_ptr + blocks + last) + tl.load(count_ptr + last) + tl.load(count_ptr + blocks + last)
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
