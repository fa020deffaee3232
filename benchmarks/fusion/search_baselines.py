"""The searches that the two stages are compared with: random draws, and everything."""

from __future__ import annotations

import random

from stof.fusion.graph.scheme import Scheme
from stof.fusion.planner.search_space import MeasurementCache, Space
from stof.fusion.planner.two_stage_search import SearchResult, best_known_scheme, scheme_of, search_result


def random_search(space: Space, meter: MeasurementCache, *, schemes: int, seed: int = 0) -> SearchResult:
    """Random schemes, and a random candidate for each of their segments; the best of all is kept."""
    chance = random.Random(seed)
    classes = sorted(set(space.classes), key=repr)
    best, saved = Scheme(space.size, tuple(range(1, space.size))), 0.0
    for _ in range(schemes):
        if meter.exhausted:
            break
        scheme = scheme_of(space, {c for c in classes if chance.random() < 0.5})
        if scheme.problems(space.intensive):
            continue
        for segment in scheme.segments:
            candidates = space.candidates(segment.start, segment.stop)
            if candidates:
                meter.measure(segment.start, segment.stop, (None, chance.choice(candidates)))
        total = sum(meter.known_gain(segment.start, segment.stop) for segment in scheme.segments)
        if total > saved:
            best, saved = scheme, total
    return search_result(meter, best)


def exhaustive(space: Space, meter: MeasurementCache) -> SearchResult:
    """Every candidate of every segment that a template covers, put together in the best way."""
    for stop in range(1, space.size + 1):
        for start in range(max(0, stop - space.longest), stop):
            candidates = space.candidates(start, stop)
            if candidates:
                meter.measure(start, stop, (None, *candidates))
    return search_result(meter, best_known_scheme(meter))
