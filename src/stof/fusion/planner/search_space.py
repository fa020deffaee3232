"""The space of candidates that a search for a scheme explores, its budget, and a cache of measurements.

A scheme saves the sum, over its segments, of the time of Inductor's code less the best measured time of a template, or
nothing where that is negative. Segments that no template covers save nothing, for Inductor compiles them together
whatever the scheme says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stof.fusion.records.store import SegmentCandidate

# Start and stop of a segment, and candidates; None is Inductor's code.
Wanted = tuple[int, int, Sequence[SegmentCandidate | None]]


@dataclass(frozen=True)
class Progress:
    """What a search tells after a measurement: the segment, candidates tried, the best so far, seconds left."""

    start: int
    stop: int
    segment: str
    tried: int
    best: SegmentCandidate | None
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


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        size: number of operators.
        key: equal for segments `start, stop` that cost the same.
        candidates: the templates' configurations for a segment, each template's recorded best or default first; empty
            when no template covers it.
        measure: microseconds of a segment with each of some candidates, `math.inf` for one that does not run, nan for
            one whose time could not be told.
        longest: upper bound on the operators of a covered segment.
        prepare: told which candidates of which segments will be measured next, so that they can be compiled together.
        floor: microseconds that a candidate takes at the least; 0 where nothing is known.
        label: a segment in words.
        kind: kernel kind of a candidate; stage 2 alternates between kinds.
    """

    size: int
    key: Callable[[int, int], Hashable]
    candidates: Callable[[int, int], Sequence[SegmentCandidate]]
    measure: Callable[[int, int, Sequence[SegmentCandidate | None]], Sequence[float]]
    longest: int
    prepare: Callable[[Sequence[Wanted]], object] = lambda wanted: None
    floor: Callable[[int, int, SegmentCandidate], float] = lambda start, stop, candidate: 0.0
    label: Callable[[int, int], str] = lambda start, stop: f"operators {start}..{stop - 1}"
    kind: Callable[[SegmentCandidate], Hashable] = lambda candidate: candidate[0]


@dataclass
class Budget:
    """What a search may spend; the clock is injected."""

    seconds: float = math.inf
    measurements: float = math.inf
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (self.clock() - self.start)


class MeasurementCache:
    """Measure each (segment, candidate) at most once, and count measurements until the budget is exhausted.

    `known` returns earlier measurements of a key, such as another process's. `searched` holds the keys for
    which stage 2 has finished, in this process or before. `noisy` holds candidates whose time was
    disturbed by other work: this search neither chooses nor measures them again, and they are not stored.
    """

    def __init__(
        self,
        space: Space,
        budget: Budget | None = None,
        progress: Callable[[Progress], object] | None = None,
        known: Callable[[Hashable], Mapping[SegmentCandidate | None, float]] = lambda key: {},
        searched: Iterable[Hashable] = (),
    ) -> None:
        self.space, self.budget, self.progress, self.known = space, budget or Budget(), progress, known
        self.searched = set(searched)
        self.times: dict[Hashable, dict[SegmentCandidate | None, float]] = {}
        self.noisy: set[tuple[Hashable, SegmentCandidate | None]] = set()
        self.measurements = 0

    @property
    def exhausted(self) -> bool:
        return self.measurements >= self.budget.measurements or self.budget.left <= 0

    def measured(self, start: int, stop: int) -> dict[SegmentCandidate | None, float]:
        """Return all times of a segment so far."""
        return self._times_of(self.space.key(start, stop))

    def measure(self, start: int, stop: int, candidates: Sequence[SegmentCandidate | None]) -> None:
        """Measure the candidates that have no time yet, together, as far as the budget allows."""
        before = self.measurements
        known = self.measure_missing(
            self.space.key(start, stop), candidates, lambda new: self.space.measure(start, stop, new)
        )
        if self.measurements > before and self.progress is not None and None in known:
            best, best_us = self.best(start, stop)
            left, name = self.budget.left, self.space.label(start, stop)
            self.progress(Progress(start, stop, name, len(known) - 1, best, best_us, known[None], left))

    def untried(self, start: int, stop: int) -> list[SegmentCandidate]:
        """Return candidates without a time whose lower bound is below the best time so far."""
        known = self.measured(start, stop)
        least = min(known.values(), default=math.inf)
        left = [c for c in self.space.candidates(start, stop) if c not in known]
        return [c for c in left if self.space.floor(start, stop, c) < least]

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Announce candidates without a time that will be measured next, so that they can be compiled together."""
        new = [(start, stop, [c for c in some if c not in self.measured(start, stop)]) for start, stop, some in wanted]
        if not self.exhausted and any(some for _, _, some in new):
            self.space.prepare([one for one in new if one[2]])

    def measure_missing(
        self,
        key: Hashable,
        candidates: Sequence[SegmentCandidate | None],
        measure: Callable[[Sequence[SegmentCandidate | None]], Sequence[float]],
    ) -> dict[SegmentCandidate | None, float]:
        """Measure the candidates of a key that have no time, as the budget allows; return all times of the key."""
        known = self._times_of(key)
        new = [candidate for candidate in candidates if candidate not in known]
        room = self.budget.measurements - self.measurements
        new = new[: int(min(room, len(new)))]
        if new and not self.exhausted:
            for candidate, taken in zip(new, measure(new), strict=True):
                known[candidate] = math.inf if math.isnan(taken) else taken
                self.noisy |= {(key, candidate)} if math.isnan(taken) else set()
            self.measurements += len(new)
        return known

    def certain(self) -> dict[Hashable, dict[SegmentCandidate | None, float]]:
        """Return all times by key, without noisy ones."""
        return {
            key: {candidate: taken for candidate, taken in times.items() if (key, candidate) not in self.noisy}
            for key, times in self.times.items()
        }

    def _times_of(self, key: Hashable) -> dict[SegmentCandidate | None, float]:
        if key not in self.times:
            self.times[key] = dict(self.known(key))
        return self.times[key]

    def best(self, start: int, stop: int) -> tuple[SegmentCandidate | None, float]:
        """The fastest candidate measured, None (Inductor) when that is as fast."""
        known = self.measured(start, stop)
        inductor = known.get(None, math.inf)
        fastest = min(known, key=lambda candidate: (known[candidate], candidate is not None), default=None)
        return (fastest, known[fastest]) if known and inductor < math.inf else (None, inductor)

    def gain(self, start: int, stop: int) -> float:
        """Microseconds that a template saves in a segment, 0 when none covers it or is faster.

        Measure Inductor's code and each template's first candidate if they have no time.
        """
        first = self.first_candidates(start, stop)
        if not first:
            return 0.0
        self.measure(start, stop, (None, *first))
        return self.known_gain(start, stop)

    def first_candidates(self, start: int, stop: int) -> list[SegmentCandidate]:
        """Return the first candidate of each template of a segment."""
        of_template: dict[str, SegmentCandidate] = {}
        for candidate in self.space.candidates(start, stop):
            of_template.setdefault(candidate[0], candidate)
        return list(of_template.values())

    def known_gain(self, start: int, stop: int, tuned_fraction: float = 1.0) -> float:
        """Return `gain` from the times so far, without measuring.

        While no candidate but the first ones was tried, the best of these counts times `tuned_fraction`: what tuning is
        expected to bring it down to.
        """
        candidates = self.space.candidates(start, stop)
        if not candidates:
            return 0.0
        known = self.measured(start, stop)
        tried = [taken for candidate, taken in known.items() if candidate is not None]
        if known.get(None, math.inf) == math.inf or not tried:
            return 0.0
        untuned = len(tried) <= len(self.first_candidates(start, stop)) < len(candidates)
        return max(0.0, known[None] - min(tried) * (tuned_fraction if untuned else 1.0))
