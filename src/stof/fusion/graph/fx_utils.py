"""Utilities on FX graphs: copies, inserted calls, and propagation of fake tensors.

Propagation runs a rewritten graph on fake tensors: it proves that shapes, dtypes and views still fit together.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from stof.fusion.graph.nodes import same_size
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


class FakeInterpreter(fx.Interpreter):
    """Runs a graph on the fake values of its placeholders and keeps the value of every node in its `meta`."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr") and "example_value" in n.meta:
            return n.meta["example_value"]
        result = super().run_node(n)
        if n.op != "output":
            self.keep(n, result)
        return result

    def keep(self, node: fx.Node, value: Any) -> None:
        node.meta["example_value"] = value


def run_on_fakes(gm: fx.GraphModule, interpreter: FakeInterpreter) -> str:
    """Run a graph on the fake values of its placeholders, without guards on sizes; return why that fails, or ""."""
    inputs = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    mode = fake_mode_of(inputs)
    shapes = getattr(mode, "shape_env", None)
    try:
        with fake_context(mode), nullcontext() if shapes is None else shapes.suppress_guards():
            interpreter.run(*inputs)
    except Exception as error:  # whatever an operator of the user's graph raises when a tensor is laid out differently
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def propagate(gm: fx.GraphModule) -> str:
    """Recompute the fake values of `gm`; return why that fails or changes what the graph returns, or ""."""
    before = _results(gm)
    problem = run_on_fakes(gm, FakeInterpreter(gm))
    if problem:
        return problem
    same = all(_alike(new, old) for new, old in zip(_results(gm), before, strict=True))
    return "" if same else "results would change their shape, strides or dtype"


def _results(gm: fx.GraphModule) -> list[Any]:
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return [node.meta.get("example_value") for node in output.all_input_nodes]


def _alike(new: Any, old: Any) -> bool:
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return type(new) is type(old)
    if new.layout is not torch.strided or new.is_nested:
        return (new.dtype, new.layout, str(new.shape)) == (old.dtype, old.layout, str(old.shape))
    return new.dtype == old.dtype and same_size((*new.shape, *new.stride()), (*old.shape, *old.stride()))
