"""Triton kernels that count the tiles of a mask on the device; those of `write_kernels.py` then write their lists.

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

from stof.layout.fill.program import program_bits, program_bounds
from stof.layout.fill.tile_bits import PROGRAM, SIZES, bits_of, start_of

# Codes of tiles.
EMPTY, PARTIAL, FULL = (tl.constexpr(code) for code in range(3))
# Row blocks, tiles of a row block, keys and words of keys that are handled together.
KEYS = 1024
CHUNK = tl.constexpr(KEYS)
# Queries that are tested for each key before all queries are, see `find_unseen_keys`.
_WITNESSES = tl.constexpr(3)


@triton.jit
@no_type_check
def state_pointers(state_ptr, blocks, patterns, columns, seen_words):
    """Where everything lies in the state, int32.

    Zero-initialised: partial and full tiles of row blocks; by pattern, keys from the first unseen one on, and up to the
    last seen one; thread blocks that are done; words of seen keys, of a bool tensor. Uninitialised: where the
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
    key_groups = (kv_len + CHUNK - 1) // CHUNK
    pattern = tl.program_id(0) // key_groups
    first_key = tl.program_id(0) % key_groups * CHUNK
    lane = tl.arange(0, CHUNK)
    key = first_key + lane
    start = tl.load(state_ptr + first_start + pattern).to(tl.int64)
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
    unseen_ptr, done_ptr, seen_ptr, _, code_ptr = state_pointers(state_ptr, blocks, patterns, columns, seen_words)
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
        # Bounds may be too wide, but no tile behind the seen keys keeps anything.
        seen = kv_len - tl.load(unseen_ptr + block // row_blocks)
        partial = exists & (nothing == 0) & ~full & (kv0 < seen)
        code = tl.where(full, FULL, tl.where(partial, PARTIAL, EMPTY))
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
    unseen_ptr, _, seen_ptr, begin_ptr, _ = state_pointers(state_ptr, blocks, patterns, columns, seen_words)
    partial_tiles = 0
    tiles = 0
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
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
            for first in range(0, seen_words, CHUNK):
                word = first + tl.arange(0, CHUNK)
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
