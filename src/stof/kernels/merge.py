"""Merges of attention over disjoint sets of keys by their log-sum-exps, and attention sinks, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import DeviceError, DtypeError, ShapeError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys into that over all of these keys.

    Source: FlashAttention-2 (arXiv 2307.08691), section 3.1. Differentiable in all four tensors.

    Both calls run without sinks, which `lse` does not count. Sinks scale the merged result:
    `out * torch.sigmoid(lse - sinks[:, None])[..., None]`.

    Args:
        out_1, out_2: outputs `[B, H, Sq, Dv]` of one dtype: float16, bfloat16, float32 or float64.
        lse_1, lse_2: their log-sum-exps `[B, H, Sq]` as `stof.attention(..., return_lse=True)` returns them (natural
            logarithm), both float32 or both float64. A row of -inf sees no key: its output is not read.

    Returns:
        `(out, lse)` of the shapes and dtypes given. The arithmetic is in float64 if a tensor is float64, else in
        float32. A row of -inf in both gives 0 and -inf, never NaN.

    Raises:
        ShapeError, DtypeError, DeviceError: the arguments are not tensors of these shapes and dtypes on one device.

    Examples:
        >>> import stof, torch
        >>> q, k, v = torch.randn(3, 1, 2, 100, 16).unbind()
        >>> first = stof.attention(q, k[:, :, :60], v[:, :, :60], return_lse=True)
        >>> second = stof.attention(q, k[:, :, 60:], v[:, :, 60:], return_lse=True)
        >>> out, lse = stof.merge(*first, *second)
        >>> torch.testing.assert_close(out, stof.attention(q, k, v))
    """
    _check(out_1, lse_1, out_2, lse_2)
    out_dtype, lse_dtype = out_1.dtype, lse_1.dtype
    dtype = torch.promote_types(out_dtype, lse_dtype)
    out_1, lse_1, out_2, lse_2 = (x.to(dtype) for x in (out_1, lse_1, out_2, lse_2))
    empty_1, empty_2 = lse_1 == -torch.inf, lse_2 == -torch.inf
    # The outputs of empty rows may be NaN, and 0 * NaN is NaN, in gradients as well.
    out_1, out_2 = out_1.masked_fill(empty_1[..., None], 0.0), out_2.masked_fill(empty_2[..., None], 0.0)
    both_empty = empty_1 & empty_2
    # -inf - -inf is NaN.
    lse_1, lse_2 = lse_1.masked_fill(both_empty, 0.0), lse_2.masked_fill(both_empty, 0.0)
    # exp(lse_1) / (exp(lse_1) + exp(lse_2)); 1 - weight_2 would lose the bits of a small weight.
    weight_1, weight_2 = torch.sigmoid(lse_1 - lse_2), torch.sigmoid(lse_2 - lse_1)
    out = out_1 * weight_1[..., None] + out_2 * weight_2[..., None]
    lse = torch.logaddexp(lse_1, lse_2).masked_fill(both_empty, -torch.inf)
    return out.to(out_dtype), lse.to(lse_dtype)


def merge_results(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` for kernels, in four operators: no checks, the output in its own dtype, no care for infinite values.

    Outputs of rows whose log-sum-exp is -inf must be finite; those of kernels are 0.
    """
    weight = _sigmoid_of_difference(lse_2, lse_1)
    return torch.lerp(out_1, out_2, weight[..., None].to(out_1.dtype)), torch.logaddexp(lse_1, lse_2)


def share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the keys' share of the softmax's denominator, which also counts the sink; 0 for rows that see no key.

    `softmax over keys and sink = softmax over keys * sigmoid(lse - sink)`.

    Args:
        lse: `[B, H, Sq]`, sinks not counted.
        sinks: `[H]`.

    Returns:
        `[B, H, Sq]` in lse's dtype.
    """
    return _sigmoid_of_difference(lse, sinks.to(lse.dtype).view(1, -1, 1))


def _sigmoid_of_difference(lse: Tensor, other: Tensor) -> Tensor:
    """`exp(lse) / (exp(lse) + exp(other))`; 0 where `lse` is -inf, also where `other` is: -inf - -inf is NaN."""
    return (lse - other).masked_fill_(lse == -torch.inf, -torch.inf).sigmoid_()


def _check(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> None:
    for name, tensor in (("out_1", out_1), ("lse_1", lse_1), ("out_2", out_2), ("lse_2", lse_2)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout)
            raise DtypeError(f"{name} is a strided tensor, got a {layout} one; make it dense first")
    if out_1.ndim != 4 or out_1.shape != out_2.shape:
        raise ShapeError(
            "out_1 and out_2 are [batch, heads, q_len, head_dim] of one shape, "
            f"got {list(out_1.shape)} and {list(out_2.shape)}"
        )
    if lse_1.shape != out_1.shape[:3] or lse_2.shape != out_1.shape[:3]:
        raise ShapeError(
            f"lse_1 and lse_2 are [batch, heads, q_len] as the outputs are, {list(out_1.shape[:3])}, "
            f"got {list(lse_1.shape)} and {list(lse_2.shape)}"
        )
    if out_1.dtype != out_2.dtype or out_1.dtype not in _DTYPES:
        raise DtypeError(
            "out_1 and out_2 share one dtype of float16, bfloat16, float32 and float64, "
            f"got {out_1.dtype} and {out_2.dtype}; cast them with .to(torch.float32)"
        )
    if lse_1.dtype != lse_2.dtype or lse_1.dtype not in (torch.float32, torch.float64):
        raise DtypeError(
            f"lse_1 and lse_2 are both float32 or both float64, got {lse_1.dtype} and {lse_2.dtype}; a log-sum-exp of "
            "16 bits is too inexact to merge by"
        )
    if not out_1.device == lse_1.device == out_2.device == lse_2.device:
        devices = ", ".join(str(x.device) for x in (out_1, lse_1, out_2, lse_2))
        raise DeviceError(f"out_1, lse_1, out_2 and lse_2 share one device, got {devices}")
