"""What tables hold at ranges of positions, for closed-form bounds of masks that look positions up."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# Ranges are widened to blocks of so many entries, which divide tiles of every size: less to reduce, and seldom less
# precise.
_BLOCK = 16


def extremes(rows: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of the entries at positions from `low` to `high`, exact for ranges of whole blocks.

    Args:
        rows: integers or bools `[..., n]`, where `[...]` broadcasts with the ranges: the table of each of them.
        low, high: int64, from 0 to n - 1.

    Returns:
        No entry is below the first or above the second; int64.
    """
    first, last = (torch.div(x, _BLOCK, rounding_mode="floor") for x in (low, high))
    widest = int((last - first).max()) + 1
    # A sparse table: level k holds the maximum of every 2**k blocks in a row. `~` reverses the order of integers and
    # cannot overflow, so minima are maxima as well.
    levels = [_blocks(rows.long())]
    for size in itertools.takewhile(lambda size: 2 * size <= widest, (2**k for k in itertools.count())):
        levels.append(torch.maximum(levels[-1][..., :-size], levels[-1][..., size:]))
    flat = torch.cat(levels, -1)
    starts = [0, *itertools.accumulate(level.shape[-1] for level in levels)]
    # Two overlapping runs of 2**k blocks cover any range of at least so many and fewer than twice as many.
    k = torch.frexp((last - first + 1).double()).exponent.long() - 1
    places = torch.arange(flat[0, ..., 0].numel(), device=flat.device).view(flat.shape[1:-1]) * flat.shape[-1]
    places = places + torch.tensor(starts, device=flat.device)[k]
    ends = (places + first, places + last + 1 - (1 << k))
    least, most = torch.maximum(*(flat.flatten(1)[:, end] for end in ends))
    return ~least, most


def _blocks(rows: Tensor) -> Tensor:
    """`~` of the smallest entry of each block, and the largest one: `[2, ..., blocks]`."""
    missing = -rows.shape[-1] % _BLOCK
    if missing:
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], -1)
    least, most = rows.unflatten(-1, (-1, _BLOCK)).aminmax(dim=-1)
    return torch.stack((~least, most))
