"""Lowering: each segment that a template computes becomes one call of the template's operator.

Nothing is assumed about the rest of the graph. A call is inserted after the last value it reads and before the first
reader of its results. A segment stays if the graph writes to a floating-point tensor in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem

import torch
from torch import fx

from stof.fusion.graph.fx_utils import insert_call
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.planner.match import FusionChoice, RowScaleArgument, insertion_point


def lower(graph: fx.Graph, choices: Iterable[FusionChoice]) -> None:
    """Replace the segments of `choices`; matches must not overlap, and `insertion_point` must accept them.

    New nodes carry fake values in `meta["example_value"]`, computed by the operators' fakes.
    """
    order = GraphOrder(graph)
    placed: list[tuple[fx.Node, FusionChoice]] = []
    for choice in choices:
        spot = insertion_point(order, choice.match)
        assert isinstance(spot, fx.Node), spot
        placed.append((spot, choice))
    placed.sort(key=lambda pair: (order.place[pair[0]], order.place[pair[1].match.results[0]]))
    # All calls are inserted before any node is erased: insertion points are nodes, and a call that reads the result of
    # another segment is redirected together with the other readers of that result.
    calls: list[list[fx.Node]] = []
    for spot, choice in placed:
        with graph.inserting_before(spot):
            calls.append(_insert(graph, choice))
    for (_, choice), results in zip(placed, calls, strict=True):
        for before, after in zip(choice.match.results, results, strict=True):
            before.replace_all_uses_with(after)
    for _, choice in placed:
        for root, view in choice.match.replaced_views:
            root.replace_all_uses_with(view)
    covered_nodes = {node for _, choice in placed for node in choice.match.covered_nodes}
    for node in sorted(covered_nodes, key=order.place.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _insert(graph: fx.Graph, choice: FusionChoice) -> list[fx.Node]:
    """Insert the call of a match's operator; return one node for each of its results."""
    match = choice.match
    arguments, like = dict(match.arguments), match.results[-1]
    if match.transposed:
        arguments["weight"] = insert_call(graph, like, "call_method", "t", (arguments["weight"],))
    for name, value in arguments.items():
        if isinstance(value, RowScaleArgument):
            arguments[name] = _row_factors(graph, like, arguments["x"], value.eps)
    out = insert_call(graph, like, "call_function", match.template.operator, (*arguments.values(), choice.config))
    if len(match.results) == 1:
        return [out]
    return [insert_call(graph, like, "call_function", getitem, (out, i)) for i in range(len(match.results))]


def _row_factors(graph: fx.Graph, like: fx.Node, x: fx.Node, eps: float) -> fx.Node:
    """Insert the operators of RMSNorm row factors; Inductor fuses them into the kernel that computes x."""

    def method(name: str, *arguments: object) -> fx.Node:
        return insert_call(graph, like, "call_method", name, arguments)

    wide = method("to", x, torch.promote_types(x.meta["example_value"].dtype, torch.float32))
    return method("rsqrt", method("add", method("mean", method("square", wide), -1), eps))
