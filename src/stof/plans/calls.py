"""What calls under one plan have in common."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from stof.errors import ArgumentError
from stof.masks import Mask

# Batch and heads that a call must have, None for any.
CallSizes = tuple[int | None, int | None]


def call_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    implementation: str | None,
    *scales: Tensor,
) -> Hashable:
    """What two calls share that can use the same bound call; strides stand for the memory order of the output."""
    key = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
        v.device, scale, softcap, implementation,
    )  # fmt: skip
    if bias is None and sinks is None and not scales:
        return key
    extra = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (bias, sinks, *scales)]
    return (*key, *extra)


def call_sizes_of(mask: Mask | None, mask_sizes: tuple[int, int]) -> CallSizes:
    """The batch and heads that calls must have under a mask of these sizes, None for any."""
    batch, heads = mask_sizes
    by_batch = batch != 1 or (mask is not None and mask.depends_on_batch)
    by_heads = heads != 1 or (mask is not None and mask.depends_on_heads)
    return batch if by_batch else None, heads if by_heads else None


def check_rows(rows: int) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ArgumentError(f"rows is an int of 0 or more, got {rows!r}")
