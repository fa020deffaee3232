"""Weights of 8-bit values with a factor for each column of the result, as plain PyTorch writes weight-only quantising.

`F.linear(x, values.to(x.dtype) * scale[:, None], bias)`, or with the GEMM first, `F.linear(x, values.to(x.dtype)) *
scale + bias`. Tensor subclasses (torchao's) hide this from the graph; GEMMs with those are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stof.fusion.graph.nodes import argument, fake_value, is_cast, op_name, same_size, source_of

# Dtypes of quantized values that the kernels read.
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
_CASTS = ("to", "float", "half", "bfloat16", "double", "type_as", "type")
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """What a GEMM's weight is made of.

    Attributes:
        values: `[N, K]` of a dtype in `QUANTIZED_DTYPES`.
        scale: `[N]` or `[N, 1]`, floating.
        nodes: those between `values` and what reads the weight, which nothing else reads.
        scale_after_matmul: the GEMM's result is scaled, not the weight.
    """

    values: fx.Node
    scale: fx.Node
    nodes: frozenset[fx.Node]
    scale_after_matmul: bool


def quantised_weight(weight: fx.Node) -> QuantizedWeight | None:
    """What a weight `[N, K]` is made of, if that is 8-bit values and a factor for each row."""
    inside: set[fx.Node] = set()
    node = weight
    while is_cast(node) and _alone(node) and _is_wide(node):
        inside.add(node)
        node = source_of(node)
    if not _alone(node) or not _is_wide(node):
        return None
    for widened, scale in _factors(node):
        values = _values(widened, inside)
        if values is not None and _is_vector(scale, values, column=True):
            return QuantizedWeight(values, scale, frozenset({*inside, node}), scale_after_matmul=False)
    return None


def scaled_product(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, QuantizedWeight] | None:
    """`(x, weight, bias, quantized)` of `x @ values.T * scale` and `... + bias`; weight are the widened values."""
    inside: set[fx.Node] = {node}
    bias: fx.Node | None = None
    if op_name(node) == "add" and len(node.args) == 2 and not node.kwargs:
        for scaled, vector in (node.args, node.args[::-1]):
            if op_name(scaled) == "mul" and _alone(scaled) and isinstance(vector, fx.Node):
                found = _scaled(scaled, inside)  # type: ignore[arg-type]
                bias = vector
                break
        else:
            return None
    else:
        found = _scaled(node, inside)
    if found is None or (bias is not None and not _is_vector(bias, found[2], column=False)):
        return None
    x, weight, values, scale = found
    return x, weight, bias, QuantizedWeight(values, scale, frozenset(inside), scale_after_matmul=True)


def _scaled(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """`(x, weight, values, scale)` of a GEMM times a vector; what lies between joins `inside`."""
    for product, scale in _factors(node):
        x, weight = argument(product, 0, "input"), argument(product, 1, "weight")
        if op_name(product) != "linear" or not _alone(product) or argument(product, 2, "bias") is not None:
            continue
        own = {node, product}
        values, before, after = _values(weight, own), fake_value(x), fake_value(node)
        if values is None or values is weight or not _is_vector(scale, values, column=False):
            continue
        if before is not None and after is not None and before.dtype == after.dtype:
            inside |= own
            return x, weight, values, scale
    return None


def _factors(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Both operands of a multiplication of tensors, in either order; none for anything else."""
    a, b = node.args if op_name(node) == "mul" and len(node.args) == 2 and not node.kwargs else (None, None)
    return [(a, b), (b, a)] if isinstance(a, fx.Node) and isinstance(b, fx.Node) else []


def _values(node: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    """The 8-bit tensor that a node is, or is widened from; the widening joins `inside`."""
    value = fake_value(node)
    if value is not None and value.dtype in QUANTIZED_DTYPES:
        return node if value.dim() == 2 else None
    if op_name(node) not in _CASTS or not _alone(node) or not _is_wide(node):
        return None
    source: fx.Node = source_of(node)
    before = fake_value(source)
    if before is None or value is None or before.dim() != 2:
        return None
    if before.dtype not in QUANTIZED_DTYPES or before.device != value.device:
        return None
    inside.add(node)
    return source


def _alone(node: Any) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


def _is_wide(node: Any) -> bool:
    value = fake_value(node)
    return value is not None and value.dtype in _WIDE


def _is_vector(node: Any, values: fx.Node, *, column: bool) -> bool:
    """Whether a node has one entry for each row of `values`: `[N, 1]` as a column, else `[N]`."""
    value, weight = fake_value(node), fake_value(values)
    if value is None or weight is None or value.dtype not in _WIDE:
        return False
    return same_size(value.shape, (weight.shape[0], 1) if column else (weight.shape[0],))
