"""Operators whose rows are scaled on their way out: GEMMs after an RMSNorm that is folded into their weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import launch, reference
from stof.fusion.templates.folded_weights import folded
from stof.fusion.templates.gemm_config import HALVES
from stof.fusion.templates.norms import Norm
from stof.fusion.templates.ops import known, paired


@torch.library.custom_op("stof::rms_linear", mutates_args=())
def rms_linear(
    x: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: str,
) -> Tensor:
    """`act((rstd * x * norm_weight) @ weight.T + bias)`: an RMSNorm whose row factors are given, and a GEMM.

    The kernels compute `rstd * (x @ (weight * norm_weight).T)`: rows are scaled in float32 on their way out, and the
    weight with the norm's folded in is kept from the first call on (`folding.folded`). Source: Zhang & Sennrich 2019,
    "Root Mean Square Layer Normalization", equation 4.

    Args:
        x, weight, bias, activation, config: as for `stof::linear`.
        rstd: `[...]`, float32 (float64 for float64 x), `1 / sqrt(mean(x^2) + eps)` of every row.
        norm_weight: None or `[K]`.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation, or text that is no configuration.
    """
    known(activation)
    call = _row_scaled("rms_linear", x, rstd, norm_weight, weight, bias, activation)
    out = _served(call, config)
    if out is not None:
        return out
    return reference.rms_linear(x, rstd, norm_weight, weight, bias, activation)


@rms_linear.register_fake
def _rms_linear_fake(x: Tensor, rstd: Tensor, norm_weight: Tensor | None, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("stof::rms_gated_linear", mutates_args=())
def rms_gated_linear(
    x: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: str,
) -> Tensor:
    """`act(n @ gate.T) * (n @ up.T)` with n = rstd * x * norm_weight.

    Args:
        x, rstd, norm_weight, activation, config: as for `stof::rms_linear`.
        weight, bias: as for `stof::gated_linear`.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation, text that is no configuration, or a weight with an odd number of rows.
    """
    known(activation)
    paired(weight)
    call = _row_scaled("rms_gated_linear", x, rstd, norm_weight, weight, bias, activation)
    out = _served(call, config)
    if out is not None:
        return out
    return reference.rms_gated_linear(x, rstd, norm_weight, weight, bias, activation)


@rms_gated_linear.register_fake
def _rms_gated_linear_fake(x: Tensor, rstd: Tensor, norm_weight: Tensor | None, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@torch.library.custom_op("stof::rotary_linear", mutates_args=())
def rotary_linear(
    x: Tensor,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    turned: int,
    head_dim: int,
    config: str,
) -> Tensor:
    """`(rstd * x * norm_weight) @ weight.T + bias`, then a rotary embedding of the heads in its first `turned` columns.

    `h * cos + cat(-h[half:], h[:half]) * sin` for each head h, as LLaMA rotates query and key. Source: Su et al. 2021,
    "RoFormer", equation 34.

    Args:
        x, norm_weight, weight, bias, config: as for `stof::rms_linear`.
        rstd: as there, or None for no norm.
        cos, sin: `[..., head_dim]` of x's dtype; row r of x (leading dimensions flattened) takes their row r modulo the
            number of rows they have.
        turned: a multiple of head_dim.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: text that is no configuration, or columns that are no heads.
    """
    if turned % head_dim or head_dim % 2 or turned > weight.shape[0]:
        raise ArgumentError(f"{turned} columns of {weight.shape[0]} cannot be heads of {head_dim} that are rotated")
    tables = [table.reshape(-1, head_dim).contiguous() for table in (cos, sin)]
    rotary = launch.Rotary(tables[0], tables[1], turned, head_dim)
    call = _row_scaled("rotary_linear", x, rstd, norm_weight, weight, bias, "none", rotary)
    out = _served(call, config)
    if out is None:
        return reference.rotary_linear(x, rstd, norm_weight, weight, bias, cos, sin, turned, head_dim)
    return out


@rotary_linear.register_fake
def _rotary_linear_fake(
    x: Tensor, rstd: Tensor | None, norm_weight: Tensor | None, weight: Tensor, *rest: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _row_scaled(
    template: str,
    x: Tensor,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    rotary: launch.Rotary | None = None,
) -> launch.GemmCall | None:
    """A GEMM with folded weights and scaled rows; None where there is no kernel for it, or folding is not exact."""
    if x.device.type != "cuda" or x.dtype not in HALVES or any(
        t is not None and (t.device, t.dtype) != (x.device, x.dtype) for t in (norm_weight, weight, bias)
    ):  # fmt: skip
        return None
    whole = weight if norm_weight is None else folded(weight, norm_weight)
    if whole is None:
        return None
    norm = None if rstd is None else Norm("rms", None, None, 0.0)
    return launch.gemm_call(template, x, whole, bias, None, activation, norm, rstd, rotary)


def _served(call: launch.GemmCall | None, config: str) -> Tensor | None:
    """The GEMM by a kernel; None where there is none for it."""
    chosen = None if call is None else launch.resolve_config(call, config)
    return None if call is None or chosen is None else launch.compute(call, chosen)
