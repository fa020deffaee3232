"""GEMMs of one tensor whose weights lie one after the other in memory become one GEMM, and slices of its result.

The graph still takes each weight as an input of its own. The first weight's input becomes the packed weight, a tensor
over the memory of all of them; `PackedCall` makes it of the weights of each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from stof.fusion.graph.fx_utils import fake_mode_of, insert_call
from stof.fusion.graph.mutations import GraphOrder, mutates, written
from stof.fusion.graph.nodes import argument, fake_value, op_name
from stof.fusion.graph.symbolic_shapes import is_symbolic
from stof.fusion.graph.visible_strides import storages, with_visible_strides
from stof.fusion.passes.weight_packing import PackedMemory
from stof.fusion.templates.folded_weights import note_sources
from stof.fusion.templates.gemm_config import ROW_SCALED
from stof.runtime.private import fake_context, storage_id

# In the `meta` of a placeholder: names of the placeholders whose tensors are packed in it, its own first, and shapes.
_PARTS = "packed_inputs"


@dataclass(frozen=True, eq=False)
class _Part:
    """One GEMM whose weight (and bias) are parameters of the graph."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def parameters(self) -> tuple[fx.Node, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def precedes(self, other: _Part) -> bool:
        """Whether the other's weight and bias follow this one's in memory."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return all(_value(b).storage_offset() == _value(a).storage_offset() + _value(a).numel() for a, b in pairs)


def merge_gemms(gm: fx.GraphModule) -> int:
    """Merge GEMMs in place; return how many went into others. `passes.weight_packing` packs their weights before.

    A GEMM stays as it is where the strides of its result may be seen (`visible_strides`) or its parameters are written.
    """
    order = GraphOrder(gm.graph)
    changed = {
        memory for node in gm.graph.nodes if mutates(node) for source in written(node) for memory in storages(source)
    }
    parts = [part for node in gm.graph.nodes if (part := _part(node, changed)) is not None]
    relaid = {node: piece for run in _runs(order, parts) for node, piece in _slices(run).items()}
    visible = with_visible_strides(gm, relaid)
    runs = _runs(order, [part for part in parts if part.node not in visible])
    sequences = dict.fromkeys(sequence for run in runs for sequence in _sequences(run))
    packed = _pack_inputs(gm.graph, list(sequences), {part.node for run in runs for part in run})
    for run in runs:
        spot = min((part.node for part in run), key=order.place.__getitem__)
        _merge(gm.graph, run, spot, [packed[sequence] for sequence in _sequences(run)])
    return sum(len(run) - 1 for run in runs)


def _part(node: fx.Node, written_memory: set[int]) -> _Part | None:
    if op_name(node) != "linear":
        return None
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    if not isinstance(x, fx.Node) or not all(one is None or _is_parameter(one) for one in (weight, bias)):
        return None
    part = _Part(node, x, weight, bias)
    values = [_value(one) for one in part.parameters]
    fits = [value.dim() for value in values] == [2, 1][: len(values)] and len({len(value) for value in values}) == 1
    return part if fits and not any(storages(one) & written_memory for one in part.parameters) else None


def _is_parameter(node: object) -> bool:
    """Whether a node is a parameter of fixed size that each call gives to the graph, or rows of a given tensor."""
    value = fake_value(node)
    if not isinstance(node, fx.Node) or value is None or value.layout is not torch.strided:
        return False
    is_input = _rows(node) is not None or (node.op == "placeholder" and isinstance(value, nn.Parameter))
    return is_input and not is_symbolic(value.shape) and value.is_contiguous() and len(value) > 0


def _rows(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """`(source, start, stop)` when a node is `source[start:stop]` of a tensor given to the graph."""
    if op_name(node) != "getitem":
        return None
    source, index = node.args
    whole = fake_value(source)
    if not isinstance(source, fx.Node) or source.op not in ("placeholder", "get_attr") or whole is None:
        return None
    if not isinstance(index, slice) or not isinstance(whole.shape[0], int):
        return None
    start, stop, step = index.indices(whole.shape[0])
    return (source, start, stop) if step == 1 else None


def _value(node: fx.Node) -> Tensor:
    value = fake_value(node)
    assert value is not None
    return value


def _runs(order: GraphOrder, parts: Iterable[_Part]) -> list[list[_Part]]:
    """Parts that can be one GEMM: of one tensor, with parameters that follow each other."""
    groups: dict[Any, list[_Part]] = {}
    for part in parts:
        groups.setdefault((part.x, *map(_memory, part.parameters)), []).append(part)
    runs: list[list[_Part]] = []
    for group in groups.values():
        group.sort(key=lambda part: _value(part.weight).storage_offset())
        runs.append([])
        for part in group:
            if runs[-1] and not runs[-1][-1].precedes(part):
                runs.append([])
            runs[-1].append(part)
    return [run for run in runs if len(run) > 1 and not order.writes_among(part.node for part in run)]


def _memory(node: fx.Node) -> tuple[Any, ...]:
    """What parameters of one GEMM have in common: memory, dtype, the size of a row, and what they are rows of."""
    value, rows = _value(node), _rows(node)
    return storage_id(value), value.dtype, value.shape[1:], rows and rows[0]


def _slices(run: list[_Part]) -> dict[fx.Node, Tensor]:
    """Fake values of the results of GEMMs that are one."""
    values = [_value(part.node) for part in run]
    with fake_context(fake_mode_of(values)):
        product = values[0].new_empty((*values[0].shape[:-1], sum(value.shape[-1] for value in values)))
        pieces = product.split([value.shape[-1] for value in values], dim=-1)
    return {part.node: piece for part, piece in zip(run, pieces, strict=True)}


def _sequences(run: list[_Part]) -> list[tuple[fx.Node, ...]]:
    """Weights that follow each other, and biases if there are any."""
    return list(zip(*(part.parameters for part in run), strict=True))


def _pack_inputs(
    graph: fx.Graph, sequences: list[tuple[fx.Node, ...]], merged: set[fx.Node]
) -> dict[tuple[fx.Node, ...], fx.Node]:
    """Let parameters that follow each other be one input of the graph; return the packed one of each sequence.

    The input of the first becomes the packed one: inputs keep their number, order and sources. Readers of the first
    alone, other than `merged` GEMMs, get its rows.
    """
    begin = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    packed = {sequence: _united(graph, begin, sequence) for sequence in sequences if _rows(sequence[0]) is not None}
    sequences = [sequence for sequence in sequences if sequence not in packed]
    longest = {sequence[0]: sequence for sequence in sorted(sequences, key=len)}
    for first, whole in longest.items():
        shapes = {one.name: _value(one).shape for one in whole}
        ends = list(accumulate(shape[0] for shape in shapes.values()))
        readers = [reader for reader in first.users if reader not in merged]
        with fake_context(fake_mode_of(_value(first))):
            first.meta["example_value"] = _value(first).new_empty((ends[-1], *_value(first).shape[1:]))
        first.meta[_PARTS] = shapes
        parts = [one for one in sequences if one[0] is first and one != whole] + [(first,)] * bool(readers)
        with graph.inserting_before(begin):
            for part in parts:
                index = slice(0, ends[len(part) - 1])
                packed[part] = insert_call(graph, first, "call_function", getitem, (first, index))
        packed[whole] = first
        for reader in readers:
            reader.replace_input_with(first, packed[first,])
    return packed


def _united(graph: fx.Graph, begin: fx.Node, sequence: tuple[fx.Node, ...]) -> fx.Node:
    """Rows of one tensor that follow each other, as one."""
    (source, start, _), (_, _, stop) = (rows for one in (sequence[0], sequence[-1]) if (rows := _rows(one)) is not None)
    if (start, stop) == (0, len(_value(source))):
        return source
    with graph.inserting_before(begin) if source.op == "placeholder" else graph.inserting_after(source):
        return insert_call(graph, sequence[0], "call_function", getitem, (source, slice(start, stop)))


def _merge(graph: fx.Graph, run: list[_Part], spot: fx.Node, operands: list[fx.Node]) -> None:
    with graph.inserting_before(spot):
        product = insert_call(graph, spot, "call_function", spot.target, (run[0].x, *operands))
        start = 0
        for part in run:
            stop = start + int(_value(part.node).shape[-1])
            columns = (Ellipsis, slice(start, stop))
            piece = insert_call(graph, part.node, "call_function", getitem, (product, columns))
            part.node.replace_all_uses_with(piece)
            start = stop
    for part in run:
        graph.erase_node(part.node)
        for node in part.parameters:
            if node.op != "placeholder" and not node.users:
                graph.erase_node(node)


def packed_examples(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Return example inputs of a graph with fake values for the packed ones."""
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    return [_value(node) if _PARTS in node.meta else value for node, value in zip(nodes, inputs, strict=True)]


def packed_call(graph: fx.Graph, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes the parameters Dynamo hands over, for a compiled graph that takes packed ones."""
    return PackedCall(graph, compiled) if any(_PARTS in node.meta for node in graph.nodes) else compiled


class PackedCall:
    """A compiled graph whose packed inputs are made of the parameters of each call.

    Where these do not lie one after the other, as after `layer.weight.data = ...`, they are copied together in each
    call: the result is right, the call slower.
    """

    def __init__(self, graph: fx.Graph, compiled: Callable[..., Any]) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        names = [node.name for node in inputs]
        self._compiled = compiled
        self._warned = False
        # Where the parts of each packed input are among the inputs, how they lie, and whether their product is kept.
        self._packed: list[tuple[list[int], PackedMemory, bool]] = []
        for node in inputs:
            shapes = node.meta.get(_PARTS)
            if shapes is not None:
                memory = PackedMemory.of(list(shapes.values()), _value(node).element_size())
                folds = any(op_name(user).removeprefix("stof.") in ROW_SCALED for user in node.users)
                self._packed.append(([names.index(name) for name in shapes], memory, folds))

    def __call__(self, *args: Any) -> Any:
        inputs = list(args)
        for places, memory, folds in self._packed:
            parts = [args[place] for place in places]
            packed = memory.view(parts)
            if packed is None:
                packed = self._copied(parts)
            if folds:
                note_sources(packed, parts)
            inputs[places[0]] = packed
        return self._compiled(*inputs)

    def _copied(self, parts: list[Tensor]) -> Tensor:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "weights that one GEMM reads do not lie together any more and are copied together in each call; "
                "stof.integrations.torch.pack_weights(model) packs them again",
                RuntimeWarning,
                stacklevel=3,
            )
        with torch.no_grad():
            return torch.cat(parts)
