"""What is timed: one implementation of a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stof.testing.attention_check import AttentionProblem

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Peer:
    """One implementation under test.

    Attributes:
        name: the `impl` of its JSON rows.
        summary: one line for `python -m benchmarks peers` and tables.
        missing: why it cannot run this problem here, or None.
        prepare: everything done once per mask and shape (timed as `build_us`); returns the call to time, whose
            result is `[B, H, Sq, D]` (any strides).
    """

    name: str
    summary: str
    missing: Callable[[AttentionProblem], str | None]
    prepare: Callable[[AttentionProblem], Call]


def always(problem: AttentionProblem) -> str | None:
    """`missing` of a peer that runs every problem."""
    del problem
    return None
