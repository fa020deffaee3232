"""Tensors of 8 bits (e4m3) with a scale for each head: made, and widened again."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import DtypeError, ShapeError

FP8 = torch.float8_e4m3fn
# Scales of q, k and v, float32 `[B or 1, heads]` each.
Scales = tuple[Tensor, Tensor, Tensor]

_LARGEST = torch.finfo(FP8).max
# Smaller units are not exact enough: below this, float32 has fewer bits.
_SMALLEST = torch.finfo(torch.float32).tiny


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each head to 8 bits, in units that bring its largest value to the largest there is, 448.

    Source: FlashAttention-3 (arXiv 2407.08608), section 3.3, with one scale for a head instead of one for a block.

    Values that are not finite in float32 become NaN, the others are as without them: attention is then NaN where such
    a value is seen.

    Args:
        x: `[B, H, S, D]`, any floating dtype of 16 bits or more.

    Returns:
        `(values, scale)`: float8_e4m3fn `[B, H, S, D]` in x's memory order, and float32 `[B, H]`, above 0: x is about
        `values * scale`. Values are off by up to 1/16 of themselves, or by 2**-10 of the scale.

    Raises:
        ShapeError, DtypeError: not four dimensions, or no floating-point tensor.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 256, 128)
        >>> (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(stof.quantise_heads, (q, k, v))
        >>> stof.attention(q8, k8, v8, masks.causal(), scales=(q_scale, k_scale, v_scale)).dtype
        torch.bfloat16
    """
    if not isinstance(x, Tensor):
        raise DtypeError(f"x is a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        layout = "nested" if x.is_nested else str(x.layout)
        raise DtypeError(f"x is a strided tensor, got a {layout} one; make it dense first, as by x.to_dense()")
    if x.ndim != 4 or x.shape[3] == 0:
        raise ShapeError(f"x is [batch, heads, length, head_dim] with a head_dim of 1 or more, got {list(x.shape)}")
    if not x.is_floating_point() or x.element_size() == 1:
        raise DtypeError(f"x is a floating-point tensor of 16 bits or more, got {x.dtype}")
    x = x.float()
    if x.numel() == 0:
        return x.to(FP8), x.new_ones(x.shape[:2])
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    x = x.where(x.isfinite(), torch.nan)  # casts of infinity to 8 bits may end at the largest number
    scale = torch.linalg.vector_norm(finite, torch.inf, dim=(2, 3)) / _LARGEST
    # Any unit will do for zeros, and for what is too small to have one.
    scale = torch.where(scale >= _SMALLEST, scale, 1.0)
    return (x / scale[:, :, None, None]).to(FP8), scale


def widened(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that 8 bits and a scale stand for, rounded once to `dtype`: `[B, H, S, D]` from `[B or 1, H]`."""
    return (x.float() * scale[:, :, None, None]).to(dtype)


def wide_dtype(device: str) -> torch.dtype:
    """What kernels for 16 bits and more are given in place of 8 bits, by device type: the result has 16 in any case."""
    return torch.bfloat16 if device == "cuda" else torch.float32
