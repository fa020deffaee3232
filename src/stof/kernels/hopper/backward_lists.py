"""A transposed layout as the backward kernel reads it: tiles with their turn in adding to dQ, and the order of items."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.layout import Layout, LayoutConfig
from stof.layout import bitmaps as bits

# Keys of a thread block and queries of a tile.
LAYOUTS = (LayoutConfig(128, 64), LayoutConfig(128, 128))


@dataclass(frozen=True, eq=False)
class BackwardLists:
    """The transposed layout of `P` patterns with `R` row blocks of 128 keys each, and `T` tiles.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        order: int32 `[R]`, row blocks by how much they have to compute, the most first.
        row_block_ptr: int32 `[P * R + 1]`, tiles of row block n are `ptr[n] : ptr[n + 1]`, from the first query on.
        tiles: int32 `[T + 2, 4]`: the block of queries; the row of `bitmaps`, below 0 for a full tile; how many row
            blocks earlier in `order` have a tile of these queries; 0. The last two rows are padding: the kernel loads
            ahead.
        bitmaps: int32 `[U, 128, 4]`, see `BackwardTiles`.
        queries: of a tile.
        q_len, kv_len: lengths.
    """

    pattern_of: Tensor
    order: Tensor
    row_block_ptr: Tensor
    tiles: Tensor
    bitmaps: Tensor
    slots: int
    queries: int
    q_len: int
    kv_len: int


def make_backward_lists(layout: Layout) -> BackwardLists:
    """Prepare the layout of a transposed mask.

    Raises:
        UnfitLayoutError: it has other tiles than the kernel, or an order of its rows.
    """
    if layout.config not in LAYOUTS or layout.row_order is not None:
        raise UnfitLayoutError("the Hopper backward kernel takes contiguous tiles of 128 keys x 64 or 128 queries")
    count, row_blocks = layout.row_block_ptr.long().diff(), layout.row_blocks
    tile_bitmap, bitmaps = layout.tile_bitmap, layout.bitmaps
    row_block = torch.repeat_interleave(torch.arange(len(count), device=layout.device), count)
    if layout.q_len % layout.config.block_m:
        # Keys past the end are zeros in shared memory, whose scores must not count: their tiles are all partial.
        ragged = torch.arange(len(count), device=layout.device) % row_blocks == row_blocks - 1
        valid = torch.arange(layout.config.block_m, device=layout.device) < layout.q_len % layout.config.block_m
        rows = bits.pack(valid[None, :, None].expand(1, -1, layout.config.block_n))
        tile_bitmap = torch.where(ragged[row_block] & (tile_bitmap < 0), len(bitmaps), tile_bitmap)
        bitmaps = torch.cat([bitmaps, rows.to(bitmaps.dtype)])
    q_block = layout.tile_columns()[:, 0].long() // layout.config.block_n
    # From the last keys on, each block of keys from its diagonal on, then from the first queries on: a block comes to
    # queries after the block behind it has.
    q_blocks = -(-layout.kv_len // layout.config.block_n)
    keys = torch.arange(row_blocks, device=layout.device)
    diagonal = (keys * layout.config.block_m * layout.kv_len // (layout.q_len * layout.config.block_n))[row_block % row_blocks]
    slot = (q_block < diagonal).long()
    ranks = _ranks(row_block, q_block * 2 + slot, 2 * q_blocks, row_blocks)
    tiles = torch.stack([q_block, tile_bitmap.long(), ranks, slot], 1)
    tiles = tiles[torch.argsort((row_block * 2 + slot) * q_blocks + q_block)]
    order = keys.flip(0)
    return BackwardLists(
        pattern_of=layout.pattern_of.int().contiguous(),
        order=order.int(),
        row_block_ptr=layout.row_block_ptr.int().contiguous(),
        tiles=torch.nn.functional.pad(tiles, (0, 0, 0, 2)).int().contiguous(),
        slots=1 + int(bool(slot.any())),
        bitmaps=accumulator_order(bitmaps, layout.config.block_n),
        queries=layout.config.block_n,
        q_len=layout.kv_len,
        kv_len=layout.q_len,
    )


def _ranks(row_block: Tensor, place: Tensor, places: int, row_blocks: int) -> Tensor:
    """How many later blocks of keys of the same pattern have a tile with the same place, for each tile."""
    place = row_block // row_blocks * places + place
    by_place = torch.argsort(place * row_blocks + row_blocks - 1 - row_block % row_blocks)
    adding = torch.bincount(place)
    first = adding.cumsum(0) - adding
    ranks = torch.empty_like(place)
    ranks[by_place] = torch.arange(len(place), device=place.device) - first[place[by_place]]
    return ranks
