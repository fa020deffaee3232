"""Rotary embeddings of a GEMM's columns: whether they can be part of the GEMM.

Models cut query and key out of a GEMM's result, lay their heads side by side, and rotate them. A GEMM that
rotates those columns itself leaves only the cutting and the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from stof.fusion.graph.nodes import argument, column_slice, fake_value, op_name, same_size, source_of
from stof.fusion.graph.operators import Operator

# Widths of heads that kernels rotate, and the columns of a large GEMM's tile, of which rotated columns are a multiple.
HEAD_DIMS = (32, 64, 128)
COLUMNS = 128
_APART = ("view", "reshape", "unflatten")


@dataclass(frozen=True, eq=False)
class Rotations:
    """The first `turned` columns of a GEMM are heads of `head_dim` to be rotated by cos and sin.

    Attributes:
        cos, sin: tensors whose last two dimensions are positions and head_dim; rows of the GEMM repeat them.
        replaced_views: for each rotation's result the view of the GEMM that then has its values.
    """

    cos: fx.Node
    sin: fx.Node
    turned: int
    head_dim: int
    replaced_views: tuple[tuple[fx.Node, fx.Node], ...]


def rotations(linear: Operator, rotaries: Sequence[Operator]) -> Rotations | str:
    """How a GEMM can rotate its own columns, or why not."""
    pieces: list[tuple[int, int, int, Operator]] = []
    views: set[fx.Node] = set()
    for rotary in rotaries:
        matched = _piece(linear, rotary)
        if isinstance(matched, str):
            return matched
        start, stop, head_dim, chain = matched
        pieces.append((start, stop, head_dim, rotary))
        views |= chain
    pieces.sort(key=lambda piece: piece[:2])
    edges = [0, *(stop for _, stop, _, _ in pieces)]
    head_dim = pieces[0][2]
    if [start for start, _, _, _ in pieces] != edges[:-1] or any(piece[2] != head_dim for piece in pieces):
        return "what is rotated is not the first columns of the GEMM"
    if head_dim not in HEAD_DIMS or edges[-1] % COLUMNS:
        return f"heads of {head_dim} in {edges[-1]} columns are not rotated by a kernel"
    for user in column_readers(linear.root):
        cut = column_slice(user)
        if user not in views and (cut is None or cut[1] < edges[-1]):
            return "what is rotated is used without rotation as well"
    tables = [tuple(_table(rotary.inputs[i]) for i in (1, 2)) for rotary in rotaries]
    if any(pair != tables[0] for pair in tables):
        return "query and key are rotated by different angles"
    cos, sin = tables[0]
    return Rotations(cos, sin, edges[-1], head_dim, tuple((one.root, one.inputs[0]) for one in rotaries))


def column_readers(product: fx.Node) -> Iterator[fx.Node]:
    """What reads a GEMM; the parts of a split one by one."""
    for user in product.users:
        if op_name(user) in ("split", "chunk"):
            yield from user.users
        else:
            yield user


def _piece(linear: Operator, rotary: Operator) -> tuple[int, int, int, set[fx.Node]] | str:
    """First and last column (exclusive) of what is rotated, its heads' width, and the views it is seen through."""
    x, cos, sin = rotary.inputs
    heads = source_of(x) if op_name(x) in ("transpose", "swapaxes") else None
    piece = source_of(heads) if isinstance(heads, fx.Node) and op_name(heads) in _APART else None
    turned, apart, whole = fake_value(x), fake_value(heads), linear.value
    if heads is None or piece is None or turned is None or apart is None or turned.dim() != 4 or whole.dim() != 3:
        return "rotates something else than heads [B, H, S, D] of the GEMM"
    if {argument(x, 1, "dim0"), argument(x, 2, "dim1")} not in ({1, 2}, {-3, -2}):
        return "rotates something else than heads [B, H, S, D] of the GEMM"
    cut = (linear.root, 0, whole.shape[-1]) if piece is linear.root else column_slice(piece)
    count, head_dim = apart.shape[2:]
    if cut is None or cut[0] is not linear.root or not same_size(apart.shape[:2], whole.shape[:2]):
        return "rotates something else than columns of the GEMM"
    if not isinstance(count, int) or not isinstance(head_dim, int) or count * head_dim != cut[2] - cut[1]:
        return "rotates something else than columns of the GEMM"
    chain = {x, heads} if piece is linear.root else {x, heads, piece}
    if any(user not in chain and user not in rotary.nodes for node in chain for user in node.users):
        return "what is rotated is used without rotation as well"
    batch, length = whole.shape[:2]
    for table in (cos, sin):
        angles = fake_value(table)
        if angles is None or angles.dim() != 4 or angles.dtype != whole.dtype:
            return "angles are no tensor [B, 1, S, D] of the GEMM's dtype"
        one = same_size(angles.shape[:1], (1,)) or same_size(angles.shape[:1], (batch,))
        if not one or not same_size(angles.shape[1:], torch.Size((1, length, head_dim))):
            return "angles are not those of all heads alike"
    return cut[1], cut[2], head_dim, chain


def _table(node: fx.Node) -> fx.Node:
    """Return the table of angles without the dimensions of size 1 inserted after it; it precedes the GEMM."""
    while op_name(node) == "unsqueeze":
        node = source_of(node)
    return node
