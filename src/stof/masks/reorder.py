"""A mask of queries and keys that were put into another order, and of some ranges of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError
from stof.masks.bounds import Range, TileBounds
from stof.masks.compose import Mask, Wrapped, placed
from stof.masks.index import Index
from stof.masks.snapshots import identity, snapshot

if TYPE_CHECKING:
    from stof.masks.index import Positions


@dataclass(frozen=True, eq=False, repr=False)
class Reordered(Wrapped):
    """Kept where the inner mask keeps the original positions."""

    rows: Tensor | None
    columns: Tensor | None

    allows_negative_queries = allows_negative_keys = False

    @property
    def row_orders(self) -> tuple[str, ...]:
        return ()  # those of the inner mask are for its own order

    def check(self, q_len: int, kv_len: int) -> None:
        for name, order, length in (("q_len", self.rows, q_len), ("kv_len", self.columns, kv_len)):
            if order is not None and len(order) != length:
                raise ShapeError(f"the mask reorders {len(order)} positions, the call has {name} {length}")
        self.mask.check(q_len, kv_len)

    def evaluate(self, index: Index) -> Tensor:
        q = index.q if self.rows is None else self.rows.to(index.device)[index.q]
        kv = index.kv if self.columns is None else self.columns.to(index.device)[index.kv]
        return self.mask.evaluate(replace(index, q=q, kv=kv))

    def __repr__(self) -> str:
        named = (("rows", self.rows), ("columns", self.columns))
        shown = [f"{name}=<#{identity(order)}>" for name, order in named if order is not None]
        return f"reordered({self.mask!r}, {', '.join(shown)})"


def reordered(mask: Mask, rows: Tensor | None = None, columns: Tensor | None = None) -> Mask:
    """The same mask for queries and keys in another order: position `i` holds query `rows[i]`, `j` key `columns[j]`.

    `attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], reordered(mask, rows, columns))` is
    `attention(q, k, v, mask)[:, :, rows]`. Scattered columns become contiguous tiles this way, which every kernel reads
    at its full speed, for one pass over the tensors; see `stof inspect --alternatives --reorder`.

    Args:
        mask: what to keep, by original positions.
        rows, columns: permutations, int64 `[q_len]` and `[kv_len]`; None keeps an order. Copied.

    Raises:
        MaskError: not a permutation.
    """
    for name, order in (("rows", rows), ("columns", columns)):
        if order is None:
            continue
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.ndim != 1 or len(order) == 0:
            got = f"{order.dtype} {list(order.shape)}" if isinstance(order, Tensor) else type(order).__name__
            raise MaskError(f"{name} of reordered() is an int64 tensor of one dimension, got {got}")
        if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise MaskError(f"{name} of reordered() is not a permutation of 0 .. {len(order) - 1}")
    if rows is None and columns is None:
        return mask
    return Reordered(mask, *(None if order is None else snapshot(order) for order in (rows, columns)))


@dataclass(frozen=True, eq=False, repr=False)
class RowRanges(Wrapped):
    """Some queries of the inner mask; see `row_ranges`.

    Attributes:
        ranges: of queries, `(first, end)`.
        q_len: queries of the inner mask.
    """

    ranges: tuple[tuple[int, int], ...]
    q_len: int

    allows_negative_queries = False
    grows = False
    row_orders = ()  # those of the inner mask are for all of its rows

    @property
    def has_monotonic_ranges(self) -> bool:
        return self.mask.has_monotonic_ranges

    def _position(self, query: Positions) -> Positions:
        """The inner mask's queries; those after the last one continue its range."""
        if isinstance(query, Range):  # positions ascend
            return replace(query, low=self._position(query.low), high=self._position(query.high))
        begins = torch.tensor([0, *accumulate(stop - first for first, stop in self.ranges[:-1])], device=query.device)
        shifts = torch.tensor([first for first, _ in self.ranges], device=query.device) - begins
        return query + shifts[torch.searchsorted(begins, query.contiguous(), right=True) - 1]

    def _moved(self, index: Index) -> Index:
        return replace(index, q=self._position(index.q), q_len=self.q_len)

    def tile_bounds(self, index: Index) -> TileBounds:
        return self.mask.tile_bounds(self._moved(index))

    def check(self, q_len: int, kv_len: int) -> None:
        rows = sum(stop - first for first, stop in self.ranges)
        if q_len != rows:
            raise ShapeError(f"the mask has {rows} queries, in ranges; the call has {q_len}")
        self.mask.check(self.q_len, kv_len)

    def evaluate(self, index: Index) -> Tensor:
        return self.mask.evaluate(self._moved(index))

    def __repr__(self) -> str:
        return f"row_ranges({self.mask.key}, {list(self.ranges)}, q_len={self.q_len})"


def row_ranges(mask: Mask, ranges: Sequence[tuple[int, int]], q_len: int) -> Mask:
    """Some queries of a mask of `q_len` queries, all keys.

    Args:
        ranges: `(first, end)` of queries, ascending and not empty.
    """
    if len(ranges) == 1:
        return placed(mask, ranges[0][0], q_len=q_len)
    return RowRanges(mask, tuple(ranges), q_len)
