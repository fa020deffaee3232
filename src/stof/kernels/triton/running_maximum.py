"""The running maximum of an online softmax, for the Triton kernels."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# The largest float32.
_HIGHEST = tl.constexpr(3.4028234663852886e38)
# The maximum of a row before its first score.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
@no_type_check
def bounded(m):
    """A maximum that began as `LOWEST`, finite also where a score is infinite.

    Scores of -inf then have a weight of 0, whatever they are compared with; one of +inf makes the row's sum infinite,
    and one of NaN makes it NaN. With an infinite maximum both would be NaN: inf - inf.
    """
    return tl.minimum(m, _HIGHEST)
