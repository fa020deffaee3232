"""Calling the block-wise kernel: strides, constants, memory for split row blocks, launch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.common import empty_output
from stof.kernels.dropout import scale_of, threshold_of
from stof.kernels.implementation import BoundCall, Options, attend_once
from stof.kernels.triton.block_wise_kernel import block_wise_kernel
from stof.kernels.triton.operands import needs_int64_offsets, padded_rows, row_strides, row_unit, rows_fit
from stof.kernels.triton.work_list import BIAS_VECTOR, PreparedWork
from stof.runtime.counters import zeroed_counters
from stof.runtime.launch import Launch
from stof.runtime.pdl import supports_pdl


def bind(q: Tensor, k: Tensor, v: Tensor, prepared: PreparedWork, options: Options) -> BoundCall:
    """Masked attention over a layout's work items, bound to tensors like these.

    Args:
        q, k, v: `[B, H, Sq, D]`, `[B, Hkv, Skv, D]`, `[B, Hkv, Skv, Dv]`; float16, bfloat16 or float32, any strides.
        prepared: work items, and compile-time choices.
        options: of the call.

    Returns:
        `call(q, k, v, bias, sinks, seed=None) -> (out, lse)`: `out [B, H, Sq, Dv]` in q's memory order,
        `lse [B, H, Sq]` float32.

    Raises:
        KernelError: (the call) the kernel does not compile here, or needs too much shared memory.
    """
    work, config = prepared.work, prepared.config
    scale, softcap, bias, sinks = options.scale, options.softcap, options.bias, options.sinks
    has_dropout = options.dropout_p > 0
    if not rows_fit(q, 1) or not all(rows_fit(x, row_unit(x)) for x in (k, v)):
        return _with_copies(prepared, options)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    out = empty_output(q, v)
    copy_out = out.stride(3) != 1
    kv_strides = (*row_strides(k), *row_strides(v))
    unit = row_unit(k) if any(n % 16 for n in (head_dim, value_dim, *kv_strides)) else 1
    out_strides = out.stride()[:3] if not copy_out else (heads * q_len * value_dim, q_len * value_dim, value_dim)

    per_group = heads // kv_heads
    pack = triton.next_power_of_2(per_group) if config.pack else 1
    groups_per_batch = kv_heads if pack > 1 else heads
    groups = batch * groups_per_batch
    block_m = max(16, work.block_m * pack)
    block_d, block_v = max(16, triton.next_power_of_2(head_dim)), max(16, triton.next_power_of_2(value_dim))
    items = work.items.shape[1]
    heads_at_once = min(config.side or groups, groups)
    has_score_mod = bias is not None or softcap > 0 or scale <= 0
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias_strides = tuple([0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)])
    *outer_strides, column_stride = bias_strides
    bias_vectors = bool(work.bias_vectors) and column_stride == 1 and not any(s % BIAS_VECTOR for s in outer_strides)
    mask_batch, mask_heads = work.pattern_of.shape
    if pack > 1 and mask_heads > 1:
        raise UnfitLayoutError("packed heads share one mask; this layout has one for each head")
    permuted = work.row_order.numel() > 0
    ready = Launch(
        block_wise_kernel,
        items * -(-groups // heads_at_once) * heads_at_once,
        (
            work.pattern_of, work.items, work.first_columns, work.partial_columns, work.partial_bitmap, work.bitmaps,
            work.full_columns, work.row_order if permuted else work.pattern_of,
        ),
        (
            *q.stride()[:3], *[n // unit for n in kv_strides], *out_strides, *bias_strides,
            0 if mask_batch == 1 else mask_heads, 0 if mask_heads == 1 else 1,
            groups, heads, groups_per_batch, per_group, q_len, head_dim // unit, value_dim // unit,
            items, heads_at_once, work.chunks, work.splits, scale if has_score_mod else scale * math.log2(math.e),
            softcap, threshold_of(options.dropout_p), scale_of(options.dropout_p),
        ),
        (
            work.block_m, pack, block_m, work.block_n, block_d, block_v, block_d != head_dim, block_v != value_dim,
            work.pattern_of.numel() > 1, work.has_partial, work.has_full, not work.full_runs, permuted,
            work.splits > 0, work.has_nan_items, work.shared, work.contiguous_tiles, has_score_mod, softcap > 0,
            bias is not None, bias_vectors, bias_vectors and work.kv_len % BIAS_VECTOR == 0, sinks is not None, unit,
            needs_int64_offsets(q, k, v, out, bias), k.stride(2) == v.stride(2),
            "tf32x3" if q.dtype == torch.float32 else "tf32", config.num_stages, has_dropout,
            supports_pdl(q.device),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # The options' arithmetic does not fit the registers that the plain kernel is held to.
        max_registers=0 if has_score_mod or has_dropout else config.max_registers,
        use_pdl=supports_pdl(q.device),
        device=q.device,
    )  # fmt: skip
    device = q.device
    lse_shape = (batch, heads, q_len)
    chunk_size = groups * work.chunks * block_m
    counters_size = groups * work.splits

    copied = _with_copies(prepared, options)

    def call(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if (k.data_ptr() | v.data_ptr()) & 15:
            return copied(q, k, v, bias, sinks, seed)
        result = out = empty_output(q, v)
        if copy_out:
            out = torch.empty_like(result, memory_format=torch.contiguous_format)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        # Pointers the kernel is compiled not to read take any tensor.
        chunk_out, chunk_ml, counters = lse, lse, work.pattern_of
        if counters_size:
            scratch = torch.empty(chunk_size * (block_v + 2), dtype=torch.float32, device=device)
            chunk_out, chunk_ml = scratch, scratch[chunk_size * block_v :]
            counters = zeroed_counters(counters_size, device)
        ready(q, k, v, out, lse, q if bias is None else bias, q if sinks is None else sinks,
              chunk_out, chunk_ml, counters, lse if seed is None else seed)  # fmt: skip
        return (result.copy_(out) if copy_out else result), lse

    return call


def _with_copies(prepared: PreparedWork, options: Options) -> BoundCall:
    """A call for tensors that the kernel cannot read as they are: it reads copies, padded with zeros to whole units."""
    scalars = options.scalars

    def call(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        result = empty_output(q, v)
        q, k, v = (padded_rows(x, row_unit(x)) for x in (q, k, v))
        out, lse = attend_once(bind, q, k, v, prepared, scalars._replace(bias=bias, sinks=sinks, seed=seed))
        return result.copy_(out[..., : result.shape[3]]), lse

    return call
