"""A mask of queries and keys in another order: any permutation, or ranges of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError
from stof.masks.bounds import Interval, TileBounds
from stof.masks.compose import DEEPEST, Mask, Wrapped, placed
from stof.masks.index import Index
from stof.masks.snapshots import identity, snapshot

if TYPE_CHECKING:
    from stof.masks.index import Positions


@dataclass(frozen=True, eq=False, repr=False)
class Reordered(Wrapped):
    """Query `i` sees key `j` where query `rows[i]` of the inner mask sees key `columns[j]`."""

    rows: Tensor | None
    columns: Tensor | None

    allows_negative_queries = allows_negative_keys = False

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return ()  # those of the inner mask are for the order of its queries

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
class InRanges(Wrapped):
    """The inner mask for ranges of its queries and keys, in the order of these ranges; see `in_ranges`.

    Attributes:
        rows, columns: ranges of queries and of keys, `(first, end)`.
        q_len, kv_len: lengths of the inner mask.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    q_len: int
    kv_len: int

    deepest = DEEPEST + 1  # any mask that a user makes may be split over ranks
    allows_negative_queries = allows_negative_keys = grows = False

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return ()  # those of the inner mask are for the order of its queries

    @property
    def has_monotonic_ranges(self) -> bool:
        in_order = all(list(ranges) == sorted(ranges) for ranges in (self.rows, self.columns))
        return in_order and self.mask.has_monotonic_ranges

    def _of_inner(self, index: Index) -> Index:
        q, kv = _positions(index.q, self.rows, self.q_len), _positions(index.kv, self.columns, self.kv_len)
        return replace(index, q=q, kv=kv, q_len=self.q_len, kv_len=self.kv_len)

    def tile_bounds(self, index: Index) -> TileBounds:
        return self.mask.tile_bounds(self._of_inner(index))

    def check(self, q_len: int, kv_len: int) -> None:
        for name, ranges, length in (("queries", self.rows, q_len), ("keys", self.columns, kv_len)):
            if _count(ranges) != length:
                raise ShapeError(f"the mask has {_count(ranges)} {name}, in ranges; the call has {length}")
        self.mask.check(self.q_len, self.kv_len)

    def evaluate(self, index: Index) -> Tensor:
        return self.mask.evaluate(self._of_inner(index))

    def __repr__(self) -> str:
        ranges = f"{list(self.rows)}, {list(self.columns)}"
        return f"in_ranges({self.mask.key}, {ranges}, q_len={self.q_len}, kv_len={self.kv_len})"


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - first for first, stop in ranges)


def begins_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Where each range begins when they follow each other."""
    return [0, *accumulate(stop - first for first, stop in ranges[:-1])]


def _positions(at: Positions, ranges: Sequence[tuple[int, int]], length: int) -> Positions:
    """Map positions in the concatenated ranges to positions in the whole sequence, of `length` tokens."""
    begins = torch.tensor(begins_of(ranges), device=at.device)
    shifts = torch.tensor([first for first, _ in ranges], device=at.device) - begins
    if not isinstance(at, Interval):
        return at + shifts[torch.searchsorted(begins, at.contiguous(), right=True) - 1]
    number, last = (torch.searchsorted(begins, end.contiguous(), right=True) - 1 for end in (at.low, at.high))
    inside = number == last  # else they lie in several ranges, and may be anywhere in the sequence
    low = torch.where(inside, at.low + shifts[number], 0)
    high = torch.where(inside, at.high + shifts[number], length - 1)
    return replace(at, low=low, high=high)


def in_ranges(
    mask: Mask, rows: Sequence[tuple[int, int]], columns: Sequence[tuple[int, int]], q_len: int, kv_len: int
) -> Mask:
    """A mask for some of its queries and keys, in another order.

    Args:
        mask: of `q_len` queries and `kv_len` keys.
        rows, columns: ranges `(first, end)` of queries and of keys, none empty; the call has them in this order.
        q_len, kv_len: lengths of `mask`, not of the call.
    """
    rows, columns = joined(rows), joined(columns)
    if (rows, columns) == (((0, q_len),), ((0, kv_len),)):
        return mask
    if len(rows) == len(columns) == 1:
        return placed(mask, rows[0][0], columns[0][0], q_len=q_len, kv_len=kv_len)
    return InRanges(mask, rows, columns, q_len, kv_len)


def joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same positions, with ranges joined that follow each other."""
    out = [ranges[0]]
    for first, stop in ranges[1:]:
        if first == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((first, stop))
    return tuple(out)
