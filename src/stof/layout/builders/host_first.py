"""Where the mask of a new plan is evaluated: on the host until the GPU's kernels for it are worth compiling.

The kernels that count tiles and build layouts take seconds to compile, the host milliseconds for short sequences, and
both give equal layouts.
"""

from __future__ import annotations

import math

import torch

from stof.masks import Mask
from stof.masks.gpu_program import programs_of
from stof.masks.tensors import DenseMask

# Scores that the host evaluates for one device, in all plans together: 64 masks of 1024 x 1024.
HOST_SCORES = 2**26
_evaluated: dict[torch.device, int] = {}


def host_mask(mask: Mask, q_len: int, kv_len: int, sizes: tuple[int, int], device: torch.device) -> Mask | None:
    """Return the mask to evaluate on the host in place of this one, or None to evaluate it on the device.

    Args:
        mask, q_len, kv_len: the mask of a plan and its lengths.
        sizes: leading sizes of the mask, as `Mask.dims` gives them.
        device: the plan's.
    """
    if device.type != "cuda":
        return None
    scores = _evaluated.get(device, 0) + math.prod(sizes) * q_len * kv_len
    if scores > HOST_SCORES:
        return None
    keep = mask.as_tensor(q_len, kv_len)
    if keep is None and not _have_programs(mask, q_len, kv_len, sizes):
        return None
    _evaluated[device] = scores
    return mask if keep is None else DenseMask(keep.cpu(), copied=True)


def _have_programs(mask: Mask, q_len: int, kv_len: int, sizes: tuple[int, int]) -> bool:
    """Whether every pattern can be written as a program; other masks may read tensors on the device."""
    ids = mask.pattern_ids(*sizes).expand(sizes).flatten().tolist()
    entries = [divmod(ids.index(one), sizes[1]) for one in dict.fromkeys(ids)]
    return programs_of(mask, q_len, kv_len, entries) is not None
