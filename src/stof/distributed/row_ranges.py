"""Which rows each rank holds: ranges of about equal work under a mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from stof.layout import LayoutConfig
from stof.layout.survey import Survey
from stof.masks.reorder import joined

RowRange = tuple[int, int]  # first row, and the row after the last

# Ranges end between row blocks of the kernels where each rank has many of them.
ROW_BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)
BLOCKS_PER_RANK = 32
# The heaviest rank's work over the mean that needs no better balance.
BALANCED = 1.1
# Numbers of ranges of a rank, in the order in which they are tried: two balance a causal mask, documents need more.
RANGES = (1, 2, 4, 8)
# Tokens of the longest shard over the mean: all layers but attention work by token, and so does memory.
MOST_TOKENS = 1.5


@dataclass(frozen=True)
class Assignment:
    """The rows of each rank.

    Attributes:
        ranges: of each rank its ranges of rows, in order.
        costs: tiles of each rank over the mean of all ranks.
        why: how the rows were assigned, as a sentence.
    """

    ranges: tuple[tuple[RowRange, ...], ...]
    costs: tuple[float, ...]
    why: str

    @property
    def imbalance(self) -> float:
        return max(self.costs)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(stop - first for first, stop in ranges) for ranges in self.ranges)

    @property
    def longest(self) -> float:
        """Tokens of the longest shard over the mean."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens)


def row_block(length: int, ranks: int) -> int:
    """Rows between which ranges may end."""
    return next((rows for rows in ROW_BLOCKS if length >= rows * ranks * BLOCKS_PER_RANK), 1)


def tile_config(length: int, ranks: int) -> LayoutConfig:
    """The tiles that are counted as a row block's work; of short sequences finer ones, else all rows would be alike."""
    rows = row_block(length, ranks)
    return LayoutConfig(block_m=rows, block_n=64 if rows >= 16 else 16)


def tiles_by_row_block(survey: Survey, config: LayoutConfig) -> Tensor:
    """float64 `[row blocks]`: tiles, in the mean over batch entries and heads."""
    counts = survey.counts[config]
    return (counts.partial + counts.full).double().mean(0)


def assign_rows(tiles: Tensor, length: int, ranks: int) -> Assignment:
    """Give each rank rows of about equal work.

    Equal numbers of tokens are preferred, in as few ranges as balance the tiles. If none do, as with global tokens, one
    range for each rank, of about equal tiles, is tried too. A rank gets at most `MOST_TOKENS` times the mean tokens.

    Args:
        tiles: float64 `[row blocks]`, work of each row block of `row_block(length, ranks)` rows.
        length, ranks: at least one row for each rank.
    """
    rows = row_block(length, ranks)
    candidates = []
    for boundaries, why in _candidates(tiles, ranks):
        ranges = tuple(joined([(a * rows, min(b * rows, length)) for a, b in blocks]) for blocks in boundaries)
        candidate = weigh(ranges, tiles, length, why)
        if candidate.imbalance <= BALANCED and candidate.longest <= MOST_TOKENS:
            return candidate
        candidates.append(candidate)
    allowed = [candidate for candidate in candidates if candidate.longest <= MOST_TOKENS]
    return min(allowed or candidates[:1], key=lambda candidate: candidate.imbalance)


def weigh(ranges: tuple[tuple[RowRange, ...], ...], tiles: Tensor, length: int, why: str) -> Assignment:
    """The tile costs of ranges that end between row blocks, or at the end."""
    rows = row_block(length, len(ranges))
    before = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)]).tolist()  # by row block
    costs = [sum(before[-(-stop // rows)] - before[first // rows] for first, stop in held) for held in ranges]
    mean = sum(costs) / len(costs)
    return Assignment(ranges, tuple(cost / mean if mean > 0 else 1.0 for cost in costs), why)


def _candidates(tiles: Tensor, ranks: int) -> Iterator[tuple[list[list[RowRange]], str]]:
    """Ranges of row blocks for each rank, the preferred ones first, and a reason."""
    blocks = len(tiles)
    for count in RANGES:
        if count * ranks <= blocks:
            held = "one range" if count == 1 else f"up to {count} ranges"
            yield _equal_tokens(tiles, ranks, count), f"equal numbers of tokens, in {held} for each rank"
    mean = float(tiles.mean())
    # The larger the constant that is added to each row block's work, the more alike are the numbers of tokens.
    for constant in (0.0, 0.5, 1.0, 2.0):
        weights = (tiles + constant * mean).cumsum(0)
        targets = torch.arange(1, ranks, dtype=tiles.dtype) * (weights[-1] / ranks)
        ends = (torch.searchsorted(weights, targets) + 1).tolist()
        cuts = [0]
        for rank, end in enumerate(ends, start=1):
            cuts.append(min(max(end, cuts[-1] + 1), blocks - (ranks - rank)))
        yield [[piece] for piece in pairwise([*cuts, blocks])], "about equal tile costs, in one range for each rank"


def _equal_tokens(tiles: Tensor, ranks: int, count: int) -> list[list[RowRange]]:
    """`count` pieces of equal length for each rank: the heaviest piece left goes to the rank with the least work."""
    pieces = _equal_pieces(len(tiles), count * ranks)
    work = [float(tiles[first:stop].sum()) for first, stop in pieces]
    held: list[list[RowRange]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    # Of equal works the later piece counts as the heavier, so a triangle pairs first with last.
    for n in sorted(range(len(pieces)), key=lambda n: (work[n], n), reverse=True):
        rank = min((rank for rank in range(ranks) if len(held[rank]) < count), key=loads.__getitem__)
        held[rank].append(pieces[n])
        loads[rank] += work[n]
    # The last piece, which may end within a row block, comes last: all other ranges begin between row blocks.
    return sorted(map(sorted, held), key=lambda pieces: pieces[-1])


def _equal_pieces(blocks: int, count: int) -> list[RowRange]:
    return list(pairwise(ceil(blocks * n / count) for n in range(count + 1)))
