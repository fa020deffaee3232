"""`torch.library` operators of the templates: argument checks, and the jump to a kernel or to plain PyTorch.

Each takes, after the arguments below, a configuration as text (`GemmConfig`, or one for each bucket of rows:
`row_buckets.format_table`). An empty one, or one that does not fit the tensors of a call, means the default for their
shape; a CPU, and whatever no kernel serves, gets plain PyTorch (`reference.py`). Results are contiguous. Statistics,
GEMMs and epilogues are computed in float32 and rounded once.

Raises, beside what each one says:
    ArgumentError: an unknown activation or norm, or text that is no configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import launch, reference
from stof.fusion.templates.folded_weights import folded
from stof.fusion.templates.gemm_config import ACTIVATIONS, GATED, HALVES, NORMS
from stof.fusion.templates.launch import GemmCall, gemm_call
from stof.fusion.templates.norms import Norm, can_normalise


def _register(name: str, compute: Callable[..., Any], doc: str | None) -> Callable[..., Any]:
    """Register `stof::NAME`: the arguments of `reference.NAME`, then `config`; results `[..., N]` in x's dtype."""
    plain = getattr(reference, name)
    schema = torch.library.infer_schema(plain, mutates_args=()).replace(") ->", ", str config) ->", 1)
    weight = list(inspect.signature(plain).parameters).index("weight")

    def fake(*arguments: Any) -> Any:
        x, rows = arguments[0], arguments[weight].shape[0]
        shape = (*x.shape[:-1], rows // 2 if name in GATED else rows)
        return (x.new_empty(shape), x.new_empty(shape)) if name == "linear_norm" else x.new_empty(shape)

    made = torch.library.custom_op(f"stof::{name}", compute, mutates_args=(), schema=schema)
    made.register_fake(fake)
    made.__doc__ = doc
    return made


def _operator(view: Callable[..., GemmCall | None]) -> Callable[..., Any]:
    """Register the operator of this name for a function that checks a call's arguments and views them for kernels.

    The function returns None for what no kernel serves.
    """
    plain = getattr(reference, view.__name__)

    def compute(*arguments: Any) -> Tensor:
        *given, config = arguments
        call = view(*given)
        chosen = None if call is None else launch.resolve_config(call, config)
        out: Tensor = plain(*given) if call is None or chosen is None else launch.compute(call, chosen)
        return out

    return _register(view.__name__, compute, view.__doc__)


@_operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> GemmCall:
    """`act(x @ weight.T + bias) + residual`.

    Args:
        x: `[..., K]`, float16, bfloat16 or float32 on a GPU, any floating dtype elsewhere.
        weight: `[N, K]` of x's dtype, contiguous in either direction.
        bias: None or `[N]`.
        residual: None or `[..., N]`.
        activation: "none", "gelu", "gelu_tanh", "relu" or "silu".
    """
    _check_options(activation)
    return gemm_call("linear", x, weight, bias, residual, activation)


@_operator
def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    eps: float,
    activation: str,
) -> GemmCall | None:
    """`act(norm(x) @ weight.T + bias)`; the norm is over the last dimension of x.

    An RMSNorm without weight scales rows, which commutes with the GEMM: the Gluon kernels run the GEMM on x as it
    is and scale its rows. Fold the norm's weight into the linear's to get there. Otherwise rows are normalized on their
    way into the GEMM (plain tiles), or by a kernel of their own before it.

    Args:
        x, weight, bias, activation: as for `stof::linear`.
        norm_weight, norm_bias: None or `[K]`.
        norm: "rms" or "layer".
        eps: added to the mean square or variance.
    """
    _check_options(activation, norm)
    if not can_normalise(x.shape[-1], x):
        return None
    return gemm_call("norm_linear", x, weight, bias, None, activation, Norm.of(norm, norm_weight, norm_bias, eps))


@_operator
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> GemmCall:
    """`act(x @ gate.T) * (x @ up.T)`, as in SwiGLU ("silu") and GEGLU ("gelu", "gelu_tanh").

    Args:
        x, activation: as for `stof::linear`.
        weight: `[2 N, K]`, the gate's rows first, then up's.
        bias: None or `[2 N]`, in the same order.

    Raises:
        ArgumentError: a weight with an odd number of rows.
    """
    _check_options(activation)
    _check_gated(weight)
    return gemm_call("gated_linear", x, weight, bias, None, activation)


def _linear_norm(
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

    The bias and the residual are part of the GEMM; the norm reads h while it is in the L2.

    Args:
        x, weight, bias, residual: as for `stof::linear`.
        norm_weight, norm_bias: None or `[N]`.
        norm: "rms" or "layer".
        eps: added to the mean square or variance.

    Returns:
        Two tensors `[..., N]` in x's dtype; the norm is of h as it was rounded.
    """
    _check_options("none", norm)
    call = gemm_call("linear_norm", x, weight, bias, residual, "none")
    chosen = launch.resolve_config(call, config)
    if chosen is None:
        return reference.linear_norm(x, weight, bias, residual, norm_weight, norm_bias, norm, eps)
    if can_normalise(call.shape.n, x):
        return launch.compute_normed(call, chosen, Norm.of(norm, norm_weight, norm_bias, eps))
    h = launch.compute(call, chosen)
    return h, reference.normalised(h, norm_weight, norm_bias, norm, eps)


linear_norm = _register("linear_norm", _linear_norm, _linear_norm.__doc__)


@_operator
def rms_linear(
    x: Tensor, rstd: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str
) -> GemmCall | None:
    """`act((rstd * x * norm_weight) @ weight.T + bias)`: an RMSNorm whose row factors are given, and a GEMM.

    The kernels compute `rstd * (x @ (weight * norm_weight).T)`: rows are scaled in float32 on their way out, and the
    weight with the norm's folded in is kept from the first call on (`folded_weights.folded`). Source: Zhang & Sennrich
    2019, "Root Mean Square Layer Normalization", equation 4.

    Args:
        x, weight, bias, activation: as for `stof::linear`.
        rstd: `[...]`, float32 (float64 for float64 x), `1 / sqrt(mean(x^2) + eps)` of every row.
        norm_weight: None or `[K]`.
    """
    _check_options(activation)
    return _row_scaled_call("rms_linear", x, rstd, norm_weight, weight, bias, activation)


@_operator
def rms_gated_linear(
    x: Tensor, rstd: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str
) -> GemmCall | None:
    """`act(n @ gate.T) * (n @ up.T)` with n = rstd * x * norm_weight.

    Args:
        x, rstd, norm_weight, activation: as for `stof::rms_linear`.
        weight, bias: as for `stof::gated_linear`.

    Raises:
        ArgumentError: a weight with an odd number of rows.
    """
    _check_options(activation)
    _check_gated(weight)
    return _row_scaled_call("rms_gated_linear", x, rstd, norm_weight, weight, bias, activation)


@_operator
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
) -> GemmCall | None:
    """`(rstd * x * norm_weight) @ weight.T + bias`, then a rotary embedding of the heads in its first `turned` columns.

    `h * cos + cat(-h[half:], h[:half]) * sin` for each head h, as LLaMA rotates query and key. Source: Su et al. 2021,
    "RoFormer", equation 34.

    Args:
        x, norm_weight, weight, bias: as for `stof::rms_linear`.
        rstd: as there, or None for no norm.
        cos, sin: `[..., head_dim]` of x's dtype; row r of x (leading dimensions flattened) takes their row r modulo the
            number of rows they have.
        turned: a multiple of head_dim.

    Raises:
        ArgumentError: columns that are no heads.
    """
    if turned % head_dim or head_dim % 2 or turned > weight.shape[0]:
        raise ArgumentError(f"{turned} columns of {weight.shape[0]} cannot be heads of {head_dim} that are rotated")
    tables = [table.reshape(-1, head_dim).contiguous() for table in (cos, sin)]
    rotary = launch.Rotary(tables[0], tables[1], turned, head_dim)
    return _row_scaled_call("rotary_linear", x, rstd, norm_weight, weight, bias, "none", rotary)


def _row_scaled_call(
    template: str,
    x: Tensor,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    rotary: launch.Rotary | None = None,
) -> GemmCall | None:
    """A GEMM with folded weights and scaled rows; None where there is no kernel for it, or folding is not exact."""
    if x.device.type != "cuda" or x.dtype not in HALVES or not _alike(x, norm_weight, weight, bias):
        return None
    whole = weight if norm_weight is None else folded(weight, norm_weight)
    if whole is None:
        return None
    norm = None if rstd is None else Norm("rms", None, None, 0.0)
    return gemm_call(template, x, whole, bias, None, activation, norm, rstd, rotary)


def _alike(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all have the device and dtype of x."""
    return all(t is None or (t.device, t.dtype) == (x.device, x.dtype) for t in others)


def _check_options(activation: str, norm: str = "rms") -> None:
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if norm not in NORMS:
        raise ArgumentError(f"norm is 'rms' or 'layer', got {norm!r}")


def _check_gated(weight: Tensor) -> None:
    if weight.shape[0] % 2:
        raise ArgumentError(f"gate and up have equally many rows, got a weight with {weight.shape[0]}")
