"""Layers that repeat: where a sequence of operators is periodic, so that alike places are decided once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repetition:
    """Places `start .. start + length - 1` repeat with `period`; period 0 when nothing repeats."""

    start: int = 0
    length: int = 0
    period: int = 0

    def place_class(self, place: int) -> tuple[str, int]:
        """Equal for places that are alike: the same place of different layers, or one place outside the layers."""
        if self.period and self.start <= place < self.start + self.length:
            return "layer", (place - self.start) % self.period
        return "own", place

    @property
    def count(self) -> int:
        """Whole layers."""
        return self.length // self.period if self.period else 0


def find_layers(signatures: Sequence[Hashable]) -> Repetition:
    """The longest stretch that repeats at least twice; of equally long ones that with the shortest period."""
    ids: dict[Hashable, int] = {}
    numbers = [ids.setdefault(signature, len(ids)) for signature in signatures]
    best = Repetition()
    for period in range(1, len(numbers) // 2 + 1):
        run = 0
        for i in range(len(numbers) - period):
            run = run + 1 if numbers[i] == numbers[i + period] else 0
            if run >= period and run + period > best.length:
                best = Repetition(i - run + 1, run + period, period)
    return best
