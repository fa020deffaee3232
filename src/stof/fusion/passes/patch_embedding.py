"""Patch embeddings as GEMMs: a convolution whose patches do not overlap reads each value once, as a matrix does.

Vision Transformers begin with one, and read its result as `[B, patches, channels]`. As a convolution of three channels
it fits tensor cores badly, and cuDNN turns its operands around first; as a GEMM it is one of many.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from stof.fusion.graph.fx_utils import fake_mode_of
from stof.fusion.graph.nodes import argument, fake_value, op_name
from stof.fusion.graph.symbolic_shapes import is_symbolic
from stof.runtime.private import fake_context

Patches = list[tuple[fx.Node, tuple[int, int]]]


def patch_embeddings(graph: fx.Graph) -> Patches:
    """Convolutions that may become GEMMs, and the height and width of their patches.

    Those of images of a fixed size whose result is flattened to `[B, C, patches]` and not read as an image: what
    follows then reads the GEMM's result as it lies.
    """
    return [(node, patch) for node in graph.nodes if (patch := _patch(node)) is not None]


def channels_last(node: fx.Node) -> Tensor:
    """The fake value of a convolution's result with the channels last, as the GEMM writes them."""
    value = fake_value(node)
    assert value is not None
    batch, channels, *image = value.shape
    with fake_context(fake_mode_of(value)):
        product = value.new_empty((batch, prod(image), channels))
        return product.transpose(1, 2).unflatten(2, image)


def multiply_patches(graph: fx.Graph, embeddings: Patches) -> int:
    """Rewrite in place what `patch_embeddings` found; returns how many."""
    for node, (rows, columns) in embeddings:
        x, weight, bias = (argument(node, place, name) for place, name in enumerate(("input", "weight", "bias")))
        with graph.inserting_before(node):
            for dim, size in ((3, columns), (2, rows)):
                x = graph.call_method("unflatten", (x, dim, (-1, size)))
            x = graph.call_method("permute", (x, 0, 2, 4, 1, 3, 5))  # [B, rows, columns, C, height, width]
            patches = graph.call_method("flatten", (graph.call_method("flatten", (x, 3)), 1, 2))
            flat = graph.call_method("flatten", (weight, 1))
            product = graph.call_function(F.linear, (patches, flat, bias))
            value = fake_value(node)
            assert value is not None
            turned = graph.call_method("transpose", (product, 1, 2))
            image = graph.call_method("unflatten", (turned, 2, tuple(int(size) for size in value.shape[2:])))
        node.replace_all_uses_with(image)
        graph.erase_node(node)
    return len(embeddings)


def _patch(node: fx.Node) -> tuple[int, int] | None:
    """Height and width of the patches, None for what is no such convolution."""
    if op_name(node) != "conv2d":
        return None
    x, weight, out = (fake_value(one) for one in (argument(node, 0, "input"), argument(node, 1, "weight"), node))
    if x is None or weight is None or x.ndim != 4 or is_symbolic((*x.shape[1:], *weight.shape)):
        return None
    # In 32 bits, convolutions and GEMMs are rounded by settings of their own (TF32).
    if out is None or out.dtype not in (torch.float16, torch.bfloat16):
        return None
    patch = int(weight.shape[2]), int(weight.shape[3])
    apart = _pair(argument(node, 3, "stride", 1)) == patch
    plain = _pair(argument(node, 4, "padding", 0)) in ((0, 0), ("valid", "valid"))
    plain &= _pair(argument(node, 5, "dilation", 1)) == (1, 1) and argument(node, 6, "groups", 1) == 1
    whole = x.shape[2] % patch[0] == 0 and x.shape[3] % patch[1] == 0
    flattened = bool(node.users) and all(_flattens(user) for user in node.users)
    return patch if apart and plain and whole and flattened and min(patch) > 1 else None


def _flattens(node: fx.Node) -> bool:
    """Whether rows and columns become one dimension."""
    first, last = argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1)
    return op_name(node) == "flatten" and first in (2, -2) and last in (3, -1)


def _pair(given: Any) -> tuple[Any, ...]:
    pair = tuple(given) if isinstance(given, list | tuple) else (given,)
    return pair * 2 if len(pair) == 1 else pair
