"""The templates in plain PyTorch: their definition, and what serves on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activated(x: Tensor, activation: str) -> Tensor:
    """`activation` is one of "none", "gelu" (by erf), "gelu_tanh", "relu", "silu".

    Raises:
        KeyError: another name.
    """
    return _ACTIVATIONS[activation](x)


_ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float) -> Tensor:
    """RMSNorm ("rms", without bias) or LayerNorm ("layer") over the last dimension, in float32 at least."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return scaled if weight is None else scaled * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """`act(x @ weight.T + bias) + residual`, `[..., N]`."""
    out = activated(F.linear(x, weight, bias), activation)
    return out if residual is None else out + residual


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    eps: float,
    activation: str,
) -> Tensor:
    """`act(norm(x) @ weight.T + bias)`, `[..., N]`."""
    return linear(normalised(x, norm_weight, norm_bias, norm, eps), weight, bias, None, activation)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`act(x @ gate.T) * (x @ up.T)`, `[..., N]`; the weight `[2 N, K]` has the gate's rows first."""
    gate, up = linear(x, weight, bias, None, "none").chunk(2, -1)
    return activated(gate, activation) * up


def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`(h, norm(h))`, both `[..., N]`, with `h = x @ weight.T + bias + residual`."""
    h = linear(x, weight, bias, residual, "none")
    return h, normalised(h, norm_weight, norm_bias, norm, eps)
