"""When a kernel is worth compiling: it takes seconds, and later masks may want another one again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
# Ratio of the estimates of a choice whose kernel is compiled, and of the best, up to which the former is taken.
_ALLOWED_SLOWDOWN = 1.1


def compiled_or_best(times: Mapping[T, float], is_compiled: Callable[[T], bool]) -> T:
    """The choice with the least time, or the fastest one whose kernel is compiled if that is about as fast.

    Args:
        times: estimated microseconds, at least one.
        is_compiled: whether the kernel of a choice is compiled.
    """
    best = min(times, key=times.__getitem__)
    known = min(filter(is_compiled, times), key=times.__getitem__, default=None)
    return best if known is None or times[known] > _ALLOWED_SLOWDOWN * times[best] else known
