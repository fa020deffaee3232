"""The Hopper kernel's lists for vertical columns and slash distances, rebuilt on the device.

How many tiles a row block has only the device finds out, so jobs are listed as if slash distances lay evenly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.hopper.tile_lists import TileLists, oob_column
from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts
from stof.plans.hopper_buffers import FilledTiles, partition_items

if TYPE_CHECKING:
    from stof.plans.vertical_slash import SlashBuffers
    from stof.runtime.launch import Launch

# Rows of a row block, and columns of a tile.
BLOCK = 64
# Distances, or tiles, handled at once; programs that make the bitmaps of a pattern.
_COPY, _TILES_AT_ONCE, _SIDE = 1024, 64, 64


def slash_refusals(room: SlashBuffers) -> tuple[str, ...]:
    """Why the kernel cannot run masks like the room's."""
    problem, found = room.problem, []
    # 0 * NaN is NaN, and TMA reads whole tiles: each column of theirs has to be seen by a row that exists, or be none.
    if problem.q_len % BLOCK:
        found.append(f"of vertical_slash, takes lengths of whole row blocks of {BLOCK}, not {problem.q_len}")
    if problem.kv_len != problem.q_len + room.offset:
        found.append(f"of vertical_slash, takes keys up to the last query, not {problem.kv_len}")
    return tuple(found)


def slash_counts(room: SlashBuffers, config: LayoutConfig) -> TileCounts:
    """Tiles of each row block, all of them partial, were all distances neighbours and all lists spread evenly."""
    problem = room.problem
    reach = problem.q_len + room.offset
    most = -(-min(room.distances + BLOCK, reach) // config.block_n) + -(-room.verticals // config.block_n)
    last = torch.arange(1, -(-problem.q_len // config.block_m) + 1) * config.block_m + room.offset
    partial = torch.div(most * last + reach - 1, reach, rounding_mode="floor")
    partial = partial.expand(problem.patterns, -1)
    return TileCounts(partial, torch.zeros_like(partial))


def make_slash_tiles(room: SlashBuffers, config: LayoutConfig, split_tiles: int) -> FilledTiles:
    """Lists for the room's masks.

    Raises:
        UnfitLayoutError: see `slash_refusals`; or more tiles than 32-bit offsets reach.
    """
    refused = slash_refusals(room)
    if refused or config != LayoutConfig(BLOCK, BLOCK):
        raise UnfitLayoutError(next(iter(refused), f"{config} is not what vertical_slash takes"))
    problem, device = room.problem, room.flags.device
    counts = slash_counts(room, config)
    count = counts.partial.numel()
    n, vertical_tiles = room.distances, room.columns.shape[-1] // BLOCK
    slots = n + vertical_tiles
    nothing, own_bitmaps = count * slots, 1 + 2 * problem.patterns * n
    bitmaps = own_bitmaps + count * vertical_tiles
    if max(nothing + 3, bitmaps * BLOCK * 4) >= 2**31:
        raise UnfitLayoutError(f"{nothing} tiles with {bitmaps} bitmaps are more than 32-bit offsets reach")

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    columns = zeros(nothing + 2, 1)
    columns[nothing:] = oob_column(problem.kv_len)
    dealt = partition_items(counts.partial, counts.full, split_tiles, nothing, device)
    lists = TileLists(
        pattern_of=room.work.pattern_of,
        items=dealt.items,
        item_ptr=dealt.item_ptr,
        tile_columns=columns,
        tile_bitmap=zeros(nothing + 3),
        bitmaps=zeros(bitmaps, BLOCK, 4),
        row_order=zeros(0),
        ranges=dealt.ranges,
        aside=room.columns,
        block_m=BLOCK,
        block_n=BLOCK,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        slab=BLOCK,
        row_step=1,
        column_step=1,
        chunks=dealt.chunks,
        has_full=0,
    )
    tables = (zeros(problem.patterns, 2, n), zeros(problem.patterns, 2, n), zeros(problem.patterns), dealt.first_item)
    return FilledTiles(lists, tables, _launches(room, lists, tables, slots, own_bitmaps, nothing))


def _launches(
    room: SlashBuffers, lists: TileLists, tables: tuple[Tensor, ...], slots: int, own_bitmaps: int, nothing: int
) -> tuple[Launch, ...]:
    from stof.plans.fill import hopper_vertical_slash as kernels
    from stof.runtime.launch import Launch

    runs, tiles, number, first_item = tables
    problem, device, n = room.problem, room.flags.device, room.distances
    words, n_columns = room.tables.shape[2] - 1, room.columns.shape[-1]
    row_blocks = (len(first_item) - 1) // problem.patterns
    columns = Launch(
        kernels.slash_columns,
        problem.patterns,
        (room.slashes, room.bad, runs, tiles, number),
        (n,),
        (BLOCK, _COPY),
        num_warps=8,
        num_stages=1,
        device=device,
    )
    bitmaps = Launch(
        kernels.slash_bitmaps,
        problem.patterns * _SIDE,
        (room.tables, tiles, number, lists.bitmaps),
        (words, n, room.offset),
        (_SIDE, BLOCK),
        num_warps=2,
        num_stages=1,
        device=device,
    )
    fill = Launch(
        kernels.slash_fill,
        problem.patterns * row_blocks,
        (
            room.columns, room.bad, room.tables, tiles, number, first_item, lists.tile_columns, lists.tile_bitmap,
            lists.bitmaps, lists.ranges,
        ),
        (n_columns, words, n, row_blocks, slots, own_bitmaps, nothing, room.offset),
        (BLOCK, _TILES_AT_ONCE),
        num_warps=1,
        num_stages=1,
        device=device,
    )  # fmt: skip
    return columns, bitmaps, fill
