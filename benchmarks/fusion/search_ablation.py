"""The searches for a fusion scheme compared on one model: how near to the best each comes, with how many measurements.

Every segment and configuration is measured once and remembered, on disk too, so that all searches see the same times
and a long comparison can be made in pieces. The times are written with the results: whoever has the file can run all
searches again, without a GPU.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import fx

import stof
from benchmarks.fusion.repeated_layers import find_layers
from benchmarks.fusion.search_baselines import (
    OperatorClasses,
    SearchResult,
    exhaustive,
    paper_stage_one,
    paper_stage_two,
    random_search,
    search_result,
)
from benchmarks.paper.models import subject_of
from stof.errors import ArgumentError, StofError
from stof.fusion.graph.fx_utils import copy_module, propagate
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.scheme import Scheme
from stof.fusion.passes.horizontal_fusion import merge_gemms
from stof.fusion.pipeline import rewrite_patches
from stof.fusion.planner.graph_space import GraphSpace, MatchTimer, ParallelCompiler
from stof.fusion.planner.search_space import Budget, MeasurementCache, Space
from stof.fusion.planner.two_stage_search import (
    TUNED_FRACTION,
    best_known_scheme,
    stage_one,
    stage_two,
)
from stof.fusion.records.report import FusionReport
from stof.fusion.records.store import Records, SegmentCandidate, Store, segment_key
from stof.fusion.templates.gemm_config import kind_in
from stof.runtime.files import read_json

# Budgets, as fractions of the exhaustive search's measurements.
SHARES = (0.1, 0.2)
SEEDS = 20
# How stage 2 divides its draws among segments: as many for each, by the gains of the last round, or no draws.
Sampling = Literal["even", "reward", "none"]
# Names of the two-stage search in rows, by the sampling of its second stage.
NAMES: dict[Sampling, str] = {"even": "two stages", "reward": "two stages, reward", "none": "stage 1 alone"}
# The paper's moves decide what stage 1 measures. The scheme made of that, and the order of draws, are as in the others.
PAPER = "the paper's moves, reward"


@dataclass(frozen=True)
class Segment:
    """What a template covers, and all that was measured of it.

    Attributes:
        label: the operators in words.
        places: where it is, `(first operator, end)`; alike ones are one segment.
        times: microseconds of Inductor's code (None) and of each configuration, in the order in which they are
            candidates; `math.inf` for one that does not run.
        floors: what a configuration takes at the least, as the search knows before it measures.
    """

    label: str
    places: tuple[tuple[int, int], ...]
    times: Mapping[SegmentCandidate | None, float]
    floors: Mapping[SegmentCandidate, float]


@dataclass(frozen=True)
class Table:
    """All that a search of one graph could measure: one entry of `intensive` and `classes` an operator."""

    intensive: tuple[bool, ...]
    classes: tuple[str, ...]
    longest: int
    segments: tuple[Segment, ...]

    @property
    def space(self) -> Space:
        """What the searches search; measuring is looking up."""
        at = {place: segment for segment in self.segments for place in segment.places}

        def key(start: int, stop: int) -> Hashable:
            return at[start, stop].places if (start, stop) in at else (start, stop)

        def candidates(start: int, stop: int) -> list[SegmentCandidate]:
            return [c for c in at[start, stop].times if c is not None] if (start, stop) in at else []

        def measure(start: int, stop: int, asked: Sequence[SegmentCandidate | None]) -> list[float]:
            return [at[start, stop].times[candidate] for candidate in asked]

        def floor(start: int, stop: int, candidate: SegmentCandidate) -> float:
            return at[start, stop].floors[candidate]

        return Space(
            len(self.classes), key, candidates, measure, self.longest, floor=floor, kind=lambda one: kind_in(one[1])
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "intensive": self.intensive,
            "classes": self.classes,
            "longest": self.longest,
            "segments": [
                {
                    "label": segment.label,
                    "places": segment.places,
                    "inductor_us": segment.times[None],
                    "candidates": [
                        [*candidate, None if math.isinf(us) else us, segment.floors[candidate]]
                        for candidate, us in segment.times.items()
                        if candidate is not None
                    ],
                }
                for segment in self.segments
            ],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Table:
        """A table as it was written."""
        segments = []
        for one in data["segments"]:
            times: dict[SegmentCandidate | None, float] = {None: one["inductor_us"]}
            floors: dict[SegmentCandidate, float] = {}
            for template, config, us, floor in one["candidates"]:
                times[template, config] = math.inf if us is None else us
                floors[template, config] = floor
            places = tuple((start, stop) for start, stop in one["places"])
            segments.append(Segment(one["label"], places, times, floors))
        return Table(tuple(data["intensive"]), tuple(data["classes"]), data["longest"], tuple(segments))


@dataclass(frozen=True)
class Row:
    """Result of one search: microseconds that it saves on the model, and the measurements it took.

    Attributes:
        search: which.
        share: its budget over all measurements.
        saved_us, worst_us: mean and minimum over seeds of what its choice saves.
        best_us: what the exhaustive search saves.
        measurements, all_measurements: that it took (mean), and that there are.
    """

    search: str
    share: float
    saved_us: float
    worst_us: float
    best_us: float
    measurements: int
    all_measurements: int


def model_graph(name: str, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> fx.GraphModule:
    """Dynamo's graph of a model of `python -m benchmarks paper` with stof's attention, GEMMs merged as by the backend.

    Of a model with several graphs, the largest.
    """
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(copy_module(gm))
        return gm.forward

    subject = subject_of(name, batch, length, device, dtype)
    model = copy.deepcopy(subject.model)
    stof.optimize(model, mask=subject.mask.mask(length))  # prepares it in place
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep, dynamic=False)(**subject.inputs)
    gm = max(graphs, key=lambda one: len(one.graph.nodes))
    rewrite_patches(gm, FusionReport())
    merge_gemms(gm)
    problem = propagate(gm)
    if problem:
        raise StofError(f"the graph of {name} cannot be rewritten: {problem}")
    gm.recompile()
    return gm


def measured(
    gm: fx.GraphModule,
    timer: MatchTimer,
    store: Store | None,
    seconds: float,
    compiler: ParallelCompiler | None = None,
) -> tuple[Table | None, int]:
    """Measure what `store` lacks, for up to `seconds`.

    Returns the table, None while times are missing, and how many times were taken.

    `compiler` compiles a segment's candidates before they are measured.
    """
    operators = recognize_operators(gm.graph)
    graph = GraphSpace(operators, GraphOrder(gm.graph), timer, compiler=compiler)
    held = store.load().segments if store is not None else {}
    found = {key: (places, dict(held.get(segment_key(key), {}))) for key, places in _segments(graph).items()}
    taken = _measure(graph, found, store, time.monotonic() + seconds)
    segments = []
    for places, times in found.values():
        candidates = graph.candidates(*places[0])
        if any(candidate not in times for candidate in (None, *candidates)):
            return None, taken
        floors = {candidate: graph.floor(*places[0], candidate) for candidate in candidates}
        ordered = {candidate: times[candidate] for candidate in (None, *candidates)}
        segments.append(Segment(graph.label(*places[0]), tuple(places), ordered, floors))
    layers = find_layers(graph.signatures)
    classes = tuple(str(layers.place_class(place)) for place in range(len(operators)))
    intensive = tuple(operator.kind.compute_intensive for operator in operators)
    return Table(intensive, classes, graph.space().longest, tuple(segments)), taken


_Found = dict[Hashable, tuple[list[tuple[int, int]], dict[SegmentCandidate | None, float]]]


def _measure(graph: GraphSpace, found: _Found, store: Store | None, end: float) -> int:
    """Fill in what is missing until `end`; the number of times taken."""
    taken = 0
    lacking = {
        key: [candidate for candidate in (None, *graph.candidates(*places[0])) if candidate not in times]
        for key, (places, times) in found.items()
    }
    if time.monotonic() < end:
        graph.prepare([(*found[key][0][0], new) for key, new in lacking.items() if new])
    for key, new in lacking.items():
        places, times = found[key]
        if not new or time.monotonic() > end:
            continue
        found_us = zip(new, graph.measure(*places[0], new), strict=True)
        times |= {candidate: us for candidate, us in found_us if not math.isnan(us)}  # noisy ones are measured again
        taken += len(new)
        if store is not None:
            store.update(Records({segment_key(key): times}))
    return taken


def _segments(graph: GraphSpace) -> dict[Hashable, list[tuple[int, int]]]:
    """The places of all segments that templates cover, by their keys."""
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for start, stop in _places(graph.space()):
        if graph.candidates(start, stop):
            found.setdefault(graph.key(start, stop), []).append((start, stop))
    return found


def _places(space: Space) -> Iterator[tuple[int, int]]:
    for start in range(space.size):
        for stop in range(start + 1, min(start + space.longest, space.size) + 1):
            yield start, stop


def read_table(path: Path) -> tuple[dict[str, Any], Table]:
    """A file of `python -m benchmarks search`: all it holds, and the times among it.

    Raises:
        ArgumentError: there is no such file, or it is not one of `python -m benchmarks search`.
    """
    try:
        data = read_json(path)
        return {"case": str(data["case"]), **data}, Table.from_json(data["table"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{path} is no result of `python -m benchmarks search`: {type(error).__name__}: {error}"
        ) from None


def compare(
    table: Table, seeds: int = SEEDS, shares: Sequence[float] = SHARES, samplings: Sequence[Sampling] = tuple(NAMES)
) -> list[Row]:
    """Every search on what was measured: the exhaustive one, then the others with each share of its measurements.

    Each runs with every seed. The two stages run with each of `samplings` in stage 2; with
    "none", stage 1 is alone. The paper's moves start with every operator by itself.
    """
    space, operators = table.space, OperatorClasses(table.intensive, table.classes)
    best = exhaustive(MeasurementCache(space))
    us, steps = best.saved_us, best.measurements
    rows = [Row("exhaustive", 1.0, us, us, us, steps, steps)]
    for share in shares:
        limit = int(share * steps)
        defaults, moved = (MeasurementCache(space, Budget(measurements=limit)) for _ in range(2))
        stage_one(defaults)
        paper_stage_one(operators, moved, Scheme(space.size, tuple(range(1, space.size))))
        searches: dict[str, Callable[[int], SearchResult]] = {
            NAMES[one]: partial(_finish, defaults, sampling=one) for one in samplings
        }
        searches[PAPER] = partial(_finish, moved, sampling="reward")
        searches["random"] = partial(_random, space, operators, limit)
        for name, search in searches.items():
            found = [search(seed) for seed in range(seeds)]
            saved = [one.saved_us for one in found]
            taken = round(fmean(one.measurements for one in found))
            rows.append(Row(name, share, fmean(saved), min(saved), us, taken, steps))
    return rows


def _finish(after_one: MeasurementCache, seed: int, *, sampling: Sampling) -> SearchResult:
    """Stage 2 on what stage 1 measured, which is the same for all seeds."""
    meter = MeasurementCache(after_one.space, after_one.budget)
    meter.times = {key: dict(times) for key, times in after_one.times.items()}
    meter.measurements = after_one.measurements
    if sampling != "none":
        stage = stage_two if sampling == "even" else paper_stage_two
        stage(meter, best_known_scheme(meter, tuned_fraction=TUNED_FRACTION), seed=seed)
    return search_result(meter)


def _random(space: Space, operators: OperatorClasses, limit: int, seed: int) -> SearchResult:
    meter = MeasurementCache(space, Budget(measurements=limit))
    return random_search(operators, meter, schemes=100 * limit, seed=seed)
