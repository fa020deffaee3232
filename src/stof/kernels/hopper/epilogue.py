"""Epilogue of a work tile: merge its chunks, apply sinks, write output and log-sum-exp."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from stof.kernels.hopper.intrinsics import (
    async_store,
    halves_layout,
    hide_from_compiler,
    reinterpret,
    thread_barrier,
    tile_layout,
)
from stof.kernels.hopper.split_kv_merge import merge_by_last, merge_pairwise
from stof.kernels.hopper.tile_fetch import CHUNK, NAN_OR_ZERO, PATTERN, SLOT, last_merges

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
    staged = reinterpret(staging, dtype, [1, 1, 64, width], tile_layout(dtype, 64, width, 4))
    async_store(out_desc, [b, h, row, column], staged)


@gluon.jit
@no_type_check
def _wait_store():
    """Wait until the last TMA store has read its shared memory; only the thread that issued it can tell."""
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
@no_type_check
def epilogue(
    acc, m_i, l_i, work_ptr, tile, ticket, staging, args,
    GROUP: gl.constexpr, OWN_STAGING: gl.constexpr, PREFETCH: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of a work tile's output. Of the chunks of a split row block, the one that merges all writes.

    Args:
        work_ptr: the work tile in the work list.
        tile: its `WorkTile`.
        ticket: see `take_ticket`; not read unless the last chunk merges all.
        staging: shared memory through which output is stored, for all of its columns or half of them.
        args: `ConsumerArgs`.
        OWN_STAGING: `staging` is not a stage of Q; the previous store from it may still be under way.
        PREFETCH: see `merge_by_last`.
    """
    acc_layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    dtype: gl.constexpr = staging.dtype
    row_block, b, h, parts = tile.row_block, tile.b, tile.h, tile.parts
    out_desc = args.out_desc
    m = gl.convert_layout(m_i, rows_layout)
    total = gl.convert_layout(gl.sum(l_i, 1), rows_layout)
    r = gl.arange(0, 64, layout=rows_layout)
    write = True
    if config.split:
        if parts > 1:
            if last_merges(config):
                acc, m, total, write = merge_by_last(
                    acc, m, total, hide_from_compiler(tile.slot).to(gl.int64), hide_from_compiler(tile.chunk), parts,
                    ticket, args.chunk_out_ptr, args.chunk_ml_ptr, args.counters_ptr, PREFETCH,
                )  # fmt: skip
            else:
                slot = gl.load(work_ptr + SLOT).to(gl.int64) * config.groups + GROUP
                chunk = gl.load(work_ptr + CHUNK)
                acc, m, total, write = merge_pairwise(
                    acc, m, total, slot, chunk, parts, args.chunk_out_ptr, args.chunk_ml_ptr, args.counters_ptr,
                    config.groups,
                )  # fmt: skip
    if write:
        position = row_block * (64 * config.groups) + GROUP * 64
        exists = position + r < args.q_len
        row = position + r
        if config.permuted:
            pattern = gl.load(work_ptr + PATTERN)
            row = gl.load(args.row_order_ptr + pattern * args.q_len + position + r, mask=exists, other=0)
        any_key = total != 0.0  # or NaN
        safe = gl.where(any_key, total, 1.0)
        lse = gl.where(any_key, (m + gl.log2(safe)) * LN2, float("-inf"))
        # The sum of a row with a score of +inf is NaN: inf - inf.
        lse = gl.where(m == float("inf"), m, lse)
        if config.has_sinks:
            # softmax over keys and sink = softmax over keys / (1 + exp(sink - lse))
            sink = gl.load(args.sinks_ptr + h).to(gl.float32)
            safe = gl.where(any_key, safe * (1.0 + gl.exp2((sink - lse) * LOG2E)), 1.0)
        if config.dynamic:
            # 0, or NaN where the mask made on the device is bad: its result must not look valid.
            nan_or_zero = gl.load(work_ptr + NAN_OR_ZERO).to(gl.float32, bitcast=True)
            lse += nan_or_zero
        gl.store(args.lse_ptr + (b * args.heads + h).to(gl.int64) * args.q_len + row, lse, mask=exists)
        factor = gl.where(any_key, 1.0 / safe, 0.0)
        if config.dynamic:
            factor += nan_or_zero
        if args.scales_ptr is not None:
            factor *= gl.load(args.scales_ptr + (b * args.heads + h) * 2 + 1)
        values = (acc * factor[:, None]).to(dtype)
        residue = position // args.rows_per_residue
        row = position - residue * args.rows_per_residue
        first = residue * args.out_residue_stride
        if staging.shape[1] == config.width:
            if OWN_STAGING:
                _wait_store()
            _start_store(values, staging, out_desc, b, h, row, first)
        else:
            halves = values.reshape([64, 2, config.width // 2]).permute((0, 2, 1))
            left, right = gl.split(gl.convert_layout(halves, halves_layout(config.width), assert_trivial=True))
            _wait_store()
            _start_store(left, staging, out_desc, b, h, row, first)
            _wait_store()
            _start_store(right, staging, out_desc, b, h, row, first + config.width // 2)
    else:
        # The wait for earlier stores counts one store group a work tile.
        tma.store_wait(0)
