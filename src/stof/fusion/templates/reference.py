"""The templates in plain PyTorch: what they mean, what serves where no kernel does, and what they are compared with.

Signatures and docstrings are those of the operators too (`operators.py`), which check arguments and raise.
"""

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
    """`act(x @ weight.T + bias) + residual`.

    Args:
        x: `[..., K]`, float16, bfloat16 or float32 on a GPU, any floating dtype elsewhere.
        weight: `[N, K]` of x's dtype, contiguous in either direction.
        bias: None or `[N]`.
        residual: None or `[..., N]`.
        activation: "none", "gelu", "gelu_tanh", "relu" or "silu".
    """
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
    return linear(normalised(x, norm_weight, norm_bias, norm, eps), weight, bias, None, activation)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`act(x @ gate.T) * (x @ up.T)`, as in SwiGLU ("silu") and GEGLU ("gelu", "gelu_tanh").

    Args:
        x, activation: as for `stof::linear`.
        weight: `[2 N, K]`, the gate's rows first, then up's.
        bias: None or `[2 N]`, in the same order.

    Raises:
        ArgumentError: a weight with an odd number of rows.
    """
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
    """`act((rstd * x * norm_weight) @ weight.T + bias)`: an RMSNorm whose row factors are given, and a GEMM.

    The kernels compute `rstd * (x @ (weight * norm_weight).T)`: rows are scaled in float32 on their way out, and the
    weight with the norm's folded in is kept from the first call on (`folded_weights.folded`). Source: Zhang & Sennrich
    2019, "Root Mean Square Layer Normalization", equation 4.

    Args:
        x, weight, bias, activation: as for `stof::linear`.
        rstd: `[...]`, float32 (float64 for float64 x), `1 / sqrt(mean(x^2) + eps)` of every row.
        norm_weight: None or `[K]`.
    """
    return linear(_factored(x, rstd, norm_weight), weight, bias, None, activation)


def rms_gated_linear(
    x: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """`act(n @ gate.T) * (n @ up.T)` with n = rstd * x * norm_weight.

    Args:
        x, rstd, norm_weight, activation: as for `stof::rms_linear`.
        weight, bias: as for `stof::gated_linear`.

    Raises:
        ArgumentError: a weight with an odd number of rows.
    """
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
    h = linear(x, weight, bias, residual, "none")
    return h, normalised(h, norm_weight, norm_bias, norm, eps)
