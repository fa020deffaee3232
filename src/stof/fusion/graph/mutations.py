"""Which nodes of a Dynamo graph write to tensors, and where in the graph they do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from stof.fusion.graph.nodes import fake_value, is_view, op_name
from stof.runtime.private import HigherOrderOperator, OpOverload, OpOverloadPacket, is_mutable

# Operators of a library: only their schemas say which argument they write to.
_LIBRARY = OpOverload | OpOverloadPacket | HigherOrderOperator


class GraphOrder:
    """Positions of the nodes of an unchanging graph, and of the nodes that may write to floating-point tensors."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.writes = [place for node, place in self.place.items() if mutates_floats(node)]

    def writes_among(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether a node from the first to the last of some may write to a floating-point tensor."""
        places = [self.place[node] for node in nodes]
        return any(min(places) <= place <= max(places) for place in self.writes)


def mutates(node: fx.Node) -> bool:
    """Whether a node may write to a tensor; unknown functions count as writes."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target: Any = node.target
    if isinstance(target, OpOverload):
        return is_mutable(target)
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads() if "out" not in name]
        return node.kwargs.get("out") is not None or any(map(is_mutable, overloads))
    name = op_name(node)
    if isinstance(target, HigherOrderOperator):
        return name not in _PURE_HIGHER_ORDER
    if node.kwargs.get("out") is not None or not name:
        return True
    return name in _PYTHON_WRITES or (name.endswith("_") and not name.endswith("__"))


_PURE_HIGHER_ORDER = {"flex_attention"}
_PYTHON_WRITES = {
    "setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "ilshift", "irshift",
}  # fmt: skip


def mutates_floats(node: fx.Node) -> bool:
    """Whether a node may write to a floating-point tensor."""
    if not mutates(node):
        return False
    changed = fake_value(_changed(node))
    return changed is None or changed.is_floating_point()


def written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a writing node may write to: all that it reads if that is not certain."""
    changed = _changed(node)
    return node.all_input_nodes if changed is None else [changed]


def _changed(node: fx.Node) -> fx.Node | None:
    """Return the node that a writing node changes, its first tensor argument; None if that is not certain."""
    if not op_name(node) or isinstance(node.target, _LIBRARY) or node.kwargs.get("out") is not None:
        return None
    return node.all_input_nodes[0] if node.all_input_nodes else None


def may_mutate_inputs(graph: fx.Graph) -> bool:
    """Whether a graph may write to its inputs, so that a second run may differ from the first."""
    for node in graph.nodes:
        if not mutates(node):
            continue
        target = _changed(node)
        while target is not None and (is_view(target) or mutates(target)) and target.all_input_nodes:
            target = target.all_input_nodes[0]
        if target is None or op_name(target) not in _ALLOCATING:
            return True
    return False


_ALLOCATING = {
    "add", "sub", "mul", "truediv", "linear", "matmul", "embedding", "where", "cat", "clone", "arange", "zeros", "ones",
    "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
    "new_empty",
}  # fmt: skip
