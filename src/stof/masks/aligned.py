"""Documents whose queries and keys have lengths of their own: positions are aligned at the end of each document."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError, shown
from stof.masks import rules
from stof.masks.bounds import Interval, TileBounds
from stof.masks.compose import And, Mask, Not, Or, Placed, Wrapped
from stof.masks.index import Index
from stof.masks.per_head import PerHead
from stof.masks.position_tests import PositionTest

Lengths = tuple[int, ...]


class Runs(NamedTuple):
    """The documents as runs of queries and of keys; run n of both is of one document.

    Attributes:
        q_ends, kv_ends: where the runs end.
        ids: the document of each run, -1 for unused keys, of which there are as many runs without queries.
    """

    q_ends: list[int]
    kv_ends: list[int]
    ids: list[int]


@dataclass(frozen=True, eq=False, repr=False)
class AlignedDocuments(Wrapped):
    """A query sees the keys of its document as far as the inner mask keeps their distance; see `documents`.

    The last query of a document is as far along as its last used key. The inner mask looks at distances alone.

    Attributes:
        q_lengths, kv_lengths: queries and keys of each document.
        kv_used: the first so many keys of each document count.
    """

    q_lengths: Lengths
    kv_lengths: Lengths
    kv_used: Lengths

    allows_negative_queries = allows_negative_keys = grows = False
    varies = True
    positions_of_documents = True

    @property
    def has_monotonic_ranges(self) -> bool:
        return self.mask.has_monotonic_ranges

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return ()  # those of the inner mask are for positions in a document

    @functools.cached_property
    def runs(self) -> Runs:
        """The runs; without those of unused keys if all are used."""
        numbers = range(len(self.q_lengths))
        if self.kv_used == self.kv_lengths:
            return Runs(list(accumulate(self.q_lengths)), list(accumulate(self.kv_lengths)), list(numbers))
        q_parts = [part for length in self.q_lengths for part in (length, 0)]
        kv_parts = [
            part for length, used in zip(self.kv_lengths, self.kv_used, strict=True) for part in (used, length - used)
        ]
        return Runs(list(accumulate(q_parts)), list(accumulate(kv_parts)), [n for s in numbers for n in (s, -1)])

    @functools.cached_property
    def shifts(self) -> list[int]:
        """For each document, the position of its last used key less that of its last query."""
        kv_begins = accumulate(self.kv_lengths, initial=0)
        ends = zip(accumulate(self.q_lengths), kv_begins, self.kv_used, strict=False)
        return [begin + used - q_end for q_end, begin, used in ends]

    def check(self, q_len: int, kv_len: int) -> None:
        for name, lengths, length in (("queries", self.q_lengths, q_len), ("keys", self.kv_lengths, kv_len)):
            if sum(lengths) != length:
                raise ShapeError(f"the documents have {sum(lengths)} {name}, the call has {length}")

    def evaluate(self, index: Index) -> Tensor:
        (row, _), (column, _) = self._runs_at(index)
        keep = (row == column) & self._seen(index.device)[row]
        return keep & self.mask.evaluate(replace(index, q=index.q + self._shift_of_run(index.device)[row]))

    def tile_bounds(self, index: Index) -> TileBounds:
        (first, last), (left, right) = self._runs_at(index)
        seen = self._seen(index.device)
        one_row, one_column = first == last, left == right
        nothing = (last < left) | (right < first) | (one_row & ~seen[first]) | (one_column & ~seen[left])
        bounds = TileBounds(nothing, one_row & one_column & (first == left) & seen[first])
        shift, q = self._shift_of_run(index.device), Interval.of(index.q)
        low = torch.where(one_row, q.low + shift[first], self.aligned_range[0])
        high = torch.where(one_row, q.high + shift[last], self.aligned_range[1])
        return bounds & self.mask.tile_bounds(replace(index, q=Interval(low, high)))  # type: ignore[arg-type]

    @functools.cached_property
    def aligned_range(self) -> tuple[int, int]:
        """The first and the last position of a query that is aligned with the keys."""
        ends = [(end, n) for end, n in zip(accumulate(self.q_lengths), self.q_lengths, strict=True) if n]
        shifts = [shift for shift, n in zip(self.shifts, self.q_lengths, strict=True) if n]
        return (
            min(end - n + shift for (end, n), shift in zip(ends, shifts, strict=True)),
            max(end - 1 + shift for (end, _), shift in zip(ends, shifts, strict=True)),
        )

    def _runs_at(self, index: Index) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The runs of the first and last query, and of the first and last key."""

        def of(positions: Tensor | Interval, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
            table = torch.tensor(ends, device=index.device)
            if isinstance(positions, Tensor):
                run = torch.searchsorted(table, positions.contiguous(), right=True)
                return run, run
            low, high = (torch.searchsorted(table, x.contiguous(), right=True) for x in (positions.low, positions.high))
            return low, high

        return of(index.q, self.runs.q_ends), of(index.kv, self.runs.kv_ends)

    def _seen(self, device: torch.device) -> Tensor:
        """Bool `[runs + 1]`: whether each run is of a document. The last one is past the end."""
        return torch.tensor([*self.runs.ids, -1], device=device) >= 0

    def _shift_of_run(self, device: torch.device) -> Tensor:
        return torch.tensor([*(self.shifts[n] if n >= 0 else 0 for n in self.runs.ids), 0], device=device)

    def __repr__(self) -> str:
        q_ends, kv_ends = ([0, *accumulate(lengths)] for lengths in (self.q_lengths, self.kv_lengths))
        used = "" if self.kv_used == self.kv_lengths else f", kv_used={list(self.kv_used)}"
        within = "" if type(self.mask) is rules.Full else f", within={self.mask.key}"
        return f"documents(cu_seqlens={q_ends}, kv_cu_seqlens={kv_ends}{used}{within})"


def aligned_documents(q_lengths: Lengths, kv_lengths: Lengths, kv_used: Lengths, within: Mask) -> Mask:
    """The mask of documents with these queries, keys and used keys; `documents & within` where all three are equal.

    Args:
        q_lengths, kv_lengths, kv_used: one number for each document; some queries and some keys.
        within: a mask by distance.

    Raises:
        MaskError: `within` looks at more than distances.
    """
    other = not_by_distance(within)
    if other is not None:
        raise MaskError(
            f"within a document, masks keep keys by their distance from the query: causal, sliding_window, "
            f"dilated_window, and what & | ~ make of them; got {shown(other)}. Give other masks to stof.attention, by "
            "packed positions: masks.documents(ids) & masks.from_function(f)"
        )
    if not q_lengths == kv_lengths == kv_used:
        return AlignedDocuments(within, q_lengths, kv_lengths, kv_used)
    packed = rules.Documents((tuple(enumerate(filter(None, q_lengths))),))
    return packed if type(within) is rules.Full else packed & within


_BY_DISTANCE = (rules.Full, rules.Causal, rules.SlidingWindow, rules.DilatedWindow)


def not_by_distance(mask: Mask) -> Mask | None:
    """A part of a mask that looks at more than the distance of a query from a key; None if there is none."""
    if isinstance(mask, And | Or | Not | Placed | PerHead):
        return next((other for part in mask.masks if (other := not_by_distance(part)) is not None), None)
    is_test = isinstance(mask, PositionTest) and mask.tested in ("distance", "distance_remainder")
    return None if is_test or isinstance(mask, _BY_DISTANCE) else mask
