"""Fusion schemes as the paper writes them: one bit an operator, equal neighbours form a segment, a flip is a boundary.

Section "Compilation-based operator fusion" of "Accelerating Sparse Transformer Inference on GPU" (arXiv 2506.06095).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stof.errors import ArgumentError
from stof.fusion.graph.operators import Operator

# More than two compute-intensive operators in a kernel leave no shared memory for either (the paper's constraint).
MAX_COMPUTE_INTENSIVE = 2


@dataclass(frozen=True)
class Scheme:
    """How a sequence of operators is cut into segments.

    `starts` are the first operators of the segments after the first, ascending; `size` the number of operators.

    Raises:
        ArgumentError: starts out of order or range.
    """

    size: int
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.starts), (*self.starts, max(self.size, 1)), strict=True))
        if self.size < 0 or not ascending:
            raise ArgumentError(f"segments of {self.size} operators cannot start at {list(self.starts)}")

    @classmethod
    def from_bits(cls, bits: str) -> Scheme:
        """The scheme written as `bits`, e.g. "0110"; a scheme and its complement are the same.

        Raises:
            ArgumentError: characters other than 0 and 1.
        """
        if set(bits) - {"0", "1"}:
            raise ArgumentError(f"a scheme is written in 0 and 1, one bit an operator; got {bits!r}")
        return cls(len(bits), tuple(i for i in range(1, len(bits)) if bits[i] != bits[i - 1]))

    @classmethod
    def of(cls, size: int, starts: Iterable[int]) -> Scheme:
        """A scheme from starts in any order; 0 and repetitions are ignored."""
        return cls(size, tuple(sorted({start for start in starts if start})))

    @property
    def bits(self) -> str:
        """One bit an operator, the first 0."""
        bit, out = 0, []
        for i in range(self.size):
            bit ^= i in self.starts
            out.append(str(bit))
        return "".join(out)

    @property
    def segments(self) -> tuple[range, ...]:
        """The operators of each segment, by their places in the sequence."""
        edges = (0, *self.starts, self.size)
        return tuple(range(a, b) for a, b in pairwise(edges) if b > a)

    def digest(self, operators: Sequence[Operator]) -> str:
        """16 hex digits that are equal, in any process, for equal schemes of equal operator sequences."""
        text = repr((self.bits, [operator.signature() for operator in operators]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.bits
