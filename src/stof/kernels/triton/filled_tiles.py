"""Filled tiles as the backward kernels read them."""

from __future__ import annotations

import torch

from stof.kernels.triton.backward_tiles import ITEM, BackwardTiles
from stof.layout.fill.tiles import FilledTiles


def filled_backward_tiles(filled: FilledTiles, rows: int) -> BackwardTiles:
    """The lists of filled tiles with all columns, of `rows` rows, for kernels that take tiles of both kinds."""
    from stof.kernels.triton.fill_items import write_items
    from stof.runtime.launch import launch

    empty, device = filled.pattern_of.new_empty(0), filled.pattern_of.device
    items = torch.empty((filled.row_blocks, len(ITEM)), dtype=torch.int32, device=device)
    patterns = len(filled.partial_count) // filled.row_blocks
    tensors = (filled.row_block_ptr, items)
    launch(write_items, filled.row_blocks, tensors, (filled.row_blocks, patterns), (), device=device)
    return BackwardTiles(
        pattern_of=filled.pattern_of,
        items=items,
        splits=empty.view(0, 3),
        row_block_ptr=filled.row_block_ptr,
        partial_count=filled.partial_count,
        columns=filled.columns,
        tile_bitmap=filled.tile_bitmap,
        bitmaps=filled.bitmaps,
        row_order=empty,
        block_m=filled.bitmaps.shape[1],
        block_n=filled.columns.shape[1],
        rows=rows,
        row_blocks=filled.row_blocks,
    )
