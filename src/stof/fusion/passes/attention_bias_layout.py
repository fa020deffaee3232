"""Biases of attention are laid out for the kernels where they are made, once for all layers that share one.

T5 looks its relative positions up with the heads last. A call of the Hopper kernel copies what TMA cannot read, each
layer by itself, and Triton's kernel reads it value by value; in a graph, Inductor writes the values in the right order
to begin with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.nodes import argument, fake_value, op_name
from stof.fusion.graph.operators import ATTENTION_OPERATORS
from stof.fusion.graph.symbolic_shapes import is_symbolic
from stof.kernels.tma_bias import BIAS_STEP, has_aligned_rows, may_be_tma_readable
from stof.selection import IMPLEMENTATIONS, CallSpec
from stof.selection.capabilities import DECODE_ROWS
from stof.selection.implementations import GPU_FLOATS

# Bytes of a bias that is given, which something has to copy in each call: with a large one of which few scores are
# kept, another kernel may be faster, and each call chooses.
_MOST_GIVEN = 2**26


def unreadable_biases(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Biases that no kernel reads row by row as they lie, and the attention that reads each."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if op_name(node) in ATTENTION_OPERATORS and _scattered(node):
            readers.setdefault(argument(node, 4, "bias"), []).append(node)
    order = GraphOrder(graph)
    return {bias: nodes for bias, nodes in readers.items() if not order.writes_among((bias, *nodes))}


def materialize_biases(graph: fx.Graph, readers: dict[fx.Node, list[fx.Node]]) -> int:
    """Rewrite in place what `unreadable_biases` found; returns how many."""
    for bias, nodes in readers.items():
        value = fake_value(bias)
        assert value is not None
        keys = int(value.shape[3])
        after = bias if bias.op != "placeholder" else [node for node in graph.nodes if node.op == "placeholder"][-1]
        with graph.inserting_before(after.next):
            laid = bias
            # Elements that a stride of 0 repeats are copied once.
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
    return len(readers)


def _scattered(node: fx.Node) -> bool:
    """Whether a kernel that reads a bias in rows might serve this attention, and could not as it lies."""
    names = {0: "q", 1: "k", 2: "v", 4: "bias"}
    queries, keys, values, bias = (fake_value(argument(node, place, name)) for place, name in names.items())
    if queries is None or keys is None or values is None or bias is None:
        return False
    # Comparing a symbolic size would add a guard that fixes it.
    if is_symbolic((*bias.shape, *bias.stride(), *queries.shape, *keys.shape, *values.shape)):
        return False
    given = argument(node, 4, "bias").op == "placeholder" and bias.numel() * bias.element_size() > _MOST_GIVEN
    if given or has_aligned_rows(bias) or bias.shape[3] != keys.shape[2] or bias.shape[2] not in (1, queries.shape[2]):
        return False
    wanted = argument(node, 8, "implementation", "")
    call = _call(queries, keys, values, bias)
    return call is not None and any(
        wanted in ("", name) and not implementation.capabilities.refusals(call)
        # Kernels of tiles read a bias by TMA or in vectors of 16 bytes (`Work.bias_vectors`).
        for name, implementation in IMPLEMENTATIONS.items()
        if implementation.gpu is not None and not (implementation.gpu.by_rows or implementation.gpu.few_rows)
    )


def _call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> CallSpec | None:
    """What kernels are asked about; None where none of those that read rows serves."""
    capability = _capability(bias)
    if capability is None or q.shape[2] <= DECODE_ROWS or bias.dtype not in GPU_FLOATS:
        return None
    sizes = int(q.shape[2]), int(k.shape[2])
    return CallSpec(
        device="cuda",
        dtype=q.dtype,
        head_dim=int(q.shape[3]),
        value_dim=int(v.shape[3]),
        heads=int(q.shape[1]),
        kv_heads=int(k.shape[1]),
        has_bias=True,
        bias_itemsize=bias.itemsize,
        tiled_bias=may_be_tma_readable(bias, *sizes),
        batch=int(q.shape[0]),
        q_len=sizes[0],
        kv_len=sizes[1],
        compute_capability=capability,
    )


def _capability(bias: Tensor) -> tuple[int, int] | None:
    """The compute capability of the GPU that a tensor is on."""
    return torch.cuda.get_device_capability(bias.device) if bias.device.type == "cuda" else None
