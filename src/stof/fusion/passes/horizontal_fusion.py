"""GEMMs of one tensor with rows of one packed weight become one GEMM, and slices of its result."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

from torch import fx

from stof.fusion.graph.fx_utils import insert_call
from stof.fusion.graph.mutations import GraphOrder
from stof.fusion.graph.nodes import argument, fake_value, op_name


@dataclass(frozen=True, eq=False)
class _Part:
    """One GEMM with rows `start .. stop - 1` of `weight` (and `bias`)."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    start: int
    stop: int


def merge_gemms(graph: fx.Graph) -> int:
    """Merge GEMMs in place; return how many went into others. `passes.weight_packing` packs their weights before."""
    order = GraphOrder(graph)
    groups: dict[tuple[fx.Node, fx.Node, fx.Node | None], list[_Part]] = {}
    for node in graph.nodes:
        part = _part(node)
        if part is not None:
            groups.setdefault((part.x, part.weight, part.bias), []).append(part)
    merged = 0
    for parts in groups.values():
        for run in _runs(sorted(parts, key=lambda part: part.start)):
            places = [order.place[part.node] for part in run]
            if len(run) > 1 and not order.writes_between(min(places), max(places)):
                _merge(graph, run, min(run, key=lambda part: order.place[part.node]).node)
                merged += len(run) - 1
    return merged


def _part(node: fx.Node) -> _Part | None:
    if op_name(node) != "linear":
        return None
    x, weight, bias = argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")
    rows = _rows(weight)
    if rows is None or not isinstance(x, fx.Node):
        return None
    if bias is None:
        return _Part(node, x, rows[0], None, rows[1], rows[2])
    entries = _rows(bias)
    if entries is None or entries[1:] != rows[1:]:
        return None
    return _Part(node, x, rows[0], entries[0], rows[1], rows[2])


def _rows(node: object) -> tuple[fx.Node, int, int] | None:
    """`(source, start, stop)` when a node is `parameter[start:stop]`."""
    if op_name(node) != "getitem":
        return None
    assert isinstance(node, fx.Node)
    source, index = node.args
    whole = fake_value(source)
    if not isinstance(source, fx.Node) or source.op not in ("placeholder", "get_attr") or whole is None:
        return None
    if not isinstance(index, slice) or not isinstance(whole.shape[0], int):
        return None
    start, stop, step = index.indices(whole.shape[0])
    return (source, start, stop) if step == 1 and start < stop else None


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    """Parts whose rows follow each other."""
    runs: list[list[_Part]] = []
    for part in parts:
        if runs and runs[-1][-1].stop == part.start:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _merge(graph: fx.Graph, run: list[_Part], spot: fx.Node) -> None:
    first, start, stop = run[0], run[0].start, run[-1].stop
    with graph.inserting_before(spot):
        operands = []
        for source in (first.weight, first.bias):
            whole = fake_value(source)
            if source is not None and whole is not None and (start, stop) != (0, whole.shape[0]):
                source = insert_call(graph, spot, "call_function", getitem, (source, slice(start, stop)))
            operands.append(source)
        product = insert_call(graph, spot, "call_function", spot.target, (first.x, *operands))
        for part in run:
            columns = (Ellipsis, slice(part.start - start, part.stop - start))
            piece = insert_call(graph, spot, "call_function", getitem, (product, columns))
            part.node.replace_all_uses_with(piece)
    for part in run:
        rows = (argument(part.node, 1, "weight"), argument(part.node, 2, "bias"))
        graph.erase_node(part.node)
        for node in rows:
            if isinstance(node, fx.Node) and not node.users:
                graph.erase_node(node)
