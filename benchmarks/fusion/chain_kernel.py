"""Two GEMMs in one kernel, what lies between them narrow enough to stay in registers."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.fusion.templates.device_functions import activate
from stof.runtime.pdl import launch_next_and_wait


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def chain_kernel(
    x_ptr,
    down_ptr,
    down_bias_ptr,
    up_ptr,
    up_bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    inner,
    stride_xm,
    stride_dr,
    stride_un,
    stride_rm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """`out = act(x @ down.T + down_bias) @ up.T + up_bias + residual`.

    PARTS programs share the columns of a block of rows; each computes what lies between for itself, and waits for no
    other. INNER: `inner`, rounded up to a power of two.
    """
    program = tl.program_id(0)
    part = program % PARTS
    m = program // PARTS
    r = m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    i = tl.arange(0, INNER)
    # Rows and columns that do not exist read the last one.
    row = tl.minimum(r, rows - 1).to(tl.int64)
    x_ptrs = x_ptr + row[:, None] * stride_xm + k[None, :]  # [BLOCK_M, BLOCK_K]
    down_ptrs = down_ptr + tl.minimum(i, inner - 1).to(tl.int64)[None, :] * stride_dr + k[:, None]  # [BLOCK_K, INNER]
    launch_next_and_wait(CHAINED)
    acc = tl.zeros([BLOCK_M, INNER], dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        exists = k < depth - start
        x = tl.load(x_ptrs + start, mask=exists[None, :], other=0.0)
        down = tl.load(down_ptrs + start, mask=exists[:, None], other=0.0)
        acc = tl.dot(x, down, acc, input_precision="ieee")
    if HAS_DOWN_BIAS:
        acc = acc + tl.load(down_bias_ptr + i, mask=i < inner, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION, FAST)
    # Rounded as the value between two GEMMs is. Columns beyond `inner` meet zeros below, and must be finite.
    between = tl.where((i < inner)[None, :], acc, 0.0).to(x_ptr.dtype.element_ty)  # [BLOCK_M, INNER]
    steps = tl.cdiv(columns, BLOCK_N)
    for step in range(part * steps // PARTS, (part + 1) * steps // PARTS):
        n = step * BLOCK_N + tl.arange(0, BLOCK_N)
        column = tl.minimum(n, columns - 1).to(tl.int64)
        up_ptrs = up_ptr + column[None, :] * stride_un + i[:, None]  # [INNER, BLOCK_N]
        up = tl.load(up_ptrs, mask=(i < inner)[:, None], other=0.0)
        out = tl.dot(between, up, input_precision="ieee")
        if HAS_UP_BIAS:
            out = out + tl.load(up_bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        kept = (r < rows)[:, None] & (n < columns)[None, :]
        if HAS_RESIDUAL:
            added = residual_ptr + r.to(tl.int64)[:, None] * stride_rm + n[None, :]
            out = out + tl.load(added, mask=kept, other=0.0).to(tl.float32)
        place = r.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=kept)
