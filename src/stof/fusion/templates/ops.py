"""`torch.library` operators of the templates: schemas, fakes, and the plain PyTorch twins that serve on a CPU.

All take `x [..., K]` and `weight [N, K]` (any strides) of one floating dtype. `config` "" means the operator's own
default for the shape. Outputs are new, contiguous tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof.fusion.templates import twins


@torch.library.custom_op("stof::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, config: str
) -> Tensor:
    """`act(x @ weight.T + bias) + residual`, `[..., N]`; residual `[..., N]`."""
    return twins.linear(x, weight, bias, residual, activation).contiguous()


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
    """`act(norm(x) @ weight.T + bias)`, `[..., N]`; norm is "rms" or "layer" over K."""
    return twins.norm_linear(x, norm_weight, norm_bias, weight, bias, norm, eps, activation).contiguous()


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
    """`act(x @ gate.T + gate_bias) * (x @ up.T + up_bias)`, `[..., N]`; weight `[2 N, K]` has the gate's rows first."""
    return twins.gated_linear(x, weight, bias, activation).contiguous()


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
    """`(h, norm(h))`, both `[..., N]`, with `h = x @ weight.T + bias + residual` and norm over N."""
    h, out = twins.linear_norm(x, weight, bias, residual, norm_weight, norm_bias, norm, eps)
    return h.contiguous(), out.contiguous()


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
