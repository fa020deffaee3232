"""Dense masked attention in plain PyTorch: the definition every other implementation is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.kernels.common import empty_output, softmax_and_lse
from stof.kernels.dropout import Dropout, dense_kept_weights
from stof.kernels.implementation import Gradients, NeedsGrad
from stof.kernels.merge import share_of_keys


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
    dropout: Dropout | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with every option of the operator, memory `O(B * H * Sq * Skv)`.

    `s = scale * q @ k^T; s = softcap * tanh(s / softcap); s += bias; s = -inf where not kept`, then a softmax
    whose denominator also counts `exp(sinks[h])`; then dropout of the weights.

    Args:
        q: `[B, H, Sq, D]`.
        k: `[B, Hkv, Skv, D]`, `H` a multiple of `Hkv` (query head `h` reads key head `h // (H / Hkv)`).
        v: `[B, Hkv, Skv, Dv]`.
        keep: bool, broadcastable to `[B, H, Sq, Skv]`; None keeps all.
        scale: factor on the scores.
        bias: additive, broadcastable to `[B, H, Sq, Skv]`.
        softcap: bound on the scaled scores, 0 for none.
        sinks: `[H]`, one extra logit per head with no value behind it.
        dropout: its probability and seed, None for none; see `stof.kernels.dropout`.
        compute_dtype: dtype of all arithmetic; default float64 for float64 inputs, else float32.

    Returns:
        `(out, lse)`: `[B, H, Sq, Dv]` in q's dtype, and the log-sum-exp over the kept keys (sinks not
        counted, nor dropout) `[B, H, Sq]` in the compute dtype. A row that keeps nothing gives 0 and -inf. Keys and
        values that no query of a head may see are never part of the result, NaN among them.
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
    if dropout is not None:
        weights = _dropped(weights, dropout)
    grouped_weights = weights.reshape(batch, kv_heads, heads // kv_heads, q_len, k.shape[2])
    out = grouped_weights @ v.to(dtype).unsqueeze(2)
    out = out.reshape(batch, heads, q_len, v.shape[-1])
    if sinks is not None:
        out = out * share_of_keys(lse, sinks)[..., None]
    return out.to(q.dtype), lse


def reference_in_q_order(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`reference_attention` with its output in q's memory order, which the operator's fake promises."""
    out, lse = reference_attention(q, k, v, keep, **options)
    return empty_output(q, v).copy_(out), lse


def _dropped(weights: Tensor, dropout: Dropout) -> Tensor:
    """Weights after dropout, or their gradients; `[B, H, Sq, Skv]`."""
    batch, heads, q_len, kv_len = weights.shape
    return weights.masked_fill(~dense_kept_weights(dropout, batch, heads, q_len, kv_len), 0.0) * dropout.scale


def _seen_values(v: Tensor, keep: Tensor, heads: int) -> Tensor:
    """`v` with zeros where no query sees a key: a weight of 0 times NaN is NaN."""
    seen = keep[(None,) * (4 - keep.ndim)].any(2)  # [B|1, H|1, Skv]
    if seen.shape[1] == heads:
        seen = seen.unflatten(1, (v.shape[1], -1)).any(2)
    return v.masked_fill(~seen[..., None], 0.0)


def reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    keep: Tensor | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    d_lse: Tensor | None = None,
    dropout: Dropout | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of `reference_attention` by definition, memory `O(B * H * Sq * Skv)`.

    With `w` the weights after the sinks, `p` those before them, and `delta = rowsum(d_out * out)`:
    `d_v = w^T d_out; d_s = w * (d_out v^T - delta) + p * d_lse; d_bias = d_s`; through the softcap,
    `d_s *= 1 - (s / softcap)^2`; then `d_q = scale * d_s k; d_k = scale * d_s^T q`. Dropout multiplies the weights of
    `d_v`, and `d_out v^T`.

    Args:
        q, k, v, keep, scale, bias, softcap, sinks, dropout, compute_dtype: as for `reference_attention`.
        d_out: `[B, H, Sq, Dv]`, the gradient of the output.
        d_lse: `[B, H, Sq]`, the gradient of the log-sum-exp; None for zero.

    Returns:
        Gradients of every input, `bias` and `sinks` None where the call has none. Rows that keep nothing (or whose
        scores are all -inf) have gradients of 0, whatever `q`, `d_out` and `d_lse` hold there; so have keys and values
        that no query sees.
    """
    dtype = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    every = (batch, heads, q_len, kv_len)
    keep = torch.ones(every, dtype=torch.bool, device=q.device) if keep is None else keep.expand(every)
    # Each query head has its keys: a weight of 0 times NaN is NaN.
    k_of_head, v_of_head = (x.to(dtype).repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    k_of_head, v_of_head = (x.masked_fill(~keep.any(2)[..., None], 0.0) for x in (k_of_head, v_of_head))
    scores = q.to(dtype) @ k_of_head.mT * scale
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    added = capped if bias is None else capped + bias.to(dtype)
    weights, lse = softmax_and_lse(added.masked_fill(~keep, -torch.inf))
    empty = lse == -torch.inf
    q_seeing, d_out = (x.to(dtype).masked_fill(empty[..., None], 0.0) for x in (q, d_out))

    share = torch.ones_like(lse) if sinks is None else share_of_keys(lse, sinks)
    d_weights = d_out @ v_of_head.mT
    shared = weights * share[..., None]
    seen = shared
    if dropout is not None:
        seen, d_weights = _dropped(shared, dropout), _dropped(d_weights, dropout)
    delta = (d_out * (seen @ v_of_head)).sum(-1)
    d_scores = shared * (d_weights - delta[..., None])
    if d_lse is not None:
        d_scores = d_scores + weights * d_lse.to(dtype).masked_fill(empty, 0.0)[..., None]
    d_scores = d_scores.masked_fill(~keep | empty[..., None], 0.0)
    d_bias = None if bias is None else d_scores.sum_to_size(bias.shape).to(bias.dtype)
    if softcap:
        d_scores = (d_scores * (1 - (capped / softcap) ** 2)).masked_fill(empty[..., None], 0.0)
    d_sinks = None if sinks is None else (delta * (share - 1)).sum((0, 2)).to(sinks.dtype)

    def of_key_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, -1)).sum(2)

    return Gradients(
        q=(d_scores @ k_of_head * scale).to(q.dtype),
        k=of_key_heads(d_scores.mT @ q_seeing * scale).to(k.dtype),
        v=of_key_heads(seen.mT @ d_out).to(v.dtype),
        bias=d_bias,
        sinks=d_sinks,
    )


def dense_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, keep: Tensor, *, needs: NeedsGrad,
    **options: Any,
) -> Gradients:  # fmt: skip
    """`reference_backward` as implementations' backward functions are called; it computes the weights anew."""
    del out, lse
    every = reference_backward(q, k, v, d_out, keep, **options)
    wanted = (needs.q, needs.kv, needs.kv, needs.bias, needs.sinks)
    return Gradients(*[gradient if want else None for gradient, want in zip(every, wanted, strict=True)])
