"""Epilogue of a work tile: merge its chunks, apply sinks, write output and log-sum-exp."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from stof.kernels.hopper.intrinsics import halves_layout, hide_from_compiler, thread_barrier, tile_layout
from stof.kernels.hopper.split_kv_merge import merge_by_last, merge_pairwise

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
@no_type_check
def _start_store(values, staging, out_desc, b, h, row, column):
    """Write values to free shared memory and start the TMA store to global memory."""
    dtype: gl.constexpr = staging.dtype
    width: gl.constexpr = staging.shape[1]
    staging.store(values)
    fence_async_shared()
    thread_barrier()
    staged = staging._reinterpret(dtype, [1, 1, 64, width], tile_layout(dtype, 64, width, 4))
    tma.async_copy_shared_to_global(out_desc, [b, h, row, column], staged)


@gluon.jit
@no_type_check
def _wait_store():
    """Wait until the last TMA store has read its shared memory; only the thread that issued it can tell."""
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
@no_type_check
def epilogue(
    acc, m_i, l_i, work_ptr, coordinates, staging, out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr,
    counters_ptr, row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, OWN_STAGING: gl.constexpr, PERMUTED: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, DYNAMIC: gl.constexpr, LAST_MERGES: gl.constexpr = False,
    PREFETCH: gl.constexpr = False, ticket=0, scales_ptr=None,
):  # fmt: skip
    """Write 64 rows of a work tile's output. Of the chunks of a split row block, the one that merges all writes.

    Args:
        coordinates: of the work tile, see `load_coordinates`.
        staging: shared memory through which output is stored, for all of its columns or half of them.
        ticket: see `take_ticket`, where LAST_MERGES.
        scales_ptr: None, or pairs of factors a head; the second one is multiplied with the output.
        OWN_STAGING: `staging` is not a stage of Q; the previous store from it may still be under way.
    """
    acc_layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    dtype: gl.constexpr = staging.dtype
    row_block, b, h, parts = coordinates[0], coordinates[1], coordinates[2], coordinates[3]
    m = gl.convert_layout(m_i, rows_layout)
    total = gl.convert_layout(gl.sum(l_i, 1), rows_layout)
    r = gl.arange(0, 64, layout=rows_layout)
    write = True
    if SPLIT:
        if parts > 1:
            if LAST_MERGES:
                acc, m, total, write = merge_by_last(
                    acc, m, total, hide_from_compiler(coordinates[4]).to(gl.int64),
                    hide_from_compiler(coordinates[5]), parts, ticket, chunk_out_ptr, chunk_ml_ptr, counters_ptr,
                    PREFETCH,
                )  # fmt: skip
            else:
                slot = gl.load(work_ptr + 7).to(gl.int64) * GROUPS + GROUP
                chunk = gl.load(work_ptr + 8)
                acc, m, total, write = merge_pairwise(
                    acc, m, total, slot, chunk, parts, chunk_out_ptr, chunk_ml_ptr, counters_ptr, GROUPS
                )
    if write:
        position = row_block * (64 * GROUPS) + GROUP * 64
        exists = position + r < q_len
        row = position + r
        if PERMUTED:
            pattern = gl.load(work_ptr + 9)
            row = gl.load(row_order_ptr + pattern * q_len + position + r, mask=exists, other=0)
        any_key = total > 0.0
        safe = gl.where(any_key, total, 1.0)
        lse = gl.where(any_key, (m + gl.log2(safe)) * LN2, float("-inf"))
        if HAS_SINKS:
            # softmax over keys and sink = softmax over keys / (1 + exp(sink - lse))
            sink = gl.load(sinks_ptr + h).to(gl.float32)
            safe = gl.where(any_key, safe * (1.0 + gl.exp2((sink - lse) * LOG2E)), 1.0)
        if DYNAMIC:
            # 0, or NaN where the mask made on the device is bad: its result must not look valid.
            nan_or_zero = gl.load(work_ptr + 11).to(gl.float32, bitcast=True)
            lse += nan_or_zero
        gl.store(lse_ptr + (b * heads + h).to(gl.int64) * q_len + row, lse, mask=exists)
        factor = gl.where(any_key, 1.0 / safe, 0.0)
        if DYNAMIC:
            factor += nan_or_zero
        if scales_ptr is not None:
            factor *= gl.load(scales_ptr + (b * heads + h) * 2 + 1)
        values = (acc * factor[:, None]).to(dtype)
        residue = position // rows_per_residue
        row = position - residue * rows_per_residue
        first = residue * out_residue_stride
        if staging.shape[1] == D:
            if OWN_STAGING:
                _wait_store()
            _start_store(values, staging, out_desc, b, h, row, first)
        else:
            halves = values.reshape([64, 2, D // 2]).permute((0, 2, 1))
            left, right = gl.split(gl.convert_layout(halves, halves_layout(D), assert_trivial=True))
            _wait_store()
            _start_store(left, staging, out_desc, b, h, row, first)
            _wait_store()
            _start_store(right, staging, out_desc, b, h, row, first + D // 2)
    else:
        # The wait for earlier stores counts one store group a work tile.
        tma.store_wait(0)
