"""Tile lists of the Hopper kernel that are filled on the device, their work list included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.config import KernelConfig
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.tile_lists import TILE_ITEM, TileLists
from stof.kernels.hopper.tile_scheduler import WORK_SIZE
from stof.layout.fill.tiles import FilledTiles


class WorkList(NamedTuple):
    """A work list of a call, and what it was made for: see `FilledTileLists.work_list`."""

    work: Tensor
    batch: int
    heads: int
    heads_at_once: int


@dataclass(frozen=True, eq=False)
class FilledTileLists(TileLists):
    """Contiguous tiles of row blocks that are not split; items are on the device alone.

    Attributes:
        row_block_ptr, partial_count, row_blocks: as in `FilledTiles`.
        work_lists: those of all calls, which `write_work_lists` writes again; None where the tiles stay.
    """

    row_block_ptr: Tensor | None = None
    partial_count: Tensor | None = None
    row_blocks: int = 0
    work_lists: list[WorkList] | None = None

    def work_list(self, batch: int, heads: int, heads_at_once: int) -> Tensor:
        """The work tiles of a call, int32 `[W + 1, WORK_SIZE]`, as `tile_scheduler.work_list` lists them."""
        shape = (batch * heads * self.row_blocks + 1, WORK_SIZE)
        work = WorkList(self.pattern_of.new_empty(shape), batch, heads, heads_at_once)
        self._write(work)
        if self.work_lists is not None:
            self.work_lists.append(work)
        return work.work

    def write_work_lists(self) -> None:
        """Write the work lists again, after the tiles."""
        for work in self.work_lists or ():
            self._write(work)

    def _write(self, work: WorkList) -> None:
        from stof.kernels.hopper.fill_work import write_work
        from stof.runtime.launch import launch

        assert self.row_block_ptr is not None
        assert self.partial_count is not None
        patterns = len(self.partial_count) // self.row_blocks
        lists = (self.pattern_of, self.row_block_ptr, self.partial_count, self.tile_columns, self.tile_bitmap)
        sizes = (self.row_blocks, patterns, *self.pattern_of.shape, work.batch, work.heads, work.heads_at_once)
        device = self.row_block_ptr.device
        launch(write_work, len(self.partial_count) + 1, (*lists, work.work), sizes, (), device=device)


def prepare_filled(
    filled: FilledTiles, lengths: tuple[int, int], block_n: int, config: KernelConfig, *, changing: bool = False
) -> PreparedTiles:
    """The lists of filled tiles of width 1, for the kernel's general form: any mask may have tiles of both kinds.

    Args:
        changing: whether the tiles will be written again.
    """
    empty = filled.pattern_of.new_empty(0)
    lists = FilledTileLists(
        pattern_of=filled.pattern_of,
        items=torch.empty((0, TILE_ITEM.bitmap + 1), dtype=torch.int32, device="cpu"),
        item_ptr=torch.empty(0, dtype=torch.int32, device="cpu"),
        tile_columns=filled.columns,
        tile_bitmap=filled.tile_bitmap,
        bitmaps=filled.bitmaps,
        row_order=empty,
        ranges=empty,
        compacted_keys=empty,
        block_m=filled.bitmaps.shape[1],
        block_n=block_n,
        q_len=lengths[0],
        kv_len=lengths[1],
        row_block_ptr=filled.row_block_ptr,
        partial_count=filled.partial_count,
        row_blocks=filled.row_blocks,
        work_lists=[] if changing else None,
    )
    return PreparedTiles(lists, config)
