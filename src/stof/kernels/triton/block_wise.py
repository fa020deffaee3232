"""Calling the block-wise kernel: strides, constants, memory for split row blocks, launch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.common import empty_output
from stof.kernels.implementation import BoundCall, Options, attend_once
from stof.kernels.triton.arguments import BlockWiseConfig, Problem, Schedule, kernel_launch
from stof.kernels.triton.block_wise_kernel import block_wise_kernel
from stof.kernels.triton.operands import BiasStrides, padded_rows, row_strides, row_unit, rows_fit
from stof.kernels.triton.work_list import BIAS_VECTOR, PreparedWork, Work
from stof.runtime.counters import zeroed_counters


class WorkLists(NamedTuple):
    """Tensors of `Work`; in the kernel, pointers to them."""

    pattern_of: Tensor
    items: Tensor
    first_columns: Tensor
    partial_columns: Tensor
    partial_bitmap: Tensor
    bitmaps: Tensor
    full_columns: Tensor
    row_order: Tensor

    @classmethod
    def of(cls, work: Work) -> WorkLists:
        lists = cls(*[getattr(work, name) for name in cls._fields])
        # A kernel compiled for rows in order does not read it, but takes a pointer.
        return lists if work.row_order.numel() else lists._replace(row_order=work.pattern_of)


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
    if not rows_fit(q, 1) or not all(rows_fit(x, row_unit(x)) for x in (k, v)):
        return _with_copies(prepared, options)
    batch, heads, q_len, _ = q.shape
    kv_heads = k.shape[1]
    out = empty_output(q, v)
    copy_out = out.stride(3) != 1
    if copy_out:
        out = torch.empty_like(out, memory_format=torch.contiguous_format)
    pack = triton.next_power_of_2(heads // kv_heads) if config.pack else 1
    if pack > 1 and work.pattern_of.shape[1] > 1:
        raise UnfitLayoutError("packed heads share one mask; this layout has one for each head")
    strided = any(n % 16 for n in (q.shape[3], v.shape[3], *row_strides(k), *row_strides(v)))
    *outer_strides, column_stride = BiasStrides.of(options.bias)
    bias_vectors = bool(work.bias_vectors) and column_stride == 1 and not any(s % BIAS_VECTOR for s in outer_strides)
    choices = BlockWiseConfig.of(
        q, v, work, options, config, row_unit(k) if strided else 1, (q, k, v, out), pack,
        split=work.splits > 0, has_nan=bool(work.has_nan_items), full_gathered=not work.full_runs,
        shared=bool(work.shared), contiguous_tiles=bool(work.contiguous_tiles), full_bias_vectors=bias_vectors,
        partial_bias_vectors=bias_vectors and work.kv_len % BIAS_VECTOR == 0, same_stride=k.stride(2) == v.stride(2),
    )  # fmt: skip
    problem = Problem.of(q, k, v, out, work.pattern_of, options, choices)
    schedule = Schedule.of(config, batch, kv_heads if pack > 1 else heads, work.items.shape[1], work.chunks)
    if choices.has_score_mod or choices.has_dropout:
        # The options' arithmetic does not fit the registers that the plain kernel is held to.
        config = replace(config, max_registers=0)
    ready = kernel_launch(
        block_wise_kernel, schedule.programs, (WorkLists.of(work),), (problem, schedule, work.splits), (choices,),
        config, q.device,
    )  # fmt: skip
    device = q.device
    lse_shape = (batch, heads, q_len)
    chunk_size, block_v = schedule.groups * work.chunks * choices.block_m, choices.block_v
    counters_size = schedule.groups * work.splits

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
