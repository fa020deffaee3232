"""The templates in plain PyTorch: what they mean, what serves where no kernel does, and what they are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activated(x: Tensor, activation: str) -> Tensor:
    """`act(x)`; activation is one of `gemm_config.ACTIVATIONS`."""
    if activation == "none":
        return x
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")
    return F.relu(x) if activation == "relu" else F.silu(x)


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension; statistics in float32 at least."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    wide = wide if weight is None else wide * weight
    return (wide if bias is None else wide + bias).to(x.dtype)


def row_factors(x: Tensor, eps: float) -> Tensor:
    """What an RMSNorm multiplies the rows of x `[..., K]` by: `[...]`, in float32 at least."""
    return torch.rsqrt(x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1) + eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """`act(x @ weight.T + bias) + residual`."""
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
    """`act(norm(x) @ weight.T + bias)`."""
    return linear(normalised(x, norm_weight, norm_bias, norm, eps), weight, bias, None, activation)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`act(x @ gate.T) * (x @ up.T)`, gate the first half of the weight's rows, up the second."""
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return activated(gate, activation) * up


def _factored(x: Tensor, rstd: Tensor, norm_weight: Tensor | None) -> Tensor:
    rows = x.to(rstd.dtype) * rstd.unsqueeze(-1)
    return (rows if norm_weight is None else rows * norm_weight).to(x.dtype)


def rms_linear(
    x: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """`act((rstd * x * norm_weight) @ weight.T + bias)`, rstd `[...]` one factor a row."""
    return linear(_factored(x, rstd, norm_weight), weight, bias, None, activation)


def rms_gated_linear(
    x: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """`act(n @ gate.T) * (n @ up.T)` with n = rstd * x * norm_weight."""
    return gated_linear(_factored(x, rstd, norm_weight), weight, bias, activation)


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
) -> Tensor:
    """`norm(x) @ weight.T + bias`, the heads of the first `turned` columns rotated by cos and sin."""
    out = linear(_factored(x, rstd, norm_weight) if rstd is not None else x, weight, bias, None, "none")
    heads = out[..., :turned].unflatten(-1, (-1, head_dim))
    first, second = heads.chunk(2, -1)
    tables = [table.reshape(-1, head_dim) for table in (cos, sin)]
    place = torch.arange(heads.shape[:-2].numel(), device=x.device) % tables[0].shape[0]
    angles = [table[place].view(*heads.shape[:-2], 1, head_dim) for table in tables]
    heads = heads * angles[0] + torch.cat((-second, first), -1) * angles[1]
    return torch.cat((heads.flatten(-2), out[..., turned:]), -1)


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
    """`(h, norm(h))` with h = x @ weight.T + bias + residual."""
    h = linear(x, weight, bias, residual, "none")
    return h, normalised(h, norm_weight, norm_bias, norm, eps)
