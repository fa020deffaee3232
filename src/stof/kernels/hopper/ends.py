"""The last jobs of a list, cut so that all thread blocks end at about the same time.

Jobs of one length leave the machine half empty in the last round: 2048 of them on 132 thread blocks take 16 rounds for
the work of 15.5. The jobs that would end too late are poured into the time that is left on each thread block, longest
first, and cut where one is full (McNaughton's rule); chunks are merged as those of heavy row blocks are.
"""

from __future__ import annotations

import heapq
import itertools
import math

import torch
from torch import Tensor

# Tiles of a chunk at least; of what is left over, half of that.
_LEAST = 8
# What writing a chunk, and reading another back, costs in full tiles: a guess.
_MERGE_COST = 1.5
# Rounds of jobs behind which what is left over at the end does not matter.
_MOST_ROUNDS = 32


def cut_ends(tiles: Tensor, cost: Tensor, whole: Tensor, blocks: int) -> Tensor:
    """What to take of which job, in order.

    Args:
        tiles: int64 `[J]`, tiles of each job in the order in which thread blocks take them.
        cost: float `[J]`, in full tiles.
        whole: bool `[J]`, jobs that cannot be cut.
        blocks: thread blocks that run at once. What these begin with stays as it is.

    Returns:
        int64 `[4, J + cuts]`: job, chunk of it, and the chunk's tiles `[begin, end)`, counted from the job's first.
    """
    number, nothing = torch.arange(len(tiles)), torch.zeros_like(tiles)
    plain = torch.stack([number, nothing, nothing, tiles])
    if not blocks < len(tiles) <= _MOST_ROUNDS * blocks or not bool((tiles[blocks:] >= 2 * _LEAST).any()):
        return plain
    costs = cost.tolist()
    starts, uncut = _play(costs, blocks)
    share = sum(costs) / blocks
    late = torch.tensor(starts) + cost > share
    late &= (tiles >= 2 * _LEAST) & ~whole
    late[:blocks] = False
    cut = sorted(late.nonzero()[:, 0].tolist(), key=lambda job: -costs[job])
    if not cut:
        return plain
    _, ends = _play(cost[~late].tolist(), blocks)
    weights = [costs[job] / int(tiles[job]) for job in cut]
    lengths = [int(tiles[job]) for job in cut]
    # The earliest common end that leaves room for all that is cut.
    bound = share
    while (pieces := _poured(lengths, weights, [bound - end for end in ends])) is None:
        bound += 1.0
    merges = math.ceil(math.log2(max(len(cuts) for cuts in pieces)))
    if bound + merges * _MERGE_COST > max(uncut) - _MERGE_COST:
        return plain
    first = min(cut)
    uncut_jobs = (~late[first:]).nonzero()[:, 0] + first
    taken = [(costs[job], job, 0, 0, int(tiles[job])) for job in uncut_jobs.tolist()]
    for job, weight, cuts in zip(cut, weights, pieces, strict=True):
        bounds = itertools.pairwise(itertools.accumulate(cuts, initial=0))
        taken += [((end - begin) * weight, job, chunk, begin, end) for chunk, (begin, end) in enumerate(bounds)]
    taken.sort(key=lambda one: (-one[0], *one[1:]))
    return torch.cat([plain[:, :first], torch.tensor([one[1:] for one in taken]).T], 1)


def _play(costs: list[float], blocks: int) -> tuple[list[float], list[float]]:
    """When each job starts if whoever is done first takes the next, and when thread blocks end."""
    ends = [0.0] * blocks
    starts = []
    for cost in costs:
        starts.append(ends[0])
        heapq.heapreplace(ends, ends[0] + cost)
    return starts, ends


def _poured(lengths: list[int], weights: list[float], room: list[float]) -> list[list[int]] | None:
    """Tiles of each chunk of each job, or None where jobs do not fit into the room, longest first."""
    free = sorted(room, reverse=True)
    pieces: list[list[int]] = []
    place = 0
    for length, weight in zip(lengths, weights, strict=True):
        cuts: list[int] = []
        left = length
        while left:
            fits = int((free[place] - _MERGE_COST) / weight) if place < len(free) else 0
            if fits < _LEAST:
                place += 1
                if place >= len(free):
                    return None
                continue
            taken = left if left <= fits else min(fits, left - _LEAST // 2)
            cuts.append(taken)
            free[place] -= taken * weight + _MERGE_COST
            left -= taken
        pieces.append(cuts)
    return pieces
