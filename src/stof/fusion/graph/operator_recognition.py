"""Dynamo graph -> sequence of operators, found by structure.

Roots are looked at from the last to the first, so that what is spelled out in many nodes is recognized before its parts
are. What nothing recognizes is an operator of kind OTHER if it computes floating-point values, else (views, index and
mask arithmetic) no operator at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from stof.fusion.graph import pattern_matcher
from stof.fusion.graph.nodes import (
    argument,
    column_slice,
    fake_value,
    is_floating,
    is_identity,
    is_row_view,
    is_view,
    op_name,
    same_size,
    scalar_value,
    source_of,
)
from stof.fusion.graph.operators import ATTENTION_OPERATORS, Kind, Operator

_ATTENTION = {"scaled_dot_product_attention", "stof.attention", *ATTENTION_OPERATORS, "flex_attention"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "mm", "addmm"}
_SPLITS = {"chunk", "split", "unbind"}


def recognize_operators(graph: fx.Graph) -> list[Operator]:
    """The operators of a Dynamo graph in graph order; each node belongs to one operator at most.

    Nodes need `meta["example_value"]`, as Dynamo leaves it.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    operators: list[Operator] = []
    for node in reversed(graph.nodes):
        if node.op not in ("call_function", "call_method") or node in taken:
            continue
        operator = _recognise(node, order, taken)
        if operator is not None:
            taken.update(operator.nodes)
            operators.append(operator)
    return sorted(operators, key=lambda operator: order[operator.root])


def _recognise(node: fx.Node, order: dict[fx.Node, int], taken: set[fx.Node]) -> Operator | None:
    if not is_floating(node) and not _is_attention(node):
        return None
    for rule in _RULES:
        operator = rule(node, order)
        if operator is not None and taken.isdisjoint(operator.nodes):
            return operator
    if is_view(node) or op_name(node) in _SPLITS:
        return None
    kind = Kind.MATMUL if op_name(node) in _PRODUCTS else Kind.OTHER
    reads = tuple(source for source in node.all_input_nodes if is_floating(source))
    return Operator(kind, node, (node,), reads)


def _is_attention(node: fx.Node) -> bool:
    return op_name(node) in _ATTENTION


def _attention(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    if not _is_attention(node):
        return None
    return Operator(Kind.ATTENTION, node, (node,), tuple(s for s in node.all_input_nodes if is_floating(s)))


def _linear(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    """`linear`, `addmm` (GPT-2 keeps weights as `[K, N]`) and `x @ weight`, with views of rows on either side."""
    inside = {node}
    product = node
    if is_row_view(node):
        product = source_of(node)
        if len(product.users) != 1:
            return None
        inside.add(product)
    read = _product(product, inside)
    if read is None:
        return None
    x, weight, bias, transposed = read
    weight_value, bias_value, out = fake_value(weight), fake_value(bias), fake_value(node)
    if weight_value is None or weight_value.dim() != 2 or out is None:
        return None
    if bias is not None and (bias_value is None or bias_value.dim() != 1):
        return None
    width = weight_value.shape[1 if transposed else 0]
    if bias_value is not None and not same_size(bias_value.shape, (width,)):
        return None
    viewed = x
    if is_row_view(x) and all(user in inside for user in x.users):
        viewed = source_of(x)
    for source in (viewed, x):
        value = fake_value(source)
        if value is not None and same_size((*value.shape[:-1], width), out.shape):
            inside |= {x} if source is not x else set()
            nodes = _ordered(inside, order)
            return Operator(Kind.LINEAR, node, nodes, (source,), weight, bias, transposed)
    return None


def _product(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """`(x, weight, bias, transposed)` of a GEMM with a 2-D weight, or of a bias added to one."""
    name = op_name(node)
    read: tuple[Any, ...] | None = None
    if name == "linear":
        read = (argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias"), False)
    elif name == "addmm" and not node.kwargs:
        read = (node.args[1], node.args[2], node.args[0], True)
    elif name == "matmul" and len(node.args) == 2 and getattr(node.args[1], "op", "") in ("placeholder", "get_attr"):
        read = (node.args[0], node.args[1], None, True)
    elif name == "add" and len(node.args) == 2 and not node.kwargs:
        for whole, vector in (node.args, node.args[::-1]):
            inner = _product(whole, inside) if op_name(whole) in ("linear", "matmul") else None  # type: ignore[arg-type]
            flat = fake_value(vector)
            if inner is not None and inner[2] is None and flat is not None and flat.dim() == 1:
                assert isinstance(whole, fx.Node)
                if len(whole.users) == 1:
                    inside.add(whole)
                    return inner[0], inner[1], vector, inner[3]  # type: ignore[return-value]
    if read is None or not isinstance(read[0], fx.Node) or not isinstance(read[1], fx.Node):
        return None
    return read


def _norm(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    name = op_name(node)
    if name in ("layer_norm", "rms_norm"):
        x, weight = argument(node, 0, "input"), argument(node, 2, "weight")
        shape = argument(node, 1, "normalized_shape")
        eps = scalar_value(
            argument(node, 4 if name == "layer_norm" else 3, "eps", 1e-5 if name == "layer_norm" else None)
        )
        if not isinstance(shape, tuple | list) or len(shape) != 1 or not isinstance(x, fx.Node) or eps is None:
            return None
        kind = Kind.LAYER_NORM if name == "layer_norm" else Kind.RMS_NORM
        bias = argument(node, 3, "bias") if name == "layer_norm" else None
        return Operator(kind, node, (node,), (x,), weight, bias, eps=eps)
    if name != "mul":
        return None
    for pattern in (pattern_matcher.RMS_NORM, pattern_matcher.RMS_NORM_PLAIN):
        match = pattern_matcher.find(pattern, node)
        if match is None:
            continue
        x, weight = match.bound["x"], match.bound.get("weight")
        before, after, scale = fake_value(x), fake_value(node), fake_value(weight)
        if before is None or after is None or before.dtype != after.dtype:
            continue
        if scale is not None and not same_size(scale.shape, before.shape[-1:]):
            continue
        return Operator(Kind.RMS_NORM, node, _ordered(match.nodes, order), (x,), weight, eps=match.bound["eps"])
    return None


def activation_of(node: object) -> tuple[str, fx.Node] | None:
    """`(name, input)` when a node is one call of a known activation."""
    name = op_name(node)
    if name not in ("gelu", "relu", "silu"):
        return None
    assert isinstance(node, fx.Node)
    x = argument(node, 0, "input")
    if name == "gelu" and argument(node, 1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    return (name, x) if isinstance(x, fx.Node) else None


def _spelled_activation(node: fx.Node) -> tuple[str, fx.Node, Iterable[fx.Node]] | None:
    plain = activation_of(node)
    if plain is not None:
        return (*plain, (node,))
    if op_name(node) != "mul":
        return None
    for name, pattern in (("gelu_tanh", pattern_matcher.GELU_TANH), ("gelu", pattern_matcher.GELU_ERF)):
        match = pattern_matcher.find(pattern, node)
        if match is not None:
            return name, match.bound["x"], match.nodes
    return None


def _activation(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    spelled = _spelled_activation(node)
    if spelled is None:
        return None
    name, x, nodes = spelled
    return Operator(Kind.ACTIVATION, node, _ordered(nodes, order), (x,), activation=name)


def _gate(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    """`act(a) * b` (Shazeer 2020), with slices of one tensor taken in."""
    if op_name(node) != "mul" or len(node.args) != 2:
        return None
    for acted, up in (node.args, node.args[::-1]):
        if not isinstance(acted, fx.Node) or not isinstance(up, fx.Node) or len(acted.users) != 1:
            continue
        spelled = _spelled_activation(acted)
        left, right = fake_value(acted), fake_value(up)
        if spelled is None or left is None or right is None or not same_size(left.shape, right.shape):
            continue
        name, gate, nodes = spelled
        inside = {node, *nodes}
        if gate is up:  # x * act(x) is no gate of two projections
            continue
        for part in (gate, up):
            if column_slice(part) is not None and all(user in inside for user in part.users):
                inside.add(part)
        for part in [part for part in inside if op_name(part) == "getitem"]:
            split = part.args[0]
            if isinstance(split, fx.Node) and op_name(split) in _SPLITS and all(u in inside for u in split.users):
                inside.add(split)
        return Operator(Kind.GATE, node, _ordered(inside, order), (gate, up), activation=name)
    return None


def _rotary(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    """Rotary position embedding with the halves of each head rotated against each other."""
    if op_name(node) != "add":
        return None
    match = pattern_matcher.find(pattern_matcher.ROTARY, node)
    if match is None:
        return None
    x, cos, rotated, sin = (match.bound[name] for name in ("x", "cos", "rotated", "sin"))
    # `mul` matches in either order: find which operands are x and its rotation.
    for one, table, turned, other in ((x, cos, rotated, sin), (cos, x, rotated, sin), (x, cos, sin, rotated),
                                      (cos, x, sin, rotated), (rotated, sin, x, cos), (rotated, sin, cos, x),
                                      (sin, rotated, x, cos), (sin, rotated, cos, x)):  # fmt: skip
        parts = _rotation(turned, one)
        if parts is not None:
            return Operator(Kind.ROTARY, node, _ordered({*match.nodes, *parts}, order), (one, table, other))
    return None


def _rotation(node: fx.Node, x: fx.Node) -> set[fx.Node] | None:
    """The nodes of `cat((-x[..., half:], x[..., :half]), -1)`; None when `node` is something else."""
    if op_name(node) != "cat" or len(node.users) != 1:
        return None
    pieces, value = argument(node, 0, "tensors"), fake_value(node)
    if value is None or argument(node, 1, "dim", 0) not in (-1, value.dim() - 1) or len(pieces) != 2:
        return None
    negative, first = pieces
    if op_name(negative) != "neg":
        return None
    second = source_of(negative)
    low, high, half = column_slice(first), column_slice(second), value.shape[-1] // 2
    if low is None or high is None or low != (x, 0, half) or high != (x, half, 2 * half):
        return None
    return {node, negative} | {part for part in (first, second) if len(part.users) == 1}


def _residual(node: fx.Node, order: dict[fx.Node, int]) -> Operator | None:
    """A sum of two tensors of the same shape and dtype; identities (dropout) on the way in belong to it."""
    if op_name(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    out = fake_value(node)
    inside, inputs = {node}, []
    for operand in node.args:
        value = fake_value(operand)
        if value is None or out is None or value.dtype != out.dtype or not same_size(value.shape, out.shape):
            return None
        # What others read as well stays outside: the sum then reads it, not what it was made from.
        while is_identity(operand) and isinstance(operand, fx.Node) and len(operand.users) == 1:
            inside.add(operand)
            operand = source_of(operand)
        assert isinstance(operand, fx.Node)
        inputs.append(operand)
    return Operator(Kind.RESIDUAL, node, _ordered(inside, order), tuple(inputs))


def _ordered(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    return tuple(sorted(nodes, key=order.__getitem__))


_Rule = Callable[[fx.Node, dict[fx.Node, int]], Operator | None]
_RULES: tuple[_Rule, ...] = (_attention, _linear, _norm, _gate, _activation, _rotary, _residual)
