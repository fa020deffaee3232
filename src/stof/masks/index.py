"""The coordinates a mask is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from stof.masks.bounds import Interval

Positions = TypeVar("Positions", Tensor, Interval)


@dataclass(frozen=True, eq=False)
class Index:
    """Coordinates of a rectangle of attention scores, ready for broadcasting.

    Attributes:
        b: batch indices, int64 `[B, 1, 1, 1]`.
        h: query-head indices, int64 `[1, H, 1, 1]`.
        q: query positions, int64 `[1, 1, Q, 1]` (any order, for permuted rows), or `[T, 1, Q, 1]` for T rectangles of
            one sequence and head.
        kv: key positions, int64 `[1, 1, 1, K]`, or `[T, 1, 1, K]`.
        q_len: number of queries of the whole attention problem.
        kv_len: number of keys of the whole attention problem.
    """

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor
    q_len: int
    kv_len: int

    @staticmethod
    def make(
        q: Tensor,
        kv: Tensor,
        *,
        q_len: int,
        kv_len: int,
        b: Tensor | None = None,
        h: Tensor | None = None,
    ) -> Index:
        """Build from 1-D index tensors (`b` and `h` default to the single index 0)."""
        zero = torch.zeros(1, dtype=torch.int64, device=q.device)
        b = zero if b is None else b
        h = zero if h is None else h
        return Index(b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), kv.view(1, 1, 1, -1), q_len, kv_len)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def shifted(self, rows: int, columns: int) -> Index:
        """The same rectangle with query positions moved by `rows`, and key positions by `columns`."""
        q_len, kv_len = self.q_len + rows, self.kv_len + columns
        return replace(self, q=self.q + rows, kv=self.kv + columns, q_len=q_len, kv_len=kv_len)

    def transposed(self) -> Index:
        """The rectangle of a transposed mask: the same positions, as keys and queries."""
        return replace(self, q=swapped(self.kv), kv=swapped(self.q), q_len=self.kv_len, kv_len=self.q_len)


def swapped(x: Positions) -> Positions:
    """What broadcasts to four dimensions, with the last two of them swapped."""
    if isinstance(x, Interval):
        return replace(x, low=swapped(x.low), high=swapped(x.high))
    return x[(None,) * (4 - x.ndim)].mT
