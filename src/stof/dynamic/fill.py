"""What kernels share that write the block-wise kernel's work, for masks whose numbers only the device knows.

Every list has a fixed place; what the numbers do not fill stays unused. Nothing waits for the host, so all of it can be
captured in a CUDA graph. The `buffers.py` of each mask launches its kernels and says how large the lists are.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.block_wise_kernel import (
    BITMAP,
    FULL_BEGIN,
    FULL_END,
    ITEM_SIZE,
    PARTIAL_BEGIN,
    PARTIAL_END,
    ROW_BLOCK,
)
from stof.kernels.triton.packed_integers import nan_row_block

# Flips a word: Triton's interpreter knows no complement of unsigned numbers.
ALL_BITS = tl.constexpr(0xFFFFFFFF)


@triton.jit
@no_type_check
def bits_from(first):
    """64 bits as two words, those from number `first` on set; 0 <= first <= 64."""
    ones = tl.full(first.shape, ALL_BITS, tl.uint32)
    shifted = ones << (first & 31).to(tl.uint32)
    return tl.where(first < 32, shifted, 0), tl.where(first < 32, ones, tl.where(first < 64, shifted, 0))


@triton.jit
@no_type_check
def store_words(words_ptr, keep, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Bits of a tile `[BLOCK_M, BLOCK_N]` in accumulator order: bit `2 j + b` of word `q` is column `8 j + 2 q + b`."""
    c = tl.arange(0, BLOCK_N)
    shifted = keep.to(tl.int32) << (2 * (c // 8) + c % 2)[None, :]
    parts = tl.reshape(shifted, (BLOCK_M, BLOCK_N // 8, 4, 2))
    words = tl.sum(tl.sum(parts, 3), 1)  # distinct bits: the sum is their union
    r = tl.arange(0, BLOCK_M)
    tl.store(words_ptr + r[:, None] * 4 + tl.arange(0, 4)[None, :], words)


@triton.jit
@no_type_check
def store_columns(words_ptr, low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same from the rows that see each column, `[BLOCK_N]`: bit r of `low` and `high` (from row 32 on).

    A word of a tile of at most 64 columns has 16 bits, so one of 32 takes those of two rows at once. The bits that a
    thread needs lie with other threads: they pass through the place of the words themselves.
    """
    tl.static_assert(BLOCK_N <= 64)
    PER: tl.constexpr = BLOCK_N // 4
    HALVES: tl.constexpr = (BLOCK_M + 31) // 32
    c = tl.arange(0, BLOCK_N)
    at = c % 8 // 2 * PER + c // 8 * 2 + c % 2
    tl.store(words_ptr + at, low.to(tl.int32, bitcast=True))
    if HALVES > 1:
        tl.store(words_ptr + BLOCK_N + at, high.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    x = tl.arange(0, HALVES * 64)  # which half, row of 16, word of 4
    i = tl.arange(0, PER)
    columns = tl.load(words_ptr + (x // 64 * BLOCK_N + x % 4 * PER)[:, None] + i[None, :])
    pairs = ((columns >> (x % 64 // 4)[:, None]) & 0x10001) << i[None, :]
    words = tl.sum(pairs, 1)  # distinct bits: the sum is their union
    tl.debug_barrier()
    at = x // 64 * 128 + x % 64
    tl.store(words_ptr + at, words & 0xFFFF)
    if BLOCK_M > 16:
        tl.store(words_ptr + at + 64, (words >> 16) & 0xFFFF)


@triton.jit
@no_type_check
def store_item(
    items_ptr, first_columns_ptr, columns_ptr, bitmap_ptr, place, row_block,
    partial_begin, partial_end, full_begin, full_end, WIDTH: tl.constexpr,
):  # fmt: skip
    """A work item, and the WIDTH columns listed of its first tile; what it refers to must have been written before."""
    n = tl.arange(0, WIDTH)
    some = partial_begin < partial_end
    first = tl.where(some, partial_begin, full_begin)
    columns = tl.load(columns_ptr + first.to(tl.int64) * WIDTH + n)
    # An item without tiles reads its columns and bitmap, and uses neither.
    tl.store(first_columns_ptr + place.to(tl.int64) * WIDTH + n, columns)
    item_ptr = items_ptr + place * ITEM_SIZE
    tl.store(item_ptr + ROW_BLOCK, row_block)
    tl.store(item_ptr + PARTIAL_BEGIN, partial_begin)
    tl.store(item_ptr + PARTIAL_END, partial_end)
    tl.store(item_ptr + FULL_BEGIN, full_begin)
    tl.store(item_ptr + FULL_END, full_end)
    tl.store(item_ptr + BITMAP, tl.load(bitmap_ptr + partial_begin))


@triton.jit
@no_type_check
def store_nan_item(items_ptr, place, row_block):
    """An item whose rows become NaN: a wrong mask must not look like an answer."""
    field = tl.arange(0, ITEM_SIZE)
    # No tiles, and nothing of an earlier mask.
    tl.store(items_ptr + place * ITEM_SIZE + field, tl.where(field == ROW_BLOCK, nan_row_block(row_block), 0))
