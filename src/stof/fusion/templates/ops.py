"""`torch.library` operators of the templates: schemas, fakes, and the jump to a kernel or to plain PyTorch.

Every operator takes a configuration as text (`GemmConfig`, or one for each bucket of rows: `buckets.written`). An empty
one, or one that does not fit the tensors of a call, means the default for their shape; a CPU, and whatever no kernel
serves, gets the twin in `twins.py`. Results are contiguous. Statistics, products and epilogues are computed in float32
and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import run, twins
from stof.fusion.templates.config import ACTIVATIONS, HALVES, NORMS
from stof.fusion.templates.folding import folded
from stof.fusion.templates.norms import Norm, can_normalise


@torch.library.custom_op("stof::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, config: str
) -> Tensor:
    """`act(x @ weight.T + bias) + residual`.

    Args:
        x: `[..., K]`, float16, bfloat16 or float32 on a GPU, any floating dtype elsewhere.
        weight: `[N, K]` of x's dtype, contiguous in either direction.
        bias: None or `[N]`.
        residual: None or `[..., N]`.
        activation: "none", "gelu", "gelu_tanh", "relu" or "silu".
        config: text of a `GemmConfig`, or of several by buckets of rows; "" for the default.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation, or text that is no configuration.
    """
    _known(activation)
    call = run.product("linear", x, weight, bias, residual, activation)
    chosen = run.choose(call, config)
    return twins.linear(x, weight, bias, residual, activation) if chosen is None else run.compute(call, chosen)


@linear.register_fake
def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, config: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("stof::norm_linear", mutates_args=())
def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    eps: float,
    activation: str,
    config: str,
) -> Tensor:
    """`act(norm(x) @ weight.T + bias)`; the norm is over the last dimension of x.

    An RMSNorm without weight scales rows, which commutes with the product: the Gluon kernels run the product on x as it
    is and scale its rows. Fold the norm's weight into the linear's to get there. Otherwise rows are normalised on their
    way into the product (plain tiles), or by a kernel of their own before it.

    Args:
        x, weight, bias, activation, config: as for `stof::linear`.
        norm_weight, norm_bias: None or `[K]`.
        norm: "rms" or "layer".
        eps: added to the mean square or variance.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation or norm, or text that is no configuration.
    """
    _known(activation, norm)
    call = run.product("norm_linear", x, weight, bias, None, activation, Norm.of(norm, norm_weight, norm_bias, eps))
    chosen = run.choose(call, config) if can_normalise(x.shape[-1], x) else None
    if chosen is None:
        return twins.norm_linear(x, norm_weight, norm_bias, weight, bias, norm, eps, activation)
    return run.compute(call, chosen)


@norm_linear.register_fake
def _norm_linear_fake(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    eps: float,
    activation: str,
    config: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("stof::gated_linear", mutates_args=())
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: str) -> Tensor:
    """`act(x @ gate.T) * (x @ up.T)`, as in SwiGLU ("silu") and GEGLU ("gelu", "gelu_tanh").

    Args:
        x, activation, config: as for `stof::linear`.
        weight: `[2 N, K]`, the gate's rows first, then up's.
        bias: None or `[2 N]`, in the same order.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        ArgumentError: an unknown activation, text that is no configuration, or a weight with an odd number of rows.
    """
    _known(activation)
    _paired(weight)
    call = run.product("gated_linear", x, weight, bias, None, activation)
    chosen = run.choose(call, config)
    return twins.gated_linear(x, weight, bias, activation) if chosen is None else run.compute(call, chosen)


@gated_linear.register_fake
def _gated_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@torch.library.custom_op("stof::linear_norm", mutates_args=())
def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    config: str,
) -> tuple[Tensor, Tensor]:
    """`(h, norm(h))` with h = x @ weight.T + bias + residual.

    The bias and the residual are part of the product; the norm reads h while it is in the L2.

    Args:
        x, weight, bias, residual, config: as for `stof::linear`.
        norm_weight, norm_bias: None or `[N]`.
        norm: "rms" or "layer".
        eps: added to the mean square or variance.

    Returns:
        Two tensors `[..., N]` in x's dtype; the norm is of h as it was rounded.

    Raises:
        ArgumentError: an unknown norm, or text that is no configuration.
    """
    _known("none", norm)
    call = run.product("linear_norm", x, weight, bias, residual, "none")
    chosen = run.choose(call, config)
    if chosen is None:
        return twins.linear_norm(x, weight, bias, residual, norm_weight, norm_bias, norm, eps)
    if can_normalise(call.shape.n, x):
        return run.compute_normed(call, chosen, Norm.of(norm, norm_weight, norm_bias, eps))
    h = run.compute(call, chosen)
    return h, twins.normalised(h, norm_weight, norm_bias, norm, eps)


@linear_norm.register_fake
def _linear_norm_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
    config: str,
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


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
    """`act((rstd * x * norm_weight) @ weight.T + bias)`: an RMSNorm whose row factors are given, and a product.

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
    _known(activation)
    call = _row_scaled("rms_linear", x, rstd, norm_weight, weight, bias, activation)
    out = _served(call, config)
    return twins.rms_linear(x, rstd, norm_weight, weight, bias, activation) if out is None else out


@rms_linear.register_fake
def _rms_linear_fake(x: Tensor, rstd: Tensor | None, norm_weight: Tensor | None, weight: Tensor, *rest: Any) -> Tensor:
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
    _known(activation)
    _paired(weight)
    call = _row_scaled("rms_gated_linear", x, rstd, norm_weight, weight, bias, activation)
    out = _served(call, config)
    return twins.rms_gated_linear(x, rstd, norm_weight, weight, bias, activation) if out is None else out


@rms_gated_linear.register_fake
def _rms_gated_linear_fake(
    x: Tensor, rstd: Tensor | None, norm_weight: Tensor | None, weight: Tensor, *rest: Any
) -> Tensor:
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
    rotary = run.Rotary(tables[0], tables[1], turned, head_dim)
    call = _row_scaled("rotary_linear", x, rstd, norm_weight, weight, bias, "none", rotary)
    out = _served(call, config)
    if out is None:
        return twins.rotary_linear(x, rstd, norm_weight, weight, bias, cos, sin, turned, head_dim)
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
    rotary: run.Rotary | None = None,
) -> run.Product | None:
    """A product with folded weights and scaled rows; None where there is no kernel for it, or folding is not exact."""
    if x.device.type != "cuda" or x.dtype not in HALVES or any(
        t is not None and (t.device, t.dtype) != (x.device, x.dtype) for t in (norm_weight, weight, bias)
    ):  # fmt: skip
        return None
    whole = weight if norm_weight is None else folded(weight, norm_weight)
    if whole is None:
        return None
    norm = None if rstd is None else Norm("rms", None, None, 0.0)
    return run.product(template, x, whole, bias, None, activation, norm, rstd, rotary)


def _served(call: run.Product | None, config: str) -> Tensor | None:
    """The product by a kernel; None where there is none for it."""
    chosen = None if call is None else run.choose(call, config)
    return None if call is None or chosen is None else run.compute(call, chosen)


def _paired(weight: Tensor) -> None:
    if weight.shape[0] % 2:
        raise ArgumentError(f"gate and up have equally many rows, got a weight with {weight.shape[0]}")


def _known(activation: str, norm: str = "rms") -> None:
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if norm not in NORMS:
        raise ArgumentError(f"norm is 'rms' or 'layer', got {norm!r}")
