"""Biases of attention that TMA can copy: 16-bit values in rows at multiples of 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

# TMA needs rows of a bias at multiples of 16 bytes, in values of 16 bits.
BIAS_STEP = 8


def tma_readable(bias: Tensor, q_len: int, kv_len: int) -> bool:
    """Whether TMA can copy tiles of a 4-D bias: 16-bit values for every key, in rows at multiples of 16 bytes."""
    return may_be_tma_readable(bias, q_len, kv_len) and has_aligned_rows(bias)


def has_aligned_rows(bias: Tensor) -> bool:
    """Whether a 4-D bias is contiguous along the keys, with rows at multiples of BIAS_STEP."""
    outer = zip(bias.shape[:3], bias.stride()[:3], strict=True)
    contiguous = bias.shape[3] == 1 or bias.stride(3) == 1
    return contiguous and all(n == 1 or (s >= 0 and s % BIAS_STEP == 0) for n, s in outer)


def may_be_tma_readable(bias: Tensor, q_len: int, kv_len: int) -> bool:
    """Whether TMA can copy tiles of a 4-D bias or of `copy_for_tma(bias)`: 16 bits, a value for every key."""
    return bias.dtype in (torch.float16, torch.bfloat16) and bias.shape[2] in (1, q_len) and bias.shape[3] == kv_len


def unbroadcast(bias: Tensor) -> Tensor:
    """Undo broadcasting: batch, head and query dimensions of stride 0 become size 1."""
    for dim in range(3):
        if bias.stride(dim) == 0:
            bias = bias.narrow(dim, 0, 1)
    return bias


def empty_for_tma(bias: Tensor, device: torch.device | str) -> Tensor:
    """Allocate a copy of an unbroadcast bias whose rows begin at multiples of 16 bytes."""
    *outer, keys = unbroadcast(bias).shape
    return torch.empty(*outer, -(-keys // BIAS_STEP) * BIAS_STEP, dtype=bias.dtype, device=device)[..., :keys]


def copy_for_tma(bias: Tensor) -> Tensor:
    """Copy a bias to rows at multiples of 16 bytes."""
    return empty_for_tma(bias, bias.device).copy_(unbroadcast(bias))
