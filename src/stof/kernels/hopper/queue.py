"""The list of jobs that the Hopper kernel's thread blocks take, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.host import tensors_on_host
from stof.kernels.hopper.ends import cut_ends
from stof.kernels.hopper.jobs import JOB_FIELDS, JOB_SIZE, LATE, PAIR_BITMAP, PAIR_LEFT_OUT, TileLists
from stof.layout.build import PARTIAL_TILE_COST

# What starting and ending a job costs, in full tiles.
_JOB_COST = 0.6
# What a tile takes where all warpgroups but one have no rows: a guess.
_ALONE = 0.5
# Rows of a warpgroup.
_ROWS = 64
# Warpgroups for one without rows, at most, that asking which has none pays.
_IDLE_SHARE = 16


@tensors_on_host()
def job_list(lists: TileLists, batch: int, heads: int, blocks: int, side: int) -> Tensor:
    """Every item of every batch entry and head, in the order in which thread blocks take them, the last ones cut.

    Args:
        lists: of the mask.
        batch, heads: of the call.
        blocks: thread blocks that run at once.
        side: neighbouring heads computed at the same time, for the L2 cache.

    Returns:
        Jobs int32 `[J + 1, 32]` on the CPU, the last for reading ahead. Fields of a job: row block, batch entry, head,
        tiles [begin, partial end, end), parts of its row block, slot of its first chunk, chunk, pattern, bitmap of the
        first tile; where tiles change on the device then what is added to the results; the number J; and in field 14,
        where tiles change, the item. Of pairs, fields from `PAIR_LEFT_OUT` on are how many tiles each row block leaves
        out, and those from `PAIR_BITMAP` on the bitmaps of their first ones. Field 15 is the kernel's own: which job a
        record is of. The other half of the line holds the columns of the first tile, so that it can be copied as soon
        as the line is there.
    """
    mask_batch, mask_heads = lists.pattern_of.shape
    pattern_of = lists.pattern_of.cpu().expand(batch if mask_batch == 1 else mask_batch, -1)
    pattern = pattern_of.expand(-1, heads if mask_heads == 1 else mask_heads).reshape(-1).long()
    item_ptr = lists.item_ptr.long()
    count = item_ptr.diff()[pattern]
    group = torch.repeat_interleave(torch.arange(len(pattern)), count)
    item = torch.arange(len(group)) - (count.cumsum(0) - count)[group] + item_ptr[pattern[group]]
    rows = lists.items[item].long()
    rows[:, 5] += group * lists.chunks
    tiles = rows[:, 1:4].clone()
    if lists.paired:
        # As long as the warpgroup with more.
        tiles[:, 0] += rows[:, 9:11].amin(1)
    cost = job_costs(rows[:, 0], tiles, lists)
    # Heads side by side come first, but jobs that would stick out at the end before all others; then longest first.
    together = torch.div(group, side, rounding_mode="floor")
    share = cost.sum() / blocks
    of_heads = torch.zeros(int(together.max()) + 1, dtype=cost.dtype).index_add_(0, together, cost)
    start = (of_heads.cumsum(0) - of_heads)[together] / blocks
    together[(start + LATE * cost > share) & (cost > share / 8)] = -1
    order = torch.argsort(cost, descending=True, stable=True)
    order = order[torch.argsort(together[order], stable=True)]
    rows, group, item = rows[order], group[order], item[order]
    if not lists.ranges.numel() and not lists.paired:
        rows, group = _with_cut_ends(rows, group, cost[order], blocks, lists)
    # One more, for reading ahead.
    jobs = torch.zeros(len(rows) + 1, JOB_SIZE, dtype=torch.int32)
    jobs[:-1, 0] = rows[:, 0]
    jobs[:-1, 1] = torch.div(group, heads, rounding_mode="floor")
    jobs[:-1, 2] = group % heads
    jobs[:-1, 3:9] = rows[:, 1:7]
    jobs[:-1, 9] = pattern[group]
    jobs[:-1, 10] = rows[:, 7]
    jobs[:-1, 12] = len(rows)
    if lists.ranges.numel():
        jobs[:-1, 14] = item
    if lists.paired:
        jobs[:-1, PAIR_BITMAP : PAIR_BITMAP + 2] = rows[:, 7:9]
        jobs[:-1, PAIR_LEFT_OUT : PAIR_LEFT_OUT + 2] = rows[:, 9:11]
    columns = lists.tile_columns[rows[:, 1].to(lists.tile_columns.device)].cpu()
    jobs[:-1, JOB_FIELDS : JOB_FIELDS + columns.shape[1]] = columns
    return jobs


def job_costs(row_block: Tensor, tiles: Tensor, lists: TileLists) -> Tensor:
    """Estimated time of jobs in full tiles, float `[J]`.

    Args:
        row_block: int64 `[J]`.
        tiles: int64 `[J, 3]`, tiles [begin, partial end, end).
        lists: what these are of.
    """
    begin, partial_end, end = tiles.unbind(1)
    cost = (partial_end - begin) * PARTIAL_TILE_COST + (end - partial_end)
    if idle_groups(lists.q_len, lists.block_m):
        used = ((lists.q_len - row_block * lists.block_m) / lists.block_m).clamp(max=1)
        used = (used * (lists.block_m // _ROWS)).ceil() - 1
        cost = cost * (_ALONE + (1 - _ALONE) * used / (lists.block_m // _ROWS - 1))
    return cost + _JOB_COST


def idle_groups(q_len: int, block_m: int) -> bool:
    """Whether warpgroups without rows, which the last row block may have, are to compute nothing.

    Only where they are more than one in 16 of all: asking makes every tile 1 % slower.
    """
    return -q_len % block_m // _ROWS * _ROWS * _IDLE_SHARE >= q_len


def chunk_slots(jobs: Tensor) -> int:
    """Slots that the chunks of jobs, which are as `job_list` gives them, leave what they have in."""
    return int(torch.where(jobs[:, 6] > 1, jobs[:, 7] + jobs[:, 6], 0).max())


def _with_cut_ends(rows: Tensor, group: Tensor, cost: Tensor, blocks: int, lists: TileLists) -> tuple[Tensor, Tensor]:
    """Items in order and the group of each, with the last ones cut; slots of these come after all others."""
    job, chunk, low, high = cut_ends(rows[:, 3] - rows[:, 1], cost, rows[:, 4] > 1, blocks)
    parts = torch.bincount(job, minlength=len(rows))
    cut = parts > 1
    slot = torch.where(cut, parts, 0).cumsum(0) - parts + (int(group.max()) + 1) * lists.chunks
    rows, group, cut, parts, slot = rows[job], group[job], cut[job], parts[job], slot[job]
    begin, end = rows[:, 1] + low, rows[:, 1] + high
    bitmap = lists.tile_bitmap[begin.to(lists.tile_bitmap.device)].cpu()
    chunks = [rows[:, 0], begin, rows[:, 2].clamp(begin, end), end, parts, slot, chunk, bitmap]
    return torch.where(cut[:, None], torch.stack(chunks, 1), rows), group
