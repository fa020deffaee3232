"""`torch.library` operators of the templates: schemas, fakes, and the jump to a kernel or to plain PyTorch.

Every operator takes a configuration as text (`GemmConfig`, or one for each bucket of rows: `buckets.written`). An empty
one, or one that does not fit the tensors of a call, means the default for their shape; a CPU, and whatever no kernel
serves, gets plain PyTorch (`reference.py`). Results are contiguous. Statistics, GEMMs and epilogues are computed in
float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.templates import launch, reference
from stof.fusion.templates.gemm_config import ACTIVATIONS, NORMS
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
    known(activation)
    call = launch.gemm_call("linear", x, weight, bias, residual, activation)
    chosen = launch.resolve_config(call, config)
    return reference.linear(x, weight, bias, residual, activation) if chosen is None else launch.compute(call, chosen)


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

    An RMSNorm without weight scales rows, which commutes with the GEMM: the Gluon kernels run the GEMM on x as it
    is and scale its rows. Fold the norm's weight into the linear's to get there. Otherwise rows are normalized on their
    way into the GEMM (plain tiles), or by a kernel of their own before it.

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
    known(activation, norm)
    call = launch.gemm_call(
        "norm_linear", x, weight, bias, None, activation, Norm.of(norm, norm_weight, norm_bias, eps)
    )
    chosen = launch.resolve_config(call, config) if can_normalise(x.shape[-1], x) else None
    if chosen is None:
        return reference.norm_linear(x, norm_weight, norm_bias, weight, bias, norm, eps, activation)
    return launch.compute(call, chosen)


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
    known(activation)
    paired(weight)
    call = launch.gemm_call("gated_linear", x, weight, bias, None, activation)
    chosen = launch.resolve_config(call, config)
    return reference.gated_linear(x, weight, bias, activation) if chosen is None else launch.compute(call, chosen)


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

    The bias and the residual are part of the GEMM; the norm reads h while it is in the L2.

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
    known("none", norm)
    call = launch.gemm_call("linear_norm", x, weight, bias, residual, "none")
    chosen = launch.resolve_config(call, config)
    if chosen is None:
        return reference.linear_norm(x, weight, bias, residual, norm_weight, norm_bias, norm, eps)
    if can_normalise(call.shape.n, x):
        return launch.compute_normed(call, chosen, Norm.of(norm, norm_weight, norm_bias, eps))
    h = launch.compute(call, chosen)
    return h, reference.normalised(h, norm_weight, norm_bias, norm, eps)


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


def paired(weight: Tensor) -> None:
    """Refuse a weight that is not one of gate and up."""
    if weight.shape[0] % 2:
        raise ArgumentError(f"gate and up have equally many rows, got a weight with {weight.shape[0]}")


def known(activation: str, norm: str = "rms") -> None:
    """Refuse activations and norms that there are not."""
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if norm not in NORMS:
        raise ArgumentError(f"norm is 'rms' or 'layer', got {norm!r}")
