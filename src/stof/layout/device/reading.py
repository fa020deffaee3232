"""Triton code that reads the scores of a tile from what masks are given as: programs, or dense tensors."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.layout.device.programs import kept

# What a kernel reads: programs, int32; bytes of dense masks; or four of their bytes, four columns, as one int32.
PROGRAM = tl.constexpr(0)
BYTES = tl.constexpr(1)
QUADS = tl.constexpr(2)
# Numbers that kernels take as they come.
SIZES = [
    "stride_b", "stride_h", "stride_q", "stride_k", "mask_heads", "q_len", "kv_len", "row_blocks", "columns",
    "patterns", "slots",
]  # fmt: skip


@triton.jit
@no_type_check
def start_of(source_ptr, entries_ptr, pattern, stride_b, stride_h, mask_heads, patterns, SOURCE: tl.constexpr):
    """Where a pattern's mask begins: its program, or its dense mask in units of the strides."""
    start = tl.full([], 0, tl.int64)
    if SOURCE == PROGRAM:
        start += tl.load(source_ptr + pattern)
    elif patterns > 1:
        entry = tl.load(entries_ptr + pattern).to(tl.int64)
        start += entry // mask_heads * stride_b + entry % mask_heads * stride_h
    return start


@triton.jit
@no_type_check
def bits_of(
    source_ptr, start, stride_q, stride_k, q0, first, tile_column, q_len, kv_len,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Packed bits `[ROWS, words]` of a tile's rows from `first` on; 0 where there is no row or column."""
    WORD: tl.constexpr = 32 if BLOCK_N > 32 else BLOCK_N
    STEP: tl.constexpr = 4 if SOURCE == QUADS else 1
    row = first + tl.arange(0, ROWS)
    q = (q0 + row)[:, None]
    own_row = (q < q_len) & (row < BLOCK_M)[:, None]
    kv = (tile_column * BLOCK_N + tl.arange(0, BLOCK_N // STEP) * STEP)[None, :]
    if SOURCE == PROGRAM:
        # Programs look up tables by position.
        bits = kept(source_ptr, start, tl.minimum(q, q_len - 1), tl.minimum(kv, kv_len - 1))
        bits = tl.where(own_row & (kv < kv_len), bits, 0)
    elif SOURCE == BYTES:
        at = start + q.to(tl.int64) * stride_q + kv.to(tl.int64) * stride_k
        bits = (tl.load(source_ptr + at, mask=own_row & (kv < kv_len), other=0) != 0).to(tl.int32)
    else:
        # Strides are in units of four quads, and so is the length: loads of 16 bytes.
        quad = tl.arange(0, BLOCK_N // 4)[None, :]
        at = (start + q.to(tl.int64) * stride_q) * 4 + tile_column * (BLOCK_N // 4) + quad
        exists = own_row & (tile_column * (BLOCK_N // 16) + quad // 4 < kv_len // 16)
        quad = tl.load(source_ptr + at, mask=exists, other=0)
        # The lowest bit of each byte: whether any of its bits is set. Then these four bits side by side, at the top.
        quad |= quad >> 4
        quad |= quad >> 2
        quad |= quad >> 1
        bits = (((quad & 0x01010101) * 0x10204080) >> 28) & 15
    shifted = (
        tl.reshape(bits, (ROWS, BLOCK_N // WORD, WORD // STEP)) << (tl.arange(0, WORD // STEP) * STEP)[None, None, :]
    )
    return tl.sum(shifted, 2)  # distinct bits: the sum is their union
