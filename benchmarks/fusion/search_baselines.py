"""The searches that the two stages are compared with: everything, the paper's moves and draws, and random draws."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from stof.fusion.graph.scheme import MAX_COMPUTE_INTENSIVE, Scheme
from stof.fusion.planner.search_space import MeasurementCache
from stof.fusion.planner.two_stage_search import TUNED_FRACTION, Draws, best_known_scheme
from stof.fusion.records.store import SegmentCandidate


@dataclass(frozen=True)
class SearchResult:
    """A search's result: the scheme, what computes its segments, microseconds saved, measurements taken."""

    scheme: Scheme
    chosen: dict[int, SegmentCandidate]
    saved_us: float
    measurements: int


def search_result(meter: MeasurementCache, scheme: Scheme | None = None) -> SearchResult:
    """A scheme (None: the best one) with the best of what has been measured so far."""
    segments = (best_known_scheme(meter) if scheme is None else scheme).segments
    saved = sum(meter.known_gain(segment.start, segment.stop) for segment in segments)
    fastest = {segment.start: meter.best(segment.start, segment.stop)[0] for segment in segments}
    chosen = {start: best for start, best in fastest.items() if best is not None}
    return SearchResult(Scheme.of(meter.space.size, fastest), chosen, saved, meter.measurements)


@dataclass(frozen=True)
class OperatorClasses:
    """Which operators of a graph are compute-intensive, and which places repeat across layers.

    Attributes:
        intensive: for each operator whether it is compute-intensive.
        classes: for each operator a value that is equal for places that are decided together (alike layers).
    """

    intensive: Sequence[bool]
    classes: Sequence[Hashable]

    def scheme_of(self, boundary_classes: Set[Hashable]) -> Scheme:
        """The scheme with boundaries at all places of these classes."""
        return Scheme.of(len(self.classes), (at for at, one in enumerate(self.classes) if one in boundary_classes))

    def allows(self, scheme: Scheme) -> bool:
        """Whether no segment has more than `MAX_COMPUTE_INTENSIVE` compute-intensive operators."""
        before = (0, *accumulate(self.intensive))
        return all(before[s.stop] - before[s.start] <= MAX_COMPUTE_INTENSIVE for s in scheme.segments)

    def count_intensive(self, segment: range) -> int:
        return sum(self.intensive[i] for i in segment)


def random_search(operators: OperatorClasses, meter: MeasurementCache, *, schemes: int, seed: int = 0) -> SearchResult:
    """Random schemes, and a random candidate for each of their segments; the best of all is kept."""
    space = meter.space
    chance = random.Random(seed)
    classes = sorted(set(operators.classes), key=repr)
    best, saved = Scheme(space.size, tuple(range(1, space.size))), 0.0
    for _ in range(schemes):
        if meter.exhausted:
            break
        scheme = operators.scheme_of({c for c in classes if chance.random() < 0.5})
        if not operators.allows(scheme):
            continue
        for segment in scheme.segments:
            candidates = space.candidates(segment.start, segment.stop)
            if candidates:
                meter.measure(segment.start, segment.stop, (None, chance.choice(candidates)))
        total = sum(meter.known_gain(segment.start, segment.stop) for segment in scheme.segments)
        if total > saved:
            best, saved = scheme, total
    return search_result(meter, best)


def exhaustive(meter: MeasurementCache) -> SearchResult:
    """Every candidate of every segment that a template covers, put together in the best way."""
    space = meter.space
    for stop in range(1, space.size + 1):
        for start in range(max(0, stop - space.longest), stop):
            candidates = space.candidates(start, stop)
            if candidates:
                meter.measure(start, stop, (None, *candidates))
    return search_result(meter)


def paper_stage_two(
    meter: MeasurementCache, scheme: Scheme, *, per_segment: int = 4, seed: int = 0, patience: int = 2
) -> None:
    """Stage 2 as in the paper: as `stage_two`, but the draws follow rewards.

    The first round draws `per_segment` configurations of each segment. Later ones draw as many in all, in proportion to
    what each segment gained in the round before, times how often it occurs; each keeps one draw at least.
    """
    draws = Draws(meter, scheme, seed)
    often = Counter(meter.space.key(segment.start, segment.stop) for segment in scheme.segments)
    rewards, idle = dict.fromkeys(draws.segments, 1.0), 0
    while draws.segments and idle < patience and not meter.exhausted:
        total = sum(rewards[key] for key in draws.segments)
        parts = {key: rewards[key] / total if total > 0 else 1 / len(draws.segments) for key in draws.segments}
        draw = per_segment * len(parts)
        gained = draws.measure({key: max(1, round(draw * part)) for key, part in parts.items()})
        rewards = {key: often[key] * us for key, us in gained.items()}
        idle = 0 if any(gained.values()) else idle + 1


def paper_stage_one(
    operators: OperatorClasses,
    meter: MeasurementCache,
    initial: Scheme,
    tuned_fraction: float = TUNED_FRACTION,
) -> Scheme:
    """Stage 1 as in the paper: improve a scheme by moves of its boundaries until none helps or the budget is spent.

    A segment expands, seizes operators of a neighbour without a GEMM, or takes some from a neighbour with one
    (compete). A move applies to the same place of every layer, and is kept only if it is faster. See
    `MeasurementCache.known_gain` for `tuned_fraction`.
    """
    boundaries = {operators.classes[first] for first in initial.starts}
    # A segment is measured once, so its gain does not change. Of hundreds of segments, a move changes a few.
    gains: dict[range, float] = {}

    def total_of(scheme: Scheme) -> float:
        if not operators.allows(scheme):
            return -math.inf
        for segment in scheme.segments:
            if segment not in gains:
                meter.gain(segment.start, segment.stop)
                gains[segment] = meter.known_gain(segment.start, segment.stop, tuned_fraction)
        return sum(map(gains.__getitem__, scheme.segments))

    best = operators.scheme_of(boundaries)
    saved = total_of(best)
    tried = {frozenset(boundaries)}
    improved = True
    while improved and not meter.exhausted:
        improved = False
        for rule in (_expand, _seize, _compete):
            for move in rule(operators, best, boundaries):
                if frozenset(move) in tried:  # the same boundary of another layer, or a move taken back before
                    continue
                tried.add(frozenset(move))
                scheme = operators.scheme_of(move)
                total = total_of(scheme)
                if total > saved:
                    best, saved, boundaries, improved = scheme, total, move, True
                    break  # moves of the old scheme are not moves of the new one
                if meter.exhausted:
                    return best
    return best


def _expand(operators: OperatorClasses, scheme: Scheme, boundaries: set[Hashable]) -> Iterator[set[Hashable]]:
    """Merge two or three neighbouring segments."""
    for count in (1, 2):
        for i in range(len(scheme.starts) - count + 1):
            yield boundaries - {operators.classes[first] for first in scheme.starts[i : i + count]}


def _shifts(
    operators: OperatorClasses, scheme: Scheme, boundaries: set[Hashable], allowed: Callable[[range, range], bool]
) -> Iterator[set[Hashable]]:
    """Give the operators at a boundary to the other segment; `allowed(taker, giver)` says between which."""
    for left, right in zip(scheme.segments, scheme.segments[1:], strict=False):
        for taker, giver, step in ((left, right, 1), (right, left, -1)):
            if not allowed(taker, giver):
                continue
            for count in range(1, len(giver) + 1):
                place = right.start + step * count
                moved = boundaries - {operators.classes[right.start]}
                # The giver's last operator taken, the boundary is gone.
                yield moved | ({operators.classes[place]} if left.start < place < right.stop else set())


def _seize(operators: OperatorClasses, scheme: Scheme, boundaries: set[Hashable]) -> Iterator[set[Hashable]]:
    """A segment with a compute-intensive operator takes operators from a neighbour without."""
    return _shifts(
        operators,
        scheme,
        boundaries,
        lambda taker, giver: operators.count_intensive(taker) > 0 and operators.count_intensive(giver) == 0,
    )


def _compete(operators: OperatorClasses, scheme: Scheme, boundaries: set[Hashable]) -> Iterator[set[Hashable]]:
    """A segment with exactly one compute-intensive operator takes operators from a neighbour that also has some."""
    return _shifts(
        operators,
        scheme,
        boundaries,
        lambda taker, giver: operators.count_intensive(taker) == 1 and operators.count_intensive(giver) >= 1,
    )
