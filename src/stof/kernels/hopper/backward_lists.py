"""A transposed layout as the backward kernel of Hopper reads it: tiles, and the order in which they add to dQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.layout import Layout, LayoutConfig
from stof.layout import bitmaps as bits

KEYS_OF_BLOCK = 128
# Tiles of keys x queries, for a head dimension up to so much: wider heads leave no registers for more queries.
LAYOUTS = {64: LayoutConfig(KEYS_OF_BLOCK, 128), 128: LayoutConfig(KEYS_OF_BLOCK, 64)}


class TileFields(NamedTuple):
    """Where a tile holds what.

    Attributes:
        q_block: number of its block of queries.
        bitmap: row of `bitmaps`, below 0 for a full tile.
        rank: how many blocks of keys add to this sum before.
        sum: which sum of dQ it is added to, 0 or 1.
    """

    q_block: int = 0
    bitmap: int = 1
    rank: int = 2
    sum: int = 3


TILE = TileFields()


@dataclass(frozen=True, eq=False)
class BackwardLists:
    """The transposed layout of `P` patterns with `R` blocks of keys each, and `T` tiles.

    Blocks of keys are work items from the last one on. Each goes through the queries from its diagonal on, and then
    from the first query to the diagonal: there, thread blocks that started at the same time are at the same distance
    from each other, and add to different tiles. After the diagonal they come to a tile in the order in which they
    started, and before it again, but not from one part to the other. So there are two sums of dQ, one for each part,
    and in both a block of keys adds after those behind it.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        row_block_ptr: int32 `[P * R + 1]`, tiles of block n are `ptr[n] : ptr[n + 1]`.
        tiles: int32 `[T + 2, 4]`, fields as `TileFields`. The last two rows are padding: the kernel loads ahead.
        bitmaps: int32 `[U, 128, 4]`, see `BackwardTiles`.
        row_blocks: R.
        queries: of a tile.
        q_len, kv_len: lengths.
        sums: 1 if no tile is before the diagonal, else 2.
    """

    pattern_of: Tensor
    row_block_ptr: Tensor
    tiles: Tensor
    bitmaps: Tensor
    row_blocks: int
    queries: int
    q_len: int
    kv_len: int
    sums: int


def make_backward_lists(layout: Layout) -> BackwardLists:
    """Prepare the layout of a transposed mask, whose rows are keys.

    Raises:
        UnfitLayoutError: it has other tiles than the kernel, or an order of its rows.
    """
    config, device = layout.config, layout.device
    if config not in LAYOUTS.values() or layout.row_order is not None:
        raise UnfitLayoutError("the Hopper backward kernel takes contiguous tiles of 128 keys x 64 or 128 queries")
    q_len, kv_len, row_blocks = layout.kv_len, layout.q_len, layout.row_blocks
    # Of each tile: the number of its row block among those of all patterns.
    number = torch.arange(layout.patterns * row_blocks, device=device)
    number = torch.repeat_interleave(number, layout.row_block_ptr.long().diff())
    row_block, pattern = number % row_blocks, number // row_blocks
    tile_bitmap, bitmaps = _with_ragged_end(layout, row_block)
    q_blocks = -(-q_len // config.block_n)
    q_block = layout.tile_columns()[:, 0].long() // config.block_n
    diagonal = row_block * (config.block_m * q_len) // (kv_len * config.block_n)
    of_sum = (q_block < diagonal).long()
    rank = _ranks((pattern * q_blocks + q_block) * 2 + of_sum, row_blocks - 1 - row_block)
    tiles = torch.stack([q_block, tile_bitmap.long(), rank, of_sum], 1)
    tiles = tiles[torch.argsort((number * 2 + of_sum) * q_blocks + q_block)]
    return BackwardLists(
        pattern_of=layout.pattern_of.int().contiguous(),
        row_block_ptr=layout.row_block_ptr.int().contiguous(),
        tiles=torch.nn.functional.pad(tiles, (0, 0, 0, 2)).int().contiguous(),
        bitmaps=accumulator_order(bitmaps, config.block_n),
        row_blocks=row_blocks,
        queries=config.block_n,
        q_len=q_len,
        kv_len=kv_len,
        sums=1 + int(bool(of_sum.any())),
    )


def _with_ragged_end(layout: Layout, row_block: Tensor) -> tuple[Tensor, Tensor]:
    """`tile_bitmap` and `bitmaps`, with a bitmap for full tiles of a last block that has fewer than 128 keys.

    Keys past the end are zeros in shared memory, and their scores would count.
    """
    left = layout.q_len % KEYS_OF_BLOCK
    if not left:
        return layout.tile_bitmap, layout.bitmaps
    exists = (torch.arange(KEYS_OF_BLOCK, device=layout.device) < left)[None, :, None]
    of_end = bits.pack(exists.expand(1, -1, layout.config.block_n)).to(layout.bitmaps.dtype)
    in_end = (row_block == layout.row_blocks - 1) & (layout.tile_bitmap < 0)
    tile_bitmap = torch.where(in_end, len(layout.bitmaps), layout.tile_bitmap)
    return tile_bitmap, torch.cat([layout.bitmaps, of_end])


def _ranks(group: Tensor, order: Tensor) -> Tensor:
    """How many elements of the same group have a lower order, for each element; orders in a group are distinct."""
    if not len(group):
        return group
    by_group = torch.argsort(group * (int(order.max()) + 1) + order)
    sizes = torch.bincount(group)
    first = sizes.cumsum(0) - sizes
    ranks = torch.empty_like(group)
    ranks[by_group] = torch.arange(len(group), device=group.device) - first[group[by_group]]
    return ranks
