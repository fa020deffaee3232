"""Masks of one test of positions each: what mask functions are translated to, besides named masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stof.masks.index import Index
from stof.masks.rules import Rule

# No position or distance is further from 0.
UNBOUNDED = 2**31 - 1

# What is tested, given positions of queries and keys, the test's `size` and `shift`. They work on ranges too.
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
