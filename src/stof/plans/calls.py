"""Which calls a plan serves."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import ArgumentError, DeviceError, PlanMismatchError
from stof.masks import Mask

# Batch and heads that a call must have, None for any.
CallSizes = tuple[int | None, int | None]


def call_sizes_of(mask: Mask | None, mask_sizes: tuple[int, int]) -> CallSizes:
    """The batch and heads that calls must have under a mask of these sizes, None for any."""
    batch, heads = mask_sizes
    by_batch = batch != 1 or (mask is not None and mask.depends_on_batch)
    by_heads = heads != 1 or (mask is not None and mask.depends_on_heads)
    return batch if by_batch else None, heads if by_heads else None


def check_rows(rows: int) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ArgumentError(f"rows is an int of 0 or more, got {rows!r}")


def check_fit(q: Tensor, k: Tensor, lengths: tuple[int, int], call_sizes: CallSizes, device: torch.device) -> None:
    """Raise unless a plan for these lengths, batch and heads on this device serves a call.

    Raises:
        PlanMismatchError: the call has other lengths, batch or heads than the plan was made for.
        DeviceError: the call is on another device.
    """
    lengths_given = (q.shape[2], k.shape[2])
    if lengths != lengths_given:
        raise PlanMismatchError(
            f"the plan was made for q_len {lengths[0]} and kv_len {lengths[1]}, the inputs have "
            f"{lengths_given[0]} and {lengths_given[1]}; make one with "
            f"stof.plan(mask, {lengths_given[0]}, {lengths_given[1]}), or pass the mask itself"
        )
    if device != q.device:
        if q.is_meta:
            raise DeviceError(
                f"the plan is on {device}, and the inputs are meta tensors, which hold no values; give inputs "
                f"on {device}, or the mask itself in the plan's place: then only shapes are computed"
            )
        raise DeviceError(
            f"the plan is on {device}, the inputs on {q.device}; move it once with plan.to({str(q.device)!r})"
        )
    for name, planned, called in (("batch", call_sizes[0], q.shape[0]), ("heads", call_sizes[1], q.shape[1])):
        if planned is not None and planned != called:
            raise PlanMismatchError(
                f"the plan's mask depends on the {'head' if name == 'heads' else 'batch entry'}, and the plan was "
                f"made for {name}={planned}; the inputs have {called}. Make a plan with {name}={called}, or leave "
                f"`{name}` out of stof.plan"
            )
