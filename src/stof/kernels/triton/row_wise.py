"""Calling the row-wise kernel: strides, constants, launch.

For masks with few columns per row or with columns that no two rows share, where tiles would be mostly empty, and for
short sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stof.kernels.common import L2_SHARE, empty_output, heads_in_l2
from stof.kernels.implementation import BoundCall, Options, attend_once
from stof.kernels.triton.row_lists import RowLists, default_config
from stof.kernels.triton.row_wise_kernel import row_wise_kernel
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl

LOG2E = math.log2(math.e)


def bind(q: Tensor, k: Tensor, v: Tensor, prepared: RowLists, options: Options) -> BoundCall:
    """Masked attention over the keys of each row, bound to tensors like these: `call(q, k, v, bias, sinks)`.

    Inputs are float16, bfloat16 or float32, arithmetic is float32. Only kept columns of `k` and `v` are read. Equal
    calls give equal bits.

    Returns (the call):
        `(out, lse)`: `[B, H, Sq, Dv]` as `empty_output` lays it out, and float32 `[B, H, Sq]`.
    """
    scale, softcap, bias, sinks = options.scale, options.softcap, options.bias, options.sinks
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return _with_copies(prepared, scale, softcap)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    out = empty_output(q, v)
    mask_batch, mask_heads = prepared.pattern_of.shape
    config = prepared.config or default_config(max(head_dim, value_dim), prepared.most, q.element_size())
    row_programs = -(-q_len // config.rows)
    kv_bytes = kv_heads * kv_len * (head_dim + value_dim) * q.element_size()
    heads_at_once = heads_in_l2(batch * heads, kv_bytes // heads, L2_SHARE)
    bias_strides = [0, 0, 0, 0]
    if bias is not None:
        bias_strides = [0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)]
    ready = Launch(
        row_wise_kernel,
        row_programs * batch * heads,
        (prepared.pattern_of, prepared.rows, prepared.row_ptr, prepared.columns),
        (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride(), *bias_strides,
            0 if mask_batch == 1 else mask_heads, 0 if mask_heads == 1 else 1,
            heads, q_len, heads_at_once, row_programs,
            # Scores are in base 2; under a softcap the scale is inside the tanh and the base outside.
            scale / softcap if softcap else scale * LOG2E, softcap * LOG2E,
        ),
        (
            heads // kv_heads, mask_batch * mask_heads == 1, head_dim, value_dim,
            bias is not None, softcap != 0.0, sinks is not None,
            (kv_len - 1) * max(k.stride(2), v.stride(2), bias_strides[3]) >= 2**31,
            config.rows, config.slots, config.cols // config.slots, config.width, supports_pdl(q.device),
        ),
        num_warps=config.num_warps,
        num_stages=1,
        use_pdl=supports_pdl(q.device),
        device=q.device,
    )  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out = empty_output(q, v)
        lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
        # What the kernel does not read may be anything.
        ready(q, k, v, out, lse, q if bias is None else bias, q if sinks is None else sinks)
        return out, lse

    return call


def _with_copies(prepared: RowLists, scale: float, softcap: float) -> BoundCall:
    """A call for tensors whose rows are not contiguous: the kernel reads copies."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        result = empty_output(q, v)
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = attend_once(bind, q, k, v, prepared, Options(scale, softcap, bias, sinks))
        return (out if out.stride() == result.stride() else result.copy_(out)), lse

    return call
