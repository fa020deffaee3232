"""`torch.nn.functional.scaled_dot_product_attention` with STOF's masks and kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stof.attention import attention
from stof.errors import ArgumentError, DtypeError, HeadCountError, ShapeError
from stof.masks import Mask, causal
from stof.plans.plan import Plan

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mask: Mask | Plan | str | Any = None,
) -> Tensor:
    """PyTorch's function of this name, with one more argument: a mask of STOF.

    Args:
        query: `[..., Hq, L, E]` or `[N, L, E]`; dtypes as for `stof.attention`.
        key: `[..., H, S, E]` or `[N, S, E]`, with the leading dimensions of `query`.
        value: `[..., H, S, Ev]` or `[N, S, Ev]`.
        attn_mask: bool (true: seen) or floating point (added to the scores), broadcastable to `[..., Hq, L, S]`.
        dropout_p: the probability of dropout, which is applied in inference too, as PyTorch does.
        is_causal: query i sees keys 0 to i; not together with `attn_mask`.
        scale: default `1 / sqrt(E)`.
        enable_gqa: allow fewer key heads than query heads.
        mask: a score counts only if this mask keeps it as well: a mask or plan of STOF, text, or a mask function.

    Returns:
        `[..., Hq, L, Ev]`; 0 in rows that see no key.

    Raises:
        ArgumentError: `attn_mask` and `is_causal`.
        ShapeError, HeadCountError, DtypeError: tensors that disagree, or an `attn_mask` that does not broadcast.
        UnsupportedError: as of `stof.attention`.

    Source: `torch.nn.functional.scaled_dot_product_attention`.

    Examples:
        >>> from stof import masks
        >>> from stof.nn.functional import scaled_dot_product_attention
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()
        >>> scaled_dot_product_attention(q, k, v, mask=masks.sliding_window(15)).shape
        torch.Size([2, 4, 100, 16])
    """
    if attn_mask is not None and is_causal:
        raise ArgumentError("scaled_dot_product_attention takes attn_mask or is_causal, not both; put both in mask=")
    lead, ndim = query.shape[:-2], query.ndim
    if ndim < 3 or key.ndim != ndim or value.ndim != ndim:
        dims = ndim, key.ndim, value.ndim
        raise ShapeError(f"query, key and value have three or more dimensions, as many as each other; got {dims}")
    if ndim > 3 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise HeadCountError(
            f"query has {query.shape[-3]} heads and key has {key.shape[-3]}; give enable_gqa=True if heads share keys"
        )
    if any(x.shape[: -2 if ndim == 3 else -3] != query.shape[: -2 if ndim == 3 else -3] for x in (key, value)):
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ShapeError(f"query, key and value have the same leading dimensions, got {shapes}")
    q, k, v = (x[:, None] if ndim == 3 else x.flatten(0, -4) if ndim > 4 else x for x in (query, key, value))
    seen, bias = _as_mask_and_bias(attn_mask, (*lead, query.shape[-2], key.shape[-2]), q, mask is not None)
    if is_causal:
        mask = causal() if mask is None else _intersected(mask)
    chosen = seen if mask is None else mask
    out = attention(q, k, v, chosen, bias=bias, scale=scale, dropout_p=dropout_p)
    return out.view(*lead, *out.shape[-2:])


def _intersected(mask: Any) -> Mask:
    """`mask & causal()`."""
    if not isinstance(mask, Mask):
        raise ArgumentError(f"with is_causal=True, mask is a mask of stof.masks, got {type(mask).__name__}")
    return mask & causal()


def _as_mask_and_bias(
    attn_mask: Tensor | None, shape: tuple[int, ...], q: Tensor, as_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """A bool `attn_mask` as a mask, any other as a bias, of up to four dimensions.

    Args:
        shape: `[..., Hq, L, S]`, or `[N, L, S]` of tensors without heads.
        as_bias: make a bias of a bool tensor too.
    """
    if attn_mask is None:
        return None, None
    if not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise DtypeError(f"attn_mask is bool or floating point, got {attn_mask.dtype}")
    sizes = (1,) * (len(shape) - attn_mask.ndim) + tuple(attn_mask.shape)
    if attn_mask.ndim > len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise ShapeError(f"attn_mask broadcasts to {list(shape)}, got {list(attn_mask.shape)}")
    expanded = attn_mask.view(sizes)
    if len(shape) == 3:
        expanded = expanded[:, None]
    elif len(shape) > 4:
        lead = sizes[:-3]
        full = (1,) * len(lead) if all(size == 1 for size in lead) else shape[:-3]
        expanded = expanded.expand(*full, *sizes[-3:]).flatten(0, -4)
    if attn_mask.dtype != torch.bool:
        return None, expanded
    if as_bias:
        return None, torch.where(expanded, torch.zeros((), dtype=q.dtype, device=q.device), -torch.inf)
    return expanded.expand(*expanded.shape[:-1], shape[-1]), None
