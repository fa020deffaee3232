"""Thread blocks on the slots of a GPU's multiprocessors, longest first: what the slot that ends last has to do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Most waves of thread blocks that are placed one by one. With more, the mean load of a slot is close enough.
_WAVES = 12


def last_slot(loads: Tensor, each: Tensor, copies: Tensor, slots: int) -> Tensor:
    """Sum of the loads on the slot that ends last, `copies[i]` thread blocks of `each[i]` us placed longest first."""
    order = torch.argsort(each, descending=True)
    loads, each, copies = loads[order], each[order], copies[order]
    programs = float(copies.sum())
    if programs > _WAVES * slots:
        # The last to start are the shortest; half of one is left over at the end on average.
        average = (loads * copies[:, None]).sum(0) / slots + 0.5 * loads[-1]
        share = float((each * copies).sum()) / slots + 0.5 * float(each[-1])
        return loads[0] if float(each[0]) > share else average
    line = torch.tensor(_in_line(copies), device="cpu")
    ends = torch.zeros(slots, dtype=each.dtype, device=each.device)
    sums = torch.zeros(slots, loads.shape[1], dtype=each.dtype, device=each.device)
    start = 0
    while start < len(line):
        # The slot that is free first takes the longest thread block left. Several are assigned in one step while none
        # of them ends before the last of them starts.
        ends, free = ends.sort()
        sums = sums[free]
        wave = line[start : start + slots]
        after = ends[: len(wave)] + each[wave]
        overtaken = ends[1 : len(wave)] > after.cummin(0).values[:-1]
        count = int(overtaken.int().argmax()) + 1 if bool(overtaken.any()) else len(wave)
        ends[:count] = after[:count]
        sums[:count] += loads[wave[:count]]
        start += count
    return sums[int(ends.argmax())]


def _in_line(copies: Tensor) -> list[int]:
    """The index in `copies` of each thread block, in order; fractions of copies add up to whole ones.

    In Python: waking PyTorch's threads takes longer than reading some thousand numbers.
    """
    ends = [math.ceil(end) for end in torch.cumsum(copies, 0).tolist()]
    ends[-1] = math.ceil(float(copies.sum()))
    line: list[int] = []
    for number, end in enumerate(ends):
        line += [number] * (min(end, ends[-1]) - len(line))
    return line
