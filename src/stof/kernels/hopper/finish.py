"""The end of a job: chunks merged, sinks, output and log-sum-exp written."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from stof.kernels.hopper.chunks import meet_at_once, meet_in_pairs
from stof.kernels.hopper.device import halves_layout, opaque, thread_barrier, tile_layout

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
@no_type_check
def _leave(values, place, out_desc, b, h, row, column):
    """Start copying values to global memory, by way of shared memory that nobody uses."""
    dtype: gl.constexpr = place.dtype
    width: gl.constexpr = place.shape[1]
    place.store(values)
    fence_async_shared()
    thread_barrier()
    staged = place._reinterpret(dtype, [1, 1, 64, width], tile_layout(dtype, 64, width, 4))
    tma.async_copy_shared_to_global(out_desc, [b, h, row, column], staged)


@gluon.jit
@no_type_check
def _await_leave():
    """Wait, all threads, until what left last has been read: one of them started the copy and knows."""
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
@no_type_check
def finish(
    acc, m_i, l_i, job_ptr, known, place, out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr,
    row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, OWN_PLACE: gl.constexpr, PERMUTED: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, AT_RUN_TIME: gl.constexpr, AT_ONCE: gl.constexpr = False,
    AHEAD: gl.constexpr = False, ticket=0, scales_ptr=None,
):  # fmt: skip
    """Write 64 rows of a job's output; of a split row block's chunks, the last does.

    Output leaves by way of `place` in shared memory, all columns at once or one half after the other. Where that is its
    `OWN_PLACE`, not one of Q with stages of its own, the output before may still be leaving. `known` is the job's, see
    `whose`, and `ticket` a chunk's where they meet `AT_ONCE`. The second of each head's pair at `scales_ptr` is a
    factor on the output.
    """
    acc_layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    dtype: gl.constexpr = place.dtype
    row_block, b, h, parts = known[0], known[1], known[2], known[3]
    m = gl.convert_layout(m_i, rows_layout)
    total = gl.convert_layout(gl.sum(l_i, 1), rows_layout)
    r = gl.arange(0, 64, layout=rows_layout)
    write = True
    if SPLIT:
        if parts > 1:
            if AT_ONCE:
                acc, m, total, write = meet_at_once(
                    acc, m, total, opaque(known[4]).to(gl.int64), opaque(known[5]), parts, ticket,
                    chunk_out_ptr, chunk_ml_ptr, counters_ptr, AHEAD,
                )  # fmt: skip
            else:
                slot = gl.load(job_ptr + 7).to(gl.int64) * GROUPS + GROUP
                chunk = gl.load(job_ptr + 8)
                acc, m, total, write = meet_in_pairs(
                    acc, m, total, slot, chunk, parts, chunk_out_ptr, chunk_ml_ptr, counters_ptr, GROUPS
                )
    if write:
        position = row_block * (64 * GROUPS) + GROUP * 64
        exists = position + r < q_len
        row = position + r
        if PERMUTED:
            pattern = gl.load(job_ptr + 9)
            row = gl.load(row_order_ptr + pattern * q_len + position + r, mask=exists, other=0)
        some = total > 0.0
        safe = gl.where(some, total, 1.0)
        lse = gl.where(some, (m + gl.log2(safe)) * LN2, float("-inf"))
        if HAS_SINKS:
            # softmax over keys and sink = softmax over keys / (1 + exp(sink - lse))
            sink = gl.load(sinks_ptr + h).to(gl.float32)
            safe = gl.where(some, safe * (1.0 + gl.exp2((sink - lse) * LOG2E)), 1.0)
        if AT_RUN_TIME:
            # 0, or NaN: a wrong mask must not look like an answer.
            spoil = gl.load(job_ptr + 11).to(gl.float32, bitcast=True)
            lse += spoil
        gl.store(lse_ptr + (b * heads + h).to(gl.int64) * q_len + row, lse, mask=exists)
        factor = gl.where(some, 1.0 / safe, 0.0)
        if AT_RUN_TIME:
            factor += spoil
        if scales_ptr is not None:
            factor *= gl.load(scales_ptr + (b * heads + h) * 2 + 1)
        values = (acc * factor[:, None]).to(dtype)
        residue = position // rows_per_residue
        row = position - residue * rows_per_residue
        first = residue * out_residue_stride
        if place.shape[1] == D:
            if OWN_PLACE:
                _await_leave()
            _leave(values, place, out_desc, b, h, row, first)
        else:
            halves = values.reshape([64, 2, D // 2]).permute((0, 2, 1))
            left, right = gl.split(gl.convert_layout(halves, halves_layout(D), assert_trivial=True))
            _await_leave()
            _leave(left, place, out_desc, b, h, row, first)
            _await_leave()
            _leave(right, place, out_desc, b, h, row, first + D // 2)
    else:
        # Whoever lets one store be on its way counts on one a job.
        tma.store_wait(0)
