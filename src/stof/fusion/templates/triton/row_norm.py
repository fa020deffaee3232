"""Norms in Triton, one row a program: of a tensor, of what a GEMM left unfinished, or their statistics alone."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.runtime.pdl import launch_next_and_wait


@triton.jit
@no_type_check
def _vector(ptr, i, exists, PRESENT: tl.constexpr, ABSENT: tl.constexpr):
    """A vector in float32; where there is none, numbers that change nothing. Loaded long before it is needed."""
    x = tl.full(i.shape, ABSENT, tl.float32)
    if PRESENT:
        x = tl.load(ptr + i, mask=exists, other=0.0).to(tl.float32)
    return x


@triton.jit
@no_type_check
def _normalised(x, scale, shift, exists, width, eps, NORM: tl.constexpr):
    """RMSNorm or LayerNorm of a row in float32 that is zero beyond `width`."""
    if NORM == "layer":
        x = tl.where(exists, x - tl.sum(x, 0) / width, 0.0)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)) * scale + shift


@triton.jit
@no_type_check
def row_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, width, stride_xm, eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """RMSNorm or LayerNorm of one row a program."""
    launch_next_and_wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < width
    x = tl.load(x_ptr + row * stride_xm + i, mask=exists, other=0.0).to(tl.float32)
    scale = _vector(weight_ptr, i, exists, HAS_WEIGHT, 1.0)
    shift = _vector(bias_ptr, i, exists, HAS_BIAS, 0.0)
    x = _normalised(x, scale, shift, exists, width, eps, NORM)
    tl.store(out_ptr + row * width + i, x.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
@no_type_check
def merged_norm_kernel(
    partial_ptr, product_bias_ptr, residual_ptr, sum_ptr, weight_ptr, bias_ptr, out_ptr, width, stride_rm, eps,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_PRODUCT_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The rest of a GEMM and the norm after it, one row a program.

    Adds the row's partial sums (`[SPLITS, rows, width]`) in order, the GEMM's bias and the residual; writes the sum
    and its norm.
    """
    launch_next_and_wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < width
    scale = _vector(weight_ptr, i, exists, HAS_WEIGHT, 1.0)
    shift = _vector(bias_ptr, i, exists, HAS_BIAS, 0.0)
    bias = _vector(product_bias_ptr, i, exists, HAS_PRODUCT_BIAS, 0.0)
    residual = _vector(residual_ptr + row * stride_rm if HAS_RESIDUAL else residual_ptr, i, exists, HAS_RESIDUAL, 0.0)
    x = tl.zeros([BLOCK], dtype=tl.float32)
    for s in tl.static_range(SPLITS):
        x += tl.load(partial_ptr + (s * tl.num_programs(0) + row) * width + i, mask=exists, other=0.0)
    # The norm is of the sum as it is written.
    x = (x + bias + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * width + i, x, mask=exists)
    x = _normalised(x.to(tl.float32), scale, shift, exists, width, eps, NORM)
    tl.store(out_ptr + row * width + i, x.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
@no_type_check
def row_statistics_kernel(
    x_ptr, mean_ptr, rstd_ptr, width, stride_xm, eps, BLOCK: tl.constexpr, NORM: tl.constexpr, CHAINED: tl.constexpr
):
    """1 / deviation of one row a program, and for a LayerNorm its mean."""
    launch_next_and_wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < width
    x = tl.load(x_ptr + row * stride_xm + i, mask=exists, other=0.0).to(tl.float32)
    if NORM == "layer":
        mean = tl.sum(x, 0) / width
        x = tl.where(exists, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps))
