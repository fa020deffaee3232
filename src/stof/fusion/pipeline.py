"""From a Dynamo graph to a lowered one: what may be touched, which segments there are, which a template computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from stof.fusion.claims import claims, without_kernel
from stof.fusion.lower import Choice, GraphOrder, copy_graph, lower
from stof.fusion.merge import merge_products
from stof.fusion.normalise import normalise
from stof.fusion.operators import Operator
from stof.fusion.propagate import propagate
from stof.fusion.report import FusionReport, SegmentReport
from stof.fusion.rules import LONGEST, apart, joined, pays, suggested
from stof.fusion.search import Budget, Meter, Progress, two_stage
from stof.fusion.store import Contents, Entry, Store, segment_key
from stof.fusion.templates.registry import Serving
from stof.fusion.tune import Ahead, GraphSpace, TimeClaim


@dataclass(frozen=True)
class Search:
    """How a graph's scheme is searched for; without one, the rules decide.

    Attributes:
        time_claim: measures (`stof.fusion.measure.SegmentTimer`).
        seconds: when to stop.
        per_segment: configurations drawn for each segment in a round of stage 2.
        progress: called after each measurement.
        seed: of the draws.
        store: where measurements are looked up, and kept; None for none.
        ahead: compiles candidates before they are measured; None compiles each where it is measured.
    """

    time_claim: TimeClaim
    seconds: float
    per_segment: int = 4
    progress: Callable[[Progress], object] | None = None
    seed: int = 0
    store: Store | None = None
    ahead: Ahead | None = None


def fuse(gm: fx.GraphModule, search: Search | None = None, *, twins: bool = False) -> FusionReport:
    """Lower `gm` in place as far as it is safe; the report says what is left to Inductor, and why.

    Nodes need `meta["example_value"]`, as Dynamo leaves it. With `twins`, templates are claimed where they have no
    kernel as well, and run as plain PyTorch.
    """
    serving = Serving.TWINS if twins else Serving.DEFAULTS if search is None else Serving.KERNELS
    report = FusionReport()
    reason = untouchable(gm.graph)
    if reason:
        report.notes.append(f"the whole graph is left to Inductor: {reason}")
        return report
    _merge(gm, report)
    operators, order = normalise(gm.graph), GraphOrder(gm.graph)
    report.notes += [f"no template kernel for {what}" for what in without_kernel(operators, serving)]
    chosen = suggested(operators, order, serving)
    meter: Meter | None = None
    if search is not None:
        graph = GraphSpace(operators, order, search.time_claim, serving, search.ahead)
        meter = _meter(graph, search)
        chosen = _searched(graph, meter, chosen, search, report)
        _keep(meter, search)
    scheme = joined(operators, [_range(start, choice) for start, choice in chosen.items()])
    report.scheme, report.digest = scheme.bits, scheme.digest(operators)
    report.segments = [
        _row(operators, segment, chosen.get(segment.start), meter, serving) for segment in scheme.segments
    ]
    if chosen:
        _apply(gm, list(chosen.values()), report)
    return report


def untouchable(graph: fx.Graph) -> str:
    """Why no operator of a graph may be replaced; "" if some may."""
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


def _range(start: int, choice: Choice) -> range:
    return range(start, start + len(choice.claim.operators))


def _meter(graph: GraphSpace, search: Search) -> Meter:
    """A meter that knows what the store holds."""
    space, budget = graph.space(), Budget(search.seconds)
    if search.store is None:
        return Meter(space, budget, search.progress)
    held = search.store.load().segments
    segments = {key: held.get(segment_key(key), Entry()) for key in graph.claimed_keys()}
    done = [key for key, entry in segments.items() if entry.per_segment >= search.per_segment]
    return Meter(space, budget, search.progress, lambda key: segments.get(key, Entry()).times, done)


def _keep(meter: Meter, search: Search) -> None:
    """Write what was measured to the store."""
    if search.store is None or not meter.measurements:
        return
    entries = {
        segment_key(key): Entry(times, search.per_segment if key in meter.searched else 0)
        for key, times in meter.times.items()
        if times
    }
    search.store.update(Contents(entries))


def _searched(
    graph: GraphSpace, meter: Meter, initial: dict[int, Choice], search: Search, report: FusionReport
) -> dict[int, Choice]:
    """The choices a search finds."""
    start = apart(graph.operators, [_range(place, choice) for place, choice in initial.items()])
    found = two_stage(meter.space, meter, start, per_segment=search.per_segment, seed=search.seed)
    report.measurements = found.measurements
    if meter.spent:
        report.notes.append(f"the budget of {search.seconds:g} s was spent after {found.measurements} measurements")
    report.notes += [f"{name} {config}: {why}" for (name, config), why in search.time_claim.failures.items()]
    stops = {segment.start: segment.stop for segment in found.scheme.segments}
    return {
        place: Choice(graph.claims(place, stops[place])[name], config) for place, (name, config) in found.chosen.items()
    }


def _row(
    operators: Sequence[Operator], segment: range, choice: Choice | None, meter: Meter | None, serving: Serving
) -> SegmentReport:
    inner = operators[segment.start : segment.stop]
    text = " + ".join(operator.label for operator in inner)
    if choice is None:
        return SegmentReport(text, "", "", "; ".join(dict.fromkeys(_why_not(operators, segment, meter, serving))))
    name = choice.claim.template.name
    if meter is None:
        return SegmentReport(text, name, choice.config, "saves memory traffic, by rule")
    known = meter.measured(segment.start, segment.stop)
    return SegmentReport(text, name, choice.config, "measured faster", known[None], known[name, choice.config])


def _why_not(operators: Sequence[Operator], segment: range, meter: Meter | None, serving: Serving) -> Iterator[str]:
    """For what templates nearly or exactly cover inside a segment: why they do not compute it."""
    for start in segment:
        for stop in range(start + 2, min(start + LONGEST, segment.stop) + 1):
            served, refused = claims(operators[start:stop], serving)
            yield from refused
            for claim in served:
                name = claim.template.name
                if meter is None:
                    if not pays(claim):
                        yield f"{name}: saves too little traffic at K = {claim.problem.shape.k}, by rule"
                    continue
                known = meter.measured(start, stop)
                times = [time for candidate, time in known.items() if candidate is not None and candidate[0] == name]
                if times and None in known:
                    yield f"{name}: {min(times):.1f} us at best, Inductor {known[None]:.1f} us"


def _merge(gm: fx.GraphModule, report: FusionReport) -> None:
    """Merge products with packed weights; slices of their results must do wherever whole tensors did."""
    backup = copy_graph(gm.graph)
    problem = propagate(gm) if merge_products(gm.graph) else ""
    if problem:
        gm.graph = backup
        report.notes.append(f"products with packed weights stay apart: {problem}")


def _apply(gm: fx.GraphModule, choices: list[Choice], report: FusionReport) -> None:
    """Lower, and take it back when the graph no longer fits together."""
    backup = copy_graph(gm.graph)
    lower(gm.graph, choices)
    problem = propagate(gm)
    if problem:
        gm.graph = backup
        report.take_back("see the note below")
        report.notes.append(f"the whole graph is left to Inductor: with segments replaced, {problem}")
    gm.recompile()
