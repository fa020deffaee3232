"""Biases of attention are laid out for the kernel where they are made, once for all layers that share one.

T5 looks its relative positions up with the heads last. A call of the Hopper kernel copies what TMA cannot read, each
layer by itself; in a graph, Inductor writes the values in the right order to begin with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from stof.fusion.lower import GraphOrder
from stof.fusion.nodes import argument, name_of, value_of
from stof.fusion.sizes import is_symbolic
from stof.kernels.hopper.jobs import has_tiles, may_have_tiles

_MULTIPLE = 8  # 16 bytes of 16-bit values


def lay_out_biases(graph: fx.Graph) -> int:
    """Rewrite in place; returns how many biases there are now in rows that TMA can copy tiles of."""
    order, readers = GraphOrder(graph), _readers(graph)
    for bias, nodes in readers.items():
        places = [order.place[node] for node in (bias, *nodes)]
        if order.writes_between(min(places), max(places)):
            continue
        after = bias if bias.op != "placeholder" else [node for node in graph.nodes if node.op == "placeholder"][-1]
        with graph.inserting_before(after.next):
            value = value_of(bias)
            assert value is not None
            keys = int(value.shape[3])
            laid = graph.call_function(torch.clone, (bias,), {"memory_format": torch.contiguous_format})
            if keys % _MULTIPLE:
                laid = graph.call_function(F.pad, (laid, (0, -keys % _MULTIPLE)))
                laid = graph.call_method("narrow", (laid, 3, 0, keys))
        for node in nodes:
            node.replace_input_with(bias, laid)
    return len(readers)


def _readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The attention that reads each bias which the kernel would copy."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if name_of(node) != "stof.masked_attention":
            continue
        q, k, bias = (argument(node, place, name) for place, name in ((0, "q"), (1, "k"), (4, "bias")))
        queries, keys, value = value_of(q), value_of(k), value_of(bias)
        if queries is None or keys is None or value is None or is_symbolic((*value.shape, *value.stride())):
            continue
        sizes = int(queries.shape[2]), int(keys.shape[2])
        if _for_hopper(value) and may_have_tiles(value, *sizes) and not has_tiles(value, *sizes):
            found.setdefault(bias, []).append(node)
    return found


def _for_hopper(bias: Tensor) -> bool:
    return bias.device.type == "cuda" and torch.cuda.get_device_capability(bias.device) == (9, 0)
