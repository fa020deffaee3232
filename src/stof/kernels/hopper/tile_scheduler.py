"""Tile scheduler: the list of work tiles that the Hopper kernel's thread blocks take, one after the other.

A work tile is some tiles of one row block, for one batch entry and one head: a whole row block, or one chunk of a row
block that is split along its keys. Thread blocks are persistent. Each starts with the work tile of its own number; then
it takes the next of the list from a counter in global memory, so all thread blocks end at about the same time.

Two decisions are made here, on the host, once a plan: the order of the list (`work_list`), and which of the last work
tiles are split so that no thread block ends late (`split_tail`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.hopper.tile_lists import ITEM, TileLists
from stof.layout.build.build import PARTIAL_TILE_COST
from stof.runtime.memory import tensors_on_host

# Integers of a work tile: its fields, and the columns of its first tile. 128 bytes, one load of a warp.
WORK_SIZE = 32


class WorkFields(NamedTuple):
    """Where a row of the work list holds what. Kernels and host read the same names.

    Attributes:
        row_block, batch, head: coordinates.
        begin, partial_end, end: tiles [begin, end), those before `partial_end` with bitmaps.
        parts: chunks of the row block, 1 where it is not split.
        slot: of the row block's first chunk.
        chunk: number of this chunk.
        pattern: for the row order.
        bitmap: of the first tile.
        nan_or_zero: of dynamic plans, a float32 that is added to the results: 0, or NaN for a bad mask.
        work_count: number of work tiles.
        item: of dynamic plans, the item whose range is read anew.
        list_index: written by the kernel, the position in the work list.
        columns: first of the columns of the first tile, so that its copy starts as soon as the descriptor is there.
        pair_skipped: of pairs, the tiles that each of both row blocks skips in total.
        pair_bitmap: of pairs, the bitmaps of both first tiles.
    """

    row_block: int = 0
    batch: int = 1
    head: int = 2
    begin: int = 3
    partial_end: int = 4
    end: int = 5
    parts: int = 6
    slot: int = 7
    chunk: int = 8
    pattern: int = 9
    bitmap: int = 10
    nan_or_zero: int = 11
    work_count: int = 12
    item: int = 14
    list_index: int = 15
    columns: int = 16
    # Pairs are neither split nor dynamic.
    pair_skipped: int = 6
    pair_bitmap: int = 10


WORK = WorkFields()
# A work tile goes to the front of the list if this many times its estimated cost exceeds the time that is left.
LATE = 1.5
# Cost of starting and ending a work tile, in full tiles.
_START_COST = 0.6
# Relative cost of a tile for which a single warpgroup has rows: a guess.
_ALONE = 0.5
# Rows of a warpgroup.
_ROWS = 64
# Empty warpgroups are skipped only where they are more than one in 16: the test costs 1 % of every tile.
_EMPTY_SHARE = 16
# Fewest tiles of a chunk; the last chunk of a work tile may have half of that.
_MIN_TILES = 8
# Cost of writing a chunk and reading another back, in full tiles: a guess.
_MERGE_COST = 1.5
# With more rounds of work tiles than this, an uneven last round does not matter.
_MAX_ROUNDS = 32


@tensors_on_host()
def work_list(lists: TileLists, batch: int, heads: int, blocks: int, side: int) -> Tensor:
    """Return the work tiles of every batch entry and head in the order in which thread blocks take them.

    Args:
        lists: of the mask.
        batch, heads: of the call.
        blocks: thread blocks that run at once.
        side: neighbouring heads computed at the same time, so that K and V stay in the L2 cache.

    Returns:
        int32 `[W + 1, WORK_SIZE]` on the CPU, fields as `WorkFields`; the last row is padding for prefetches.
    """
    mask_batch, mask_heads = lists.pattern_of.shape
    pattern_of = lists.pattern_of.cpu().expand(batch if mask_batch == 1 else mask_batch, -1)
    pattern = pattern_of.expand(-1, heads if mask_heads == 1 else mask_heads).reshape(-1).long()
    item_ptr = lists.item_ptr.long()
    count = item_ptr.diff()[pattern]
    batch_head = torch.repeat_interleave(torch.arange(len(pattern)), count)
    item = torch.arange(len(batch_head)) - (count.cumsum(0) - count)[batch_head] + item_ptr[pattern[batch_head]]
    rows = lists.items[item].long()
    rows[:, ITEM.slot] += batch_head * lists.chunks
    tiles = rows[:, ITEM.begin : ITEM.end + 1].clone()
    if lists.paired:
        # A pair takes as long as its warpgroup with more tiles.
        tiles[:, 0] += rows[:, ITEM.pair_skipped : ITEM.pair_skipped + 2].amin(1)
    cost = work_costs(rows[:, ITEM.row_block], tiles, lists)
    # Groups of `side` heads follow each other, the longest work tiles of each first. A work tile that would still run
    # at the end goes before all groups.
    together = torch.div(batch_head, side, rounding_mode="floor")
    share = cost.sum() / blocks
    of_heads = torch.zeros(int(together.max()) + 1, dtype=cost.dtype).index_add_(0, together, cost)
    start = (of_heads.cumsum(0) - of_heads)[together] / blocks
    together[(start + LATE * cost > share) & (cost > share / 8)] = -1
    order = torch.argsort(cost, descending=True, stable=True)
    order = order[torch.argsort(together[order], stable=True)]
    rows, batch_head, item = rows[order], batch_head[order], item[order]
    if not lists.ranges.numel() and not lists.paired:
        rows, batch_head = _with_split_tail(rows, batch_head, cost[order], blocks, lists)
    work = torch.zeros(len(rows) + 1, WORK_SIZE, dtype=torch.int32)
    work[:-1, WORK.row_block] = rows[:, ITEM.row_block]
    work[:-1, WORK.batch] = torch.div(batch_head, heads, rounding_mode="floor")
    work[:-1, WORK.head] = batch_head % heads
    work[:-1, WORK.begin : WORK.chunk + 1] = rows[:, ITEM.begin : ITEM.chunk + 1]
    work[:-1, WORK.pattern] = pattern[batch_head]
    work[:-1, WORK.bitmap] = rows[:, ITEM.bitmap]
    work[:-1, WORK.work_count] = len(rows)
    if lists.ranges.numel():
        work[:-1, WORK.item] = item
    if lists.paired:
        for row_block in range(2):
            work[:-1, WORK.pair_bitmap + row_block] = rows[:, ITEM.bitmap + row_block]
            work[:-1, WORK.pair_skipped + row_block] = rows[:, ITEM.pair_skipped + row_block]
    columns = lists.tile_columns[rows[:, ITEM.begin].to(lists.tile_columns.device)].cpu()
    work[:-1, WORK.columns : WORK.columns + columns.shape[1]] = columns
    return work


def work_costs(row_block: Tensor, tiles: Tensor, lists: TileLists) -> Tensor:
    """Return the estimated time of work tiles in full tiles, float `[W]`.

    Args:
        row_block: int64 `[W]`.
        tiles: int64 `[W, 3]`, tiles [begin, end of the partial ones, end).
        lists: of the mask.
    """
    begin, partial_end, end = tiles.unbind(1)
    cost = (partial_end - begin) * PARTIAL_TILE_COST + (end - partial_end)
    if skips_empty_groups(lists.q_len, lists.block_m):
        used = ((lists.q_len - row_block * lists.block_m) / lists.block_m).clamp(max=1)
        used = (used * (lists.block_m // _ROWS)).ceil() - 1
        cost = cost * (_ALONE + (1 - _ALONE) * used / (lists.block_m // _ROWS - 1))
    return cost + _START_COST


def skips_empty_groups(q_len: int, block_m: int) -> bool:
    """Whether warpgroups that have no rows in the last row block skip its tiles."""
    return -q_len % block_m // _ROWS * _ROWS * _EMPTY_SHARE >= q_len


def chunk_slots(work: Tensor) -> int:
    """Return how many chunks leave a partial result, for work tiles as `work_list` gives them."""
    return int(torch.where(work[:, WORK.parts] > 1, work[:, WORK.slot] + work[:, WORK.parts], 0).max())


def _with_split_tail(rows: Tensor, group: Tensor, cost: Tensor, blocks: int, lists: TileLists) -> tuple[Tensor, Tensor]:
    """Return items and their groups with the last ones split. Slots of the new chunks follow all others."""
    item, chunk, low, high = split_tail(rows[:, ITEM.end] - rows[:, ITEM.begin], cost, rows[:, ITEM.parts] > 1, blocks)
    parts = torch.bincount(item, minlength=len(rows))
    split = parts > 1
    slot = torch.where(split, parts, 0).cumsum(0) - parts + (int(group.max()) + 1) * lists.chunks
    rows, group, split, parts, slot = rows[item], group[item], split[item], parts[item], slot[item]
    begin, end = rows[:, ITEM.begin] + low, rows[:, ITEM.begin] + high
    bitmap = lists.tile_bitmap[begin.to(lists.tile_bitmap.device)].cpu()
    partial_end = rows[:, ITEM.partial_end].clamp(begin, end)
    chunks = [rows[:, ITEM.row_block], begin, partial_end, end, parts, slot, chunk, bitmap]
    return torch.where(split[:, None], torch.stack(chunks, 1), rows), group


def split_tail(tiles: Tensor, cost: Tensor, fixed: Tensor, blocks: int) -> Tensor:
    """Split the last work tiles so that all thread blocks end at about the same time.

    Work tiles of one length leave the machine half empty in the last round: 2048 of them on 132 thread blocks take 16
    rounds for the work of 15.5. The work tiles that would end late fill the time that is left on each thread block,
    longest first, and are split where a thread block is full (McNaughton's rule). Their chunks are merged as those of
    split row blocks are.

    Args:
        tiles: int64 `[W]`, tiles of each work tile in the order in which thread blocks take them.
        cost: float `[W]`, in full tiles.
        fixed: bool `[W]`, chunks of row blocks that are split already; they are not split again.
        blocks: thread blocks that run at once. Their first work tiles are not split.

    Returns:
        int64 `[4, W + splits]`: work tile, chunk of it, and the chunk's tiles [begin, end) counted from its first.
    """
    number, nothing = torch.arange(len(tiles)), torch.zeros_like(tiles)
    plain = torch.stack([number, nothing, nothing, tiles])
    if not blocks < len(tiles) <= _MAX_ROUNDS * blocks or not bool((tiles[blocks:] >= 2 * _MIN_TILES).any()):
        return plain
    costs = cost.tolist()
    starts, unsplit_ends = _simulate(costs, blocks)
    share = sum(costs) / blocks
    late = torch.tensor(starts) + cost > share
    late &= (tiles >= 2 * _MIN_TILES) & ~fixed
    late[:blocks] = False
    split = sorted(late.nonzero()[:, 0].tolist(), key=lambda work: -costs[work])
    if not split:
        return plain
    _, ends = _simulate(cost[~late].tolist(), blocks)
    tile_costs = [costs[work] / int(tiles[work]) for work in split]
    lengths = [int(tiles[work]) for work in split]
    # The earliest common end that leaves room for all chunks.
    bound = share
    while (chunks := _fill(lengths, tile_costs, [bound - end for end in ends])) is None:
        bound += 1.0
    merges = math.ceil(math.log2(max(len(cuts) for cuts in chunks)))
    if bound + merges * _MERGE_COST > max(unsplit_ends) - _MERGE_COST:
        return plain
    first = min(split)
    others = (~late[first:]).nonzero()[:, 0] + first
    taken = [(costs[work], work, 0, 0, int(tiles[work])) for work in others.tolist()]
    for work, tile_cost, cuts in zip(split, tile_costs, chunks, strict=True):
        bounds = itertools.pairwise(itertools.accumulate(cuts, initial=0))
        taken += [((end - begin) * tile_cost, work, chunk, begin, end) for chunk, (begin, end) in enumerate(bounds)]
    taken.sort(key=lambda one: (-one[0], *one[1:]))
    return torch.cat([plain[:, :first], torch.tensor([one[1:] for one in taken]).T], 1)


def _simulate(costs: list[float], blocks: int) -> tuple[list[float], list[float]]:
    """Return when each work tile starts if the first free thread block takes the next, and when thread blocks end."""
    ends = [0.0] * blocks
    starts = []
    for cost in costs:
        starts.append(ends[0])
        heapq.heapreplace(ends, ends[0] + cost)
    return starts, ends


def _fill(lengths: list[int], tile_costs: list[float], room: list[float]) -> list[list[int]] | None:
    """Return the tiles of each chunk of each work tile, or None where they do not fit into the room."""
    free = sorted(room, reverse=True)
    chunks: list[list[int]] = []
    block = 0
    for length, tile_cost in zip(lengths, tile_costs, strict=True):
        cuts: list[int] = []
        left = length
        while left:
            fits = int((free[block] - _MERGE_COST) / tile_cost) if block < len(free) else 0
            if fits < _MIN_TILES:
                block += 1
                if block >= len(free):
                    return None
                continue
            taken = left if left <= fits else min(fits, left - _MIN_TILES // 2)
            cuts.append(taken)
            free[block] -= taken * tile_cost + _MERGE_COST
            left -= taken
        chunks.append(cuts)
    return chunks
