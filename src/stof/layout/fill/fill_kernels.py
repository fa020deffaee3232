"""Triton kernels that fill tile lists on the device: they count the tiles of a mask, then write them.

Tiles are contiguous and aligned, rows keep their order, no row block is split, and each partial tile has a bitmap.
Bitmap 0 keeps nothing and bitmap 1 everything. After `count_tiles`, the host reads how much memory the lists take.

Attention kernels must not read keys that no query sees: their values may be anything. The number of keys that come
before the first unseen one is `seen` of a pattern; later keys must be unseen too. A tile
that would reach past `seen` is moved back to end there. The columns that it then shares with the tile before it are in
none of its bits.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.builders.gpu.program import program_bits, program_bounds, run_of_bits
from stof.layout.builders.gpu.tile_bits import PROGRAM, SIZES, bits_of, start_of

# Codes of tiles.
_EMPTY, _PARTIAL, _FULL = (tl.constexpr(code) for code in range(3))
# Row blocks, tiles of a row block, keys and words of keys that are handled together.
KEYS = 1024
_CHUNK = tl.constexpr(KEYS)
# Bitmaps that come before those of partial tiles.
_NOTHING, _EVERYTHING, _KNOWN = (tl.constexpr(bitmap) for bitmap in range(3))
# Queries of which one sees most keys, see `find_unseen_keys`.
_WITNESSES = tl.constexpr(3)


@triton.jit
@no_type_check
def _state_pointers(state_ptr, blocks, patterns, columns, seen_words):
    """Where everything lies in the state, int32.

    Zero at first: partial and full tiles of row blocks; by pattern, keys from the first unseen one on, and up to the
    last seen one; thread blocks that are done; words of seen keys, of a bool tensor. Anything at first: where the
    partial tiles, and all tiles, of each row block begin; codes of tiles, int8.
    """
    unseen_ptr = state_ptr + 2 * blocks
    done_ptr = unseen_ptr + 2 * patterns
    seen_ptr = done_ptr + 1
    begin_ptr = seen_ptr + patterns * seen_words
    code_ptr = (begin_ptr + 2 * blocks).to(tl.pointer_type(tl.int8))
    return unseen_ptr, done_ptr, seen_ptr, begin_ptr, code_ptr


@triton.jit(do_not_specialize=["blocks", "patterns", "first_number", "first_start", "q_len", "kv_len"])
@no_type_check
def find_unseen_keys(state_ptr, blocks, patterns, first_number, first_start, q_len, kv_len):
    """Find the keys that no query sees among some keys of a pattern, for masks with programs.

    Most keys are seen by one of three queries: the nearest one, where both sequences begin or where they end together,
    or the first. Where one is not, all queries are asked for the 32 keys around it.
    """
    unseen_ptr = state_ptr + 2 * blocks
    numbers_ptr = state_ptr + first_number
    key_groups = (kv_len + _CHUNK - 1) // _CHUNK
    pattern = tl.program_id(0) // key_groups
    first_key = tl.program_id(0) % key_groups * _CHUNK
    lane = tl.arange(0, _CHUNK)
    key = first_key + lane
    start = tl.load(state_ptr + first_start + pattern).to(tl.int64)
    unseen = key < kv_len
    words = tl.arange(0, _CHUNK // 32)
    seen_words = words * 0
    row_groups = (q_len + _CHUNK - 1) // _CHUNK
    steps = _WITNESSES + 0
    step = 0
    word = 0
    # One loop for both questions: the code that runs programs takes seconds to compile for each call.
    while step < steps:
        if step >= _WITNESSES:
            word = (step - _WITNESSES) // row_groups
            first_row = (step - _WITNESSES) % row_groups * _CHUNK
        else:
            first_row = 0
        nearest = tl.minimum(tl.maximum(key + tl.where(step == 0, 0, q_len - kv_len), 0), q_len - 1)
        q = tl.where(step < 2, nearest, tl.where(step == 2, 0, tl.minimum(first_row + lane, q_len - 1)))
        kv = tl.where(step < _WITNESSES, tl.minimum(key, kv_len - 1), first_key + word * 32)
        asked = tl.sum((unseen & (lane // 32 == word)).to(tl.int32), 0)
        if (step < _WITNESSES) | (asked != 0):
            bits = program_bits(numbers_ptr, start, q[:, None], kv[:, None])
            if step < _WITNESSES:
                unseen = unseen & (tl.sum(bits & 1, 1) == 0)
            else:
                some = tl.sum(tl.reduce(bits, 0, _either), 0)
                seen_words = tl.where(words == word, seen_words | some, seen_words)
        step += 1
        if step == _WITNESSES:
            steps += tl.where(tl.max(unseen.to(tl.int32), 0) > 0, (_CHUNK // 32) * row_groups, 0)
    bits = tl.reshape((seen_words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (_CHUNK,))
    unseen = unseen & (bits == 0)
    # Of all unseen keys the first has most keys from it on.
    most = tl.max(tl.where(unseen, kv_len - key, 0), 0)
    if most > 0:
        tl.atomic_max(unseen_ptr + pattern, most, sem="relaxed")
    end_of_seen = tl.max(tl.where((key < kv_len) & ~unseen, key + 1, 0), 0)
    tl.atomic_max(unseen_ptr + patterns + pattern, end_of_seen, sem="relaxed")


@triton.jit
@no_type_check
def _either(words, other_words):
    return words | other_words


@triton.jit(do_not_specialize=[*SIZES, "groups", "seen_words"])
@no_type_check
def count_tiles(
    source_ptr,  # numbers of programs, or a bool tensor: see `Source`
    state_ptr,
    mailbox_ptr,  # [3] int32 on the host: tiles, partial tiles, and whether later keys are seen, each plus 1
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    q_len,
    kv_len,
    row_blocks,  # of one pattern
    columns,  # tiles of a row block, empty ones included
    patterns,
    first_number,
    first_start,
    groups,  # of GROUP tiles in a row block
    seen_words,  # words of seen keys of a pattern: 0 for programs
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the codes of a group of tiles of a row block.

    A tile of a program that may keep something, and not certainly everything, is partial. The last thread block adds
    up.
    """
    pid = tl.program_id(0)
    blocks = patterns * row_blocks
    _, done_ptr, seen_ptr, _, code_ptr = _state_pointers(state_ptr, blocks, patterns, columns, seen_words)
    if SOURCE == PROGRAM:
        source_ptr = state_ptr + first_number
    block = pid // groups
    first_column = pid % groups * GROUP
    q0 = block % row_blocks * BLOCK_M
    start = start_of(state_ptr + first_start, block // row_blocks, stride_b, stride_h, mask_heads, SOURCE)
    if SOURCE == PROGRAM:
        column = first_column + tl.arange(0, GROUP)
        exists = column < columns
        kv0 = tl.minimum(column, columns - 1) * BLOCK_N
        last_row = tl.minimum(q0 + BLOCK_M, q_len) - 1
        last_column = tl.minimum(kv0 + BLOCK_N, kv_len) - 1
        nothing, everything = program_bounds(source_ptr, start, q0, last_row, kv0, last_column)
        full = exists & (everything != 0) & (kv0 + BLOCK_N <= kv_len)
        partial = exists & (nothing == 0) & ~full
        code = tl.where(full, _FULL, tl.where(partial, _PARTIAL, _EMPTY))
        tl.store(code_ptr + block.to(tl.int64) * columns + column, code.to(tl.int8), mask=exists)
        partial_tiles = tl.sum(partial.to(tl.int32), 0)
        full_tiles = tl.sum(full.to(tl.int32), 0)
    else:
        tl.static_assert(GROUP == 1)
        seen_ptr += block // row_blocks * seen_words + first_column * (BLOCK_N // 32)
        some, full = _read_tile(
            source_ptr, start, stride_q, stride_k, q0, first_column, q_len, kv_len, seen_ptr,
            SOURCE, BLOCK_M, BLOCK_N, ROWS,
        )  # fmt: skip
        full_tiles = some & full
        partial_tiles = some - full_tiles
        code = some + full_tiles
        tl.store(code_ptr + block.to(tl.int64) * columns + first_column, code.to(tl.int8))
    if partial_tiles != 0:
        tl.atomic_add(state_ptr + block, partial_tiles, sem="relaxed")
    if full_tiles != 0:
        tl.atomic_add(state_ptr + blocks + block, full_tiles, sem="relaxed")
    # The barrier orders what all threads have written before the count.
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1) == tl.num_programs(0) - 1:
        _add_up(state_ptr, mailbox_ptr, kv_len, row_blocks, columns, patterns, seen_words, SOURCE)


@triton.jit
@no_type_check
def _any_and_all(some, lacks, other_some, other_lacks):
    return some | other_some, lacks | other_lacks


@triton.jit
@no_type_check
def _read_tile(
    source_ptr, start, stride_q, stride_k, q0, tile_column, q_len, kv_len, seen_ptr,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Whether a tile of a bool tensor keeps something, and everything, 0 or 1; adds its keys to the seen ones."""
    WORDS: tl.constexpr = BLOCK_N // 32
    rows = tl.minimum(q_len - q0, BLOCK_M)
    some = tl.zeros([ROWS, WORDS], tl.int32)
    lacks = tl.zeros([ROWS, WORDS], tl.int32)
    for first in range(0, BLOCK_M, ROWS):
        words = bits_of(source_ptr, start, stride_q, stride_k, q0, first, tile_column, q_len, kv_len,
                        SOURCE, BLOCK_M, BLOCK_N, ROWS)  # fmt: skip
        row = (first + tl.arange(0, ROWS))[:, None]
        some |= words
        lacks |= tl.where(row < rows, ~words, 0)
    some, lacks = tl.reduce((some, lacks), 0, _any_and_all)  # [WORDS]
    word = tl.arange(0, WORDS)
    tl.atomic_or(seen_ptr + word, some, mask=some != 0, sem="relaxed")
    all_columns = ((tile_column + 1) * BLOCK_N <= kv_len).to(tl.int32)
    return (tl.sum((some != 0).to(tl.int32), 0) != 0).to(tl.int32), (tl.sum((lacks != 0).to(tl.int32), 0) == 0).to(
        tl.int32
    ) & all_columns


@triton.jit
@no_type_check
def _add_up(state_ptr, mailbox_ptr, kv_len, row_blocks, columns, patterns, seen_words, SOURCE: tl.constexpr):
    """Where the tiles of each row block begin, and what the host waits for."""
    blocks = patterns * row_blocks
    unseen_ptr, _, seen_ptr, begin_ptr, _ = _state_pointers(state_ptr, blocks, patterns, columns, seen_words)
    partial_tiles = 0
    tiles = 0
    for first in range(0, blocks, _CHUNK):
        block = first + tl.arange(0, _CHUNK)
        partial = tl.load(state_ptr + block, mask=block < blocks, other=0)
        both = partial + tl.load(state_ptr + blocks + block, mask=block < blocks, other=0)
        tl.store(begin_ptr + block, partial_tiles + tl.cumsum(partial, 0) - partial, mask=block < blocks)
        tl.store(begin_ptr + blocks + block, tiles + tl.cumsum(both, 0) - both, mask=block < blocks)
        partial_tiles += tl.sum(partial, 0)
        tiles += tl.sum(both, 0)
    later_seen = 0
    for pattern in range(patterns):
        if SOURCE == PROGRAM:
            first_unseen = kv_len - tl.load(unseen_ptr + pattern)
            end_of_seen = tl.load(unseen_ptr + patterns + pattern)
        else:
            first_unseen = kv_len
            end_of_seen = 0
            for first in range(0, seen_words, _CHUNK):
                word = first + tl.arange(0, _CHUNK)
                seen = tl.load(seen_ptr + pattern * seen_words + word, mask=word < seen_words, other=0)
                # The number of trailing ones, and of bits up to the last one.
                ones = _low_ones(seen)
                first_unseen = tl.minimum(first_unseen, tl.min(tl.where(ones < 32, word * 32 + ones, kv_len), 0))
                end_of_seen = tl.maximum(end_of_seen, tl.max(tl.where(seen != 0, word * 32 + _bit_length(seen), 0), 0))
            tl.store(unseen_ptr + pattern, kv_len - first_unseen)
        later_seen |= (end_of_seen > first_unseen).to(tl.int32)
    tl.store(mailbox_ptr, tiles + 1)
    tl.store(mailbox_ptr + 1, partial_tiles + 1)
    tl.store(mailbox_ptr + 2, later_seen + 1)


@triton.jit
@no_type_check
def _low_ones(words):
    """How many bits from the lowest on are set, int32."""
    count = words * 0
    going = count == 0
    for bit in tl.static_range(32):
        going = going & (((words >> bit) & 1) != 0)
        count += going.to(tl.int32)
    return count


@triton.jit
@no_type_check
def _bit_length(words):
    """The number of the highest bit that is set, plus 1; 0 for 0."""
    length = words * 0
    for bit in tl.static_range(32):
        length = tl.where(((words >> bit) & 1) != 0, bit + 1, length)
    return length


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
    """Write the tiles of a group: partial ones first, the last of them foremost, and their bitmaps.

    With the last partial tile in front, which has the diagonal of causal masks, every row mostly has a key in the first
    tile, which saves the Hopper kernel later rescaling. With WIDTH columns a tile, none is past the seen keys.
    """
    pid = tl.program_id(0)
    blocks = patterns * row_blocks
    unseen_ptr, _, _, begin_ptr, code_ptr = _state_pointers(state_ptr, blocks, patterns, columns, seen_words)
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
    for first in range(0, first_column, _CHUNK):
        column = first + tl.arange(0, _CHUNK)
        code = tl.load(code_ptr + column, mask=column < first_column, other=0)
        partial_before += tl.sum((code == _PARTIAL).to(tl.int32), 0)
        full_before += tl.sum((code == _FULL).to(tl.int32), 0)
    column = first_column + tl.arange(0, GROUP)
    code = tl.load(code_ptr + column, mask=column < columns, other=0)
    partial = (code == _PARTIAL).to(tl.int32)
    full = (code == _FULL).to(tl.int32)
    partial_rank = partial_before + tl.cumsum(partial, 0) - 1
    full_rank = full_before + tl.cumsum(full, 0) - 1
    tile = begin + tl.where(partial != 0, partial_tiles - 1 - partial_rank, partial_tiles + full_rank)
    bitmap = _KNOWN + tl.load(begin_ptr + block) + partial_rank
    listed = (partial | full) != 0
    kv0 = tl.minimum(column * BLOCK_N, seen - BLOCK_N)
    if WIDTH == 1:
        tl.store(columns_ptr + tile, kv0, mask=listed)
    else:
        n = tl.arange(0, WIDTH)[None, :]
        keys = tl.minimum(column[:, None] * BLOCK_N + n, seen - 1)
        tl.store(columns_ptr + tile.to(tl.int64)[:, None] * WIDTH + n, keys, mask=listed[:, None])
    tl.store(tile_bitmap_ptr + tile, tl.where(partial != 0, bitmap, _EVERYTHING), mask=listed)

    start = start_of(state_ptr + first_start, pattern, stride_b, stride_h, mask_heads, SOURCE)
    if SOURCE == PROGRAM:
        source_ptr = state_ptr + first_number
    q0 = block % row_blocks * BLOCK_M
    # Partial tiles of the group have consecutive bitmaps, in the order of their columns.
    number = tl.load(begin_ptr + block) + partial_before + _KNOWN
    for n in range(tl.minimum(GROUP, columns - first_column)):
        if tl.load(code_ptr + first_column + n) == _PARTIAL:
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
    for first in range(0, blocks, _CHUNK):
        block = first + tl.arange(0, _CHUNK)
        exists = block < blocks
        tl.store(pointers_ptr + block, tl.load(begin_ptr + blocks + block, mask=exists), mask=exists)
        tl.store(partial_count_ptr + block, tl.load(state_ptr + block, mask=exists), mask=exists)
    tl.store(pointers_ptr + blocks, tiles)
    if patterns == 1:
        for first in range(0, entries, _CHUNK):
            entry = first + tl.arange(0, _CHUNK)
            tl.store(pattern_of_ptr + entry, 0, mask=entry < entries)
    # TMA fills tiles past the last key with zeros; lists of all columns are read, and must name keys.
    n = tl.arange(0, WIDTH)
    for spare in tl.static_range(3):
        past = kv_len if WIDTH == 1 else 0
        tl.store(columns_ptr + (tiles + spare).to(tl.int64) * WIDTH + n, tl.zeros([WIDTH], tl.int32) + past)
        tl.store(tile_bitmap_ptr + tiles + spare, _NOTHING)
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
    for first in range(0, row_blocks, _CHUNK):
        other = first + tl.arange(0, _CHUNK)
        exists = other < row_blocks
        tiles = tl.zeros([_CHUNK], tl.int32)
        for pattern in range(patterns):
            block_ptr = pointers_ptr + pattern * row_blocks + other
            here = tl.load(block_ptr + 1, mask=exists, other=0) - tl.load(block_ptr, mask=exists, other=0)
            tiles = tl.maximum(tiles, here)
        earlier = (tiles > mine) | ((tiles == mine) & (other < row_block))
        before += tl.sum((exists & earlier).to(tl.int32), 0)
    return before
