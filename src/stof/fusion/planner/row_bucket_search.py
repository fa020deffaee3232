"""Configurations for calls with more or fewer rows than the one that is being compiled.

A graph whose batch or length stays open is compiled once. Which segments templates compute is decided at the sizes of
the first call; how they run is decided for each bucket of rows, by measuring at the bucket's largest size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stof.fusion.planner.graph_space import GraphSpace
from stof.fusion.planner.match import FusionChoice, TemplateMatch
from stof.fusion.planner.search_space import MeasurementCache
from stof.fusion.records.store import SegmentCandidate, segment_key
from stof.fusion.templates.row_buckets import SMALLEST, bucket_of, format_table

# Buckets beyond the first call's that are looked at: calls with up to 8 times its rows.
_LARGER = 3


def buckets_around(rows: int) -> list[int]:
    """Buckets other than that of `rows`, nearest first: down to the smallest, and some larger ones."""
    first = bucket_of(rows)
    all_of_them = [SMALLEST << i for i in range((first // SMALLEST).bit_length() + _LARGER)]
    return sorted((bucket for bucket in all_of_them if bucket != first), key=lambda b: abs(math.log2(b / first)))


def by_buckets(
    graph: GraphSpace, meter: MeasurementCache, chosen: Mapping[int, FusionChoice], per_segment: int
) -> dict[int, FusionChoice]:
    """Choices whose configuration depends on the bucket of the rows, where the graph leaves their number open.

    In each bucket the default, the choice for the first call and `per_segment` drawn ones are measured. Buckets that
    the budget does not reach get the default for their size, or where there is none (float32) what the nearest one has.
    """
    tables: dict[int, dict[int, str]] = {}
    for start, choice in chosen.items():
        if choice.match.has_dynamic_rows:
            tables[start] = {bucket_of(choice.match.problem.shape.m): choice.config}
    reached = {bucket for start in tables for bucket in buckets_around(chosen[start].match.problem.shape.m)}
    middle = max((bucket for table in tables.values() for bucket in table), default=SMALLEST)
    for bucket in sorted(reached, key=lambda b: abs(math.log2(b / middle))):
        for start, table in tables.items():
            match = chosen[start].match.in_bucket(bucket)
            if match is not None and bucket not in table:
                best = _fastest(graph, meter, match, chosen[start].config, per_segment)
                table |= {} if best is None else {bucket: best}
    return {
        start: replace(choice, config=format_table(tables[start])) if start in tables else choice
        for start, choice in chosen.items()
    }


def _fastest(
    graph: GraphSpace, meter: MeasurementCache, match: TemplateMatch, usual: str, per_segment: int
) -> str | None:
    """The fastest configuration of a match at its sizes; None when nothing has been measured."""
    key = graph.match_key(match)
    listed = match.template.configs(match.problem, graph.policy)
    # Equal draws in every process: what was measured in one is found by the next.
    chance = random.Random(segment_key(key))
    first = [config for config in dict.fromkeys((*listed[:1], usual)) if config in listed]
    others = [config for config in listed if config not in first]
    draws = [*first, *chance.sample(others, min(per_segment, len(others)))]
    name = match.template.name

    def measure(new: Sequence[SegmentCandidate | None]) -> Sequence[float]:
        assert graph.time_match is not None
        return graph.time_match(match, [candidate[1] for candidate in new if candidate is not None])

    known = meter.measure_missing(key, [(name, config) for config in draws], measure)
    times = {candidate[1]: known[candidate] for candidate in known if candidate is not None and candidate[0] == name}
    best = min(times, key=lambda config: times[config], default=None)
    return best if best is not None and times[best] < math.inf else None
