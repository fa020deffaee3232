"""Lists of the Hopper kernel that a device fills, for masks made at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stof.kernels.hopper.tile_lists import RANGE, TileLists, split_items
from stof.kernels.implementation import tensors_of

if TYPE_CHECKING:
    from stof.runtime.launch import Launch

_NAN_BITS = 0x7FC00000


@dataclass(frozen=True, eq=False)
class FilledTiles:
    """Lists for one shape of tiles, and what fills them.

    Attributes:
        lists: what the kernel reads.
        tables: what the launches keep for themselves.
        launches: in their order.
    """

    lists: TileLists
    tables: tuple[Tensor, ...]
    launches: tuple[Launch, ...]

    def fill(self) -> None:
        """Write the lists of the present mask."""
        for launch in self.launches:
            launch()

    def bytes(self) -> int:
        """Memory on the device."""
        device = self.lists.ranges.device
        held = {t.data_ptr(): t for t in (*tensors_of(self.lists), *self.tables) if t.device == device}
        return sum(t.numel() * t.element_size() for t in held.values())


class WorkPartition(NamedTuple):
    """Fields of `TileLists` that say who computes what, and int32 `[P * R + 1]`, items before each row block."""

    items: Tensor
    item_ptr: Tensor
    ranges: Tensor
    chunks: int
    first_item: Tensor


def partition_items(
    partial: Tensor, full: Tensor, split_tiles: int, nothing: int, device: torch.device
) -> WorkPartition:
    """Items of row blocks; each computes nothing, and spoils it, until the lists are filled.

    Args:
        partial, full: int64 `[P, R]`, how many tiles of either kind row blocks are taken to have.
        split_tiles: see `make_tile_lists`.
        nothing: the tile that keeps nothing.
        device: where the lists are.
    """
    tiles = (partial + full).flatten()
    patterns, row_blocks = partial.shape
    pointers = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    items, item_ptr, chunks = split_items(pointers, partial.flatten(), patterns, split_tiles, nothing)
    owner = items[:, 0] + torch.repeat_interleave(torch.arange(patterns) * row_blocks, item_ptr.long().diff())
    first_item = torch.searchsorted(owner, torch.arange(len(tiles) + 1)).int()
    ranges = torch.tensor([nothing, nothing + 1, nothing + 1, 0, _NAN_BITS], dtype=torch.int32)
    ranges = ranges.expand(len(items), len(RANGE)).contiguous().to(device)
    return WorkPartition(items, item_ptr, ranges, chunks, first_item.to(device))
