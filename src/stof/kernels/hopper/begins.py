"""Which of a job's tiles comes first.

The Hopper kernel goes by the maximum of the tiles before, and takes a tile again where that does not serve, as where a
row meets its first key. So a job begins with a tile in which every row has one, if there is any.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_first(item: Tensor, covered: Tensor, full: Tensor) -> Tensor:
    """Bool `[T]`: the tile of each item to begin with, of the most covered rows, and partial rather than full.

    Args:
        item: int64 `[T]`, the item of each tile.
        covered: int64 `[T]`, rows that keep some of its keys.
        full: bool `[T]`, tiles without bits: as the first of its item, a tile is computed with bits anyhow.
    """
    order = torch.argsort(covered * 2 + (~full).long(), descending=True, stable=True)
    order = order[torch.argsort(item[order], stable=True)]
    item = item[order]
    begins = torch.ones_like(item, dtype=torch.bool)
    begins[1:] = item[1:] != item[:-1]
    first = torch.zeros_like(full)
    first[order[begins]] = True
    return first


def begin_well(items: Tensor, covered: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Items with the best tile first, and the new order of tiles: int64 `[T]`, which one comes at each place.

    Args:
        items: int32 `[I, 8]` as `TileLists.items`; their tiles follow each other, but for those of empty row blocks.
        covered, full: see `best_first`.
    """
    tiles = len(covered)
    ranges = items.to(covered.device).long()
    begin, partial_end, end = ranges[:, 1], ranges[:, 2], ranges[:, 3]
    exists = begin < tiles
    numbers = torch.arange(len(items), device=covered.device)
    item = torch.repeat_interleave(numbers[exists], (end - begin)[exists], output_size=tiles)
    first = best_first(item, covered, full)
    order = torch.argsort(item * 2 + (~first).long(), stable=True)
    # A full tile before partial ones is one of them.
    before = torch.zeros(len(items), dtype=torch.bool, device=covered.device)
    before[exists] = full[order[begin[exists]]]
    items = items.clone()
    items[:, 2] = (partial_end + (before & (partial_end > begin))).int().to(items.device)
    return items, order
