"""Where the mask of a new plan is evaluated: on the host until the GPU's kernels for it are worth compiling.

The kernels that count tiles and build layouts take seconds to compile, the host milliseconds for short sequences, and
both give equal layouts.
"""

from __future__ import annotations

import math

import torch

from stof.layout.builders.strips import STRIP_SCORES_GPU
from stof.masks import Mask
from stof.masks.gpu_program import programs_of
from stof.masks.index import Index
from stof.masks.tensors import DenseMask

# Maximum number of scores that the host evaluates for one device, summed over all plans: about half a second of work.
# A mask given as a tensor is copied to the host first, so each of its scores counts `_TENSOR_COST` times.
HOST_SCORES, _TENSOR_COST = 2**28, 4
_evaluated: dict[torch.device, int] = {}
# Scores, a byte each, of a mask that is evaluated as a whole on a GPU: those of 32,768 tokens.
_MOST_SCORES = 2**30


def host_mask(
    mask: Mask, q_len: int, kv_len: int, sizes: tuple[int, int], device: torch.device, row_keys: float | None = None
) -> Mask | None:
    """Return the mask to evaluate on the host in place of this one, or None to evaluate it on the device.

    Args:
        mask, q_len, kv_len: the mask of a plan and its lengths.
        sizes: leading sizes of the mask, as `Mask.dims` gives them.
        device: the plan's.
        row_keys: average number of keys that a row keeps, if these are contiguous; the host then evaluates few other
            keys. None if it has to evaluate every key.
    """
    if device.type != "cuda":
        return None
    keep = mask.as_tensor(q_len, kv_len)
    scores = math.prod(sizes) * q_len * math.ceil(kv_len if row_keys is None else row_keys)
    scores = _evaluated.get(device, 0) + (scores if keep is None else _TENSOR_COST * scores)
    if scores > HOST_SCORES:
        return None
    if not has_gpu_form(mask, q_len, kv_len, sizes):  # a mask function that may read tensors on the device
        return None
    if keep is None and mask.tensors_device() is not None:
        return None
    _evaluated[device] = scores
    return mask if keep is None else DenseMask(keep.cpu(), copied=True)


def scores_of(mask: Mask, q_len: int, kv_len: int, sizes: tuple[int, int], device: torch.device) -> Mask | None:
    """Evaluate every score of a mask on a device, and return a mask of the bool tensor; None if that is too large.

    Args:
        mask, q_len, kv_len, sizes: as for `host_mask`.
        device: where the tensors are that the mask reads.
    """
    count = math.prod(sizes) * kv_len
    if count * q_len > _MOST_SCORES:
        return None
    b, h, keys = (torch.arange(n, device=device) for n in (*sizes, kv_len))
    try:
        keep = torch.empty((*sizes, q_len, kv_len), dtype=torch.bool, device=device)
    except torch.OutOfMemoryError:
        return None
    at_once = max(1, STRIP_SCORES_GPU // count)
    for first in range(0, q_len, at_once):
        rows = torch.arange(first, min(first + at_once, q_len), device=device)
        index = Index.make(rows, keys, q_len=q_len, kv_len=kv_len, b=b, h=h)
        keep[:, :, first : first + len(rows)] = mask.evaluate(index)
    return DenseMask(keep, copied=True)


def has_gpu_form(mask: Mask, q_len: int, kv_len: int, sizes: tuple[int, int]) -> bool:
    """Whether a mask is a tensor, or every pattern can be written as a program."""
    if mask.as_tensor(q_len, kv_len) is not None:
        return True
    if sizes == (1, 1):
        return programs_of(mask, q_len, kv_len, [(0, 0)]) is not None
    ids = mask.pattern_ids(*sizes).expand(sizes).flatten().tolist()
    entries = [divmod(ids.index(one), sizes[1]) for one in dict.fromkeys(ids)]
    return programs_of(mask, q_len, kv_len, entries) is not None
