"""GEMM with prologue and epilogue in Triton: one program a tile."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.fusion.templates.device_functions import activate, prefetch_l2, tile_coordinates
from stof.runtime.pdl import launch_next_and_wait


@triton.jit
@no_type_check
def _apply_rotary(acc, cos_ptr, sin_ptr, r, rows, positions, HEAD_DIM: tl.constexpr):
    """Heads side by side in a tile's columns, the halves of each rotated against each other.

    cos_ptr, sin_ptr: `[positions, HEAD_DIM]`; row r has position `r % positions`. Source: Su et al. 2021, equation 34.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    HALF: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = COLUMNS // HEAD_DIM
    first, second = tl.split(tl.permute(tl.reshape(acc, [ROWS, HEADS, 2, HALF]), [0, 1, 3, 2]))
    # Rows that do not exist read the last one's.
    place = (tl.minimum(r, rows - 1) % positions) * HEAD_DIM
    at = place[:, None, None] + tl.arange(0, HALF)[None, None, :]  # [ROWS, 1, HALF]
    cos = tl.load(cos_ptr + at).to(tl.float32)
    sin = tl.load(sin_ptr + at).to(tl.float32)
    left = first * cos - second * sin
    cos = tl.load(cos_ptr + at + HALF).to(tl.float32)
    sin = tl.load(sin_ptr + at + HALF).to(tl.float32)
    right = second * cos + first * sin
    return tl.reshape(tl.permute(tl.join(left, right), [0, 1, 3, 2]), [ROWS, COLUMNS])


@triton.jit
@no_type_check
def _epilogue(
    acc, up, bias_ptr, residual_ptr, r, n, rows, columns, stride_rm,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to accumulators `[r, n]`, in float32; `up` is ignored unless GATED."""
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up = up + tl.load(bias_ptr + columns + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION, FAST)
    if GATED:
        acc = acc * up
    if HAS_RESIDUAL:
        kept = (r < rows)[:, None] & (n < columns)[None, :]
        residual = tl.load(residual_ptr + r.to(tl.int64)[:, None] * stride_rm + n[None, :], mask=kept, other=0.0)
        acc = acc + residual.to(tl.float32)
    return acc


@triton.jit
@no_type_check
def _prefetch_weights(
    b_ptr, column, columns, first, last, depth, stride_bn, stride_bk, up_offset,
    BLOCK_N: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Prefetch columns of B from `column` on, depth `first` to `last`, into the L2: one address per cache line."""
    LINE: tl.constexpr = 128 // (b_ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES_N: tl.constexpr = (BLOCK_N + LINE - 1) // LINE if TRANSPOSED else BLOCK_N
    LINES_K: tl.constexpr = 512 // LINES_N
    STEP_N: tl.constexpr = LINE if TRANSPOSED else 1
    STEP_K: tl.constexpr = 1 if TRANSPOSED else LINE
    n = tl.minimum(column + tl.arange(0, LINES_N) * STEP_N, columns - 1)
    for start in range(first, last, LINES_K * STEP_K):
        k = tl.minimum(start + tl.arange(0, LINES_K) * STEP_K, depth - 1)
        at = b_ptr + n.to(tl.int64)[:, None] * stride_bn + k.to(tl.int64)[None, :] * stride_bk
        prefetch_l2(at)
        if GATED:
            prefetch_l2(at + up_offset)


@triton.jit(do_not_specialize=["rows", "positions"])
@no_type_check
def tile_gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    residual_ptr,
    mean_ptr,
    rstd_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    partial_ptr,
    counters_ptr,
    rows,
    columns,
    depth,
    stride_am,
    stride_bn,
    stride_bk,
    up_offset,
    stride_rm,
    cos_ptr,
    sin_ptr,
    positions,
    turned,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    MERGE: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """`C = act(norm(A) @ B.T + bias) + residual`, or act(gate) * up: one program a tile, or SPLITS over its depth.

    The programs of a tile leave partial sums in `partial_ptr` (float32); with MERGE the last to end adds them in order:
    equal calls give equal bits. Counters are zero before and after. Without, the next kernel adds them: `partial_ptr`
    is `[SPLITS, rows, columns]`, and nothing else is written. EVEN_N, EVEN_K: no tile reaches beyond the columns, no
    step beyond the depth. HEAD_DIM: of heads that are rotated in the first `turned` columns, whole tiles of them; 0 for
    none.
    """
    program = tl.program_id(0)
    split = program % SPLITS
    tile = program // SPLITS
    m, n_tile = tile_coordinates(tile, tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP_M)
    r = m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns that do not exist read the last one: no masks in the loop.
    row = tl.minimum(r, rows - 1).to(tl.int64)
    # Clamped columns are no run of neighbours to the compiler: where B is transposed they are loaded one by one.
    column = (n if EVEN_N else tl.minimum(n, columns - 1)).to(tl.int64)
    a_ptrs = a_ptr + row[:, None] * stride_am + k[None, :]  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + column[None, :] * stride_bn + k[:, None] * stride_bk  # [BLOCK_K, BLOCK_N]
    steps = tl.cdiv(depth, BLOCK_K)
    begin = split * steps // SPLITS
    end = (split + 1) * steps // SPLITS
    if CHAINED:
        # Weights do not depend on the previous kernel; the first row of tiles prefetches them.
        if m == 0:
            _prefetch_weights(b_ptr, n_tile * BLOCK_N, columns, begin * BLOCK_K, end * BLOCK_K, depth, stride_bn,
                              stride_bk, up_offset, BLOCK_N, GATED, TRANSPOSED)  # fmt: skip
    launch_next_and_wait(CHAINED)
    # The scale of a row commutes with the GEMM.
    SCALE_AFTER: tl.constexpr = NORM == "rms" and not HAS_NORM_WEIGHT and not HAS_NORM_BIAS
    if NORM != "none" and not SCALE_AFTER:
        rstd = tl.load(rstd_ptr + row)
    if NORM == "layer":
        mean = tl.load(mean_ptr + row)
    b_ptrs += begin.to(tl.int64) * (BLOCK_K * stride_bk)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = acc
    for step in range(begin, end):
        start = step * BLOCK_K
        exists = k < (BLOCK_K if EVEN_K else depth - start)
        if EVEN_K:
            a = tl.load(a_ptrs + start)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs + start, mask=exists[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=exists[:, None], other=0.0)
        if NORM != "none" and not SCALE_AFTER:
            scaled = a.to(tl.float32)
            if NORM == "layer":
                scaled = scaled - mean[:, None]
            scaled = scaled * rstd[:, None]
            if HAS_NORM_WEIGHT:
                scaled = scaled * tl.load(norm_weight_ptr + start + k, mask=exists, other=0.0).to(tl.float32)[None, :]
            if HAS_NORM_BIAS:
                scaled = scaled + tl.load(norm_bias_ptr + start + k, mask=exists, other=0.0).to(tl.float32)[None, :]
            a = scaled.to(a_ptr.dtype.element_ty)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            more = tl.load(b_ptrs + up_offset, mask=exists[:, None], other=0.0)
            up = tl.dot(a, more, up, input_precision="ieee")
        b_ptrs += BLOCK_K * stride_bk

    kept = (r < rows)[:, None] & (n < columns)[None, :]
    # r, not row: the last row would be written again and again.
    place = r.to(tl.int64)[:, None] * columns + n[None, :]  # [BLOCK_M, BLOCK_N]
    write = True
    if SPLITS > 1 and MERGE:
        HALVES: tl.constexpr = 2 if GATED else 1
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partial_ptr + program.to(tl.int64) * (SIZE * HALVES)
        tl.store(mine + at, acc)
        if GATED:
            tl.store(mine + SIZE + at, up)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        write = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if write:
            tl.debug_barrier()
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            up = acc
            for s in range(SPLITS):
                other = partial_ptr + (tile * SPLITS + s).to(tl.int64) * (SIZE * HALVES)
                # .cg: written by other multiprocessors
                acc += tl.load(other + at, cache_modifier=".cg")
                if GATED:
                    up += tl.load(other + SIZE + at, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
    if SPLITS > 1 and not MERGE:
        tl.store(partial_ptr + split.to(tl.int64) * rows * columns + place, acc, mask=kept)
    elif write:
        if SCALE_AFTER:
            rstd = tl.load(rstd_ptr + row)
            acc = acc * rstd[:, None]
            up = up * rstd[:, None]
        out = _epilogue(acc, up, bias_ptr, residual_ptr, r, n, rows, columns, stride_rm,
                        GATED, ACTIVATION, FAST, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
        if HEAD_DIM > 0:
            # Whole tiles are rotated, or none of their columns.
            if n_tile * BLOCK_N < turned:
                out = _apply_rotary(out, cos_ptr, sin_ptr, r, rows, positions, HEAD_DIM)
        tl.store(c_ptr + place, out.to(c_ptr.dtype.element_ty), mask=kept)
