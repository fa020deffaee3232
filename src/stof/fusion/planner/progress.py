"""What a search tells while it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stof.fusion.records.store import Candidate


@dataclass(frozen=True)
class Progress:
    """A measurement, for whoever shows progress: the segment, candidates tried, the best so far, seconds left."""

    start: int
    stop: int
    segment: str
    tried: int
    best: Candidate | None
    best_us: float
    inductor_us: float
    seconds_left: float

    def __str__(self) -> str:
        return (
            f"{self.segment}: {self.tried} tried, best {self.by} {_us(self.best_us)}, "
            f"Inductor {_us(self.inductor_us)}, {self.seconds_left:.0f} s left"
        )

    @property
    def by(self) -> str:
        """What is best, in words."""
        return "Inductor" if self.best is None else " ".join(self.best).strip()


def _us(time: float) -> str:
    return f"{time:.1f} us" if time < math.inf else "no clear time"
