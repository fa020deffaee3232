"""Timing a segment on its own: Inductor's code for it against a template's call, on the device it will run on.

Both read the same random tensors of the segment's shapes. Each template call is first checked against a float64
reference; a call that is wrong or fails has no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from stof.fusion.graph.nodes import fake_value
from stof.fusion.graph.symbolic_shapes import size_hint
from stof.fusion.planner.match import RowScaleArgument, TemplateMatch
from stof.runtime.private import inductor, outside_tracing
from stof.tuning.timing import time_calls

# A template's error may be this many times the error of PyTorch's own operators in the same dtype ...
_ERROR_FACTOR = 2.0
# ... and, where those happen to be exact, this many units in the last place of the largest value.
_ERROR_ULPS = 2.0


class SegmentTimer:
    """Times candidates of matched segments; `failures` collects the reasons of those that fail."""

    def __init__(self, *, rounds: int = 5) -> None:
        self.rounds = rounds
        self.failures: dict[tuple[str, str], str] = {}

    def __call__(self, match: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
        """Microseconds with each configuration of the match's template, None for Inductor's code.

        inf for failures, nan for what cannot be told from other work on the GPU.
        """
        calls: dict[str, Callable[[], object]] = {}
        with outside_tracing(), torch.no_grad():
            inputs = random_inputs(match)
            expected: tuple[Tensor, ...] | None = None
            for config in configs:
                name = "inductor" if config is None else f"={config}"
                if config is None:
                    calls[name] = compiled_segment(match, inputs)
                    continue
                if expected is None:
                    expected = exact(match, inputs)
                problem, call = _checked(match, inputs, config, expected)
                if problem:
                    self.failures[match.template.name, config] = problem
                else:
                    calls[name] = call
            timed = time_calls(calls, match.problem.device, rounds=self.rounds)
        out = []
        for config in configs:
            timing = timed.get("inductor" if config is None else f"={config}")
            if timing is None:
                out.append(math.inf)
            elif not timing.clear:
                out.append(math.nan)
            else:
                out.append(timing.call_us if timing.gpu_us is None else timing.gpu_us)
        return out


def check(match: TemplateMatch, config: str) -> str:
    """Return why a configuration of a match may not be used; "" if it runs and its result is correct."""
    with outside_tracing(), torch.no_grad():
        inputs = random_inputs(match)
        return _checked(match, inputs, config, exact(match, inputs))[0]


def random_inputs(match: TemplateMatch) -> dict[fx.Node, Tensor]:
    """Return a random tensor for each tensor that a match reads, with its strides in the graph."""
    inputs: dict[fx.Node, Tensor] = {}
    generator = torch.Generator(match.problem.device).manual_seed(0)
    for node in match.arguments.values():
        value = fake_value(node)
        if isinstance(node, fx.Node) and value is not None and node not in inputs:
            sizes = [size_hint(size, match.at) for size in value.shape]
            strides = [size_hint(stride, match.at) for stride in value.stride()]
            tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
            if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
                tensor = tensor.contiguous()  # an expanded tensor cannot be filled element by element
            # GEMMs of such values stay of the order of 1, whatever their depth.
            scale = 1.0 if node is match.arguments["x"] or len(sizes) < 2 else match.problem.shape.k**-0.5
            drawn = torch.randn(sizes, generator=generator, device=value.device).mul_(scale)
            inputs[node] = tensor.copy_(drawn.to(value.dtype))
    return inputs


def segment_graph(match: TemplateMatch, inputs: dict[fx.Node, Tensor]) -> fx.GraphModule:
    """Return the operators of the segment as a module, whose arguments are in the order of `inputs`."""
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {node: graph.placeholder(f"arg{i}") for i, node in enumerate(inputs)}

    def take(node: fx.Node) -> Any:
        """The copy of a node. Sizes become numbers; what lies between the segment and its inputs comes along."""
        if node not in copied:
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                copied[node] = size_hint(value, match.at)
            elif isinstance(value, torch.SymFloat):
                copied[node] = float(value)
            else:
                copied[node] = graph.node_copy(node, take)
                copied[node].meta = {}
        return copied[node]

    graph.output(tuple(take(node) for node in match.outputs))
    return fx.GraphModule({}, graph)


def compiled_segment(match: TemplateMatch, inputs: dict[fx.Node, Tensor]) -> Callable[[], object]:
    """Compile the segment with Inductor, without its CUDA graphs, and bind the inputs."""
    args = list(inputs.values())
    compiled = inductor(segment_graph(match, inputs), args, {"triton.cudagraphs": False})
    return lambda: compiled(*args)


def exact(match: TemplateMatch, inputs: dict[fx.Node, Tensor]) -> tuple[Tensor, ...]:
    """Compute the results of the segment by the template's reference in float64."""
    return _results(match.template.reference(**_computed(_arguments(match, inputs, torch.float64))))


def _arguments(match: TemplateMatch, inputs: dict[fx.Node, Tensor], dtype: torch.dtype | None = None) -> dict[str, Any]:
    given = {
        name: inputs[value].to(dtype or inputs[value].dtype) if isinstance(value, fx.Node) else value
        for name, value in match.arguments.items()
    }
    if match.transposed:
        given["weight"] = given["weight"].t()
    return given


def bound_call(match: TemplateMatch, inputs: dict[fx.Node, Tensor], config: str) -> Callable[[], Any]:
    """Bind the template's operator to these tensors."""
    arguments = _arguments(match, inputs)
    return lambda: match.template.operator(**_computed(arguments), config=config)


def _computed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with what lowering adds to a graph: part of what a template takes."""
    return {
        name: value.of(arguments["x"]) if isinstance(value, RowScaleArgument) else value
        for name, value in arguments.items()
    }


def _results(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _checked(
    match: TemplateMatch, inputs: dict[fx.Node, Tensor], config: str, expected: tuple[Tensor, ...]
) -> tuple[str, Callable[[], Any]]:
    """Return why the template's operator may not be used ("" if it may), and its call."""
    call = bound_call(match, inputs, config)
    try:
        got = _results(call())
    except Exception as error:  # whatever a compiler or a launch raises for a configuration that does not fit
        return f"does not run: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}", call
    plain = _results(match.template.reference(**_computed(_arguments(match, inputs))))
    for one, reference, value in zip(got, plain, expected, strict=True):
        off, usual = _distance(one, value), _distance(reference, value)
        ulp = torch.finfo(one.dtype).eps * value.abs().max().item()
        allowed = _ERROR_FACTOR * usual + _ERROR_ULPS * ulp
        if not (off <= allowed and math.isfinite(off)):  # NaN and infinite errors are refused too
            return f"wrong: off by {off:.2g}, PyTorch's operators by {usual:.2g}", call
    return "", call


def _distance(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected).abs().max().item()
