"""The softcap of scores, for the Triton kernels."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def softcapped(x, bound):
    """`bound * tanh(x)` without overflow; near 0 a series, where `1 - exp` would lose the leading digits."""
    size = tl.abs(x)
    decay = tl.exp2(size * -2.8853900817779268)  # exp(-2 |x|)
    far = (1.0 - decay) / (1.0 + decay)
    near = tl.minimum(size, 0.25)
    square = near * near
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return bound * tl.where(size < 0.25, x * series, tl.where(x < 0, -far, far))
