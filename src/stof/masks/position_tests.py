"""Masks of one position test, or one table: `stof.masks.translate` makes them of functions, besides named masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stof.masks.bounds import Interval, TileBounds, bounds_of_blocks
from stof.masks.index import Index
from stof.masks.rules import Rule

# No position or distance is further from 0.
UNBOUNDED = 2**31 - 1

# The tested value, given positions of queries and keys (tensors or `Interval`s), and the test's `size` and `shift`.
TESTED: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "distance": lambda q, kv, size, shift: q - kv,
    "query": lambda q, kv, size, shift: q,
    "key": lambda q, kv, size, shift: kv,
    "distance_remainder": lambda q, kv, size, shift: (q - kv + shift) % size,
    "query_remainder": lambda q, kv, size, shift: q % size,
    "key_remainder": lambda q, kv, size, shift: kv % size,
    "grid_row": lambda q, kv, size, shift: q // size - kv // size,
    "grid_column": lambda q, kv, size, shift: q % size - kv % size,
}


@dataclass(frozen=True, eq=False, repr=False)
class PositionTest(Rule):
    """Kept where `low <= x <= high`.

    Attributes:
        tested: which x, a name of `TESTED`.
        low, high: its bounds.
        size: what positions are divided by.
        shift: what is added to a distance before the remainder is taken.
    """

    name = "position_test"
    tested: str
    low: int = -UNBOUNDED
    high: int = UNBOUNDED
    size: int = 1
    shift: int = 0

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        if self.tested == "distance_remainder" and self.low == self.high and self.size > 1:
            return (f"remainder {self.size}",)
        return (f"grid {self.size}",) if self.tested == "grid_column" else ()

    def evaluate(self, index: Index) -> Tensor:
        x = TESTED[self.tested](index.q, index.kv, self.size, self.shift)
        keep: Tensor = (x >= self.low) & (x <= self.high)
        return keep


@dataclass(frozen=True, eq=False, repr=False)
class Listed(Rule):
    """Kept where the query, or the key, is one of some tokens.

    Attributes:
        of_keys: whether keys are looked up, not queries.
        tokens: positions, ascending.
    """

    name = "listed"
    of_keys: bool
    tokens: tuple[int, ...]

    def evaluate(self, index: Index) -> Tensor:
        tokens = torch.tensor(self.tokens, dtype=torch.int64, device=index.device)
        return torch.isin(index.kv if self.of_keys else index.q, tokens)


@dataclass(frozen=True, eq=False, repr=False)
class ChosenBlocks(Rule):
    """Kept where `key // size` is in `blocks[query // size]`.

    Attributes:
        size: number of tokens in a block, of queries and of keys.
        blocks: for each block of queries, the numbers of its kept key blocks.
    """

    name = "chosen_blocks"
    size: int
    blocks: tuple[tuple[int, ...], ...]

    grows = False
    allows_negative_queries = allows_negative_keys = False

    def evaluate(self, index: Index) -> Tensor:
        q, kv = (torch.div(x, self.size, rounding_mode="floor") for x in (index.q, index.kv))
        return self._taken(index)[q, kv]

    def tile_bounds(self, index: Index) -> TileBounds:
        q, kv = (Interval.of(x) // self.size for x in (index.q, index.kv))
        return bounds_of_blocks(self._taken(index), q, kv)

    def _taken(self, index: Index) -> Tensor:
        """Bool `[blocks of queries, blocks of keys]`."""
        rows, columns = (-(-n // self.size) for n in (index.q_len, index.kv_len))
        taken = torch.zeros(rows, columns, dtype=torch.bool, device="cpu")
        at = [(row, block) for row, blocks in enumerate(self.blocks) for block in blocks]
        if at:
            taken[tuple(torch.tensor(at, device="cpu").T)] = True
        return taken.to(index.device)
