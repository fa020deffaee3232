"""What runs before and after the backward kernel on Hopper: numbers of each query row, and dQ in 16 bits."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.runtime.pdl import launch_next_and_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def backward_rows_kernel(
    out_ptr,  # [B, H, Sq, Dv]
    d_out_ptr,
    lse_ptr,  # [B, H, Sq] float32, contiguous, as d_lse
    d_lse_ptr,
    stats_ptr,  # [B * H * blocks of queries, 2, ROWS] float32: lse and delta
    counters_ptr,  # [1 + 2 * B * H * blocks of queries] int32
    out_strides,
    d_out_strides,
    heads,
    q_len,
    q_blocks,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_D_LSE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """lse in units of log 2 and `delta = rowsum(d_out * out) - d_lse` of ROWS rows; clears the kernel's counters.

    lse is +inf where a row keeps nothing or does not exist: its weights are 0 then.
    """
    launch_next_and_wait(USE_PDL)
    program = tl.program_id(0)
    group = program // q_blocks
    r = tl.arange(0, ROWS)
    row = (program % q_blocks) * ROWS + r
    d = tl.arange(0, BLOCK_D)
    ok = row < q_len
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    mask = ok[:, None] & (d < HEAD_DIM)[None, :]
    at = row.to(tl.int64)[:, None]
    out_base = out_ptr + b * out_strides[0] + h * out_strides[1]
    d_out_base = d_out_ptr + b * d_out_strides[0] + h * d_out_strides[1]
    out = tl.load(out_base + at * out_strides[2] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_base + at * d_out_strides[2] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + group.to(tl.int64) * q_len + row, mask=ok, other=float("-inf"))
    some = lse != float("-inf")  # or NaN
    delta = tl.where(some, tl.sum(out * d_out, 1), 0.0)
    if HAS_D_LSE:
        d_lse = tl.load(d_lse_ptr + group.to(tl.int64) * q_len + row, mask=ok, other=0.0)
        delta -= tl.where(some, d_lse, 0.0)
    tl.store(stats_ptr + program * (2 * ROWS) + r, tl.where(some, lse * LOG2E, float("inf")))
    tl.store(stats_ptr + program * (2 * ROWS) + ROWS + r, delta)
    tl.store(counters_ptr + 1 + 2 * program + tl.arange(0, 2), 0)
    if program == 0:
        tl.store(counters_ptr, 0)


@triton.jit
@no_type_check
def convert_dq_kernel(
    sums_ptr,  # [B * H * blocks of queries, ROWS, BLOCK_D] float32
    counters_ptr,
    dq_ptr,  # [B, H, Sq, D]
    strides,
    heads,
    q_len,
    q_blocks,
    blocks,
    scale,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """dQ of ROWS rows in 16 bits, times the scale; 0 where no key sees them, whose sums were never written."""
    launch_next_and_wait(USE_PDL)
    program = tl.program_id(0)
    group = program // q_blocks
    r = tl.arange(0, ROWS)
    row = (program % q_blocks) * ROWS + r
    d = tl.arange(0, BLOCK_D)
    at = program.to(tl.int64) * (ROWS * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for slot in tl.static_range(SLOTS):
        some = tl.load(counters_ptr + 1 + 2 * program + slot) > 0
        mask = some & (r >= 0)[:, None] & (d >= 0)[None, :]
        sums += tl.load(sums_ptr + slot * blocks.to(tl.int64) * (ROWS * BLOCK_D) + at, mask=mask, other=0.0)
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    base = dq_ptr + b * strides[0] + h * strides[1] + row.to(tl.int64)[:, None] * strides[2] + d[None, :]
    tl.store(base, (sums * scale).to(dq_ptr.dtype.element_ty), mask=(row < q_len)[:, None] & (d < HEAD_DIM)[None, :])
