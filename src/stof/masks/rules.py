"""The value classes behind the named masks. Users build them through `stof.masks.<name>(...)`."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from stof.errors import ShapeError
from stof.masks.base import numbered
from stof.masks.bounds import Interval, TileBounds, bounds_of_blocks
from stof.masks.compose import Mask
from stof.masks.index import Index


class Rule(Mask):
    """A named mask: a frozen dataclass whose repr is the call that builds it."""

    name: ClassVar[str]

    allows_negative_queries = True
    allows_negative_keys = True

    def __repr__(self) -> str:
        shown = (f"{f.name}={_show(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]
        return f"{self.name}({', '.join(shown)})"


class PerSequence(Rule):
    """A named mask with a value for each sequence of the batch, or one for all.

    Attributes:
        per_sequence: name of the field that holds these values.
    """

    varies = True
    per_sequence: ClassVar[str]

    @property
    def batch(self) -> int:
        return len(getattr(self, self.per_sequence))

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        if self.batch == 1:
            return super().pattern_ids(mask_batch, mask_heads)
        return numbered(getattr(self, self.per_sequence))[:, None]


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_show, value)) + "]"
    return repr(value)


def are_distinct(ids: Sequence[int]) -> bool:
    """Whether each document is one run, by the ids of the runs; negative ones are padding."""
    seen = ids if min(ids) >= 0 else [doc for doc in ids if doc >= 0]
    return len(set(seen)) == len(seen)


def _per_batch(values: tuple[int, ...], index: Index) -> Tensor:
    """`values[b]` as `[B, 1, 1, 1]`, or one value for all sequences."""
    table = torch.tensor(values, dtype=torch.int64, device=index.device)
    return table.view(1, 1, 1, 1) if len(values) == 1 else table[index.b]


def _among_first(count: int | Tensor, positions: Tensor) -> Tensor:
    """Which positions are among the first `count`; offsets may make some below 0, which are not."""
    return (positions >= 0) & (positions < count)


@dataclass(frozen=True, eq=False, repr=False)
class Full(Rule):
    name = "full"

    has_monotonic_ranges = True

    def evaluate(self, index: Index) -> Tensor:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=index.device)


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Rule):
    name = "causal"

    has_monotonic_ranges = True

    def evaluate(self, index: Index) -> Tensor:
        return index.q >= index.kv


@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Rule):
    name = "sliding_window"
    left: int
    right: int

    has_monotonic_ranges = True

    def evaluate(self, index: Index) -> Tensor:
        distance = index.q - index.kv
        return (distance <= self.left) & (distance >= -self.right)


@dataclass(frozen=True, eq=False, repr=False)
class DilatedWindow(Rule):
    name = "dilated_window"
    left: int
    right: int
    dilation: int

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return (f"remainder {self.dilation}",) if self.dilation > 1 else ()

    def evaluate(self, index: Index) -> Tensor:
        distance = index.q - index.kv
        near = (distance <= self.left) & (distance >= -self.right)
        return near & (torch.remainder(distance, self.dilation) == 0)


@dataclass(frozen=True, eq=False, repr=False)
class Strided(Rule):
    name = "strided"
    local: int
    stride: int
    width: int
    causal: bool

    def evaluate(self, index: Index) -> Tensor:
        distance = index.q - index.kv
        summary = torch.remainder(index.kv, self.stride) >= self.stride - self.width
        if self.causal:
            return (distance >= 0) & ((distance < self.local) | summary)
        return (distance.abs() < self.local) | summary


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Rule):
    name = "global_tokens"
    tokens: int | tuple[int, ...]

    def evaluate(self, index: Index) -> Tensor:
        if isinstance(self.tokens, int):
            return _among_first(self.tokens, index.q) | _among_first(self.tokens, index.kv)
        chosen = torch.tensor(self.tokens, dtype=torch.int64, device=index.device)
        return torch.isin(index.q, chosen) | torch.isin(index.kv, chosen)


@dataclass(frozen=True, eq=False, repr=False)
class SinkTokens(Rule):
    name = "sink_tokens"
    tokens: int

    def evaluate(self, index: Index) -> Tensor:
        return _among_first(self.tokens, index.kv) & (index.q >= index.kv)


# Entries of a table that answers for rectangles: beyond, they are evaluated. Also of a table of blocks that are taken.
_TABLE = 2**22
# Random blocks of a row block up to which comparing with each of them is fastest.
_FEW = 16


def _mix(x: Tensor) -> Tensor:
    """A 31-bit integer hash (multiply-xorshift), the same on every device and torch version."""
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        x = ((x ^ (x >> 16)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 15)


@dataclass(frozen=True, eq=False, repr=False)
class RandomBlocks(Rule):
    name = "random_blocks"
    blocks: int
    block_size: int
    seed: int

    grows = False  # blocks are drawn from all there are
    allows_negative_keys = False  # and are counted from position 0

    def evaluate(self, index: Index) -> Tensor:
        kv_blocks = -(-index.kv_len // self.block_size)
        row_block = torch.div(index.q, self.block_size, rounding_mode="floor")
        kv_block = torch.div(index.kv, self.block_size, rounding_mode="floor")
        chosen = self.choose(row_block.flatten(), kv_blocks)
        if chosen.shape[1] > _FEW:
            chosen = chosen.sort().values.view(*row_block.shape[:3], -1)
            wanted = torch.broadcast_tensors(row_block, kv_block)[1].contiguous()
            place = torch.searchsorted(chosen, wanted).clamp_(max=chosen.shape[-1] - 1)
            return chosen.gather(-1, place) == wanted
        keep = torch.zeros_like(row_block, dtype=torch.bool)
        for column in chosen.unbind(1):
            keep = keep | (column.view_as(row_block) == kv_block)
        return keep

    def tile_bounds(self, index: Index) -> TileBounds:
        """Chosen blocks within a tile, counted by a table of running sums.

        Where the table is too large, a tile is empty only if no queries that are asked about see its keys.
        """
        q, kv = (Interval.of(x) // self.block_size for x in (index.q, index.kv))
        first, columns = int(q.low.min()), -(-index.kv_len // self.block_size)
        q = q - first
        rows = int(q.high.max()) + 1
        if rows * min(self.blocks, columns) > _TABLE:
            return TileBounds.unknown(index.device)
        chosen = self.choose(torch.arange(first, first + rows, device=index.device), columns)
        if rows * columns > _TABLE:
            return TileBounds.unknown(index.device) & torch.isin(kv, chosen)  # type: ignore[call-overload]
        taken = torch.zeros(rows, columns, dtype=torch.bool, device=index.device).scatter_(1, chosen, True)
        return bounds_of_blocks(taken, q, kv)

    def choose(self, row_block: Tensor, kv_blocks: int) -> Tensor:
        """Distinct key blocks of each row block `[R, min(blocks, kv_blocks)]` (Floyd's sampling)."""
        picks = min(self.blocks, kv_blocks)
        if picks > _FEW and kv_blocks <= picks * picks:
            parts = row_block.split(max(1, _TABLE // kv_blocks))
            return torch.cat([self._choose_many(part, kv_blocks, picks) for part in parts])
        picked: list[Tensor] = []
        for turn, top in enumerate(range(kv_blocks - picks, kv_blocks)):
            draw = self._draw(row_block, turn, top)
            taken = torch.zeros_like(draw, dtype=torch.bool)
            for earlier in picked:
                taken |= earlier == draw
            picked.append(torch.where(taken, top, draw))
        return torch.stack(picked, dim=1)

    def _choose_many(self, row_block: Tensor, kv_blocks: int, picks: int) -> Tensor:
        """`choose` with a table of the blocks that are taken, where comparing all pairs of picks costs more."""
        turns = torch.arange(picks, device=row_block.device)[:, None]
        draws = self._draw(row_block, turns, turns + (kv_blocks - picks))  # [picks, R]
        taken = torch.zeros(kv_blocks, len(row_block), dtype=torch.bool, device=row_block.device)
        for top, draw in enumerate(draws.unsqueeze(1).unbind(0), start=kv_blocks - picks):
            draw.masked_fill_(taken.gather(0, draw), top)
            taken.scatter_(0, draw, True)
        return draws.T

    def _draw(self, row_block: Tensor, turn: int | Tensor, top: int | Tensor) -> Tensor:
        """Numbers from 0 to `top`, by row block and turn."""
        key = row_block * 1_000_003 + turn * 7_919 + (self.seed & 0xFFFF_FFFF) * 104_729
        return torch.remainder(_mix(_mix(key & 0x7FFFFFFF) + 0x9E3779B), top + 1)


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(PerSequence):
    name, per_sequence = "prefix_lm", "prefix"
    prefix: tuple[int, ...]

    def evaluate(self, index: Index) -> Tensor:
        return _among_first(_per_batch(self.prefix, index), index.kv) | (index.q >= index.kv)


@dataclass(frozen=True, eq=False, repr=False)
class Padding(PerSequence):
    name, per_sequence = "padding", "lengths"
    lengths: tuple[int, ...]

    def check(self, q_len: int, kv_len: int) -> None:
        del q_len
        if max(self.lengths) > kv_len:
            raise ShapeError(
                f"padding lengths up to {max(self.lengths)} do not fit kv_len {kv_len}; "
                "lengths count the valid keys of each sequence"
            )

    def evaluate(self, index: Index) -> Tensor:
        return _among_first(_per_batch(self.lengths, index), index.kv)


@dataclass(frozen=True, eq=False, repr=False)
class Documents(PerSequence):
    name, per_sequence = "documents", "runs"
    # One run-length list per sequence: ((id, length), ...); an id below 0 is padding and sees nothing.
    runs: tuple[tuple[tuple[int, int], ...], ...]

    @functools.cached_property
    def length(self) -> int:
        return sum(map(operator.itemgetter(1), self.runs[0]))

    @property
    def has_monotonic_ranges(self) -> bool:
        return self._contiguous

    @functools.cached_property
    def _ids(self) -> numpy.ndarray:
        """int64 `[batch, length]`: the document of each token."""
        runs = numpy.array(list(itertools.chain.from_iterable(self.runs)), dtype=numpy.int64)
        return numpy.repeat(runs[:, 0], runs[:, 1]).reshape(len(self.runs), self.length)

    @functools.cached_property
    def _tables(self) -> list[tuple[numpy.ndarray, numpy.ndarray]]:
        """Where the runs of each sequence end, and whether each is a document.

        Rows before the first and past the last one are runs as well, of no document.
        """
        out = []
        for runs in self.runs:
            ids, lengths = numpy.array([(-1, 0), *runs, (-1, 0)], dtype=numpy.int64).T
            out.append((lengths[:-1].cumsum(), ids >= 0))
        return out

    @functools.cached_property
    def _contiguous(self) -> bool:
        """Whether every document is one run; else its parts see each other across other documents."""
        return all(are_distinct([doc for doc, _ in runs]) for runs in self.runs)

    def tile_bounds(self, index: Index) -> TileBounds:
        """Which runs the ends of a rectangle's ranges lie in."""
        if not self._contiguous:
            return TileBounds.unknown(index.device)
        number = int(index.b) if len(self.runs) > 1 else 0
        stops, seen = (torch.as_tensor(table, device=index.device) for table in self._tables[number])
        first, last, left, right = (
            torch.searchsorted(stops, end.contiguous(), right=True)
            for x in (index.q, index.kv)
            for end in (Interval.of(x).low, Interval.of(x).high)
        )
        one_row, one_column = first == last, left == right
        nothing = (last < left) | (right < first) | (one_row & ~seen[first]) | (one_column & ~seen[left])
        return TileBounds(nothing, one_row & one_column & (first == left) & seen[first])

    def check(self, q_len: int, kv_len: int) -> None:
        if self.length != kv_len or q_len > kv_len:
            raise ShapeError(
                f"the documents cover {self.length} tokens, the call has q_len {q_len} and kv_len {kv_len}; "
                "give one id per key (negative ids for padding), and no more queries than keys"
            )

    def evaluate(self, index: Index) -> Tensor:
        table = torch.as_tensor(self._ids, device=index.device)
        b = index.b if len(table) > 1 else torch.zeros_like(index.b)[:1]
        q_doc, kv_doc = (
            # Positions before the first and past the last document (by an offset) belong to no document.
            torch.where((x >= 0) & (x < self.length), table[b, x.clamp(0, self.length - 1)], -1)
            for x in (index.q, index.kv)
        )
        return (q_doc == kv_doc) & (q_doc >= 0)

    def __repr__(self) -> str:
        """Cumulative lengths, and where the documents are not numbered in order, their ids."""
        columns = [tuple(zip(*runs, strict=True)) for runs in self.runs]
        ids = [list(numbers) for numbers, _ in columns]
        ends = [[0, *itertools.accumulate(lengths)] for _, lengths in columns]
        ordered = all(numbers == list(range(len(numbers))) for numbers in ids)
        shown_ids, shown_ends = (rows[0] if len(rows) == 1 else rows for rows in (ids, ends))
        return f"documents({'' if ordered else f'{shown_ids}, '}cu_seqlens={shown_ends})"


@dataclass(frozen=True, eq=False, repr=False)
class Neighborhood2D(Rule):
    name = "neighborhood_2d"
    height: int
    width: int
    kernel: tuple[int, int]

    allows_negative_queries = allows_negative_keys = False  # the grid has no rows before its first

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return (f"patch {self.height} {self.width} 8 8",)

    def check(self, q_len: int, kv_len: int) -> None:
        tokens = self.height * self.width
        if kv_len != tokens or q_len > tokens:
            raise ShapeError(
                f"a {self.height}x{self.width} neighbourhood has {tokens} tokens, "
                f"the call has q_len {q_len} and kv_len {kv_len}"
            )

    def evaluate(self, index: Index) -> Tensor:
        dy = torch.div(index.q, self.width, rounding_mode="floor") - torch.div(
            index.kv, self.width, rounding_mode="floor"
        )
        dx = torch.remainder(index.q, self.width) - torch.remainder(index.kv, self.width)
        return (dy.abs() <= self.kernel[0] // 2) & (dx.abs() <= self.kernel[1] // 2)
