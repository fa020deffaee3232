"""Whether anything in a graph can see the strides of a value that a rewrite would lay out differently.

Dynamo evaluates `x.stride()` while it traces. The numbers stay in the graph as constants: arguments of `as_strided`, of
a custom operator, of a user's Triton kernel. A rewrite that changes strides must change none that such code may see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from stof.fusion.graph.fx_utils import FakeInterpreter, run_on_fakes
from stof.fusion.graph.mutations import mutates, written
from stof.fusion.graph.nodes import op_name, same_size
from stof.runtime.private import HigherOrderOperator, pytree, storage_id

# Tensor functions and methods whose result depends on strides, or on memory beside the tensor.
_STRIDE_READERS = {
    "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "data_ptr", "is_contiguous",
    "is_set_to", "resize_", "resize_as_", "set_", "storage", "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
# Libraries whose operators take tensors as they lie.
_STRIDE_AGNOSTIC = ("aten", "prims", "stof")


def with_visible_strides(gm: fx.GraphModule, relaid: Mapping[fx.Node, Tensor]) -> set[fx.Node]:
    """Return the nodes of `relaid` that must keep their strides.

    The graph is run on fake tensors, once for each set of nodes that may still change. A node has to keep its strides
    if others would reach a reader of strides, a result of the graph, or a write in place, or if an operator fails on
    them.

    Args:
        gm: a graph whose nodes hold the fake values Dynamo recorded in `meta["example_value"]`.
        relaid: fake values with the strides that a rewrite would give to nodes.
    """
    left, visible = dict(relaid), set[fx.Node]()
    while left:
        more = _visible(gm, left)
        if not more:
            break
        visible |= more
        left = {node: value for node, value in left.items() if node not in more}
    return visible


def _visible(gm: fx.GraphModule, relaid: Mapping[fx.Node, Tensor]) -> set[fx.Node]:
    run = _Relaid(gm, relaid)
    problem = run_on_fakes(gm, run)
    moved = {node for node, value in run.values.items() if not _lie_alike(value, node.meta.get("example_value"))}
    memory: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        for storage in storages(node):
            memory.setdefault(storage, []).append(node)
    seen = {
        alias
        for node in gm.graph.nodes
        for source in _seen_by(node)
        for storage in storages(source)
        for alias in memory[storage]
    }
    if problem and run.reached is not None:
        seen.update(run.reached.all_input_nodes)
    causes = _origins(seen & moved, moved) & relaid.keys()
    # No changed value explains the failure, so nothing is known of the nodes after it: all keep their strides.
    return set(relaid) if problem and not causes else causes


class _Relaid(FakeInterpreter):
    """Runs a graph with other values of some nodes; leaves the graph's as they are."""

    def __init__(self, gm: fx.GraphModule, relaid: Mapping[fx.Node, Tensor]) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = dict(relaid)
        self.reached: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.reached = n
        return self.values[n] if n in self.values else super().run_node(n)

    def keep(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value


def storages(node: fx.Node) -> set[int]:
    """Return the memory of a node's tensors, which views of them share."""
    return {storage_id(value) for value in _tensors(node.meta.get("example_value"))}


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            yield leaf


def _lie_alike(new: Any, old: Any) -> bool:
    """Whether tensors have equal strides and offsets, as far as that is known without a guard."""
    return all(
        same_size((*a.stride(), a.storage_offset()), (*b.stride(), b.storage_offset()))
        for a, b in zip(_tensors(new), _tensors(old), strict=False)
    )


def _seen_by(node: fx.Node) -> Iterable[fx.Node]:
    """Return the tensors whose memory a node may see: where it lies, and what else lies there."""
    if node.op == "output" or _reads_strides(node):
        return node.all_input_nodes
    return written(node) if mutates(node) else ()


def _reads_strides(node: fx.Node) -> bool:
    """Whether what a node computes may depend on strides; what is unknown may."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    name = op_name(node)
    if isinstance(node.target, HigherOrderOperator):
        return name != "flex_attention"  # its kernels take strides when they run
    library, _, operator = name.partition(".")
    if operator:
        return library not in _STRIDE_AGNOSTIC or operator.partition(".")[0] in _STRIDE_READERS
    return not name or name in _STRIDE_READERS


def _origins(nodes: Iterable[fx.Node], moved: set[fx.Node]) -> set[fx.Node]:
    """Return nodes and the moved nodes that they are computed from."""
    origins: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in moved and node not in origins:
            origins.add(node)
            todo += node.all_input_nodes
    return origins
