"""Rewriting a Dynamo graph: segments with a template become one call of its operator.

Nothing is assumed about the rest of the graph. A call is placed where every value it reads exists and before anything
that reads its results; if the graph writes to a floating-point tensor in between, the segment is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from stof.fusion.graph.nodes import mutates_floats, writes
from stof.fusion.planner.match import Refusal, RowScaleArgument, TemplateMatch


@dataclass(frozen=True)
class FusionChoice:
    """A claim, the configuration it runs with ("" for the template's default), and why, in words."""

    match: TemplateMatch
    config: str = ""
    why: str = ""


class GraphOrder:
    """Places of nodes in a graph that is not being changed, and of its writes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.writes = [place for node, place in self.place.items() if mutates_floats(node)]
        self.all_writes = [place for node, place in self.place.items() if writes(node)]

    def writes_between(self, first: int, last: int, *, floats: bool = True) -> bool:
        """Whether something is written between two places; `floats`: to a floating-point tensor."""
        return any(first <= place <= last for place in (self.writes if floats else self.all_writes))

    def insertion(self, match: TemplateMatch) -> fx.Node | Refusal:
        """The node before which the claim's call goes."""
        readers = {user for node in match.results for user in node.users} - match.inside
        spot = min((*readers, match.results[-1]), key=self.place.__getitem__)
        sources = [node for node in match.arguments.values() if isinstance(node, fx.Node)]
        if any(self.place[source] >= self.place[spot] for source in sources):
            return Refusal("a value of the segment is used before all it reads is there")
        places = [self.place[node] for node in (*match.inside, spot)]
        if self.writes_between(min(places), max(places), floats=not match.problem.shape.stored):
            return Refusal("the graph writes to a tensor in place amid the segment")
        return spot


def lower(graph: fx.Graph, choices: Iterable[FusionChoice]) -> None:
    """Replace the segments of `choices`; claims must not overlap, and `GraphOrder.insertion` must accept them.

    New nodes carry fake values in `meta["example_value"]`, computed by the operators' fakes.
    """
    order = GraphOrder(graph)
    placed: list[tuple[fx.Node, FusionChoice]] = []
    for choice in choices:
        spot = order.insertion(choice.match)
        assert isinstance(spot, fx.Node), spot
        placed.append((spot, choice))
    placed.sort(key=lambda pair: (order.place[pair[0]], order.place[pair[1].match.results[0]]))
    # All calls go in before anything is taken out, so that every spot is still there; a call that reads another
    # segment's result is redirected with all its other readers.
    calls: list[list[fx.Node]] = []
    for spot, choice in placed:
        with graph.inserting_before(spot):
            calls.append(_insert(graph, choice))
    for (_, choice), results in zip(placed, calls, strict=True):
        for before, after in zip(choice.match.results, results, strict=True):
            before.replace_all_uses_with(after)
    for _, choice in placed:
        for root, view in choice.match.passed:
            root.replace_all_uses_with(view)
    inside = {node for _, choice in placed for node in choice.match.inside}
    for node in sorted(inside, key=order.place.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _insert(graph: fx.Graph, choice: FusionChoice) -> list[fx.Node]:
    """Insert the call of a claim's operator; return one node for each of its results."""
    match = choice.match
    arguments, like = dict(match.arguments), match.results[-1]
    if match.transposed:
        arguments["weight"] = call(graph, like, "call_method", "t", (arguments["weight"],))
    for name, value in arguments.items():
        if isinstance(value, RowScaleArgument):
            arguments[name] = _row_factors(graph, like, arguments["x"], value.eps)
    out = call(graph, like, "call_function", match.template.operator, (*arguments.values(), choice.config))
    if len(match.results) == 1:
        return [out]
    return [call(graph, like, "call_function", getitem, (out, i)) for i in range(len(match.results))]


def _row_factors(graph: fx.Graph, like: fx.Node, x: fx.Node, eps: float) -> fx.Node:
    """As operators of the graph: Inductor computes them while it computes x, where that is its to compute."""
    value = x.meta["example_value"]
    wide = call(graph, like, "call_method", "to", (x, torch.promote_types(value.dtype, torch.float32)))
    mean = call(graph, like, "call_method", "mean", (call(graph, like, "call_method", "square", (wide,)), -1))
    return call(graph, like, "call_method", "rsqrt", (call(graph, like, "call_method", "add", (mean, eps)),))


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose placeholders still say where Dynamo took them from: compilers tell parameters by that."""
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with a copy of the graph, and the same parameters, buffers and notes for compilers."""
    copied = fx.GraphModule(gm, copy_graph(gm.graph))
    copied.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    return copied


def call(graph: fx.Graph, like: fx.Node, op: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A new node at the graph's insertion point, with its fake value, and `like`'s notes on where it comes from."""
    node = graph.create_node(op, target, args)
    node.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace") if key in like.meta}
    fake_args = fx.node.map_arg(args, lambda argument: argument.meta["example_value"])
    function = target if op == "call_function" else getattr(torch.Tensor, target)
    with fake_context(fake_mode_of(fake_args)):
        node.meta["example_value"] = function(*fake_args)
    return node


@contextmanager
def fake_context(mode: Any) -> Iterator[None]:
    """Operators run on fake values of a mode as Dynamo runs them.

    Composite operators do so in Python: in C++ those of torch 2.11 ask for sizes as numbers (`linear`, `matmul`), which
    makes every symbolic size a fixed one.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with torch.no_grad(), enable_python_dispatcher(), mode:
        yield


def fake_mode_of(values: Any) -> Any:
    """The fake tensor mode of (nested) fake values, in which operators on them run; none for real tensors."""
    from torch.utils._pytree import tree_leaves

    modes = [leaf.fake_mode for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor)]
    return modes[0] if modes else nullcontext()
