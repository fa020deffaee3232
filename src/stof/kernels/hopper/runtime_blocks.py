"""The Hopper kernel's lists for the best key blocks of each query block, rebuilt on the device.

How many tiles each row block has is known beforehand but for scores that exclude blocks: so jobs are dealt out once,
and what the device finds out are the tiles' columns and, within its place in the lists, what each item computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.hopper.jobs import RANGE_FIELDS, TileLists, split_items
from stof.kernels.triton.work import accumulator_order
from stof.layout import LayoutConfig, bits
from stof.layout.survey import TileCounts

if TYPE_CHECKING:
    from stof.kernels.triton.launch import Launch
    from stof.kernels.triton.runtime_blocks import BlockRoom

_NAN_BITS = 0x7FC00000
# Tiles written at once.
_TILES_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class BlockTiles:
    """Lists for one shape of tiles, and what fills them from the room's chosen blocks.

    Attributes:
        lists: what the kernel reads.
        first_item: int32 `[P * R + 1]`, items of each row block.
        fill: the launch.
    """

    lists: TileLists
    first_item: Tensor
    fill: Launch

    def bytes(self) -> int:
        """Memory on the device."""
        tensors = [t for t in self.lists.flatten()[0] if t.device == self.first_item.device]
        return sum(t.numel() * t.element_size() for t in (*tensors, self.first_item))


def block_refusals(room: BlockRoom) -> tuple[str, ...]:
    """Why the kernel cannot run masks like the room's, in any shape of tiles."""
    problem, found = room.problem, []
    if room.block_size < 64:
        found.append(f"takes blocks of 64 or 128 made at run time, not {room.block_size}")
    if room.causal and problem.kv_len > problem.q_len and problem.q_len % room.block_size:
        # 0 * NaN is NaN, and TMA reads whole tiles.
        found.append(f"the last block holds keys past query {problem.q_len - 1}, which no query sees")
    return tuple(found)


def fits_blocks(config: LayoutConfig, block_size: int) -> bool:
    """Whether no row block has two partial tiles, and no tile keys of two blocks."""
    return config.slab is None and config.block_m <= config.block_n <= block_size


def block_counts(room: BlockRoom, config: LayoutConfig) -> TileCounts:
    """Tiles of each row block where no score is -inf; of two possible counts of partial ones, that for most rows."""
    problem, size = room.problem, room.block_size
    row_blocks = -(-problem.q_len // config.block_m)
    key_blocks = -(-problem.kv_len // size)
    query_block = torch.div(torch.arange(row_blocks) * config.block_m, size, rounding_mode="floor")
    seen = (query_block + 1).clamp(max=key_blocks) if room.causal else torch.full_like(query_block, key_blocks)
    tiles = seen.clamp(max=room.k) * (size // config.block_n)
    # With more blocks to choose from than are taken, a query's own is one among many.
    partial = (seen <= room.k).long() if room.causal else torch.zeros_like(tiles)
    shape = (problem.patterns, row_blocks)
    return TileCounts(partial.expand(shape), (tiles - partial).expand(shape))


def bitmaps_of(config: LayoutConfig, kv_len: int) -> Tensor:
    """Every bitmap there is, in the kernel's order: int32 `[3 + 2 * block_n / block_m, block_m, 4]`.

    The first keeps nothing. The one at `1 + 2 * place + tail` keeps what a causal mask does in tiles that begin
    `place * block_m - block_n` columns after their row block (at place 0 that is everything), and with a tail only
    columns before `kv_len`, in the tile that holds the last of them.
    """
    block_m, block_n = config.block_m, config.block_n
    row, column = torch.arange(block_m)[:, None], torch.arange(block_n)[None, :]
    keep = [torch.zeros(block_m, block_n, dtype=torch.bool)]
    for place in range(1 + block_n // block_m):
        causal = column + place * block_m - block_n <= row
        keep += [causal, causal & (column < kv_len % block_n)]
    return accumulator_order(bits.pack(torch.stack(keep)), block_n)


def make_block_tiles(room: BlockRoom, config: LayoutConfig, split_tiles: int) -> BlockTiles:
    """Lists for the room's masks, each row spoiled until they are filled.

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
    tiles = (counts.partial + counts.full).flatten()
    slots = room.k * (room.block_size // config.block_n) + 1
    nothing = len(tiles) * slots
    pointers = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    items, item_ptr, chunks = split_items(pointers, counts.partial.flatten(), problem.patterns, split_tiles, nothing)
    owner = items[:, 0] + torch.repeat_interleave(
        torch.arange(problem.patterns) * counts.full.shape[1], item_ptr.long().diff()
    )
    first_item = torch.searchsorted(owner, torch.arange(len(tiles) + 1)).int().to(device)
    ranges = torch.tensor([nothing, nothing + 1, nothing + 1, 0, _NAN_BITS], dtype=torch.int32)
    columns = torch.zeros(nothing + 2, 1, dtype=torch.int32, device=device)
    columns[nothing:] = problem.kv_len  # past the end, where TMA fills in zeros
    lists = TileLists(
        pattern_of=room.work.pattern_of,
        items=items,
        item_ptr=item_ptr,
        tile_columns=columns,
        tile_bitmap=torch.zeros(nothing + 3, dtype=torch.int32, device=device),
        bitmaps=bitmaps_of(config, problem.kv_len).to(device),
        row_order=torch.zeros(0, dtype=torch.int32, device=device),
        ranges=ranges.expand(len(items), RANGE_FIELDS).contiguous().to(device),
        block_m=config.block_m,
        block_n=config.block_n,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        slab=0,
        row_step=1,
        column_step=1,
        chunks=chunks,
        has_full=1,
    )
    return BlockTiles(lists, first_item, _filling(room, lists, first_item, slots, nothing))


def _filling(room: BlockRoom, lists: TileLists, first_item: Tensor, slots: int, nothing: int) -> Launch:
    from stof.kernels.hopper.fill import fill_tiles
    from stof.kernels.triton.launch import Launch

    problem = room.problem
    row_blocks = (len(first_item) - 1) // problem.patterns
    return Launch(
        fill_tiles,
        problem.patterns * row_blocks,
        (room.chosen, room.count, room.bad, first_item, lists.tile_columns, lists.tile_bitmap, lists.ranges),
        (row_blocks, room.chosen.shape[1], room.k, slots, nothing, problem.q_len, problem.kv_len),
        (room.block_size, room.causal, lists.block_m, lists.block_n, _TILES_AT_ONCE),
        num_warps=1,
        num_stages=1,
        device=room.flags.device,
    )
