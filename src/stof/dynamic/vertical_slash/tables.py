"""Triton kernel that turns slash distances into tables of bits and counts, and checks the lists of `vertical_slash`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.dynamic.fill import ALL_BITS

# Slash distances stand at this bit of their table, so that windows may begin before distance 0.
SLASH_BASE = tl.constexpr(64)
# Rows of a pattern's tables, `[7, words + 1]` int32: slash distances as bits; the places from which on all, and some
# but not all, of a row block's rows are at a slash distance; how many of either there are before each word; those from
# which on any row is, and all that are no earlier than the column.
DISTANCES, FULL, SOME, FULL_BEFORE, SOME_BEFORE, TOUCHED, COVERED = (tl.constexpr(row) for row in range(7))
TABLES = tl.constexpr(7)


@triton.jit
@no_type_check
def ones_of(word):
    """Number of bits that are set, of uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
@no_type_check
def _load_word(ptr, mask):
    # Past the L1 cache: the bits are set by atomic operations, which pass it as well.
    return tl.load(ptr, mask=mask, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)


@triton.jit
@no_type_check
def _runs(first, second, third, LENGTH: tl.constexpr):
    """Whether all, and whether any, of the LENGTH <= 64 bits from each of a word's on are set, as words of bits."""
    # Lengths are powers of two: the second half of 64 is the same of the next word.
    every = first.to(tl.uint64) | (second.to(tl.uint64) << 32)
    every_next = second.to(tl.uint64) | (third.to(tl.uint64) << 32)
    some, some_next = every, every_next
    for exponent in tl.static_range(5):
        if 2**exponent < LENGTH:
            every = every & (every >> 2**exponent)
            some = some | (some >> 2**exponent)
            every_next = every_next & (every_next >> 2**exponent)
            some_next = some_next | (some_next >> 2**exponent)
    if LENGTH > 32:
        every, some = every & every_next, some | some_next
    return every.to(tl.uint32), some.to(tl.uint32)


@triton.jit
@no_type_check
def _wrong(list_ptr, size, limit, OUT_OF_RANGE: tl.constexpr, NOT_ASCENDING: tl.constexpr, COPY: tl.constexpr):
    """What is wrong with a list of indices."""
    outside, unsorted = tl.zeros([COPY], tl.int32), tl.zeros([COPY], tl.int32)
    for start in range(0, size, COPY):
        x = start + tl.arange(0, COPY)
        here = tl.load(list_ptr + x, mask=x < size, other=-1)
        after = tl.load(list_ptr + x + 1, mask=x + 1 < size, other=-1)
        outside |= ((here < -1) | (here >= limit)).to(tl.int32)
        unsorted |= ((after != -1) & ((after <= here) | (here == -1))).to(tl.int32)
    return tl.max(outside, 0) * OUT_OF_RANGE + tl.max(unsorted, 0) * NOT_ASCENDING


@triton.jit
@no_type_check
def _keep(list_ptr, kept_ptr, size, limit, places, COPY: tl.constexpr):
    """Copy a list of indices, with -1 for those that mean nothing and in places past its end."""
    for start in range(0, places, COPY):
        x = start + tl.arange(0, COPY)
        here = tl.load(list_ptr + x, mask=x < size, other=-1)
        tl.store(kept_ptr + x, tl.where((here >= 0) & (here < limit), here, -1).to(tl.int32), mask=x < places)


@triton.jit
@no_type_check
def slash_tables(
    vertical_ptr,  # [B | 1, H | 1, verticals] int32 or int64
    slash_ptr,  # [B | 1, H | 1, distances]
    bad_ptr,  # [P] int32, what is wrong with the lists of each pattern
    flags_ptr,  # [P] int32, the same gathered over updates
    tables_ptr,  # [P, 7, words + 1] int32
    columns_ptr,  # [P, n_columns] int32, the vertical columns that mean something
    distances_ptr,  # [P, distances] int32, the same of slash distances
    vertical_stride_b,
    vertical_stride_h,
    slash_stride_b,
    slash_stride_h,
    mask_heads,
    verticals,
    distances,
    kv_len,
    reach,  # distances are below it
    words,
    n_columns,
    OUT_OF_RANGE: tl.constexpr,
    NOT_ASCENDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COPY: tl.constexpr,
):
    """Check the lists of one pattern, keep them, and make its tables of slash distances."""
    pattern = tl.program_id(0)
    b, h = pattern // mask_heads, pattern % mask_heads
    vertical_ptr += b * vertical_stride_b + h * vertical_stride_h
    slash_ptr += b * slash_stride_b + h * slash_stride_h
    tables_ptr += pattern * TABLES * (words + 1)
    for start in range(0, words, COPY):
        x = start + tl.arange(0, COPY)
        tl.store(tables_ptr + x, tl.zeros([COPY], tl.int32), mask=x < words)
    bad = _wrong(vertical_ptr, verticals, kv_len, OUT_OF_RANGE, NOT_ASCENDING, COPY)
    bad |= _wrong(slash_ptr, distances, reach, OUT_OF_RANGE, NOT_ASCENDING, COPY)
    _keep(vertical_ptr, columns_ptr + pattern * n_columns, verticals, kv_len, n_columns, COPY)
    _keep(slash_ptr, distances_ptr + pattern * distances, distances, reach, distances, COPY)
    tl.store(bad_ptr + pattern, bad)
    tl.store(flags_ptr + pattern, tl.load(flags_ptr + pattern) | bad)
    tl.debug_barrier()
    for start in range(0, distances, COPY):
        x = start + tl.arange(0, COPY)
        d = tl.load(slash_ptr + x, mask=x < distances, other=-1)
        ok = (d >= 0) & (d < reach)
        place = tl.where(ok, d, 0).to(tl.int32) + SLASH_BASE
        tl.atomic_or(tables_ptr + (place >> 5), 1 << (place & 31), mask=ok, sem="relaxed")
    tl.debug_barrier()
    n_full, n_some = 0, 0
    for start in range(0, words, COPY):
        w = start + tl.arange(0, COPY)
        ok = w < words
        first = _load_word(tables_ptr + w, ok)
        second = _load_word(tables_ptr + w + 1, w + 1 < words)
        third = _load_word(tables_ptr + w + 2, w + 2 < words)
        every, some = _runs(first, second, third, BLOCK_M)
        tl.store(tables_ptr + TOUCHED * (words + 1) + w, some.to(tl.int32, bitcast=True), mask=ok)
        # Before distance 0 there is nothing to be covered.
        first = tl.where(w < SLASH_BASE // 32, ALL_BITS, first)
        second = tl.where(w + 1 < SLASH_BASE // 32, ALL_BITS, second)
        covered, _ = _runs(first, second, third, BLOCK_M)
        tl.store(tables_ptr + COVERED * (words + 1) + w, covered.to(tl.int32, bitcast=True), mask=ok)
        some = some & (every ^ ALL_BITS)
        full_count, some_count = ones_of(every), ones_of(some)
        tl.store(tables_ptr + FULL * (words + 1) + w, every.to(tl.int32, bitcast=True), mask=ok)
        tl.store(tables_ptr + SOME * (words + 1) + w, some.to(tl.int32, bitcast=True), mask=ok)
        full_before, some_before = tl.cumsum(full_count, 0) - full_count, tl.cumsum(some_count, 0) - some_count
        tl.store(tables_ptr + FULL_BEFORE * (words + 1) + w, n_full + full_before, mask=ok)
        tl.store(tables_ptr + SOME_BEFORE * (words + 1) + w, n_some + some_before, mask=ok)
        n_full += tl.sum(full_count, 0)
        n_some += tl.sum(some_count, 0)
    tl.store(tables_ptr + FULL_BEFORE * (words + 1) + words, n_full)
    tl.store(tables_ptr + SOME_BEFORE * (words + 1) + words, n_some)
