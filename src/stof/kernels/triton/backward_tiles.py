"""A layout as the backward kernels read it: work items, column lists, bitmaps in accumulator order.

dQ reads the forward layout; dK, dV and the gradient of a bias read the transposed one, whose row blocks are keys and
whose tiles hold queries. Plain torch; importing it does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.common import PARTIAL_TILE_COST, chunks_of
from stof.kernels.config import KernelConfig
from stof.kernels.triton.work_list import only_live_columns
from stof.layout import Layout


class ItemFields(NamedTuple):
    """Where a work item holds what.

    Attributes:
        row_block: number within its pattern.
        chunk: number of this chunk of the row block.
        chunks: how many chunks it has, 1 where it is not split.
        slot: row of the partial sums, of a split row block.
    """

    row_block: int = 0
    chunk: int = 1
    chunks: int = 2
    slot: int = 3


ITEM = ItemFields()
# `partial_count` of a row block that could not be listed.
NAN_ROW_BLOCK = -1


@dataclass(frozen=True, eq=False)
class BackwardTiles:
    """A layout of `P` patterns with `R` row blocks each and `T` tiles, in the order of `Layout`.

    Work items are the same for all patterns, so that one program can go through several: dK and dV sum over the query
    heads of a key head, whose masks may differ. A chunk is an equal part of whatever tiles a pattern has there.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        items: int32 `[I, 4]`, fields as `ItemFields`, longest first.
        splits: int32 `[n, 3]`, row block, first slot and number of chunks of each split row block.
        row_block_ptr: int32 `[P * R + 1]`, tiles of row block n are `ptr[n] : ptr[n + 1]`, partial ones first.
        partial_count: int32 `[P * R]`.
        columns: int32 `[T + 2, block_n]`, the column of each tile column; where no row keeps it, another of the tile's.
        tile_bitmap: int32 `[T + 2]`, row of `bitmaps`, -1 for a full tile.
        bitmaps: int32 `[U, block_m, 4]`; bit `2 j + b` of word `q` is column `8 j + 2 q + b`.
        row_order: int32 `[P, rows]`, empty when rows keep their order.
        block_m, block_n: sizes of tiles.
        rows, row_blocks: of one pattern.
        slots: rows of partial sums, the chunks of all split row blocks.
        has_partial, has_full: whether there are tiles of that kind.
        full_contiguous: whether the columns of every full tile follow each other, so that the first one tells all.
        has_nan: whether `partial_count` may be `NAN_ROW_BLOCK`, of a row block without tiles whose gradients are NaN.

    The last two rows of `columns` and `tile_bitmap` are padding: kernels load ahead.
    """

    pattern_of: Tensor
    items: Tensor
    splits: Tensor
    row_block_ptr: Tensor
    partial_count: Tensor
    columns: Tensor
    tile_bitmap: Tensor
    bitmaps: Tensor
    row_order: Tensor
    block_m: int
    block_n: int
    rows: int
    row_blocks: int
    slots: int = 0
    has_partial: bool = True
    has_full: bool = True
    full_contiguous: bool = True
    has_nan: bool = False


@dataclass(frozen=True, eq=False)
class PreparedBackward:
    """Tiles of the forward layout for dQ, of the transposed layout for dK, dV and d_bias, and how the kernels run."""

    dq: BackwardTiles
    dq_config: KernelConfig
    dkv: BackwardTiles
    dkv_config: KernelConfig


def prepare_backward(
    layout: Layout,
    transposed: Layout,
    dq_config: KernelConfig | None = None,
    dkv_config: KernelConfig | None = None,
) -> PreparedBackward:
    """Prepare both layouts of a mask.

    Args:
        layout: of the mask, rows are queries.
        transposed: of the transposed mask, rows are keys; its block sizes may be others.
        dq_config, dkv_config: warps, stages, `split_tiles` and `side` of the two kernels.

    Raises:
        UnfitLayoutError: the layouts are not of one mask's lengths and patterns, or have sizes that kernels lack.
    """
    sizes = (layout.q_len, layout.kv_len), (transposed.kv_len, transposed.q_len)
    shapes = layout.pattern_of.shape, transposed.pattern_of.shape
    if sizes[0] != sizes[1] or shapes[0] != shapes[1]:
        raise UnfitLayoutError(
            f"the second layout is of the transposed mask: it has {sizes[1][1]} rows, {sizes[1][0]} columns and masks "
            f"{list(shapes[1])}, the first one {sizes[0][0]} rows, {sizes[0][1]} columns and masks {list(shapes[0])}"
        )
    dq_config, dkv_config = dq_config or KernelConfig(), dkv_config or KernelConfig()
    for of, config in ((layout, dq_config), (transposed, dkv_config)):
        # Of two warpgroups on 64 rows Triton 3.6 compiles a kernel that reads past its shared memory (seen on an H200
        # in float32 with head_dim 16).
        if of.config.block_m >= 64 and config.num_warps * 16 > of.config.block_m:
            raise UnfitLayoutError(
                f"backward kernels take at most a warp for 16 rows, got {config.num_warps} for {of.config.block_m}"
            )
    return PreparedBackward(
        make_backward_tiles(layout, dq_config.split_tiles),
        dq_config,
        make_backward_tiles(transposed, dkv_config.split_tiles),
        dkv_config,
    )


def make_backward_tiles(layout: Layout, split_tiles: int = 0) -> BackwardTiles:
    """Prepare a layout; row blocks with more than `split_tiles` tiles are cut into chunks, unless that is 0.

    Raises:
        UnfitLayoutError: its block sizes are none of the kernels', or patterns have different row orders.
    """
    config = layout.config
    if config.block_m & (config.block_m - 1) or config.block_n > 128:
        raise UnfitLayoutError(
            f"backward kernels take powers of two as rows and at most 128 columns of a tile, got {config.block_m} x "
            f"{config.block_n}"
        )
    order = layout.row_order
    if order is not None and not bool((order == order[:1]).all()):
        raise UnfitLayoutError("backward kernels take one row order for all patterns")
    live = layout.tile_live()
    columns = only_live_columns(layout.tile_columns(), live)
    full = layout.tile_bitmap < 0
    steps = torch.arange(config.block_n, device=layout.device)
    items, splits, slots = _items(layout, split_tiles)
    return BackwardTiles(
        pattern_of=layout.pattern_of.contiguous(),
        items=items,
        splits=splits,
        row_block_ptr=layout.row_block_ptr.contiguous(),
        partial_count=layout.partial_count.contiguous(),
        columns=torch.nn.functional.pad(columns.int(), (0, 0, 0, 2)).contiguous(),
        tile_bitmap=torch.nn.functional.pad(layout.tile_bitmap, (0, 2)).contiguous(),
        bitmaps=accumulator_order(layout.bitmaps, config.block_n),
        row_order=layout.pattern_of.new_empty(0) if order is None else order.contiguous(),
        block_m=config.block_m,
        block_n=config.block_n,
        rows=layout.q_len,
        row_blocks=layout.row_blocks,
        slots=slots,
        has_partial=not bool(full.all()),
        has_full=bool(full.any()),
        full_contiguous=bool((columns[full] == columns[full][:, :1] + steps).all()),
    )


def _items(layout: Layout, split_tiles: int) -> tuple[Tensor, Tensor, int]:
    """Work items, split row blocks, and slots of partial sums; see `BackwardTiles`."""
    of_pattern = (layout.patterns, layout.row_blocks)
    tiles = layout.row_block_ptr.long().diff().view(of_pattern).amax(0)
    partial = layout.partial_count.long().view(of_pattern).amax(0)
    cost = tiles + (PARTIAL_TILE_COST - 1) * partial
    chunks = chunks_of(tiles, split_tiles, 1)
    row_block, first_slot = chunks.row_block, chunks.first_slot
    items = torch.stack([row_block, chunks.number, chunks.parts, first_slot + chunks.number], 1)
    longest = torch.argsort(cost[row_block] / chunks.parts, descending=True, stable=True)
    firsts = (chunks.parts > 1) & (chunks.number == 0)
    splits = torch.stack([row_block, first_slot, chunks.parts], 1)[firsts]
    return items[longest].int().contiguous(), splits.int().contiguous(), chunks.slots
