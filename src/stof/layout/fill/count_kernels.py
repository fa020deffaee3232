"""Triton kernels that count the tiles of a mask on the device; those of `write_kernels.py` then write them.

Tiles are contiguous and aligned, rows keep their order, and no row block is split. After `count_tiles`, the host reads
how much memory the tiles take. They are written as lists that attention kernels read, or as a `Layout`.

In lists, each partial tile has a bitmap; bitmap 0 keeps nothing and bitmap 1 everything. Tiles of a program that may
keep something, and not certainly everything, are partial. In layouts, empty and full tiles are told exactly, and equal
bitmaps are stored once.

Lists name no keys that no query sees: their values may be anything, so attention kernels must not read them. The number
of keys that come before the first unseen one is `seen` of a pattern; later keys must be unseen too. A tile that would
reach past `seen` is moved back to end there. The columns that it then shares with the tile before it are in none of its
bits.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.fill.bitmap_kernels import (
    EMPTY,
    FULL,
    PARTIAL,
    find_slot,
    hashed,
    number_bitmaps,
    table_pointers,
)
from stof.layout.fill.program import program_bits, program_bounds
from stof.layout.fill.tile_bits import PROGRAM, SIZES, bits_of, start_of

# Row blocks, tiles of a row block, keys and words of keys that are handled together.
KEYS = 1024
CHUNK = tl.constexpr(KEYS)
# Row blocks whose tiles are added up together: few enough that their registers do not lower the kernel's occupancy.
_SUMMED = tl.constexpr(256)
# Queries that are tested for each key before all queries are, see `find_unseen_keys`.
_WITNESSES = tl.constexpr(3)


@triton.jit
@no_type_check
def state_pointers(state_ptr, blocks, patterns, columns, seen_words, slots):
    """Where everything lies in the state, int32; `bitmap_kernels.table_pointers` says where the table of bitmaps is.

    Zero-initialised, after a table of `slots`: partial and full tiles of row blocks; by pattern, keys from the first
    unseen one on, and up to the last seen one; thread blocks that are done; bitmaps in the table; words of seen keys,
    of a bool tensor. Uninitialised: where the partial tiles, and all tiles, of each row block begin; codes of tiles,
    int8.
    """
    count_ptr = state_ptr + 7 * slots
    unseen_ptr = count_ptr + 2 * blocks
    done_ptr = unseen_ptr + 2 * patterns
    seen_ptr = done_ptr + 2
    begin_ptr = seen_ptr + patterns * seen_words
    code_ptr = (begin_ptr + 2 * blocks).to(tl.pointer_type(tl.int8))
    return count_ptr, unseen_ptr, done_ptr, seen_ptr, begin_ptr, code_ptr


@triton.jit(do_not_specialize=["blocks", "patterns", "first_number", "q_len", "kv_len"])
@no_type_check
def find_unseen_keys(state_ptr, blocks, patterns, first_number, q_len, kv_len):
    """Find the keys that no query sees among some keys of a pattern, for masks with programs.

    Most keys are seen by one of three queries: the nearest one, where both sequences begin or where they end together,
    or the first. Where one is not, all queries are asked for the 32 keys around it.
    """
    unseen_ptr = state_ptr + 2 * blocks
    numbers_ptr = state_ptr + first_number
    key_groups = (kv_len + CHUNK - 1) // CHUNK
    pattern = tl.program_id(0) // key_groups
    first_key = tl.program_id(0) % key_groups * CHUNK
    lane = tl.arange(0, CHUNK)
    key = first_key + lane
    start = tl.load(state_ptr + first_number + pattern).to(tl.int64)
    unseen = key < kv_len
    words = tl.arange(0, CHUNK // 32)
    seen_words = words * 0
    row_groups = (q_len + CHUNK - 1) // CHUNK
    steps = _WITNESSES + 0
    step = 0
    word = 0
    # One loop for both questions: the code that runs programs takes seconds to compile for each call.
    while step < steps:
        if step >= _WITNESSES:
            word = (step - _WITNESSES) // row_groups
            first_row = (step - _WITNESSES) % row_groups * CHUNK
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
            steps += tl.where(tl.max(unseen.to(tl.int32), 0) > 0, (CHUNK // 32) * row_groups, 0)
    bits = tl.reshape((seen_words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (CHUNK,))
    unseen = unseen & (bits == 0)
    # `kv_len - key` is largest at the first unseen key.
    from_unseen = tl.max(tl.where(unseen, kv_len - key, 0), 0)
    if from_unseen > 0:
        tl.atomic_max(unseen_ptr + pattern, from_unseen, sem="relaxed")
    end_of_seen = tl.max(tl.where((key < kv_len) & ~unseen, key + 1, 0), 0)
    tl.atomic_max(unseen_ptr + patterns + pattern, end_of_seen, sem="relaxed")


@triton.jit
@no_type_check
def _either(words, other_words):
    return words | other_words


@triton.jit(do_not_specialize=[*SIZES, "groups", "seen_words", "slots", "block_m", "block_n"])
@no_type_check
def count_tiles(
    source_ptr,  # numbers of programs, or a bool tensor: see `Source`
    state_ptr,
    mailbox_ptr,  # int32 on the host, see `_add_up`; of layouts, four numbers that identify each pattern after those
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
    groups,  # of GROUP tiles in a row block
    seen_words,  # words of seen keys of a pattern: 0 for programs and layouts
    slots,  # of the table of bitmaps: 0 for lists
    block_m,
    block_n,
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # as block_m, and the next two, where tiles are read; else 0: one kernel serves all sizes
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Write the codes of a group of tiles of a row block; the last thread block adds up.

    Tiles of a program are classified by bounds, several at once. Tiles of bool tensors, and for a layout those that
    bounds do not tell, are read.
    """
    pid = tl.program_id(0)
    blocks = patterns * row_blocks
    count_ptr, unseen_ptr, done_ptr, seen_ptr, _, code_ptr = state_pointers(
        state_ptr, blocks, patterns, columns, seen_words, slots
    )
    if SOURCE == PROGRAM:
        source_ptr = state_ptr + first_number
    block = pid // groups
    first_column = pid % groups * GROUP
    q0 = block % row_blocks * block_m
    first_tile = block.to(tl.int64) * columns + first_column
    start = start_of(state_ptr + first_number, block // row_blocks, stride_b, stride_h, mask_heads, SOURCE)
    partial_tiles = 0
    full_tiles = 0
    if SOURCE == PROGRAM:
        column = first_column + tl.arange(0, GROUP)
        exists = column < columns
        kv0 = tl.minimum(column, columns - 1) * block_n
        last_row = tl.minimum(q0 + block_m, q_len) - 1
        last_column = tl.minimum(kv0 + block_n, kv_len) - 1
        nothing, everything = program_bounds(source_ptr, start, q0, last_row, kv0, last_column)
        full = exists & (everything != 0) & (kv0 + block_n <= kv_len)
        # Bounds may be too wide, but no tile behind the seen keys keeps anything.
        seen = kv_len - tl.load(unseen_ptr + block // row_blocks)
        uncertain = exists & (nothing == 0) & ~full & (kv0 < seen)
        code = tl.where(full, FULL, tl.where(uncertain, PARTIAL, EMPTY))
        tl.store(code_ptr + first_tile + tl.arange(0, GROUP), code.to(tl.int8), mask=exists)
        full_tiles += tl.sum(full.to(tl.int32), 0)
        if LAYOUT:
            to_read = tl.sum(uncertain.to(tl.int32) << tl.arange(0, GROUP), 0)
            # Tiles that are read store their codes over these.
            tl.debug_barrier()
        else:
            partial_tiles += tl.sum(uncertain.to(tl.int32), 0)
    else:
        to_read = (1 << tl.minimum(columns - first_column, GROUP)) - 1
    if LAYOUT or SOURCE != PROGRAM:
        # The last bitmap found, and its slot: neighbouring tiles often have the same.
        last_key = tl.full([], 0, tl.int64)
        last_other = last_key
        last_slot = 0
        for n in range(GROUP):
            if (to_read >> n) & 1 != 0:
                tile_code, key, other = _read_tile(
                    source_ptr, start, stride_q, stride_k, q0, first_column + n, q_len, kv_len,
                    seen_ptr + block // row_blocks * seen_words, SOURCE, BLOCK_M, BLOCK_N, ROWS, LAYOUT,
                )  # fmt: skip
                tl.store(code_ptr + first_tile + n, tile_code.to(tl.int8))
                partial_tiles += (tile_code == PARTIAL).to(tl.int32)
                full_tiles += (tile_code == FULL).to(tl.int32)
                if LAYOUT:
                    if tile_code == PARTIAL:
                        tile = block * columns + first_column + n
                        tiles = blocks * columns
                        if (key != last_key) | (other != last_other):
                            last_slot = find_slot(state_ptr, code_ptr, done_ptr + 1, tile, key, other, tiles, slots)
                            last_key, last_other = key, other
                        tl.store(table_pointers(state_ptr, code_ptr, tiles, slots)[2] + tile, last_slot)
    if partial_tiles != 0:
        tl.atomic_add(count_ptr + block, partial_tiles, sem="relaxed")
    if full_tiles != 0:
        tl.atomic_add(count_ptr + blocks + block, full_tiles, sem="relaxed")
    # The barrier orders what all threads have written before the count, whose acquire-release takes as long as a tile.
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1) == tl.num_programs(0) - 1:
        _add_up(state_ptr, mailbox_ptr, kv_len, row_blocks, columns, patterns, seen_words, slots, SOURCE, LAYOUT)


@triton.jit
@no_type_check
def _any_and_all(some, lacks, other_some, other_lacks):
    return some | other_some, lacks | other_lacks


@triton.jit
@no_type_check
def _sums_and_all(a, b, lacks, other_a, other_b, other_lacks):
    return a + other_a, b + other_b, lacks | other_lacks


@triton.jit
@no_type_check
def _read_tile(
    source_ptr, start, stride_q, stride_k, q0, tile_column, q_len, kv_len, seen_ptr,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Code of a tile; for a layout both halves of its hash, else 0, and the tile's keys are added to the seen ones."""
    WORDS: tl.constexpr = (BLOCK_N + 31) // 32
    ALL: tl.constexpr = -1 if BLOCK_N >= 32 else (1 << BLOCK_N) - 1
    rows = tl.minimum(q_len - q0, BLOCK_M)
    lacks = tl.zeros([ROWS, WORDS], tl.int32)
    some = lacks
    a = tl.zeros([ROWS, WORDS], tl.int64)
    b = a
    for first in range(0, BLOCK_M, ROWS):
        words = bits_of(source_ptr, start, stride_q, stride_k, q0, first, tile_column * BLOCK_N, 0, q_len, kv_len,
                        SOURCE, BLOCK_M, BLOCK_N, ROWS)  # fmt: skip
        row = (first + tl.arange(0, ROWS))[:, None]
        lacks |= tl.where(row < rows, words ^ ALL, 0)
        if LAYOUT:
            rows_a, rows_b = hashed(words, row * WORDS + tl.arange(0, WORDS)[None, :])
            a += rows_a
            b += rows_b
        else:
            some |= words
    if LAYOUT:
        key, other, lacks = tl.reduce((tl.ravel(a), tl.ravel(b), tl.ravel(lacks)), 0, _sums_and_all)
        keeps_some = (key != 0) | (other != 0)
        key = tl.where(key == 0, 1, key)  # 0 is a free slot
    else:
        key = tl.full([], 0, tl.int64)
        other = key
        some, lacks = tl.reduce((some, lacks), 0, _any_and_all)  # [WORDS]
        word = tile_column * WORDS + tl.arange(0, WORDS)
        tl.atomic_or(seen_ptr + word, some, mask=some != 0, sem="relaxed")
        keeps_some = tl.sum((some != 0).to(tl.int32), 0) != 0
        lacks = tl.sum((lacks != 0).to(tl.int32), 0)
    is_full = (lacks == 0) & ((tile_column + 1) * BLOCK_N <= kv_len)
    return tl.where(is_full, FULL, tl.where(keeps_some, PARTIAL, EMPTY)), key, other


@triton.jit
@no_type_check
def _add_up(
    state_ptr, mailbox_ptr, kv_len, row_blocks, columns, patterns, seen_words, slots,
    SOURCE: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Where the tiles of each row block begin, and what the host waits for.

    These are, each plus 1: the number of tiles; the number of partial tiles, for a layout that of distinct bitmaps; and
    whether later keys are seen, for a layout how many bitmaps share a slot with another.
    """
    blocks = patterns * row_blocks
    count_ptr, unseen_ptr, done_ptr, seen_ptr, begin_ptr, code_ptr = state_pointers(
        state_ptr, blocks, patterns, columns, seen_words, slots
    )
    partial_tiles = 0
    tiles = 0
    for first in range(0, blocks, _SUMMED):
        block = first + tl.arange(0, _SUMMED)
        partial = tl.load(count_ptr + block, mask=block < blocks, other=0)
        both = partial + tl.load(count_ptr + blocks + block, mask=block < blocks, other=0)
        tl.store(begin_ptr + block, partial_tiles + tl.cumsum(partial, 0) - partial, mask=block < blocks)
        tl.store(begin_ptr + blocks + block, tiles + tl.cumsum(both, 0) - both, mask=block < blocks)
        partial_tiles += tl.sum(partial, 0)
        tiles += tl.sum(both, 0)
    if LAYOUT:
        bitmaps, refused = number_bitmaps(
            state_ptr, code_ptr, done_ptr + 1, mailbox_ptr + 3, row_blocks, columns, patterns, slots
        )
    else:
        bitmaps, refused = partial_tiles, 0
        for pattern in range(patterns):
            if SOURCE == PROGRAM:
                first_unseen = kv_len - tl.load(unseen_ptr + pattern)
                end_of_seen = tl.load(unseen_ptr + patterns + pattern)
            else:
                first_unseen = kv_len
                end_of_seen = 0
                for first in range(0, seen_words, _SUMMED):
                    word = first + tl.arange(0, _SUMMED)
                    seen = tl.load(seen_ptr + pattern * seen_words + word, mask=word < seen_words, other=0)
                    # The number of trailing ones, and of bits up to the last one.
                    ones = _low_ones(seen)
                    first_unseen = tl.minimum(first_unseen, tl.min(tl.where(ones < 32, word * 32 + ones, kv_len), 0))
                    last_seen = tl.where(seen != 0, word * 32 + _bit_length(seen), 0)
                    end_of_seen = tl.maximum(end_of_seen, tl.max(last_seen, 0))
                tl.store(unseen_ptr + pattern, kv_len - first_unseen)
            refused |= (end_of_seen > first_unseen).to(tl.int32)
    tl.store(mailbox_ptr, tiles + 1)
    tl.store(mailbox_ptr + 1, bitmaps + 1)
    tl.store(mailbox_ptr + 2, refused + 1)


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
