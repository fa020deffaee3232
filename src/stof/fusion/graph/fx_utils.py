"""Utilities on FX graphs: copies, inserted calls, and propagation of fake tensors.

Propagation runs a rewritten graph on fake tensors: it proves that shapes, dtypes and views still fit together.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from stof.runtime.private import FakeTensor, copy_sources, fake_context, pytree


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with Dynamo's sources of placeholders, by which Inductor recognizes parameters."""
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        copy_sources(old, new)
    return copied


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a module's graph; share its parameters and buffers, and keep the metadata that compilers read."""
    copied = fx.GraphModule(gm, copy_graph(gm.graph))
    copied.meta.update(gm.meta)
    copy_sources(gm, copied)
    return copied


def insert_call(graph: fx.Graph, like: fx.Node, op: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """Create a node at the graph's insertion point, with its fake value and the stack trace of `like`."""
    node = graph.create_node(op, target, args)
    node.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace") if key in like.meta}
    fake_args = fx.node.map_arg(args, lambda argument: argument.meta["example_value"])
    function = target if op == "call_function" else getattr(torch.Tensor, target)
    with fake_context(fake_mode_of(fake_args)):
        node.meta["example_value"] = function(*fake_args)
    return node


def fake_mode_of(values: Any) -> Any:
    """Return the fake tensor mode of (nested) values; a null context for real tensors."""
    modes = [leaf.fake_mode for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor)]
    return modes[0] if modes else nullcontext()


class _Propagate(fx.Interpreter):
    """Run a graph on the fake values of its placeholders and record the value of every node."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result


def propagate(gm: fx.GraphModule, *, strides: bool = False) -> str:
    """Recompute the fake values of `gm`; return why that fails or changes the results' sizes or dtypes, or "".

    Args:
        strides: whether results have to keep their strides as well.
    """
    inputs = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    before = _forms(gm, strides)
    mode = fake_mode_of(inputs)
    shapes = getattr(mode, "shape_env", None)
    try:
        with fake_context(mode):
            if shapes is None:
                _Propagate(gm).run(*inputs)
            else:
                with shapes.suppress_guards():
                    _Propagate(gm).run(*inputs)
    except Exception as error:  # whatever an operator of the user's graph raises when a tensor is laid out differently
        return str(error).strip().splitlines()[0]
    return "" if _forms(gm, strides) == before else "results would change their shape, strides or dtype"


def _forms(gm: fx.GraphModule, strides: bool) -> list[str]:
    """Sizes, dtype and, if asked for, strides of everything the graph returns."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    return [
        f"{tuple(v.shape)} {v.dtype} {v.stride() if strides else ''}" if isinstance(v, torch.Tensor) else str(type(v))
        for v in values
    ]
