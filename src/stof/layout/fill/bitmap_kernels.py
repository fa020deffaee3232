"""Triton kernels that build a layout: one classifies tiles and numbers their bitmaps, the other writes both.

Tiles are numbered `row block * tile columns + tile column`, row blocks through all patterns. Bitmaps are told apart by
128 bits of hash: 64 find a slot in a table, the sum of the other 64 tells whether they are those of the slot's first
tile. What is known of tiles lies in `state`, the numbers of programs after it.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.fill.program import program_bounds
from stof.layout.fill.tile_bits import PROGRAM, SIZES, bits_of, start_of

# Codes of tiles: empty ones, full ones, and from 1 on the slots of partial ones.
_EMPTY = tl.constexpr(0)
_FULL = tl.constexpr(-1)
# Columns of a row block, and row blocks, looked at together.
_CHUNK = tl.constexpr(512)
# Bitmaps that are numbered by comparing them with each other, and how many of them at once with all.
_FEW = tl.constexpr(128)
_COMPARED_AT_ONCE = tl.constexpr(32)


@triton.jit
@no_type_check
def _mixed(x):
    """Every bit of a number depends on all of it: xor-shifts and odd factors, one to one."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
@no_type_check
def _mixed_64(x):
    """The same for uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
@no_type_check
def _hashed(words, at):
    """Two 64-bit numbers of each word and its place, to be summed; 0 of words that are 0, as rows past the end are."""
    x = words.to(tl.uint32, bitcast=True)
    place = (at.to(tl.uint32) + 1) * 0x9E3779B1
    a = _mixed(x ^ place)
    b = _mixed(x + place * 5)
    c = _mixed(a + 0x5BD1E995)
    d = _mixed(b ^ 0x3C6EF372)
    key = a.to(tl.int64) + (b.to(tl.int64) << 32)
    other = c.to(tl.int64) + (d.to(tl.int64) << 32)
    return tl.where(words != 0, key, 0), tl.where(words != 0, other, 0)


@triton.jit
@no_type_check
def _state_pointers(state_ptr, blocks, tiles, slots):
    """Where everything lies in `state`:

    - zero at first: int64, keys of slots and sums of the second hashes of their tiles; int32, first tiles of slots and
      how many tiles were summed, partial and full tiles of row blocks, thread blocks that are done, slots taken;
    - anything at first: int64, second hashes of tiles; int32, codes of tiles, numbers of slots, owners of bitmaps, and
      slots as they were taken.
    """
    wide: tl.constexpr = tl.pointer_type(tl.int64)
    first_ptr = state_ptr + 4 * slots
    partial_ptr = first_ptr + 2 * slots
    done_ptr = partial_ptr + 2 * blocks
    hash_ptr = done_ptr + 2
    code_ptr = hash_ptr + 2 * tiles
    number_ptr = code_ptr + tiles
    owner_ptr = number_ptr + slots
    return state_ptr.to(wide), first_ptr, partial_ptr, done_ptr, hash_ptr.to(wide), code_ptr, number_ptr, owner_ptr


@triton.jit(do_not_specialize=[*SIZES, "slots"])
@no_type_check
def classify_tiles(
    source_ptr,  # see SOURCE
    state_ptr,
    mailbox_ptr,  # [3 + 4 P] int32 on the host, see `_numbered`
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    q_len,
    kv_len,
    row_blocks,  # of one pattern
    columns,
    patterns,
    first_number,
    first_start,
    slots,
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Whether a few tiles of a row block are empty, full or partial, and for partial ones the slot of their bitmap.

    Tiles of a mask's program are ruled out first, several at once. The thread block that ends last numbers the bitmaps.
    """
    groups = (columns + GROUP - 1) // GROUP
    block = tl.program_id(0) // groups
    first_column = tl.program_id(0) % groups * GROUP
    blocks = patterns * row_blocks
    tiles = blocks * columns
    _, _, partial_ptr, done_ptr, _, code_ptr, _, _ = _state_pointers(state_ptr, blocks, tiles, slots)
    q0 = block % row_blocks * BLOCK_M
    numbers_ptr = state_ptr + first_number
    start = start_of(state_ptr + first_start, block // row_blocks, stride_b, stride_h, mask_heads, SOURCE)
    if SOURCE == PROGRAM:
        source_ptr = numbers_ptr
        column = first_column + tl.arange(0, GROUP)
        # Columns past the end are clamped to the last one; their results are discarded.
        kv0 = tl.minimum(column, columns - 1) * BLOCK_N
        last_row = tl.minimum(q0 + BLOCK_M, q_len) - 1
        last_column = tl.minimum(kv0 + BLOCK_N, kv_len) - 1
        nothing, everything = program_bounds(numbers_ptr, start, q0, last_row, kv0, last_column)
        certain = (everything != 0) & (kv0 + BLOCK_N <= kv_len)
        tl.store(code_ptr + block * columns + column, tl.where(certain, _FULL, _EMPTY), mask=column < columns)
        full = tl.sum((certain & (column < columns)).to(tl.int32), 0)
        looked_at = (nothing == 0) & ~certain & (column < columns)
        todo = tl.sum(looked_at.to(tl.int32) << tl.arange(0, GROUP), 0)
        # Tiles that are read store their codes over these.
        tl.debug_barrier()
    else:
        full = 0
        todo = (1 << tl.minimum(columns - first_column, GROUP)) - 1
    partial = 0
    # The last bitmap found, and its slot: neighbouring tiles often have the same.
    last_key = tl.full([], 0, tl.int64)
    last_other = last_key
    last_slot = 0
    for n in range(GROUP):
        if (todo >> n) & 1 != 0:
            tile = block * columns + first_column + n
            key, other, full_here = _read_tile(
                source_ptr, start, stride_q, stride_k, q0, first_column + n, q_len, kv_len,
                SOURCE, BLOCK_M, BLOCK_N, ROWS,
            )  # fmt: skip
            full += full_here
            code = -full_here
            if (full_here == 0) & ((key != 0) | (other != 0)):
                partial += 1
                key = tl.where(key == 0, 1, key)  # 0 is a free slot
                if (key != last_key) | (other != last_other):
                    last_slot = _slot_of(state_ptr, tile, key, other, blocks, tiles, slots)
                    last_key, last_other = key, other
                code = last_slot + 1
            tl.store(code_ptr + tile, code)
    if partial != 0:
        tl.atomic_add(partial_ptr + block, partial, sem="relaxed")
    if full != 0:
        tl.atomic_add(partial_ptr + blocks + block, full, sem="relaxed")
    # The barrier orders stores of all threads before the atomic count, whose acquire-release takes as long as a tile.
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1) == tl.num_programs(0) - 1:
        _numbered(state_ptr, mailbox_ptr, row_blocks, columns, patterns, slots, CHUNK)


@triton.jit
@no_type_check
def _merged(a, b, lacks, other_a, other_b, other_lacks):
    return a + other_a, b + other_b, lacks | other_lacks


@triton.jit
@no_type_check
def _read_tile(
    source_ptr, start, stride_q, stride_k, q0, tile_column, q_len, kv_len,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Both halves of a tile's hash, and 1 if it is full, else 0."""
    WORDS: tl.constexpr = (BLOCK_N + 31) // 32
    ALL: tl.constexpr = -1 if BLOCK_N >= 32 else (1 << BLOCK_N) - 1
    rows = tl.minimum(q_len - q0, BLOCK_M)
    a = tl.zeros([ROWS, WORDS], tl.int64)
    b = tl.zeros([ROWS, WORDS], tl.int64)
    lacks = tl.zeros([ROWS, WORDS], tl.int32)
    for first in range(0, BLOCK_M, ROWS):
        words = bits_of(source_ptr, start, stride_q, stride_k, q0, first, tile_column, q_len, kv_len,
                        SOURCE, BLOCK_M, BLOCK_N, ROWS)  # fmt: skip
        row = (first + tl.arange(0, ROWS))[:, None]
        rows_a, rows_b = _hashed(words, row * WORDS + tl.arange(0, WORDS)[None, :])
        a += rows_a
        b += rows_b
        lacks |= tl.where(row < rows, words ^ ALL, 0)
    a, b, lacks = tl.ravel(a), tl.ravel(b), tl.ravel(lacks)
    key, other, lacks = tl.reduce((a, b, lacks), 0, _merged)
    return key, other, ((lacks == 0) & ((tile_column + 1) * BLOCK_N <= kv_len)).to(tl.int32)


@triton.jit
@no_type_check
def _slot_of(state_ptr, tile, key, other, blocks, tiles, slots):
    """Find or take the slot of a bitmap, and leave there what numbering it takes."""
    keys_ptr, first_ptr, _, done_ptr, hash_ptr, _, _, owner_ptr = _state_pointers(state_ptr, blocks, tiles, slots)
    slot = (key & (slots - 1)).to(tl.int32)
    stored_key = tl.atomic_cas(keys_ptr + slot, key * 0, key, sem="relaxed")
    while (stored_key != 0) & (stored_key != key):
        slot = (slot + 1) & (slots - 1)
        stored_key = tl.atomic_cas(keys_ptr + slot, key * 0, key, sem="relaxed")
    if stored_key == 0:
        tl.store(owner_ptr + tiles + tl.atomic_add(done_ptr + 1, 1, sem="relaxed"), slot)
    tl.atomic_max(first_ptr + slot, tiles - tile, sem="relaxed")
    # Sums tell whether all of a slot's tiles have the same second hash.
    tl.atomic_add(keys_ptr + slots + slot, other, sem="relaxed")
    tl.atomic_add(first_ptr + slots + slot, 1, sem="relaxed")
    tl.store(hash_ptr + tile, other)
    return slot


@triton.jit
@no_type_check
def _identity(state_ptr, blocks, tiles, slots, first, count, CHUNK: tl.constexpr):
    """128 bits that tell the tiles of a pattern, `count` from `first` on, from those of another."""
    keys_ptr, first_ptr, _, _, hash_ptr, code_ptr, _, _ = _state_pointers(state_ptr, blocks, tiles, slots)
    a = tl.zeros([CHUNK], tl.uint64)
    b = tl.zeros([CHUNK], tl.uint64)
    for start in range(0, count, CHUNK):
        n = start + tl.arange(0, CHUNK)
        code = tl.load(code_ptr + first + n, mask=n < count, other=_EMPTY)
        partial = code > 0
        slot = tl.maximum(code - 1, 0)
        leader = tiles - tl.load(first_ptr + slot, mask=partial, other=0)
        key = tl.load(keys_ptr + slot, mask=partial, other=-1).to(tl.uint64, bitcast=True)
        second_hash = tl.load(hash_ptr + leader, mask=partial, other=-1).to(tl.uint64, bitcast=True)
        place = (n + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        a += tl.where(code == _EMPTY, 0, _mixed_64(key ^ place))
        b += tl.where(code == _EMPTY, 0, _mixed_64(second_hash + place))
    return tl.sum(a.to(tl.int64, bitcast=True), 0), tl.sum(b.to(tl.int64, bitcast=True), 0)


@triton.jit
@no_type_check
def _hash_collisions(keys_ptr, first_ptr, hash_ptr, slots, slot, leader, there):
    """How many slots have tiles with another second hash than their first tile's."""
    sums = tl.load(keys_ptr + slots + slot, mask=there, other=0)
    summed = tl.load(first_ptr + slots + slot, mask=there, other=0)
    return tl.sum((sums != summed * tl.load(hash_ptr + leader, mask=there, other=0)).to(tl.int32), 0)


@triton.jit
@no_type_check
def _rank_pairwise(state_ptr, distinct, blocks, tiles, slots):
    """Number a few bitmaps, each compared with all; how many clash."""
    keys_ptr, first_ptr, _, _, hash_ptr, _, number_ptr, owner_ptr = _state_pointers(state_ptr, blocks, tiles, slots)
    taken_ptr = owner_ptr + tiles
    n = tl.arange(0, _FEW)
    slot = tl.load(taken_ptr + n, mask=n < distinct, other=0)
    leader = tiles - tl.load(first_ptr + slot, mask=n < distinct, other=0)
    number = n * 0
    for start in range(0, distinct, _COMPARED_AT_ONCE):
        m = start + tl.arange(0, _COMPARED_AT_ONCE)
        other = tl.load(taken_ptr + m, mask=m < distinct, other=0)
        other = tiles - tl.load(first_ptr + other, mask=m < distinct, other=0)
        number += tl.sum((other[None, :] < leader[:, None]).to(tl.int32), 1)
    tl.store(number_ptr + slot, number, mask=n < distinct)
    tl.store(owner_ptr + number, leader, mask=n < distinct)
    return _hash_collisions(keys_ptr, first_ptr, hash_ptr, slots, slot, leader, n < distinct)


@triton.jit
@no_type_check
def _rank_by_scan(state_ptr, blocks, tiles, slots, CHUNK: tl.constexpr):
    """Number bitmaps by going through all tiles; how many clash."""
    keys_ptr, first_ptr, _, _, hash_ptr, code_ptr, number_ptr, owner_ptr = _state_pointers(
        state_ptr, blocks, tiles, slots
    )
    count = 0
    clash = 0
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        code = tl.load(code_ptr + tile, mask=tile < tiles, other=_EMPTY)
        if tl.max(code, 0) > 0:
            slot = tl.maximum(code - 1, 0)
            leads = (code > 0) & (tile == tiles - tl.load(first_ptr + slot, mask=code > 0, other=0))
            number = count + tl.cumsum(leads.to(tl.int32), 0) - 1
            tl.store(number_ptr + slot, number, mask=leads)
            tl.store(owner_ptr + number, tile, mask=leads)
            count += tl.sum(leads.to(tl.int32), 0)
            clash += _hash_collisions(keys_ptr, first_ptr, hash_ptr, slots, slot, tile, leads)
    return clash


@triton.jit
@no_type_check
def _numbered(state_ptr, mailbox_ptr, row_blocks, columns, patterns, slots, CHUNK: tl.constexpr):
    """Number bitmaps in the order of their first tiles, in the thread block that ends last.

    Writes how many tiles and bitmaps there are, and how many bitmaps share only half of their slot's hash, each plus 1:
    the host waits until none is 0. Where there are several patterns, an identity of each as well, before these.
    """
    blocks = patterns * row_blocks
    tiles = blocks * columns
    _, _, partial_ptr, done_ptr, _, _, _, _ = _state_pointers(state_ptr, blocks, tiles, slots)
    distinct = tl.load(done_ptr + 1)
    if distinct <= _FEW:
        clash = _rank_pairwise(state_ptr, distinct, blocks, tiles, slots)
    else:
        clash = _rank_by_scan(state_ptr, blocks, tiles, slots, CHUNK)
    total = 0
    for start in range(0, 2 * blocks, CHUNK):  # partial tiles of every row block, then full ones
        at = start + tl.arange(0, CHUNK)
        total += tl.sum(tl.load(partial_ptr + at, mask=at < 2 * blocks, other=0), 0)
    if patterns > 1:
        for pattern in range(patterns):
            each = row_blocks * columns
            a, b = _identity(state_ptr, blocks, tiles, slots, pattern * each, each, CHUNK)
            identity_ptr = mailbox_ptr + 3 + 4 * pattern
            tl.store(identity_ptr, a.to(tl.int32))
            tl.store(identity_ptr + 1, (a >> 32).to(tl.int32))
            tl.store(identity_ptr + 2, b.to(tl.int32))
            tl.store(identity_ptr + 3, (b >> 32).to(tl.int32))
    tl.store(mailbox_ptr, total + 1)
    tl.store(mailbox_ptr + 1, distinct + 1)
    tl.store(mailbox_ptr + 2, clash + 1)


@triton.jit
@no_type_check
def _write_row_block(
    partial_ptr, code_ptr, number_ptr, pointers_ptr, partial_count_ptr, base_ptr, tile_bitmap_ptr,
    row_block, columns, row_blocks, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row block's tiles, partial ones first, and its place among all."""
    full_ptr = partial_ptr + row_blocks
    partial_tiles = tl.load(partial_ptr + row_block)
    full_tiles = tl.load(full_ptr + row_block)
    begin = 0
    for start in range(0, row_blocks, _CHUNK):
        other = start + tl.arange(0, _CHUNK)
        partial = tl.load(partial_ptr + other, mask=other < row_blocks, other=0)
        full = tl.load(full_ptr + other, mask=other < row_blocks, other=0)
        begin += tl.sum(tl.where(other < row_block, partial + full, 0), 0)
    tl.store(pointers_ptr + row_block, begin)
    if row_block == row_blocks - 1:
        tl.store(pointers_ptr + row_blocks, begin + partial_tiles + full_tiles)
    tl.store(partial_count_ptr + row_block, partial_tiles)
    partial_at = begin
    full_at = begin + partial_tiles
    for start in range(0, columns, _CHUNK):
        column = start + tl.arange(0, _CHUNK)
        code = tl.load(code_ptr + row_block * columns + column, mask=column < columns, other=_EMPTY)
        partial = (code > 0).to(tl.int32)
        full = (code == _FULL).to(tl.int32)
        at = tl.where(partial != 0, partial_at + tl.cumsum(partial, 0), full_at + tl.cumsum(full, 0)) - 1
        number = tl.load(number_ptr + tl.maximum(code - 1, 0), mask=partial != 0, other=-1)
        tl.store(base_ptr + at, column * BLOCK_N, mask=code != _EMPTY)
        tl.store(tile_bitmap_ptr + at, number, mask=code != _EMPTY)
        partial_at += tl.sum(partial, 0)
        full_at += tl.sum(full, 0)


@triton.jit(do_not_specialize=[*SIZES, "slots", "entries"])
@no_type_check
def write_layout(
    source_ptr,  # as for `classify_tiles`
    state_ptr,
    pattern_of_ptr,  # [B, H] int32, written where there is one pattern
    pointers_ptr,  # [P * R + 1] int32
    partial_count_ptr,  # [P * R] int32
    base_ptr,  # [T] int32
    tile_bitmap_ptr,  # [T] int32
    bitmaps_ptr,  # [U, BLOCK_M, words] int32
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
    slots,
    entries,  # B * H
    SOURCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write one row block's tiles, or one bitmap; thread blocks that write tiles come first."""
    pid = tl.program_id(0)
    blocks = patterns * row_blocks
    tiles = blocks * columns
    _, _, partial_ptr, _, _, code_ptr, number_ptr, owner_ptr = _state_pointers(state_ptr, blocks, tiles, slots)
    if pid < blocks:
        _write_row_block(
            partial_ptr, code_ptr, number_ptr, pointers_ptr, partial_count_ptr, base_ptr, tile_bitmap_ptr,
            pid, columns, blocks, BLOCK_N,
        )  # fmt: skip
        if (pid == 0) & (patterns == 1):
            for first in range(0, entries, _CHUNK):
                entry = first + tl.arange(0, _CHUNK)
                tl.store(pattern_of_ptr + entry, 0, mask=entry < entries)
        return
    WORDS: tl.constexpr = (BLOCK_N + 31) // 32
    number = pid - blocks
    tile = tl.load(owner_ptr + number)
    block = tile // columns
    numbers_ptr = state_ptr + first_number
    start = start_of(state_ptr + first_start, block // row_blocks, stride_b, stride_h, mask_heads, SOURCE)
    if SOURCE == PROGRAM:
        source_ptr = numbers_ptr
    q0 = block % row_blocks * BLOCK_M
    for first in range(0, BLOCK_M, ROWS):
        words = bits_of(source_ptr, start, stride_q, stride_k, q0, first, tile % columns, q_len, kv_len,
                        SOURCE, BLOCK_M, BLOCK_N, ROWS)  # fmt: skip
        row = first + tl.arange(0, ROWS)
        at = number.to(tl.int64) * (BLOCK_M * WORDS) + row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        tl.store(bitmaps_ptr + at, words, mask=(row < BLOCK_M)[:, None])
