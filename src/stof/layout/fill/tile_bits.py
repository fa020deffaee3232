"""Triton code that prepares what masks are given as, programs or dense tensors, and reads a tile's scores from it."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.fill import input_forms
from stof.layout.fill.program import draw_blocks, program_bits, run_of_bits

PROGRAM = tl.constexpr(input_forms.PROGRAM)
QUADS = tl.constexpr(input_forms.QUADS)
# Integer arguments that kernels are not specialised for.
SIZES = [
    "stride_b", "stride_h", "stride_q", "stride_k", "mask_heads", "q_len", "kv_len", "row_blocks", "columns",
    "patterns", "first_number",
]  # fmt: skip
# Numbers that one thread block of `prepare` sets to 0 or copies, and rows of blocks that it draws at once.
_AT_ONCE = tl.constexpr(1024)
_DRAWN = tl.constexpr(128)


@triton.jit(do_not_specialize=["first_given", "zeros", "first_number", "numbers", "draws"])
@no_type_check
def prepare(
    given_ptr,  # int32 on the host: from `first_given` on numbers of programs, then what is to be drawn for them
    state_ptr,  # int32: `zeros` to set to 0; room for the numbers from `first_number` on, and for what is drawn before
    first_given,
    zeros,
    first_number,
    numbers,
    draws,
):
    """What kernels find in memory when they start: zeros, programs' numbers, and the tables that are drawn."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    given_ptr += first_given
    number_ptr = state_ptr + first_number
    lane = tl.arange(0, _AT_ONCE)
    for start in range(pid * _AT_ONCE, zeros, programs * _AT_ONCE):
        tl.store(state_ptr + start + lane, 0, mask=start + lane < zeros)
    for start in range(pid * _AT_ONCE, numbers, programs * _AT_ONCE):
        inside = start + lane < numbers
        tl.store(number_ptr + start + lane, tl.load(given_ptr + start + lane, mask=inside), mask=inside)
    for draw in range(draws):
        draw_ptr = given_ptr + numbers + draw * 6
        table_ptr = number_ptr + tl.load(draw_ptr)
        first, rows = tl.load(draw_ptr + 1), tl.load(draw_ptr + 2)
        key_blocks, picks, seed = tl.load(draw_ptr + 3), tl.load(draw_ptr + 4), tl.load(draw_ptr + 5)
        for start in range(pid * _DRAWN, rows, programs * _DRAWN):
            row = start + tl.arange(0, _DRAWN)
            draw_blocks(table_ptr, row, first, rows, key_blocks, picks, seed)


@triton.jit
@no_type_check
def start_of(starts_ptr, pattern, stride_b, stride_h, mask_heads, SOURCE: tl.constexpr):
    """Where a pattern's mask begins: its program among the numbers, or its dense mask in units of the strides."""
    start = tl.load(starts_ptr + pattern).to(tl.int64)
    if SOURCE != PROGRAM:
        start = start // mask_heads * stride_b + start % mask_heads * stride_h
    return start


@triton.jit
@no_type_check
def bits_of(
    source_ptr, start, stride_q, stride_k, q0, first, kv0, least, q_len, kv_len,
    SOURCE: tl.constexpr, BLOCK_M, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, MOVED: tl.constexpr = False,
):  # fmt: skip
    """Packed bits `[ROWS, words]` of rows from `first` on, of BLOCK_N columns from `kv0` on.

    0 where there is no row or column, and for columns before `least`. `source_ptr` is a dense mask, or where numbers of
    programs begin. `kv0` is a multiple of BLOCK_N; with MOVED it may be any column, also one below 0, and a dense mask
    is read byte by byte.
    """
    WORD: tl.constexpr = 32 if BLOCK_N > 32 else BLOCK_N
    row = first + tl.arange(0, ROWS)
    q = (q0 + row)[:, None]
    row_exists = (q < q_len) & (row < BLOCK_M)[:, None]
    if SOURCE == PROGRAM:
        kv = (kv0 + tl.arange(0, BLOCK_N // WORD) * WORD)[None, :]
        # Programs look up tables by position: keys from 0 on are moved to their place.
        words = program_bits(source_ptr, start, tl.minimum(q, q_len - 1), tl.maximum(kv, 0) if MOVED else kv)
        if MOVED:
            moved = tl.maximum(-kv, 0)
            words = tl.where(moved < 32, words << tl.minimum(moved, 31), 0)
        words = tl.where(row_exists, words & run_of_bits(least - kv, tl.minimum(kv_len - kv, WORD) - 1), 0)
    else:
        STEP: tl.constexpr = 4 if SOURCE == QUADS else 1
        if SOURCE != QUADS:
            kv = (kv0 + tl.arange(0, BLOCK_N))[None, :]
            exists = row_exists & (kv >= least) & (kv < kv_len)
            at = start + q.to(tl.int64) * stride_q + kv.to(tl.int64) * stride_k
            bits = (tl.load(source_ptr + at, mask=exists, other=0) != 0).to(tl.int32)
        else:
            # Strides are in units of four quads, and so is the length: loads of 16 bytes.
            tl.static_assert(not MOVED)
            quad = tl.arange(0, BLOCK_N // 4)[None, :]
            at = (start + q.to(tl.int64) * stride_q) * 4 + kv0 // 4 + quad
            exists = row_exists & (kv0 // 16 + quad // 4 < kv_len // 16)
            quad = tl.load(source_ptr + at, mask=exists, other=0)
            # Reduce each byte to its lowest bit, then move the four bits side by side, to the top.
            quad |= quad >> 4
            quad |= quad >> 2
            quad |= quad >> 1
            bits = (((quad & 0x01010101) * 0x10204080) >> 28) & 15
        places = (tl.arange(0, WORD // STEP) * STEP)[None, None, :]
        # Distinct bits: the sum is their union.
        words = tl.sum(tl.reshape(bits, (ROWS, BLOCK_N // WORD, WORD // STEP)) << places, 2)
    return words
