"""The Hopper kernel's lists for the best key blocks of each query block, rebuilt on the device.

How many tiles each row block has is known beforehand but for scores that exclude blocks: so jobs are listed once,
and what the device finds out are the tiles' columns and, within its place in the lists, what each item computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.config import RUN
from stof.kernels.hopper.tile_lists import TileLists, oob_column
from stof.layout import LayoutConfig
from stof.layout import bitmaps as bits
from stof.layout.survey import TileCounts
from stof.plans.hopper_buffers import FilledTiles, partition_items

if TYPE_CHECKING:
    from stof.plans.block_topk import BlockBuffers
    from stof.runtime.launch import Launch

# Columns of a slab where tiles are pairs of blocks; a block is a run of them.
_SLAB = 16
# Tiles written at once.
_TILES_AT_ONCE = 64


def block_refusals(room: BlockBuffers) -> tuple[str, ...]:
    """Why the kernel cannot run masks like the room's, in any shape of tiles."""
    problem, found = room.problem, []
    if room.block_size < 64:
        found.append(f"takes blocks of 64 or 128 made at run time, not {room.block_size}")
    if room.causal and problem.kv_len > problem.q_len and problem.q_len % room.block_size:
        # 0 * NaN is NaN, and TMA reads whole tiles.
        found.append(f"the last block holds keys past query {problem.q_len - 1}, which no query sees")
    return tuple(found)


def fits_blocks(config: LayoutConfig, block_size: int) -> bool:
    """Whether tiles hold keys of one block, or pairs of blocks of 64, and row blocks one partial one at most."""
    if _paired(config, block_size):
        return True
    return config.slab is None and config.block_m <= config.block_n <= block_size


def _paired(config: LayoutConfig, block_size: int) -> bool:
    """Whether each half of a tile is a block of its own."""
    return config == LayoutConfig(RUN, 2 * RUN, _SLAB) and block_size == RUN


def block_counts(room: BlockBuffers, config: LayoutConfig) -> TileCounts:
    """Tiles of each row block where no score is -inf; of two possible counts of partial ones, the likelier."""
    problem, size = room.problem, room.block_size
    row_blocks = -(-problem.q_len // config.block_m)
    key_blocks = -(-problem.kv_len // size)
    query_block = torch.div(torch.arange(row_blocks) * config.block_m, size, rounding_mode="floor")
    seen = (query_block + 1).clamp(max=key_blocks) if room.causal else torch.full_like(query_block, key_blocks)
    taken = seen.clamp(max=room.k)
    tiles = torch.div(taken * size + config.block_n - 1, config.block_n, rounding_mode="floor")
    # With more blocks to choose from than are taken, a query's own is one among many.
    partial = (seen <= room.k) & room.causal
    if _paired(config, size):
        partial |= taken % 2 == 1
    shape = (problem.patterns, row_blocks)
    return TileCounts(partial.long().expand(shape), (tiles - partial.long()).expand(shape))


def bitmaps_of(block_m: int, width: int, kv_len: int) -> Tensor:
    """Every bitmap of `width` columns: bool `[3 + 2 * width / block_m, block_m, width]`.

    The first keeps nothing. The one at `1 + 2 * place + tail` keeps what a causal mask does in tiles that begin
    `place * block_m - width` columns after their row block (at place 0 that is everything), and with a tail only
    columns before `kv_len`, in the tile that holds the last of them.
    """
    row, column = torch.arange(block_m)[:, None], torch.arange(width)[None, :]
    keep = [torch.zeros(block_m, width, dtype=torch.bool)]
    for place in range(1 + width // block_m):
        causal = column + place * block_m - width <= row
        keep += [causal, causal & (column < kv_len % width)]
    return torch.stack(keep)


def make_block_tiles(room: BlockBuffers, config: LayoutConfig, split_tiles: int) -> FilledTiles:
    """Lists for the room's masks.

    Args:
        room: of the mask.
        config: a shape of tiles that `fits_blocks`.
        split_tiles: see `jobs.make_tile_lists`.

    Raises:
        UnfitLayoutError: see `block_refusals`.
    """
    refused = block_refusals(room)
    if refused or not fits_blocks(config, room.block_size):
        raise UnfitLayoutError(next(iter(refused), f"{config} does not divide blocks of {room.block_size}"))
    problem, device = room.problem, room.flags.device
    counts = block_counts(room, config)
    paired = _paired(config, room.block_size)
    slots = -(-room.k * room.block_size // config.block_n) + 1
    nothing = counts.full.numel() * slots
    keep = bitmaps_of(config.block_m, config.block_n // (1 + paired), problem.kv_len)
    if paired:  # every one on the left, with every one on the right
        kinds = len(keep)
        keep = torch.cat([keep.repeat_interleave(kinds, 0), keep.repeat(kinds, 1, 1)], 2)
    width = config.block_n // _SLAB if paired else 1
    if (nothing + 2) * width >= 2**31:
        raise UnfitLayoutError(f"{nothing} tiles are more than 32-bit offsets reach")
    columns = torch.zeros(nothing + 2, width, dtype=torch.int32, device=device)
    spare = oob_column(problem.kv_len)
    columns[nothing:] = -1 - spare if paired else spare
    dealt = partition_items(counts.partial, counts.full, split_tiles, nothing, device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    lists = TileLists(
        pattern_of=room.work.pattern_of,
        items=dealt.items,
        item_ptr=dealt.item_ptr,
        tile_columns=columns,
        # A partial tile is its item's first, whose bitmap comes with the item: these are never applied.
        tile_bitmap=torch.zeros(nothing + 3, dtype=torch.int32, device=device),
        bitmaps=accumulator_order(bits.pack(keep), config.block_n).to(device),
        row_order=empty,
        ranges=dealt.ranges,
        aside=empty,
        block_m=config.block_m,
        block_n=config.block_n,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        slab=_SLAB if paired else 0,
        row_step=1,
        column_step=1,
        chunks=dealt.chunks,
        has_full=1,
    )
    return FilledTiles(lists, (dealt.first_item,), (_filling(room, lists, dealt.first_item, slots, nothing),))


def _filling(room: BlockBuffers, lists: TileLists, first_item: Tensor, slots: int, nothing: int) -> Launch:
    from stof.plans.fill.hopper_block_topk import fill_tiles
    from stof.runtime.launch import Launch

    problem = room.problem
    row_blocks = (len(first_item) - 1) // problem.patterns
    return Launch(
        fill_tiles,
        problem.patterns * row_blocks,
        (room.chosen, room.count, room.bad, first_item, lists.tile_columns, lists.ranges),
        (row_blocks, room.chosen.shape[1], room.k, slots, nothing, problem.q_len, problem.kv_len),
        (
            room.block_size, room.causal, lists.block_m, min(lists.block_n, room.block_size), lists.slab > 0,
            _TILES_AT_ONCE,
        ),
        num_warps=1,
        num_stages=1,
        device=room.flags.device,
    )  # fmt: skip
