"""Dropout in Triton kernels: which weights of a tile stay; the definition is `stof.kernels.dropout`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def load_seed(seed_ptr, HAS_DROPOUT: tl.constexpr):
    """Both values of a seed, int64; zeros without dropout."""
    seed, offset = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if HAS_DROPOUT:
        seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    return seed, offset


@triton.jit
@no_type_check
def kept_weights(
    seed,  # int64, as offset
    offset,
    threshold,  # of 2**32
    head,  # b * H + h, broadcast as the two others
    query,
    key,
):
    """Which weights of a tile stay.

    Indices keep their dimensions of size 1: the first two rounds are computed for rows and columns alone.
    """
    head = tl.zeros([], tl.int32) + head  # a tensor, where the caller's is a constant
    word, _, _, _ = tl.philox(seed, query.to(tl.uint32), key.to(tl.uint32), head.to(tl.uint32), offset.to(tl.uint32))
    return word >= (tl.zeros([], tl.int64) + threshold).to(tl.uint32)
