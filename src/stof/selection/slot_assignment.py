"""Thread blocks on the slots of a GPU's multiprocessors, longest first: what the slot that ends last has to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    _Array = npt.NDArray[Any]

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
    return torch.from_numpy(_placed(loads.numpy(), each.numpy(), copies.numpy(), slots))


def _placed(loads: _Array, each: _Array, copies: _Array, slots: int) -> _Array:
    """`last_slot` by placing one thread block after another; in NumPy, whose calls take a fifth of PyTorch's time."""
    import numpy as np

    # Fractions of copies add up to whole ones.
    copied = np.ceil(np.cumsum(copies)).astype(np.int64)
    copied[-1] = np.ceil(copies.sum())
    line = np.repeat(np.arange(len(copies)), np.diff(np.minimum(copied, copied[-1]), prepend=0))
    ends = np.zeros(slots)
    sums = np.zeros((slots, loads.shape[1]))
    start = 0
    while start < len(line):
        # The slot that is free first takes the longest thread block left. Several are assigned in one step while none
        # of them ends before the last of them starts.
        free = np.argsort(ends, kind="stable")
        ends, sums = ends[free], sums[free]
        wave = line[start : start + slots]
        after = ends[: len(wave)] + each[wave]
        overtaken = ends[1 : len(wave)] > np.minimum.accumulate(after)[:-1]
        count = int(overtaken.argmax()) + 1 if overtaken.any() else len(wave)
        ends[:count] = after[:count]
        sums[:count] += loads[wave[:count]]
        start += count
    last: _Array = sums[int(ends.argmax())]
    return last
