"""Launching the kernels that normalise rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.fusion.templates.device_properties import pdl_options
from stof.runtime.cache_keys import on_grid

# Widest row that one program normalises.
_WIDEST_ROW = 16384


class Norm(NamedTuple):
    """A norm next to a GEMM: "rms" or "layer", its weight and bias (a vector of the row's width), its epsilon."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @staticmethod
    def of(kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Norm:
        """With vectors of any stride; kernels read elements one after the other."""
        weight, bias = (None if vector is None else vector.contiguous() for vector in (weight, bias))
        return Norm(kind, weight, bias, eps)


def can_normalise(width: int, like: Tensor) -> bool:
    """Whether the row kernels serve rows of this width, with dtype and device of a tensor that is not empty."""
    small = like.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return like.device.type == "cuda" and small and 0 < width <= _WIDEST_ROW and like.numel() > 0


def row_statistics(x: Tensor, norm: Norm) -> tuple[Tensor | None, Tensor]:
    """Mean (None for RMSNorm) and 1 / deviation of every row of x `[M, K]`, float32 `[M]`."""
    from stof.fusion.templates.triton.row_norm import row_statistics_kernel

    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if norm.kind == "layer" else None
    block, warps = _sizes(x.shape[1])
    on_grid(row_statistics_kernel, (x.shape[0],))(
        x, mean, rstd, x.shape[1], x.stride(0), norm.eps, BLOCK=block, NORM=norm.kind, num_warps=warps, **pdl_options(x)
    )
    return mean, rstd


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm or LayerNorm over the last dimension of x `[..., K]`, whose rows are contiguous; contiguous."""
    from stof.fusion.templates.triton.row_norm import row_norm_kernel

    rows = x.view(-1, x.shape[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block, warps = _sizes(x.shape[-1])
    on_grid(row_norm_kernel, (rows.shape[0],))(
        rows, norm.weight, norm.bias, out, rows.shape[1], rows.stride(0), norm.eps, BLOCK=block, NORM=norm.kind,
        HAS_WEIGHT=norm.weight is not None, HAS_BIAS=norm.bias is not None, num_warps=warps, **pdl_options(x),
    )  # fmt: skip
    return out


def merge_and_normalise(
    partial: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`(h, norm(h))` in `dtype`, `[M, N]`; h is the sum of partial `[splits, M, N]` (float32), bias and residual."""
    from stof.fusion.templates.triton.row_norm import merged_norm_kernel

    splits, rows, width = partial.shape
    h = torch.empty(rows, width, dtype=dtype, device=partial.device)
    out = torch.empty_like(h)
    block, warps = _sizes(width)
    on_grid(merged_norm_kernel, (rows,))(
        partial, bias, residual, h, norm.weight, norm.bias, out, width,
        0 if residual is None else residual.stride(0), norm.eps,
        BLOCK=block, SPLITS=splits, HAS_PRODUCT_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        NORM=norm.kind, HAS_WEIGHT=norm.weight is not None, HAS_BIAS=norm.bias is not None,
        num_warps=warps, **pdl_options(partial),
    )  # fmt: skip
    return h, out


def _sizes(width: int) -> tuple[int, int]:
    """Elements of a program, a power of two, and its warps."""
    block = 1 << (width - 1).bit_length()
    return block, 1 if block <= 256 else 4 if block <= 4096 else 8
