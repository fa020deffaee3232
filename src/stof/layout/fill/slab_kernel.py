"""A Triton kernel that counts what tiles of many sizes would hold, for `stof.layout.survey`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.fill.program import program_bounds
from stof.layout.fill.tile_bits import PROGRAM, SIZES, bits_of, start_of

# Kinds of slabs: every power of two of columns up to the 256 of a thread block.
KINDS = tl.constexpr(9)
_NUMBERS = [*SIZES, "first_count", "first_row", "first_word", "height"]


@triton.jit(do_not_specialize=_NUMBERS)
@no_type_check
def count_slabs(
    source_ptr,  # as for `count_tiles`
    counts_ptr,  # int32, zeros: at `first_count` [P * R, KINDS, 2], slabs that are needed and slabs that are full
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    mask_heads,
    q_len,
    kv_len,
    row_blocks,
    columns,  # thread blocks along the keys
    patterns,
    first_number,
    first_count,
    first_row,  # place of kept scores of each row [P, q_len]; below 0 they are not counted
    first_word,  # place of bits of each column [2, P * R, 8 columns], some row keeps it and all do; below 0 not written
    height,  # rows of a row block: not a constant, so one compiled kernel counts for every height
    SOURCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Slabs of one row block and BLOCK_N keys that keep some scores, and that keep all; columns likewise."""
    pid = tl.program_id(0)
    block = pid // columns
    q0 = block % row_blocks * height
    kv0 = pid % columns * BLOCK_N
    pattern = block // row_blocks
    rows = tl.minimum(q_len - q0, height)
    numbers_ptr = counts_ptr + first_number
    start = start_of(counts_ptr + first_number, pattern, stride_b, stride_h, mask_heads, SOURCE)
    row_ptr = counts_ptr + first_row + pattern.to(tl.int64) * q_len + q0
    count_ptr = counts_ptr + first_count + block.to(tl.int64) * (KINDS * 2)
    if SOURCE == PROGRAM:
        source_ptr = numbers_ptr
        one = kv0 + tl.arange(0, 1)
        last_column = tl.minimum(one + BLOCK_N, kv_len) - 1
        nothing, everything = program_bounds(numbers_ptr, start, q0, q0 + rows - 1, one, last_column)
        if tl.max(nothing, 0) != 0:
            return
        if (tl.max(everything, 0) != 0) & (kv0 + BLOCK_N <= kv_len):
            for kind in tl.static_range(KINDS):
                tl.atomic_add(count_ptr + 2 * kind, BLOCK_N >> kind)
                tl.atomic_add(count_ptr + 2 * kind + 1, BLOCK_N >> kind)
            if first_word >= 0:
                both = tl.full([BLOCK_N // 32], -1, tl.int32)
                _store_bits(counts_ptr + first_word, both, both)
            if first_row >= 0:
                for first in range(0, rows, ROWS):
                    row = first + tl.arange(0, ROWS)
                    tl.atomic_add(row_ptr + row, tl.full([ROWS], BLOCK_N, tl.int32), mask=row < rows)
            return
    per_column = tl.zeros([BLOCK_N // 32, 32], tl.int32)
    for first in range(0, rows, ROWS):
        words = bits_of(source_ptr, start, stride_q, stride_k, q0, first, kv0, 0, q_len, kv_len,
                        SOURCE, height, BLOCK_N, ROWS)  # fmt: skip
        keep = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        per_column += tl.sum(keep, 0)
        if first_row >= 0:
            row = first + tl.arange(0, ROWS)
            tl.atomic_add(row_ptr + row, tl.sum(tl.sum(keep, 2), 1), mask=row < rows)
    if first_word >= 0:
        lane = tl.arange(0, 32)[None, :]
        some = tl.sum((per_column > 0).to(tl.int32) << lane, 1)
        _store_bits(counts_ptr + first_word, some, tl.sum((per_column == rows).to(tl.int32) << lane, 1))
    least = tl.reshape(per_column, (BLOCK_N,))
    most = least
    for kind in tl.static_range(KINDS):
        if kind > 0:
            # Neighbouring slabs, two by two.
            least = tl.min(tl.reshape(least, (BLOCK_N >> kind, 2)), 1)
            most = tl.max(tl.reshape(most, (BLOCK_N >> kind, 2)), 1)
        tl.atomic_add(count_ptr + 2 * kind, tl.sum((most > 0).to(tl.int32), 0))
        tl.atomic_add(count_ptr + 2 * kind + 1, tl.sum((least == rows).to(tl.int32), 0))


@triton.jit
@no_type_check
def _store_bits(words_ptr, some, every):
    """Write this thread block's words: bits of columns that some row keeps, then of those that every row keeps."""
    WORDS: tl.constexpr = some.shape[0]
    words_ptr += tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    tl.store(words_ptr, some)
    tl.store(words_ptr + tl.num_programs(0).to(tl.int64) * WORDS, every)
