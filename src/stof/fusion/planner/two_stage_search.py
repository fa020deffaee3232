"""The two-stage search for a scheme and its parameters.

Stage 1 measures each distinct segment in its first configurations; dynamic programming gives the best scheme of them.
Stage 2 samples configurations of that scheme's segments, those with the lowest bound on their time first.

After "Accelerating Sparse Transformer Inference on GPU" (arXiv 2506.06095), section on the search engine. The paper's
stage 1 is a local search over boundaries, which can stop in a local optimum, and its stage 2 draws in proportion to
gains, which is no better in the mean of six models (docs/paper.md); `benchmarks/fusion/search_baselines.py` has both.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set

from stof.fusion.graph.scheme import Scheme
from stof.fusion.planner.search_space import MeasurementCache, Space
from stof.fusion.records.store import SegmentCandidate

# Stage 2's scheme counts a segment's first configurations at this share of its time, since tuning may speed it up.
TUNED_FRACTION = 0.8


def two_stage(
    meter: MeasurementCache,
    first: Iterable[range] = (),
    *,
    per_segment: int = 4,
    seed: int = 0,
) -> Scheme:
    """Stage 1, then stage 2 on what it found; return the best scheme. `first`: segments to measure before others.

    After each stage the segments measured so far are put together in the best way, which costs no measurement:
    configurations found late may reverse a choice made early.
    """
    stage_one(meter, first)
    stage_two(meter, best_known_scheme(meter, tuned_fraction=TUNED_FRACTION), per_segment=per_segment, seed=seed)
    return best_known_scheme(meter)


def stage_one(meter: MeasurementCache, first: Iterable[range] = ()) -> None:
    """Measure Inductor's code and each template's first candidate of each distinct segment.

    Segments of `first` come first, then the longest.
    """
    space = meter.space
    early = {space.key(segment.start, segment.stop) for segment in first}
    covered = sorted(_covered(space), key=lambda at: (space.key(*at) not in early, at[0] - at[1]))
    meter.prepare((start, stop, meter.first_candidates(start, stop)) for start, stop in covered)
    for start, stop in covered:
        meter.gain(start, stop)


def _covered(space: Space) -> Iterator[tuple[int, int]]:
    """One segment of each key that a template covers."""
    seen: set[Hashable] = set()
    for stop in range(1, space.size + 1):
        for start in range(max(0, stop - space.longest), stop):
            if space.candidates(start, stop) and space.key(start, stop) not in seen:
                seen.add(space.key(start, stop))
                yield start, stop


def best_known_scheme(meter: MeasurementCache, tuned_fraction: float = 1.0) -> Scheme:
    """The scheme that saves most with the segments measured so far; nothing is measured.

    By dynamic programming, which takes savings as additive: the best scheme of the first n operators is a last segment
    after the best scheme of those before it.
    """
    space = meter.space
    saved, cut = [0.0], [0]
    for stop in range(1, space.size + 1):
        # Of equally good ones the shortest: nothing is fused without a gain.
        starts = range(max(0, stop - space.longest), stop)
        total, start = max((saved[start] + meter.known_gain(start, stop, tuned_fraction), start) for start in starts)
        saved.append(total)
        cut.append(start)
    edges, at = [], space.size
    while at > 0:
        at = cut[at]
        edges.append(at)
    return Scheme.of(space.size, edges)


class Draws:
    """Draws configurations of a scheme's distinct segments, without replacement, and measures them.

    `_drawn` gives the order, but the fastest configuration of one segment comes first in the others: GEMMs of a model
    are alike. `segments` are those with something left to draw, by key; those in `meter.searched` have nothing.
    """

    def __init__(self, meter: MeasurementCache, scheme: Scheme, seed: int) -> None:
        space, chance = meter.space, random.Random(seed)
        self.meter = meter
        self.segments: dict[Hashable, range] = {}
        for segment in scheme.segments:
            key = space.key(segment.start, segment.stop)
            if space.candidates(segment.start, segment.stop) and key not in meter.searched:
                self.segments.setdefault(key, segment)
        self._queues = {key: _drawn(space, s.start, s.stop, chance) for key, s in self.segments.items()}

    def measure(self, counts: Mapping[Hashable, int]) -> dict[Hashable, float]:
        """Draw and measure so many configurations of each segment; return the microseconds that each gained."""
        meter, segments = self.meter, dict(self.segments)
        before = {key: meter.gain(s.start, s.stop) for key, s in segments.items()}
        fast = _fastest(meter, segments.values())
        drawn = {
            key: _in_order(self._queues[key], meter.untried(s.start, s.stop), fast)[: counts[key]]
            for key, s in segments.items()
        }
        meter.prepare((s.start, s.stop, drawn[key]) for key, s in segments.items())
        for key, segment in segments.items():
            meter.measure(segment.start, segment.stop, drawn[key])
            if not meter.untried(segment.start, segment.stop):
                del self.segments[key]
        return {key: meter.gain(s.start, s.stop) - before[key] for key, s in segments.items()}


def stage_two(
    meter: MeasurementCache, scheme: Scheme, *, per_segment: int = 4, seed: int = 0, patience: int = 2
) -> None:
    """Sample configurations of the scheme's segments into the meter, `per_segment` of each distinct one in a round.

    Ends when nothing is left, when the budget is spent, or after `patience` rounds without a gain. If the budget lasts,
    the sampled segments join `meter.searched`, except those with a noisy time.
    """
    draws = Draws(meter, scheme, seed)
    sampled, idle = set(draws.segments), 0
    while draws.segments and idle < patience and not meter.exhausted:
        gained = draws.measure(dict.fromkeys(draws.segments, per_segment))
        idle = 0 if any(gained.values()) else idle + 1
    if not meter.exhausted:
        meter.searched |= sampled - {key for key, _ in meter.noisy}


def _drawn(space: Space, start: int, stop: int, chance: random.Random) -> list[SegmentCandidate]:
    """Candidates of a segment in the order of drawing: one of each kind, then a second of each, and so on.

    Kinds differ most. Of a kind, those with the lowest bound on their time come first; equal ones in random order.
    """
    candidates = space.candidates(start, stop)
    floors = {candidate: space.floor(start, stop, candidate) for candidate in candidates}
    drawn = sorted(chance.sample(candidates, len(candidates)), key=floors.__getitem__)
    of_kind: Counter[Hashable] = Counter()
    turns: dict[SegmentCandidate, int] = {}
    for candidate in drawn:
        turns[candidate] = of_kind[space.kind(candidate)]
        of_kind[space.kind(candidate)] += 1
    return sorted(drawn, key=turns.__getitem__)


def _in_order(
    queue: Sequence[SegmentCandidate], some: Sequence[SegmentCandidate], first: Set[str]
) -> list[SegmentCandidate]:
    """Some of a queue, those with the configurations of `first` before the others."""
    wanted = set(some)
    return sorted((one for one in queue if one in wanted), key=lambda one: one[1] not in first)


def _fastest(meter: MeasurementCache, segments: Iterable[range]) -> set[str]:
    """Each segment's fastest configuration so far, of whatever template."""
    configs = set()
    for segment in segments:
        tried = {c: us for c, us in meter.measured(segment.start, segment.stop).items() if c is not None}
        if tried:
            configs.add(min(tried, key=tried.__getitem__)[1])
    return configs
