"""Tile scheduler: makes the list of work tiles that the Hopper kernel's persistent thread blocks process.

A work tile is a range of tiles of one row block, for one batch entry and one head: the whole row block, or one chunk of
a row block that is split along its keys. A thread block starts with the work tile of its own number. It takes each
further work tile from an atomic counter in global memory, so all thread blocks end at about the same time.

Two decisions are made here, on the host, once per plan: the order of the list (`work_list`), and which of the last work
tiles are split so that no thread block ends late (`split_tail`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.common import PARTIAL_TILE_COST
from stof.kernels.hopper.tile_lists import TILE_ITEM, TileLists
from stof.runtime.memory import tensors_on_host

# Integers of a work tile's descriptor: its fields, and the columns of its first tile. 128 bytes, one load of a warp.
WORK_SIZE = 32


class WorkFields(NamedTuple):
    """Column of each field in a row of the work list, for kernels and host.

    Paired row blocks are neither split nor dynamic, so their two fields share columns with `parts`, `slot` and
    `bitmap`, `nan_or_zero`.

    Attributes:
        row_block, batch, head: coordinates of the work tile.
        begin, partial_end, end: its tiles are [begin, end); those before `partial_end` are partial.
        parts: number of chunks of the row block, 1 if it is not split.
        slot: index, in the buffer of partial results, of the row block's first chunk.
        chunk: index of this chunk.
        pattern: index of the pattern, which selects the row order.
        bitmap: index of the first tile's bitmap.
        nan_or_zero: in dynamic plans, a float32 that is added to the results: 0, or NaN if the mask is invalid.
        work_count: number of work tiles in the list.
        item: in dynamic plans, index of the item from whose range begin to end, bitmap and `nan_or_zero` are refreshed.
        list_index: position in the work list, written by the kernel.
        columns: first of the columns that list the first tile's keys; with them its copy can start at once.
        pair_skipped: of paired row blocks (two columns), how many tiles each of them skips in total.
        pair_bitmap: of paired row blocks (two columns), the bitmap of each one's first tile.
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
    pair_skipped: int = 6
    pair_bitmap: int = 10


WORK = WorkFields()
# A work tile goes to the front of the list if, at its place, less time is left than this many times its estimated cost.
LATE = 1.5
# Cost of starting and ending a work tile, in full tiles.
_START_COST = 0.6
# Cost of a tile in which only one warpgroup has rows, relative to one in which all have: a guess.
_ALONE = 0.5
# Rows of a warpgroup.
_ROWS = 64
# Warpgroups without rows are skipped only if their rows are at least a 16th of q_len: the test costs 1 % of every tile.
_EMPTY_SHARE = 16
# Fewest tiles of a chunk that `split_tail` makes; the last chunk of a work tile may have half of that.
_MIN_TILES = 8
# Cost of writing a chunk and reading another back, in full tiles: a guess.
_MERGE_COST = 1.5
# With more rounds of work tiles than this, an uneven last round does not matter.
_MAX_ROUNDS = 32


@tensors_on_host()
def work_list(lists: TileLists, batch: int, heads: int, blocks: int, heads_at_once: int) -> Tensor:
    """Return the work tiles of every batch entry and head in the order in which thread blocks take them.

    Args:
        lists: the mask's tile lists.
        batch, heads: sizes of the call.
        blocks: thread blocks that run at once.
        heads_at_once: heads in a group whose K and V fit the L2 cache together (`KernelConfig.side`).

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
    rows[:, TILE_ITEM.slot] += batch_head * lists.chunks
    tiles = rows[:, TILE_ITEM.begin : TILE_ITEM.end + 1].clone()
    if lists.paired:
        # A pair takes as long as the warpgroup that skips fewer tiles.
        tiles[:, 0] += rows[:, TILE_ITEM.pair_skipped : TILE_ITEM.pair_skipped + 2].amin(1)
    cost = work_costs(rows[:, TILE_ITEM.row_block], tiles, lists)
    # The list has one group of heads after another, each with its longest work tiles first. Work tiles so long that
    # they would run past the common end go to the front of the list, as group -1.
    head_group = torch.div(batch_head, heads_at_once, rounding_mode="floor")
    share = cost.sum() / blocks
    group_cost = torch.zeros(int(head_group.max()) + 1, dtype=cost.dtype).index_add_(0, head_group, cost)
    start = (group_cost.cumsum(0) - group_cost)[head_group] / blocks
    head_group[(start + LATE * cost > share) & (cost > share / 8)] = -1
    order = torch.argsort(cost, descending=True, stable=True)
    order = order[torch.argsort(head_group[order], stable=True)]
    rows, batch_head, item = rows[order], batch_head[order], item[order]
    if not lists.ranges.numel() and not lists.paired:
        rows, batch_head = _with_split_tail(rows, batch_head, cost[order], blocks, lists)
    work = torch.zeros(len(rows) + 1, WORK_SIZE, dtype=torch.int32)
    work[:-1, WORK.row_block] = rows[:, TILE_ITEM.row_block]
    work[:-1, WORK.batch] = torch.div(batch_head, heads, rounding_mode="floor")
    work[:-1, WORK.head] = batch_head % heads
    work[:-1, WORK.begin : WORK.chunk + 1] = rows[:, TILE_ITEM.begin : TILE_ITEM.chunk + 1]
    work[:-1, WORK.pattern] = pattern[batch_head]
    work[:-1, WORK.bitmap] = rows[:, TILE_ITEM.bitmap]
    work[:-1, WORK.work_count] = len(rows)
    if lists.ranges.numel():
        work[:-1, WORK.item] = item
    if lists.paired:
        for row_block in range(2):
            work[:-1, WORK.pair_bitmap + row_block] = rows[:, TILE_ITEM.bitmap + row_block]
            work[:-1, WORK.pair_skipped + row_block] = rows[:, TILE_ITEM.pair_skipped + row_block]
    columns = lists.tile_columns[rows[:, TILE_ITEM.begin].to(lists.tile_columns.device)].cpu()
    work[:-1, WORK.columns : WORK.columns + columns.shape[1]] = columns
    return work


def work_costs(row_block: Tensor, tiles: Tensor, lists: TileLists) -> Tensor:
    """Return the estimated time of work tiles in full tiles, float `[W]`.

    Args:
        row_block: int64 `[W]`.
        tiles: int64 `[W, 3]`: begin, end of the partial tiles, end.
        lists: the mask's tile lists.
    """
    begin, partial_end, end = tiles.unbind(1)
    cost = (partial_end - begin) * PARTIAL_TILE_COST + (end - partial_end)
    if skips_empty_groups(lists.q_len, lists.block_m):
        used = ((lists.q_len - row_block * lists.block_m) / lists.block_m).clamp(max=1)
        used = (used * (lists.block_m // _ROWS)).ceil() - 1
        cost = cost * (_ALONE + (1 - _ALONE) * used / (lists.block_m // _ROWS - 1))
    return cost + _START_COST


def skips_empty_groups(q_len: int, block_m: int) -> bool:
    """Whether warpgroups that have no rows in the last row block skip its tiles, see `_EMPTY_SHARE`."""
    return -q_len % block_m // _ROWS * _ROWS * _EMPTY_SHARE >= q_len


def chunk_slots(work: Tensor) -> int:
    """Return how many partial results the chunks of a work list store: the size of their buffer."""
    return int(torch.where(work[:, WORK.parts] > 1, work[:, WORK.slot] + work[:, WORK.parts], 0).max())


def _with_split_tail(rows: Tensor, group: Tensor, cost: Tensor, blocks: int, lists: TileLists) -> tuple[Tensor, Tensor]:
    """Return rows and their batch-heads (`group`) with the last ones split. Slots of new chunks follow all others."""
    item, chunk, low, high = split_tail(
        rows[:, TILE_ITEM.end] - rows[:, TILE_ITEM.begin], cost, rows[:, TILE_ITEM.parts] > 1, blocks
    )
    parts = torch.bincount(item, minlength=len(rows))
    split = parts > 1
    slot = torch.where(split, parts, 0).cumsum(0) - parts + (int(group.max()) + 1) * lists.chunks
    rows, group, split, parts, slot = rows[item], group[item], split[item], parts[item], slot[item]
    begin, end = rows[:, TILE_ITEM.begin] + low, rows[:, TILE_ITEM.begin] + high
    bitmap = lists.tile_bitmap[begin.to(lists.tile_bitmap.device)].cpu()
    partial_end = rows[:, TILE_ITEM.partial_end].clamp(begin, end)
    chunks = [rows[:, TILE_ITEM.row_block], begin, partial_end, end, parts, slot, chunk, bitmap]
    return torch.where(split[:, None], torch.stack(chunks, 1), rows), group


def may_split_tail(work_tiles: float, blocks: float, longest: float) -> bool:
    """Whether `split_tail` considers splitting: work tiles are enough, and one of `longest` tiles is long enough."""
    return blocks < work_tiles <= _MAX_ROUNDS * blocks and longest >= 2 * _MIN_TILES


def split_tail(tiles: Tensor, cost: Tensor, fixed: Tensor, blocks: int) -> Tensor:
    """Split the last work tiles so that all thread blocks end at about the same time.

    Work tiles of equal length leave thread blocks idle in the last round: 2048 of them on 132 thread blocks take 16
    rounds, although their work would fill 15.5. So the work tiles that would end late are placed, longest first, in the
    time that each thread block has left, and are split where a thread block is full (McNaughton's rule). Their chunks
    are merged like those of split row blocks.

    Args:
        tiles: int64 `[W]`, tiles of each work tile in the order in which thread blocks take them.
        cost: float `[W]`, in full tiles.
        fixed: bool `[W]`, true for chunks of row blocks that are split already; they are not split again.
        blocks: thread blocks that run at once. Their first work tiles are not split.

    Returns:
        int64 `[4, W + splits]`: index of the work tile, index of the chunk, and the chunk's tiles [begin, end), counted
        from the work tile's first.
    """
    number, nothing = torch.arange(len(tiles)), torch.zeros_like(tiles)
    plain = torch.stack([number, nothing, nothing, tiles])
    longest = int(tiles[blocks:].max()) if len(tiles) > blocks else 0
    if not may_split_tail(len(tiles), blocks, longest):
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
    # The earliest common end at which all chunks fit.
    bound = share
    while (chunks := _fill(lengths, tile_costs, [bound - end for end in ends])) is None:
        bound += 1.0
    merges = math.ceil(math.log2(max(len(cuts) for cuts in chunks)))
    if bound + merges * _MERGE_COST > max(unsplit_ends) - _MERGE_COST:
        return plain
    first = min(split)
    unsplit = (~late[first:]).nonzero()[:, 0] + first
    taken = [(costs[work], work, 0, 0, int(tiles[work])) for work in unsplit.tolist()]
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


def _fill(lengths: list[int], tile_costs: list[float], free: list[float]) -> list[list[int]] | None:
    """Return the number of tiles of each chunk of each work tile, or None if they do not fit.

    `free` is the time that each thread block has left.
    """
    free = sorted(free, reverse=True)
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
