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
from stof.kernels.hopper.jobs import BIAS_STEP, has_tiles, may_have_tiles
from stof.selection import IMPLEMENTATIONS
from stof.selection.model import DECODE_ROWS

# Bytes of a bias that is given, which something has to copy in each call: with a large one of which few scores are
# kept, another kernel may be faster, and each call chooses.
_MOST_GIVEN = 2**26


def scattered_biases(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Biases that TMA cannot read as they lie, and the attention that reads each."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if name_of(node) == "stof.masked_attention" and _scattered(node):
            found.setdefault(argument(node, 4, "bias"), []).append(node)
    return {bias: nodes for bias, nodes in found.items() if not _written(graph, bias, nodes)}


def _written(graph: fx.Graph, bias: fx.Node, nodes: list[fx.Node]) -> bool:
    """Whether something is written to a tensor from where a bias is made to where it is read last."""
    order = GraphOrder(graph)
    places = [order.place[node] for node in (bias, *nodes)]
    return order.writes_between(min(places), max(places))


def lay_out_biases(graph: fx.Graph, found: dict[fx.Node, list[fx.Node]]) -> int:
    """Rewrite in place what `scattered_biases` found; returns how many."""
    for bias, nodes in found.items():
        value = value_of(bias)
        assert value is not None
        keys = int(value.shape[3])
        after = bias if bias.op != "placeholder" else [node for node in graph.nodes if node.op == "placeholder"][-1]
        with graph.inserting_before(after.next):
            laid = bias
            # What strides of 0 share is copied once.
            shared = [dim for dim in range(3) if value.stride(dim) == 0 and value.shape[dim] > 1]
            for dim in shared:
                laid = graph.call_method("narrow", (laid, dim, 0, 1))
            laid = graph.call_function(torch.clone, (laid,), {"memory_format": torch.contiguous_format})
            if keys % BIAS_STEP:
                laid = graph.call_function(F.pad, (laid, (0, -keys % BIAS_STEP)))
                laid = graph.call_method("narrow", (laid, 3, 0, keys))
            if shared:
                laid = graph.call_method("expand", (laid, *map(int, value.shape)))
        for node in nodes:
            node.replace_input_with(bias, laid)
    return len(found)


def _scattered(node: fx.Node) -> bool:
    """Whether the Hopper kernel might serve this attention, and would copy its bias."""
    q, k, bias = (argument(node, place, name) for place, name in ((0, "q"), (1, "k"), (4, "bias")))
    queries, keys, value = value_of(q), value_of(k), value_of(bias)
    kernel = IMPLEMENTATIONS["hopper"].capabilities
    if queries is None or keys is None or value is None or not {queries.dtype, value.dtype} <= set(kernel.dtypes):
        return False
    if not _for_hopper(value) or argument(node, 8, "implementation", "") not in ("", "hopper"):
        return False
    lengths = queries.shape[2], keys.shape[2]
    # Nothing may ask what a size is that the graph leaves open: it would be fixed.
    if is_symbolic((*value.shape, *value.stride(), *lengths, queries.shape[3])):
        return False
    sizes = int(lengths[0]), int(lengths[1])
    served = sizes[0] > DECODE_ROWS and queries.shape[3] <= kernel.head_dims[1]
    given = bias.op == "placeholder" and value.numel() * value.element_size() > _MOST_GIVEN
    return served and not given and may_have_tiles(value, *sizes) and not has_tiles(value, *sizes)


def _for_hopper(bias: Tensor) -> bool:
    generation = IMPLEMENTATIONS["hopper"].capabilities.compute_capability
    return bias.device.type == "cuda" and torch.cuda.get_device_capability(bias.device) == generation
