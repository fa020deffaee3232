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
    seed,  # first value of the seed, int64
    offset,  # second value, int64; the low 32 bits are used
    threshold,  # dropout_p * 2**32, less than 2**32: a weight stays if its random word is at least that
    head,  # b * H + h; broadcasts with query and key
    query,
    key,
):
    """A bool tensor, True where a weight stays.

    Pass `query` and `key` as `[M, 1]` and `[1, N]` in either order, not broadcast to `[M, N]`: the multiplications of
    the first two Philox rounds then take M or N elements instead of M * N.
    """
    head = tl.zeros([], tl.int32) + head  # a tensor: the argument may be a Python constant
    word, _, _, _ = tl.philox(seed, query.to(tl.uint32), key.to(tl.uint32), head.to(tl.uint32), offset.to(tl.uint32))
    return word >= (tl.zeros([], tl.int64) + threshold).to(tl.uint32)
