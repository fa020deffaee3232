"""The two-stage search for a scheme and its parameters.

Stage 1 walks boundaries with the paper's rules (expand, seize, compete), each move measured and taken back if slower.
Stage 2 samples configurations of the segments that templates compute, first the same number each, then more where more
was gained. After "Accelerating Sparse Transformer Inference on GPU" (arXiv 2506.06095), section on the search engine.

What a scheme costs is what templates change: the sum over its segments of the best measured time of a template less the
time of Inductor's code for the same segment. Segments that no template covers change nothing, for Inductor compiles
them together whatever the scheme says.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stof.fusion.progress import Progress
from stof.fusion.scheme import Scheme

# A template and its configuration, e.g. ("linear", "128x128x64,8w,3s,tile"); None is Inductor's own code.
Candidate = tuple[str, str]
# Candidates of the segment from one place to another.
Wanted = tuple[int, int, Sequence[Candidate | None]]
# What tuning is hoped to leave of a default configuration's time: stage 1 keeps segments whose template loses by less.
HOPE = 0.8


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        intensive: for each operator whether it is compute-intensive.
        classes: for each operator a value that is equal for places that are decided together (alike layers).
        key: equal for segments `start, stop` that cost the same.
        candidates: the templates' configurations for a segment, defaults first; empty when no template covers it.
        measure: microseconds of a segment with each of some candidates, `math.inf` for one that does not run, nan for
            one whose time could not be told.
        longest: operators in the longest segment that any template covers.
        prepare: told which candidates of which segments will be measured soon, so that they can be compiled meanwhile.
        floor: microseconds that a candidate takes at the least; 0 where nothing is known.
        label: a segment in words.
    """

    intensive: Sequence[bool]
    classes: Sequence[Hashable]
    key: Callable[[int, int], Hashable]
    candidates: Callable[[int, int], Sequence[Candidate]]
    measure: Callable[[int, int, Sequence[Candidate | None]], Sequence[float]]
    longest: int
    prepare: Callable[[Sequence[Wanted]], object] = lambda wanted: None
    floor: Callable[[int, int, Candidate], float] = lambda start, stop, candidate: 0.0
    label: Callable[[int, int], str] = lambda start, stop: f"operators {start}..{stop - 1}"

    @property
    def size(self) -> int:
        return len(self.intensive)


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


class Meter:
    """Measures each (segment, candidate) once, counts, and stops when the budget is spent.

    `known` gives what was measured before for a key of the space, in another process perhaps; `searched` are the keys
    whose configurations stage 2 has sampled to its end, then or now. A candidate whose time cannot be told is not
    chosen, nor measured again by this meter; `unclear` has it, so that nobody takes it for one that does not run.
    """

    def __init__(
        self,
        space: Space,
        budget: Budget | None = None,
        progress: Callable[[Progress], object] | None = None,
        known: Callable[[Hashable], Mapping[Candidate | None, float]] = lambda key: {},
        searched: Iterable[Hashable] = (),
    ) -> None:
        self.space, self.budget, self.progress, self.known = space, budget or Budget(), progress, known
        self.searched = set(searched)
        self.times: dict[Hashable, dict[Candidate | None, float]] = {}
        self.unclear: set[tuple[Hashable, Candidate | None]] = set()
        self.measurements = 0

    @property
    def spent(self) -> bool:
        return self.measurements >= self.budget.measurements or self.budget.left <= 0

    def measured(self, start: int, stop: int) -> dict[Candidate | None, float]:
        """All times of a segment so far."""
        return self._times_of(self.space.key(start, stop))

    def measure(self, start: int, stop: int, candidates: Sequence[Candidate | None]) -> None:
        """Measure what has not been, together, as far as the budget goes."""
        before = self.measurements
        known = self.take(self.space.key(start, stop), candidates, lambda new: self.space.measure(start, stop, new))
        if self.measurements > before and self.progress is not None and None in known:
            best, best_us = self.best(start, stop)
            left, name = self.budget.left, self.space.label(start, stop)
            self.progress(Progress(start, stop, name, len(known) - 1, best, best_us, known[None], left))

    def untried(self, start: int, stop: int) -> list[Candidate]:
        """Candidates that have not been measured and could be the fastest, as far as their floors tell."""
        known = self.measured(start, stop)
        least = min(known.values(), default=math.inf)
        left = [c for c in self.space.candidates(start, stop) if c not in known]
        return [c for c in left if self.space.floor(start, stop, c) < least]

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Announce what will be measured soon, as far as it has not been."""
        new = [(start, stop, [c for c in some if c not in self.measured(start, stop)]) for start, stop, some in wanted]
        if not self.spent and any(some for _, _, some in new):
            self.space.prepare([one for one in new if one[2]])

    def take(
        self,
        key: Hashable,
        candidates: Sequence[Candidate | None],
        measure: Callable[[Sequence[Candidate | None]], Sequence[float]],
    ) -> dict[Candidate | None, float]:
        """All times of what a key stands for, after measuring those candidates that have none, as the budget allows."""
        known = self._times_of(key)
        new = [candidate for candidate in candidates if candidate not in known]
        room = self.budget.measurements - self.measurements
        new = new[: int(min(room, len(new)))]
        if new and not self.spent:
            for candidate, taken in zip(new, measure(new), strict=True):
                known[candidate] = math.inf if math.isnan(taken) else taken
                self.unclear |= {(key, candidate)} if math.isnan(taken) else set()
            self.measurements += len(new)
        return known

    def certain(self) -> dict[Hashable, dict[Candidate | None, float]]:
        """All times by key, without those that could not be told."""
        return {
            key: {candidate: taken for candidate, taken in times.items() if (key, candidate) not in self.unclear}
            for key, times in self.times.items()
        }

    def _times_of(self, key: Hashable) -> dict[Candidate | None, float]:
        if key not in self.times:
            self.times[key] = dict(self.known(key))
        return self.times[key]

    def best(self, start: int, stop: int) -> tuple[Candidate | None, float]:
        """The fastest candidate measured, None (Inductor) when that is as fast."""
        known = self.measured(start, stop)
        inductor = known.get(None, math.inf)
        fastest = min(known, key=lambda candidate: (known[candidate], candidate is not None), default=None)
        return (fastest, known[fastest]) if known and inductor < math.inf else (None, inductor)

    def gain(self, start: int, stop: int, hope: float = 1.0) -> float:
        """Microseconds that a template saves in a segment, 0 when none covers it or is faster.

        Measures the first template's default if nothing has been measured. `hope` is what tuning is hoped to leave of
        that time; it counts only as long as no other configuration was tried.
        """
        candidates = self.space.candidates(start, stop)
        if not candidates:
            return 0.0
        self.measure(start, stop, (None, candidates[0]))
        return self.known_gain(start, stop, hope)

    def known_gain(self, start: int, stop: int, hope: float = 1.0) -> float:
        """The same from what has been measured so far."""
        if not self.space.candidates(start, stop):
            return 0.0
        known = self.measured(start, stop)
        tried = [taken for candidate, taken in known.items() if candidate is not None]
        if known.get(None, math.inf) == math.inf or not tried:
            return 0.0
        best = min(tried) * (hope if len(tried) == 1 and len(self.space.candidates(start, stop)) > 1 else 1.0)
        return max(0.0, known[None] - best)

    def total(self, scheme: Scheme, hope: float = 1.0) -> float:
        """Microseconds that a scheme saves; -inf when it is no scheme."""
        if scheme.problems(self.space.intensive):
            return -math.inf
        return sum(self.gain(segment.start, segment.stop, hope) for segment in scheme.segments)

    def chosen(self, scheme: Scheme) -> dict[int, Candidate]:
        """The candidates that are faster than Inductor's code, by the first operator of their segments."""
        found = {segment.start: self.best(segment.start, segment.stop)[0] for segment in scheme.segments}
        return {start: best for start, best in found.items() if best is not None}


@dataclass(frozen=True)
class Outcome:
    """A search's result: the scheme, what computes its segments, microseconds saved, measurements taken."""

    scheme: Scheme
    chosen: dict[int, Candidate]
    saved_us: float
    measurements: int


def two_stage(space: Space, meter: Meter, initial: Scheme, *, per_segment: int = 4, seed: int = 0) -> Outcome:
    """Stage 1 from `initial`, then stage 2 on what it found.

    After each stage the segments measured so far are put together in the best way, which costs no measurement: moves of
    single boundaries cannot cross a valley, and configurations found late may reverse a choice made early.
    """
    meter.prepare((start, stop, space.candidates(start, stop)[:1]) for start, stop in _covered(space))
    stage_one(space, meter, initial, hope=HOPE)
    stage_two(space, meter, assemble(meter, hope=HOPE), per_segment=per_segment, seed=seed)
    return outcome(meter, assemble(meter))


def _covered(space: Space) -> Iterator[tuple[int, int]]:
    """One segment of each key that a template covers."""
    seen: set[Hashable] = set()
    for stop in range(1, space.size + 1):
        for start in range(max(0, stop - space.longest), stop):
            if space.candidates(start, stop) and space.key(start, stop) not in seen:
                seen.add(space.key(start, stop))
                yield start, stop


def assemble(meter: Meter, hope: float = 1.0) -> Scheme:
    """The scheme that saves most with the segments measured so far; nothing is measured.

    Savings add up, so the best scheme of the first n operators is some segment after a best scheme of the rest.
    """
    space = meter.space
    saved, cut = [0.0], [0]
    for stop in range(1, space.size + 1):
        # Of equally good ones the shortest: nothing is fused without a gain.
        starts = range(max(0, stop - space.longest), stop)
        total, start = max((saved[start] + meter.known_gain(start, stop, hope), start) for start in starts)
        saved.append(total)
        cut.append(start)
    edges, at = [], space.size
    while at > 0:
        at = cut[at]
        edges.append(at)
    return Scheme.of(space.size, edges)


def outcome(meter: Meter, scheme: Scheme) -> Outcome:
    """A scheme with the best of what has been measured so far."""
    saved = sum(meter.known_gain(segment.start, segment.stop) for segment in scheme.segments)
    return Outcome(scheme, meter.chosen(scheme), saved, meter.measurements)


def stage_one(space: Space, meter: Meter, initial: Scheme, *, hope: float = 1.0) -> Scheme:
    """Improve a scheme by moves of its boundaries until none helps or the budget is spent.

    A move concerns all alike places at once, so that equal layers stay equal. `hope` as in `Meter.gain`.
    """
    starts = {space.classes[start] for start in initial.starts}
    best = scheme_of(space, starts)
    saved = meter.total(best, hope)
    tried = {frozenset(starts)}
    improved = True
    while improved and not meter.spent:
        improved = False
        for rule in (_expand, _seize, _compete):
            for move in rule(space, best, starts):
                if frozenset(move) in tried:  # the same boundary of another layer, or a move taken back before
                    continue
                tried.add(frozenset(move))
                scheme = scheme_of(space, move)
                total = meter.total(scheme, hope)
                if total > saved:
                    best, saved, starts, improved = scheme, total, move, True
                    break  # moves of the old scheme are not moves of the new one
                if meter.spent:
                    return best
    return best


def scheme_of(space: Space, starts: set[Hashable]) -> Scheme:
    """The scheme with boundaries at all places of these classes."""
    return Scheme.of(space.size, (place for place in range(1, space.size) if space.classes[place] in starts))


def _expand(space: Space, scheme: Scheme, starts: set[Hashable]) -> Iterator[set[Hashable]]:
    """Merge two or three neighbouring segments."""
    for count in (1, 2):
        for i in range(len(scheme.starts) - count + 1):
            yield starts - {space.classes[place] for place in scheme.starts[i : i + count]}


def _shifts(
    space: Space, scheme: Scheme, starts: set[Hashable], allowed: Callable[[range, range], bool]
) -> Iterator[set[Hashable]]:
    """Give the operators at a boundary to the other segment; `allowed(taker, giver)` says between which."""
    for left, right in zip(scheme.segments, scheme.segments[1:], strict=False):
        for taker, giver, step in ((left, right, 1), (right, left, -1)):
            if not allowed(taker, giver):
                continue
            for count in range(1, len(giver) + 1):
                place = right.start + step * count
                moved = starts - {space.classes[right.start]}
                # The giver's last operator taken, the boundary is gone.
                yield moved | ({space.classes[place]} if left.start < place < right.stop else set())


def _heavy(space: Space, segment: range) -> int:
    return sum(space.intensive[i] for i in segment)


def _seize(space: Space, scheme: Scheme, starts: set[Hashable]) -> Iterator[set[Hashable]]:
    """A segment with a compute-intensive operator takes from one without."""
    return _shifts(space, scheme, starts, lambda taker, giver: _heavy(space, taker) > 0 and _heavy(space, giver) == 0)


def _compete(space: Space, scheme: Scheme, starts: set[Hashable]) -> Iterator[set[Hashable]]:
    """Two segments with compute-intensive operators contest those between; the one with a single such operator wins."""
    return _shifts(space, scheme, starts, lambda taker, giver: _heavy(space, taker) == 1 and _heavy(space, giver) >= 1)


def stage_two(
    space: Space, meter: Meter, scheme: Scheme, *, per_segment: int = 4, seed: int = 0, patience: int = 2
) -> None:
    """Sample configurations of the scheme's segments into the meter.

    A round draws `per_segment` times the number of segments, the first round evenly, later ones in proportion to what
    each segment gained in the round before (times how often it occurs). Ends when nothing is left, when the budget is
    spent, or after `patience` rounds without a gain. Segments in `meter.searched` are left as they are; those that were
    sampled to the end join them.
    """
    chance = random.Random(seed)
    groups: dict[Hashable, range] = {}
    often: dict[Hashable, int] = {}
    for segment in scheme.segments:
        key = space.key(segment.start, segment.stop)
        if space.candidates(segment.start, segment.stop) and key not in meter.searched:
            groups.setdefault(key, segment)
            often[key] = often.get(key, 0) + 1
    # Drawn without replacement: in which order is settled now, so that what comes next can be compiled early.
    queues = {key: _shuffled(space.candidates(s.start, s.stop), chance) for key, s in groups.items()}
    reward = dict.fromkeys(groups, 1.0)
    sampled, idle = set(groups), 0
    while groups and idle < patience and not meter.spent:
        before = {key: meter.gain(s.start, s.stop) for key, s in groups.items()}
        left = {key: _in_order(queues[key], meter.untried(s.start, s.stop)) for key, s in groups.items()}
        shares = _shares(reward, per_segment * len(groups))
        meter.prepare((s.start, s.stop, left[key][: shares[key]]) for key, s in groups.items())
        meter.prepare((s.start, s.stop, left[key][shares[key] :][:per_segment]) for key, s in groups.items())
        for key, count in shares.items():
            segment = groups[key]
            meter.measure(segment.start, segment.stop, left[key][:count])
            if not meter.untried(segment.start, segment.stop):
                del groups[key]
        reward = {k: often[k] * (meter.gain(s.start, s.stop) - before[k]) for k, s in groups.items()}
        gained = any(meter.gain(s.start, s.stop) > before[k] for k, s in groups.items())
        idle = 0 if gained else idle + 1
    if not meter.spent:
        meter.searched |= sampled - {key for key, _ in meter.unclear}


def _shuffled(candidates: Sequence[Candidate], chance: random.Random) -> list[Candidate]:
    return chance.sample(candidates, len(candidates))


def _in_order(queue: Sequence[Candidate], some: Sequence[Candidate]) -> list[Candidate]:
    wanted = set(some)
    return [candidate for candidate in queue if candidate in wanted]


def _shares(reward: dict[Hashable, float], total: int) -> dict[Hashable, int]:
    """`total` draws in proportion to rewards, evenly when there are none; each segment keeps one draw at least."""
    whole = sum(reward.values())
    even = {key: 1.0 / len(reward) for key in reward}
    share = {key: value / whole for key, value in reward.items()} if whole > 0 else even
    return {key: max(1, round(total * part)) for key, part in share.items()}
