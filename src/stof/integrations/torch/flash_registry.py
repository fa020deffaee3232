"""STOF's kernels as a flash attention implementation of PyTorch: `activate_flash_attention_impl("stof")`.

`torch.nn.attention` keeps a registry of implementations. The active one replaces the CUDA kernels of a few ATen
operators, which `F.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` call under autograd.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from stof.attention import attention
from stof.dispatch import is_empty, plan_of, run_backward
from stof.errors import UnsupportedError
from stof.kernels.implementation import NeedsGrad, Options
from stof.masks import Mask, causal, full
from stof.varlen import mask_of_sequences

NAME = "stof"
Gradients = tuple[Tensor, Tensor, Tensor]


class _Registration:
    """The operators' kernels, until `remove`."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # of kernels that are replaced
            for name, kernel in _KERNELS.items():
                if hasattr(torch.ops.aten, name):  # newer versions have operators that others lack
                    self._library.impl(name, kernel)

    def remove(self) -> None:
        self._library = None  # the kernels go with it


def register_flash_attention() -> None:
    """Add "stof" to PyTorch's implementations of flash attention; importing `stof.integrations.torch` does so.

    `torch.nn.attention.activate_flash_attention_impl("stof")` then serves `F.scaled_dot_product_attention`, where
    PyTorch chooses its flash backend, and `varlen_attn`, forward and backward, in float16 and bfloat16. Gradients have
    equal bits in equal calls. `restore_flash_attention_impl()` undoes it. Dropout, ALiBi slopes and paged caches raise
    `UnsupportedError`. Calls of `varlen_attn` read the lengths on the host.

    Examples:
        >>> import stof.integrations.torch
        >>> "stof" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Registration)


def _refuse(dropout_p: float, **options: Any) -> None:
    refused = ["dropout"] * bool(dropout_p)
    refused += [name for name, value in options.items() if value is not None and value is not False]
    if refused:
        raise UnsupportedError(
            f"stof as PyTorch's flash attention has no {', '.join(refused)}; call "
            "stof.attention, which has dropout, or torch.nn.attention.restore_flash_attention_impl()",
            {},
        )


def _no_random_numbers(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`rng_state`, an unused tensor and `debug_attn_mask` of calls without dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> tuple[Tensor, Tensor]:
    """`out` and `lse`; autograd is PyTorch's, around these operators."""
    with torch.no_grad():
        return attention(q.detach(), k.detach(), v.detach(), mask, scale=scale, return_lse=True)


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float | None
) -> Gradients:
    if is_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    options = Options(q.shape[-1] ** -0.5 if scale is None else scale)
    with torch.no_grad():
        dq, dk, dv, *_ = run_backward(q, k, v, out, lse, d_out, None, plan_of(mask, q, k), options, NeedsGrad())
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return dq, dk, dv


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(dropout_p, return_debug_mask=return_debug_mask)
    out, lse = _attend(query, key, value, causal() if is_causal else full(), scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_no_random_numbers(query)


def _sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: None,
    cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> Gradients:  # fmt: skip
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset
    _refuse(dropout_p)
    mask = causal() if is_causal else full()
    return _backward(grad_out, query, key, value, out, logsumexp, mask, scale)


def _mask_of(
    q: Tensor, k: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, is_causal: bool, left: int | None,
    right: int | None, seqused_k: Tensor | None = None,
) -> Mask:  # fmt: skip
    """The mask of sequences in `[total, H, D]`."""
    window = tuple(-1 if side is None else side for side in (left, right))
    if cum_seq_q is None or cum_seq_k is None:
        raise UnsupportedError(
            "stof as PyTorch's flash attention takes sequences with cum_seq_q and cum_seq_k; call "
            "F.scaled_dot_product_attention for dense tensors",
            {},
        )
    return mask_of_sequences(q, k, cum_seq_q, cum_seq_k, causal=is_causal, window_size=window, seqused_k=seqused_k)


def _in_batch(x: Tensor) -> Tensor:
    """`[total, H, D]` as `[1, H, total, D]`."""
    return x.transpose(0, 1)[None]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    del max_q, max_k, num_splits  # the longest lengths are read, and what a kernel splits is its matter
    _refuse(dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes, block_table=block_table)
    mask = _mask_of(query, key, cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right, seqused_k)
    out, lse = _attend(_in_batch(query), _in_batch(key), _in_batch(value), mask, scale)
    return out[0].transpose(0, 1), lse[0], *_no_random_numbers(query)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:  # fmt: skip
    del max_q, max_k, rng_state, unused
    _refuse(dropout_p)
    mask = _mask_of(query, key, cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right)
    d_out, q, k, v, o = map(_in_batch, (grad_out, query, key, value, out))
    dq, dk, dv = (x[0].transpose(0, 1) for x in _backward(d_out, q, k, v, o, logsumexp[None], mask, scale))
    return dq, dk, dv


def _flash_in_place(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`_flash`, with the output in a tensor that is given."""
    computed, lse, *_ = _flash(*args, **kwargs)
    out.copy_(computed)
    return lse


_KERNELS = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_flash_attention_forward_no_dropout_inplace": _flash_in_place,
}
