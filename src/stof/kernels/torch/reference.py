"""Dense masked attention in plain PyTorch: the definition every other implementation is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.kernels.common import empty_output, softmax_and_lse


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with every option of the operator, memory `O(B * H * Sq * Skv)`.

    `s = scale * q @ k^T; s = softcap * tanh(s / softcap); s += bias; s = -inf where not kept`, then a softmax
    whose denominator also counts `exp(sinks[h])`.

    Args:
        q: `[B, H, Sq, D]`.
        k: `[B, Hkv, Skv, D]`, `H` a multiple of `Hkv` (query head `h` reads key head `h // (H / Hkv)`).
        v: `[B, Hkv, Skv, Dv]`.
        keep: bool, broadcastable to `[B, H, Sq, Skv]`; None keeps all.
        scale: factor on the scores.
        bias: additive, broadcastable to `[B, H, Sq, Skv]`.
        softcap: bound on the scaled scores, 0 for none.
        sinks: `[H]`, one extra logit per head with no value behind it.
        compute_dtype: dtype of all arithmetic; default float64 for float64 inputs, else float32.

    Returns:
        `(out, lse)`: `[B, H, Sq, Dv]` in q's dtype, and the log-sum-exp over the kept keys (sinks not
        counted) `[B, H, Sq]` in the compute dtype. A row that keeps nothing gives 0 and -inf. Keys and values that
        no query of a head may see are never part of the result, NaN among them.
    """
    dtype = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    batch, heads, q_len, _ = q.shape
    kv_heads = k.shape[1]
    grouped = q.to(dtype).reshape(batch, kv_heads, heads // kv_heads, q_len, q.shape[-1])
    scores = grouped @ k.to(dtype).unsqueeze(2).transpose(-1, -2)
    scores = scores.reshape(batch, heads, q_len, k.shape[2]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
        v = _seen_values(v, keep, heads)
    weights, lse = softmax_and_lse(scores)
    grouped_weights = weights.reshape(batch, kv_heads, heads // kv_heads, q_len, k.shape[2])
    out = grouped_weights @ v.to(dtype).unsqueeze(2)
    out = out.reshape(batch, heads, q_len, v.shape[-1])
    if sinks is not None:
        # softmax over keys and sink = softmax over keys * sigmoid(lse - sink); -inf - -inf is NaN
        share = torch.sigmoid(lse - sinks.to(dtype).view(1, heads, 1)).masked_fill(lse == -torch.inf, 0.0)
        out = out * share[..., None]
    return out.to(q.dtype), lse


def reference_in_q_order(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`reference_attention` with its output in q's memory order, which the operator's fake promises."""
    out, lse = reference_attention(q, k, v, keep, **options)
    return empty_output(q, v).copy_(out), lse


def _seen_values(v: Tensor, keep: Tensor, heads: int) -> Tensor:
    """`v` with zeros where no query sees a key: a weight of 0 times NaN is NaN."""
    seen = keep[(None,) * (4 - keep.ndim)].any(2)  # [B|1, H|1, Skv]
    if seen.shape[1] == heads:
        seen = seen.unflatten(1, (v.shape[1], -1)).any(2)
    return v.masked_fill(~seen[..., None], 0.0)
