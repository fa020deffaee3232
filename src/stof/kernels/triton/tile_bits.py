"""Bits of a partial tile, for the block-wise kernels."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def kept_scores(words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which scores count, bool `[BLOCK_M, BLOCK_N]`, from bitmap words `[BLOCK_M, 4]` (`bitmap_order.py`).

    Bit 2 j + b of word q is column 8 j + 2 q + b: a thread of the tensor core's accumulator holds two neighbouring
    columns in each group of 8, so one word holds all its bits of a row.
    """
    j = tl.arange(0, BLOCK_N // 8)
    b = tl.arange(0, 2)
    shift = 2 * j[None, :, None, None] + b[None, None, None, :]
    keep = (words[:, None, :, None] >> shift) & 1
    return tl.reshape(keep, (BLOCK_M, BLOCK_N)) != 0
