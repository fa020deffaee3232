"""From a Dynamo graph to a lowered one: what may be touched, which segments there are, which a template computes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from stof.fusion.claims import claims
from stof.fusion.lower import Choice, GraphOrder, lower
from stof.fusion.merge import merge_products
from stof.fusion.nodes import name_of
from stof.fusion.normalise import normalise
from stof.fusion.operators import Operator
from stof.fusion.propagate import propagate
from stof.fusion.rules import suggested


@dataclass(frozen=True)
class SegmentReport:
    """One segment: what it holds, the template and configuration that compute it ("" for Inductor), and why."""

    operators: str
    template: str
    config: str
    reason: str


@dataclass
class FusionReport:
    """What was done to one graph.

    Attributes:
        segments: in graph order.
        scheme, digest: the scheme's bits, and its stable hash.
        notes: parts of the graph, or the whole of it, that were left alone; one line each.
    """

    segments: list[SegmentReport] = field(default_factory=list)
    scheme: str = ""
    digest: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def fused(self) -> int:
        """Segments computed by a template."""
        return sum(bool(segment.template) for segment in self.segments)


def fuse(gm: fx.GraphModule) -> FusionReport:
    """Lower `gm` in place as far as it is safe; the report says what is left to Inductor, and why."""
    report = FusionReport()
    reason = untouchable(gm.graph)
    if reason:
        report.notes.append(f"the whole graph is left to Inductor: {reason}")
        return report
    _merge(gm, report)
    operators = normalise(gm.graph)
    scheme, chosen = suggested(operators)
    report.scheme, report.digest = scheme.bits, scheme.digest(operators)
    order = GraphOrder(gm.graph)
    kept: list[Choice] = []
    for segment in scheme.segments:
        row, choice = _settle([operators[i] for i in segment], chosen.get(segment.start), order)
        report.segments.append(row)
        kept += [choice] if choice is not None else []
    if kept:
        _apply(gm, kept, report)
    return report


def untouchable(graph: fx.Graph) -> str:
    """Why no operator of a graph may be replaced; "" if some may."""
    for node in graph.nodes:
        if name_of(node) in ("_enter_autocast", "amp_definitely_not_available") or "autocast" in str(node.target):
            return "it changes autocast inside"
        value = node.meta.get("example_value")
        if node.op != "placeholder" and isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

            if free_unbacked_symbols(value):
                return f"sizes depend on data ({node.name})"
    return ""


def _settle(
    operators: Sequence[Operator], choice: Choice | None, order: GraphOrder
) -> tuple[SegmentReport, Choice | None]:
    """The report of a segment, and its choice if the graph lets it be replaced."""
    text = " + ".join(operator.label for operator in operators)
    if choice is None:
        reasons = "; ".join(claims(operators)[1])
        return SegmentReport(text, "", "", reasons or "no template pays here"), None
    spot = order.insertion(choice.claim)
    if not isinstance(spot, fx.Node):
        return SegmentReport(text, "", "", str(spot)), None
    return SegmentReport(text, choice.claim.template.name, choice.config, "saves memory traffic, by rule"), choice


def _merge(gm: fx.GraphModule, report: FusionReport) -> None:
    """Merge products with packed weights; slices of their results must do wherever whole tensors did."""
    backup = copy.deepcopy(gm.graph)
    problem = propagate(gm) if merge_products(gm.graph) else ""
    if problem:
        gm.graph = backup
        report.notes.append(f"products with packed weights stay apart: {problem}")


def _apply(gm: fx.GraphModule, choices: list[Choice], report: FusionReport) -> None:
    """Lower, and take it back when the graph no longer fits together."""
    backup = copy.deepcopy(gm.graph)
    lower(gm.graph, choices)
    problem = propagate(gm)
    if problem:
        gm.graph = backup
        report.segments = [SegmentReport(row.operators, "", "", row.reason) for row in report.segments]
        report.notes.append(f"the whole graph is left to Inductor: with segments replaced, {problem}")
    gm.recompile()
