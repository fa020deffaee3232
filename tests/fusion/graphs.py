"""Dynamo graphs of small functions and models, captured without compiling anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from stof.fusion import pipeline
from stof.fusion.graph.fx_utils import propagate
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.operators import Operator
from stof.fusion.passes.horizontal_fusion import merge_gemms, packed_call
from stof.fusion.pipeline import Search
from stof.fusion.records.report import FusionReport


def capture(function: Callable[..., Any], *args: Any, dynamic: bool = False, **kwargs: Any) -> fx.GraphModule:
    """The one graph Dynamo makes of a call, in inference."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=keep, dynamic=dynamic)(*args, **kwargs)
    (graph,) = graphs
    return graph


def merged(function: Callable[..., Any], dynamic: bool = False) -> tuple[Callable[..., Any], list[int]]:
    """The function with its GEMMs merged, and for each of its graphs how many went into others."""
    counts: list[int] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        counts.append(merge_gemms(gm))
        assert propagate(gm) == ""
        gm.recompile()
        return packed_call(gm.graph, gm.forward)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic), counts


def fuse(gm: fx.GraphModule, search: Search | None = None, *, fold: bool = False) -> FusionReport:
    """As on a device that has a kernel for everything: references stand for them."""
    return pipeline.fuse(gm, search, references=True, fold=fold)


def operators(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Operator]:
    return recognize_operators(capture(function, *args, **kwargs).graph)


def labels(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Kinds in graph order; activations and gates by their own name."""
    named = {"activation", "gate"}
    return [o.label if o.kind in named else str(o.kind) for o in operators(function, *args, **kwargs)]


def calls(gm: fx.GraphModule) -> list[str]:
    """The template operators a graph calls, in order: `linear`, `norm_linear`, ...; not GEMMs by themselves."""
    return [name for name, alone in _calls(gm) if not alone]


def products(gm: fx.GraphModule) -> int:
    """How many GEMMs by themselves are calls of a template."""
    return sum(alone for _, alone in _calls(gm))


def _calls(gm: fx.GraphModule) -> list[tuple[str, bool]]:
    """Template operators, and whether there is nothing but a GEMM and its bias to them."""
    found = [(str(node.target), node.args) for node in gm.graph.nodes if node.op == "call_function"]
    return [
        (name.split(".")[1], name == "stof.linear.default" and args[3:5] == (None, "none"))
        for name, args in found
        if name.startswith("stof.")
    ]


class RMSNorm(nn.Module):
    """As Hugging Face writes it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
