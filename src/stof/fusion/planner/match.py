"""Matching of segments with templates: whether the dataflow fits, and the call that replaces the segment.

A template may be matched for a segment only if the call computes exactly what the segment's operators compute and
nothing outside needs what lies in between. Every other case has a reason, in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from stof.fusion.graph.fx_utils import fake_mode_of
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.nodes import column_slice, fake_value, same_size, skip_identities
from stof.fusion.graph.operators import NORMS, Kind, Operator
from stof.fusion.graph.symbolic_shapes import Values, is_symbolic, size_hint, values_for
from stof.fusion.planner.match_rotary import column_readers, rotations
from stof.fusion.templates.gemm_config import GATED, ROW_SCALED, GemmShape
from stof.fusion.templates.launch import row_factors
from stof.fusion.templates.registry import TEMPLATES, GemmProblem, KernelPolicy, Template, no_kernel
from stof.fusion.templates.row_buckets import SMALLEST
from stof.runtime.private import FakeTensor, fake_context

_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, eq=False)
class TemplateMatch:
    """A segment that a template can compute, and the call that replaces it.

    Attributes:
        template: the template whose operator is called.
        operators: the segment.
        covered_nodes: all nodes that the call replaces.
        arguments: the operator's arguments in its order, without the configuration. Tensors are nodes, or
            `RowScaleArgument`.
        transposed: whether the argument "weight" has to be transposed first.
        results: the nodes whose values the call computes, one for each of its outputs.
        problem: shapes and options. Symbolic sizes are replaced by their values in the call that is being compiled, or
            by those in `at`.
        replaced_views: pairs of a node and of the view of the call's result that replaces it.
        at: values of the symbols, for a match that stands for calls of another size.
    """

    template: Template
    operators: tuple[Operator, ...]
    covered_nodes: frozenset[fx.Node]
    arguments: dict[str, Any]
    transposed: bool
    results: tuple[fx.Node, ...]
    problem: GemmProblem
    at: Values | None = None
    replaced_views: tuple[tuple[fx.Node, fx.Node], ...] = ()

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Return the nodes of the segment that nodes outside read."""
        if not self.replaced_views:
            return self.results
        views = {view for _, view in self.replaced_views}
        read = [user for node in self.results for user in column_readers(node) if user not in self.covered_nodes]
        rest = [user for user in read if not any(_leads_to(user, view) for view in views)]
        return (*(root for root, _ in self.replaced_views), *rest)

    @property
    def relaid(self) -> dict[fx.Node, Tensor]:
        """Return the fake values of nodes that lowering gives other strides: operators' results are contiguous."""
        values = {node: value for node in self.results if (value := fake_value(node)) is not None}
        with fake_context(fake_mode_of(list(values.values()))):
            new = {node: value.new_empty(value.shape) for node, value in values.items()}
        new |= {root: value for root, view in self.replaced_views if (value := fake_value(view)) is not None}
        return {node: value for node, value in new.items() if not _lies_like(value, fake_value(node))}

    @property
    def has_dynamic_rows(self) -> bool:
        """Whether the graph leaves the number of rows open."""
        return is_symbolic(self._lead)

    def in_bucket(self, bucket: int) -> TemplateMatch | None:
        """Return the match at the largest size of a bucket of rows; None if the graph has no such sizes."""
        values = values_for(self._lead, bucket // 2 if bucket > SMALLEST else 0, bucket)
        if values is None:
            return None
        rows = prod(size_hint(size, values) for size in self._lead)
        return replace(self, at=values, problem=replace(self.problem, shape=replace(self.problem.shape, m=rows)))

    @property
    def _lead(self) -> torch.Size:
        x = fake_value(self.arguments["x"])
        assert x is not None
        return x.shape[:-1]


@dataclass(frozen=True)
class RowScaleArgument:
    """An argument that lowering adds to the graph: the factors by which an RMSNorm multiplies the rows of x."""

    eps: float

    def of(self, x: Tensor) -> Tensor:
        """`[...]` for x `[..., K]`."""
        return row_factors(x, self.eps)


def _lies_like(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and same_size(value.stride(), other.stride())


class Refusal(str):
    """Why a template does not serve a segment, in words."""


@dataclass(frozen=True)
class FusionChoice:
    """A match, its configuration ("" for the template's default), and the reason in words."""

    match: TemplateMatch
    config: str = ""
    why: str = ""


def insertion_point(order: GraphOrder, match: TemplateMatch) -> fx.Node | Refusal:
    """Return the node before which the call of a match is inserted."""
    readers = {user for node in match.results for user in node.users} - match.covered_nodes
    spot = min((*readers, match.results[-1]), key=order.place.__getitem__)
    sources = [node for node in match.arguments.values() if isinstance(node, fx.Node)]
    if any(order.place[source] >= order.place[spot] for source in sources):
        return Refusal("a value of the segment is used before all it reads is there")
    if order.writes_among((*match.covered_nodes, spot)):
        return Refusal("the graph writes to a tensor in place amid the segment")
    return spot


def find_matches(operators: Sequence[Operator], policy: KernelPolicy) -> tuple[list[TemplateMatch], list[Refusal]]:
    """Return all matches of neighbouring operators, and why templates with the right operator kinds do not match.

    Return nothing if nothing in `policy` computes their GEMMs: `without_kernel` reports that once for the graph.
    """
    if without_kernel(operators, policy):
        return [], []
    served: list[TemplateMatch] = []
    refused: list[Refusal] = []
    kinds = tuple(operator.kind for operator in operators)
    for template in TEMPLATES:
        if not template.covers(kinds):
            continue
        match = _match(template, operators)
        if isinstance(match, TemplateMatch):
            served.append(match)
        else:
            refused.append(Refusal(f"{template.name}: {match}"))
    return served, refused


def without_kernel(operators: Iterable[Operator], policy: KernelPolicy) -> list[str]:
    """Return the devices and dtypes of GEMMs that nothing in `policy` computes, such as "cpu"."""
    values = [operator.value for operator in operators if operator.kind is Kind.LINEAR]
    missing = (no_kernel(value.device, value.dtype, policy) for value in values)
    return [what for what in dict.fromkeys(missing) if what]


def _match(template: Template, operators: Sequence[Operator]) -> TemplateMatch | str:
    linear = next(operator for operator in operators if operator.kind is Kind.LINEAR)
    norm = next((operator for operator in operators if operator.kind in NORMS), None)
    act = next((operator for operator in operators if operator.kind in (Kind.ACTIVATION, Kind.GATE)), None)
    dataflow = _dataflow(operators, linear)
    if isinstance(dataflow, str):
        return dataflow
    covered_nodes, residual = dataflow
    rotaries = [operator for operator in operators if operator.kind is Kind.ROTARY]
    turned = rotations(linear, rotaries) if rotaries else None
    if isinstance(turned, str):
        return turned
    replaced_views = turned.replaced_views if turned is not None else ()
    results = (linear.root,) if replaced_views else _results(template, operators)
    for node in covered_nodes.difference(results, (root for root, _ in replaced_views)):
        if any(user not in covered_nodes for user in node.users):
            owner = next((operator for operator in operators if node in operator.nodes), operators[0])
            return f"the value of {owner.label} is used elsewhere as well"
    x = operators[0].inputs[0]
    problem = operand_mismatch([x, linear.weight, linear.bias, residual, *results], norm) or folding_mismatch(
        template, norm, linear
    )
    if problem:
        return problem
    arguments: dict[str, Any] = {
        "x": x,
        "weight": linear.weight,
        "bias": linear.bias,
        "residual": residual,
        "activation": act.activation if act is not None else "none",
    }
    if norm is not None:
        arguments |= {"norm_weight": norm.weight, "norm_bias": norm.bias, "norm": NORMS[norm.kind], "eps": norm.eps}
        arguments["rstd"] = RowScaleArgument(norm.eps)
    else:
        arguments |= {"norm_weight": None, "rstd": None}
    if turned is not None:
        arguments |= {"cos": turned.cos, "sin": turned.sin, "turned": turned.turned, "head_dim": turned.head_dim}
    asked = _problem(template, linear, arguments)
    if 0 in (asked.shape.m, asked.shape.n, asked.shape.k):
        return f"a GEMM of {asked.shape.m} x {asked.shape.k} and {asked.shape.k} x {asked.shape.n} takes no time"
    return TemplateMatch(
        template,
        tuple(operators),
        frozenset(covered_nodes),
        {name: arguments[name] for name in inspect.signature(template.reference).parameters},
        linear.transposed,
        results,
        asked,
        replaced_views=replaced_views,
    )


def _dataflow(operators: Sequence[Operator], linear: Operator) -> tuple[set[fx.Node], fx.Node | None] | str:
    """The nodes of a segment and what its residual addition adds, if it has one; or why no value flows through it."""
    covered_nodes = {node for operator in operators for node in operator.nodes}
    residual: fx.Node | None = None
    for before, after in pairwise(operators):
        problem = "" if after.kind is Kind.ROTARY else _connected(before, after, covered_nodes, linear)
        if problem:
            return problem
        if after.kind is Kind.RESIDUAL:
            others = [source for source in after.inputs if skip_identities(source) is not before.root]
            if len(others) != 1:
                return "adds a value to itself"
            residual = others[0]
    return covered_nodes, residual


def _problem(template: Template, linear: Operator, arguments: dict[str, Any]) -> GemmProblem:
    """Sizes and options of a call, symbolic sizes at their hints."""
    x = fake_value(arguments["x"])
    assert x is not None
    n, k = (size_hint(size) for size in linear.weight_size)
    shape = GemmShape(
        template.name,
        prod(size_hint(size) for size in x.shape[:-1]),
        n // 2 if template.name in GATED else n,
        k,
        arguments["activation"],
        arguments.get("norm", ""),
        scaled=template.name not in ROW_SCALED
        and any(arguments.get(name) is not None for name in ("norm_weight", "norm_bias")),
        bias=linear.bias is not None,
        residual=arguments["residual"] is not None,
        transposed=linear.transposed,
        head_dim=arguments.get("head_dim", 0),
        turned=arguments.get("turned", 0),
        aligned=all(size * x.element_size() % 16 == 0 for size in (n, k)),
    )
    return GemmProblem(shape, x.dtype, x.device)


def _leads_to(node: fx.Node, view: fx.Node) -> bool:
    """Whether a chain of views, each with one reader, leads from a node to a view."""
    while node is not view and len(node.users) == 1:
        node = next(iter(node.users))
    return node is view


def folding_mismatch(template: Template, norm: Operator | None, linear: Operator) -> str:
    if template.name not in ROW_SCALED or norm is None or norm.weight is None:
        return ""
    if not norm.foldable:
        return "the norm's weight is not folded into the GEMM's (option fold)"
    # In compiled code, a view has no version counter that would show writes to the weight.
    given = all(node is not None and node.op in ("placeholder", "get_attr") for node in (linear.weight, norm.weight))
    return "" if given and not linear.transposed else "the norm's weight is not folded into a view of a weight"


def _connected(before: Operator, after: Operator, covered_nodes: set[fx.Node], linear: Operator) -> str:
    """Return why the second operator does not read the first, or ""; add identities between them to the nodes."""
    if after.kind is Kind.GATE:
        n = linear.weight_size[0]
        parts = [column_slice(part) for part in after.inputs]
        if parts[0] is None or parts[1] is None or parts[0][0] is not before.root or parts[1][0] is not before.root:
            return "gate and up projection are two GEMMs; stof.optimize packs their weights into one"
        if parts[0][1:] != (0, n // 2) or parts[1][1:] != (n // 2, n):
            return "the gate is not the first half of the GEMM"
        return ""
    for source in after.inputs:
        passed: set[fx.Node] = set()
        if skip_identities(source, passed) is before.root:
            covered_nodes |= passed
            return ""
    return f"{after.label} does not read {before.label}"


def _results(template: Template, operators: Sequence[Operator]) -> tuple[fx.Node, ...]:
    if template.name == "linear_norm":
        return operators[-2].root, operators[-1].root
    return (operators[-1].root,)


def operand_mismatch(nodes: Sequence[fx.Node | None], norm: Operator | None = None) -> str:
    """Return why tensors are not what the operators take, or "".

    Tensors are plain, of one dtype and one device; the weight and bias of a norm are vectors.
    """
    nodes = [*nodes, *([norm.weight, norm.bias] if norm is not None else [])]
    values = [fake_value(node) for node in nodes if node is not None]
    if any(value is None for value in values):
        return "an operand is no tensor"
    tensors = [value for value in values if value is not None]
    kinds = {type(value) for value in tensors} - {FakeTensor, Tensor, torch.nn.Parameter}
    if kinds:
        return f"an operand is a {', '.join(kind.__name__ for kind in kinds)}"
    dtypes = {value.dtype for value in tensors}
    if len(dtypes) > 1:
        return f"dtypes differ: {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
    if not dtypes <= _DTYPES:
        return f"{dtypes.pop()} is not served"
    if len({value.device for value in tensors}) > 1:
        return "operands lie on different devices"
    if norm is not None:
        width = fake_value(norm.root)
        assert width is not None
        for node in (norm.weight, norm.bias):
            vector = fake_value(node)
            if vector is not None and not same_size(vector.shape, width.shape[-1:]):
                return "the norm's weight is not one vector"
    return ""
