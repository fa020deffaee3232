"""The pipeline from a Dynamo graph to a lowered one: recognition, planning, search, lowering, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import fx

from stof.fusion.graph.fx_utils import copy_graph, propagate
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.operators import NORMS
from stof.fusion.graph.scheme import Scheme
from stof.fusion.graph.symbolic_shapes import is_symbolic
from stof.fusion.graph.visible_strides import with_visible_strides
from stof.fusion.passes.attention_bias_layout import materialize_biases, unreadable_biases
from stof.fusion.passes.horizontal_fusion import merge_gemms
from stof.fusion.passes.lower_segments import lower
from stof.fusion.passes.patch_embedding import channels_last, multiply_patches, patch_embeddings
from stof.fusion.planner.graph_space import GraphSpace, MatchTimer, ParallelCompiler
from stof.fusion.planner.heuristics import (
    MAX_OPS,
    first_reader,
    heuristic_choices,
    is_profitable,
    merged_scheme,
    tuning_key,
)
from stof.fusion.planner.lock_replay import Replay, replayed
from stof.fusion.planner.match import FusionChoice, find_matches, without_kernel
from stof.fusion.planner.row_bucket_search import by_buckets
from stof.fusion.planner.search_space import Budget, MeasurementCache, Progress
from stof.fusion.planner.two_stage_search import two_stage
from stof.fusion.records.choices import Choices, TunedConfig
from stof.fusion.records.report import FusionReport, SegmentReport
from stof.fusion.records.store import Records, Store, segment_key
from stof.fusion.templates.registry import KernelPolicy
from stof.fusion.templates.row_buckets import in_bucket

# Seconds between two writes of a running search's measurements to the store.
_KEEP_EVERY = 5.0


@dataclass(frozen=True)
class Search:
    """How to search for a graph's scheme; without a search, heuristics decide.

    Attributes:
        time_match: times the candidates of a match (`segment_timer.SegmentTimer`).
        seconds: time budget.
        per_segment: configurations drawn for each segment in a round of stage 2.
        progress: called after each measurement.
        store: where measurements are read and recorded; None for nowhere.
        compiler: compiles candidates before they are measured; None compiles each one when it is measured.
    """

    time_match: MatchTimer
    seconds: float
    per_segment: int = 4
    progress: Callable[[Progress], object] | None = None
    store: Store | None = None
    compiler: ParallelCompiler | None = None


def fuse(
    gm: fx.GraphModule,
    search: Search | None = None,
    *,
    references: bool = False,
    fold: bool = False,
    known: Mapping[str, TunedConfig] = MappingProxyType({}),
    replay: Replay | None = None,
) -> FusionReport:
    """Lower `gm` in place where that is safe; the report says what is left to Inductor, and why.

    Nodes need `meta["example_value"]`, as Dynamo leaves it.

    Args:
        search: measures candidates; without a search or a lock, heuristics decide.
        references: match templates where they have no kernel as well, and run their PyTorch references.
        fold: fold weights of RMSNorms into the GEMMs after them; a lock may ask for it as well.
        known: recorded times, for the heuristics.
        replay: a lock whose choices are reproduced.
    """
    policy = (
        KernelPolicy.REFERENCE if references else KernelPolicy.KERNELS if search or replay else KernelPolicy.DEFAULTS
    )
    report = FusionReport()
    reason = skip_reason(gm.graph)
    if reason:
        report.notes.append(f"the whole graph is left to Inductor: {reason}")
        return report
    rewrite_patches(gm, report)
    _rewrite(gm, report, lambda: merge_gemms(gm), "GEMMs with packed weights stay apart")
    operators, order = recognize_operators(gm.graph), GraphOrder(gm.graph)
    # A graph with symbolic sizes has another key than a static one, even if their first calls are equal.
    left_open = any(is_symbolic(operator.value.shape) for operator in operators)
    report.graph = Scheme(len(operators)).digest(operators) + "-open" * left_open
    report.fold = fold or (replay is not None and replay.folds(report.graph))
    if report.fold and not fold:
        report.notes.append("norms' weights are folded into GEMMs, as where the lock was made")
    operators = [replace(o, foldable=report.fold) if o.kind in NORMS else o for o in operators]
    report.notes += [f"no template kernel for {what}" for what in without_kernel(operators, policy)]
    timer, compiler = (search.time_match, search.compiler) if search is not None else (None, None)
    known = known if replay is None else replay.known(known)
    graph = GraphSpace(operators, order, timer, policy, compiler, known)
    meter: MeasurementCache | None = None
    chosen = None if replay is None else replayed(graph, replay, report)
    if chosen is None:
        chosen = heuristic_choices(operators, order, policy, known)
    if search is not None:
        # Of the graph and its template matches, which depend on this package's version.
        key = segment_key((report.graph, policy.name, sorted(map(segment_key, graph.matched_keys()))))
        meter = _meter(graph, search, key)
        chosen = _searched(graph, meter, chosen, search, report)
        report.choices = graph.choices(meter.measured)
        _keep(meter, search, key, report.choices)
    chosen = _without_visible_strides(gm, chosen, report)
    report.used = {tuning_key(choice.match, policy): choice.config for choice in chosen.values()}
    scheme = merged_scheme(operators, [_range(start, choice) for start, choice in chosen.items()])
    report.scheme, report.digest = scheme.bits, scheme.digest(operators)
    report.segments = [_row(graph, segment, chosen.get(segment.start), meter) for segment in scheme.segments]
    if chosen:
        _apply(gm, list(chosen.values()), report)
    # Last, so that graph keys and choices do not depend on the GPU.
    rewrite_biases(gm, report)
    return report


def skip_reason(graph: fx.Graph) -> str:
    """Return why no operator of a graph may be replaced, or ""."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in graph.nodes:
        if "autocast" in str(node.target):
            return "it turns autocast on or off inside"
        if getattr(node.target, "__module__", None) == "torch._functorch.predispatch":
            return "it transforms functions (torch.func), whose tensors exist only while it runs"
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and free_unbacked_symbols(value):
            return f"sizes depend on data ({node.name})"
    return ""


def _range(start: int, choice: FusionChoice) -> range:
    return range(start, start + len(choice.match.operators))


def _meter(graph: GraphSpace, search: Search, graph_key: str) -> MeasurementCache:
    """Return a measurement cache that reads the store, and writes to it while the search runs: it may be killed.

    An equally thorough search of this graph that came to its end has left nothing to measure.
    """
    held = search.store.load() if search.store is not None else Records()

    def done(key: str) -> bool:
        return held.searched.get(key, 0) >= search.per_segment

    kept = time.monotonic()

    def progress(step: Progress) -> None:
        nonlocal kept
        if search.progress is not None:
            search.progress(step)
        if time.monotonic() - kept > _KEEP_EVERY:
            _keep(meter, search)
            kept = time.monotonic()

    budget = Budget(measurements=0) if done(graph_key) else Budget(search.seconds)
    finished = [key for key in graph.matched_keys() if done(segment_key(key))]
    meter = MeasurementCache(
        graph.space(), budget, progress, lambda key: held.segments.get(segment_key(key), {}), finished
    )
    return meter


def _keep(meter: MeasurementCache, search: Search, graph_key: str = "", choices: Choices | None = None) -> None:
    """Write measurements to the store, and at the end of a search (`graph_key`) what it came to."""
    if search.store is None or meter.budget.measurements == 0:
        return
    times = {segment_key(key): times for key, times in meter.certain().items() if times}
    finished = {*map(segment_key, meter.searched)}
    if graph_key and times and not meter.exhausted and not meter.noisy:
        finished.add(graph_key)
    if times:
        search.store.update(Records(times, searched=dict.fromkeys(finished, search.per_segment)))
    search.store.update_choices(choices or {})


def _searched(
    graph: GraphSpace, meter: MeasurementCache, initial: dict[int, FusionChoice], search: Search, report: FusionReport
) -> dict[int, FusionChoice]:
    """Run the search and return its choices."""
    first = [_range(place, choice) for place, choice in initial.items()]
    chosen: dict[int, FusionChoice] = {}
    for at in two_stage(meter, first, per_segment=search.per_segment).segments:
        best, _ = meter.best(at.start, at.stop)
        if best is not None:
            name, config = best
            chosen[at.start] = FusionChoice(graph.matches(at.start, at.stop)[name], config, "measured faster")
    chosen = by_buckets(graph, meter, chosen, search.per_segment)
    report.measurements = meter.measurements
    if meter.exhausted and meter.budget.measurements:
        report.notes.append(f"the budget of {search.seconds:g} s was spent after {meter.measurements} measurements")
    if meter.noisy:
        report.notes.append(
            f"{len(meter.noisy)} of {meter.measurements} times could not be told from other work on the device: they "
            "are left out, and will be measured again"
        )
    report.notes += [f"{name} {config}: {why}" for (name, config), why in search.time_match.failures.items()]
    return chosen


def _row(
    graph: GraphSpace, segment: range, choice: FusionChoice | None, meter: MeasurementCache | None
) -> SegmentReport:
    text = graph.label(segment.start, segment.stop)
    if choice is None:
        why = "; ".join(dict.fromkeys(_why_not(graph, segment, meter)))
        taken = meter.measured(segment.start, segment.stop).get(None) if meter is not None else None
        ours = [operator.is_stof_attention for operator in graph.operators[segment.start : segment.stop]]
        rest = "stof attention" if all(ours) else "Inductor, stof attention" if any(ours) else "Inductor"
        return SegmentReport(text, "", "", why, _finite(taken), rest=rest)
    inductor_us = template_us = None
    name, config = choice.match.template.name, in_bucket(choice.config, choice.match.problem.shape.m)
    if meter is not None:
        times = meter.measured(segment.start, segment.stop)
        inductor_us, template_us = times[None], times[name, config]
    else:
        tuned = graph.known.get(tuning_key(choice.match, graph.policy))
        if tuned is not None and tuned.config == config:
            inductor_us, template_us = tuned.inductor_us, tuned.template_us
    return SegmentReport(text, name, choice.config, choice.why, inductor_us, template_us)


def _finite(us: float | None) -> float | None:
    return us if us is not None and us < math.inf else None


def _why_not(graph: GraphSpace, segment: range, meter: MeasurementCache | None) -> Iterator[str]:
    """Yield why templates that match parts of a segment, or nearly do, do not compute them."""
    for start in segment:
        for stop in range(start + 2, min(start + MAX_OPS, segment.stop) + 1):
            served, refused = find_matches(graph.operators[start:stop], graph.policy)
            yield from refused
            for match in served:
                part = "" if len(segment) == stop - start else f"{graph.label(start, stop)} by "
                name = part + match.template.name
                if meter is None:
                    tuned = graph.known.get(tuning_key(match, graph.policy))
                    if tuned is not None and not tuned.pays:
                        yield f"{name}: {tuned.template_us:.1f} us at best before, Inductor {tuned.inductor_us:.1f} us"
                    elif tuned is None and not is_profitable(match, first_reader(match, graph.operators[stop:])):
                        yield f"{name}: saves too little traffic at K = {match.problem.shape.k}, by rule"
                    continue
                times = meter.measured(start, stop)
                tried = [
                    time
                    for candidate, time in times.items()
                    if candidate is not None and candidate[0] == match.template.name
                ]
                if times.get(None, math.inf) < math.inf and min(tried, default=math.inf) < math.inf:
                    yield f"{name}: {min(tried):.1f} us at best, Inductor {times[None]:.1f} us"


def rewrite_patches(gm: fx.GraphModule, report: FusionReport) -> None:
    """Rewrite patch embeddings to GEMMs, unless something may see the other strides of their results."""
    patches = patch_embeddings(gm.graph)
    visible = with_visible_strides(gm, {node: channels_last(node) for node, _ in patches})
    if visible:
        report.notes.append("patches are embedded by a convolution: its strides are read or returned")
    patches = [patch for patch in patches if patch[0] not in visible]
    _rewrite(gm, report, partial(multiply_patches, gm.graph, patches), "patches are embedded by a convolution")


def rewrite_biases(gm: fx.GraphModule, report: FusionReport) -> None:
    """Copy attention biases into a layout that TMA and vector loads can read."""
    if biases := unreadable_biases(gm.graph):
        _rewrite(
            gm, report, partial(materialize_biases, gm.graph, biases), "biases are copied by each layer's attention"
        )


def _rewrite(gm: fx.GraphModule, report: FusionReport, rewrite: Callable[[], int], otherwise: str) -> None:
    """Apply a rewrite that returns how many places it changed; revert it if fake-tensor propagation fails.

    Args:
        otherwise: the note in the report after a revert.
    """
    backup = copy_graph(gm.graph)
    if not rewrite():
        return
    problem = propagate(gm)
    if problem:
        gm.graph = backup
        report.notes.append(f"{otherwise}: {problem}")
    gm.recompile()


def _without_visible_strides(
    gm: fx.GraphModule, chosen: dict[int, FusionChoice], report: FusionReport
) -> dict[int, FusionChoice]:
    """Return the choices without those that change strides which something in the graph may see."""
    places = {node: place for place, choice in chosen.items() for node in choice.match.relaid}
    relaid = {node: value for choice in chosen.values() for node, value in choice.match.relaid.items()}
    visible = with_visible_strides(gm, relaid)
    if visible:
        names = ", ".join(sorted(node.name for node in visible))
        report.notes.append(f"no template computes {names}: strides that it would change are read or returned")
    left = {places[node] for node in visible}
    return {place: choice for place, choice in chosen.items() if place not in left}


def _apply(gm: fx.GraphModule, choices: list[FusionChoice], report: FusionReport) -> None:
    """Lower the choices; revert if fake-tensor propagation fails."""
    backup = copy_graph(gm.graph)
    lower(gm.graph, choices)
    problem = propagate(gm)
    if problem:
        gm.graph = backup
        report.revert_to_inductor("see the note below")
        report.notes.append(f"the whole graph is left to Inductor: with segments replaced, {problem}")
    gm.recompile()
