"""Masked attention on Hopper, in Gluon: one warp copies by TMA, one to three warpgroups compute.

A thread block stays on its multiprocessor and takes job after job from a list (see `stof.kernels.hopper.queue`): some
tiles of one row block, for one batch entry and one head. Whoever is done first takes the next, so that all end at about
the same time, whatever their jobs cost and whoever shares their multiprocessor. One warp, the producer, copies Q, K and
V to shared memory; each warpgroup of consumers owns 64 rows of the block. While a tile's softmax is computed, the
tensor cores multiply the tile before with V, across the ends of jobs as well, so short jobs do not drain the pipeline.

Source: STOF (arXiv 2506.06095), section 4.1; warp specialisation and the overlap of softmax and products as
FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2; split and merge as Flash-Decoding.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from stof.kernels.hopper.consumer import consumer
from stof.kernels.hopper.device import (
    lane_number,
    of_lane,
    tile_layout,
)
from stof.kernels.hopper.jobs import JOB_FIELDS, JOB_SIZE, PAIR_BITMAP, PAIR_LEFT_OUT
from stof.kernels.hopper.producer import (
    PASSED,
    bias_bytes,
    copy_bias,
    copy_rows,
    copy_tile,
    producer,
    record_layout,
    slabs_of,
    whose_first,
)
from stof.kernels.triton.turns import let_next, wait_turn

FIELDS = gl.constexpr(JOB_FIELDS)
SIZE = gl.constexpr(JOB_SIZE)
LEFT_OUT = gl.constexpr(PAIR_LEFT_OUT)
BITMAP = gl.constexpr(PAIR_BITMAP)


@gluon.jit
@no_type_check
def warp_specialized_kernel(
    q_desc,
    k_desc,
    v_desc,
    k_slab_desc,
    v_slab_desc,
    out_desc,
    bias_desc,
    lse_ptr,
    sinks_ptr,
    chunk_out_ptr,
    chunk_ml_ptr,
    counters_ptr,
    jobs_ptr,
    tiles_ptr,
    tile_bitmap_ptr,
    bitmaps_ptr,
    row_order_ptr,
    heads,
    heads_per_group,
    q_len,
    rows_per_residue,
    q_residue_stride,
    out_residue_stride,
    kv_step,
    k_residue_stride,
    v_residue_stride,
    heads_per_slab,
    bias_batch,
    bias_heads,
    scale,
    softcap,
    GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    SLAB: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    PERMUTED: gl.constexpr,
    SPLIT: gl.constexpr,
    MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr,
    AT_RUN_TIME: gl.constexpr,
    QUEUED: gl.constexpr,
    IDLE: gl.constexpr,
    PAIRED: gl.constexpr,
    CHAINED: gl.constexpr,
):
    let_next(CHAINED)
    if AT_RUN_TIME:
        wait_turn(CHAINED)
    # Registers of the warp that copies: with 24, its addresses are kept in memory.
    PRODUCER: gl.constexpr = 72 if PAIRED else 56 if GROUPS == 1 and D == 128 else 24
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = tile_layout(dtype, BLOCK_N, D, 2)
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS, 64, D], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    if HAS_BIAS:
        bias_layout: gl.constexpr = tile_layout(bias_desc.dtype, 64, BLOCK_N, 2)
        bias_smem = gl.allocate_shared_memory(bias_desc.dtype, [STAGES * GROUPS, 64, BLOCK_N], bias_layout)
    else:
        bias_smem = k_smem
    # Output leaves by the place of Q that it was computed from, where that is not in use again by then.
    if Q_STAGES > 1:
        out_smem = q_smem
    else:
        LEAVING: gl.constexpr = out_desc.block_type.shape[3]
        out_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, LEAVING], tile_layout(dtype, 64, LEAVING, 2))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    records = q_full
    passed_on = q_full
    if QUEUED:
        # Not otherwise: what partitions are told would lie where barriers were set up that nobody uses, and what is
        # written there first may come last.
        records = gl.allocate_shared_memory(gl.int32, [PASSED, 32], record_layout())
        passed_on = gl.allocate_shared_memory(gl.int64, [PASSED, 1], mbarrier.MBarrierLayout())
    # A job and the columns of its first tile lie in one line. While memory answers, the
    # barriers are set up; then the first copies start, and the warpgroups, which are told the first job. Where the host
    # dealt out the jobs, no kernel writes that line, and all this is done before it is this one's turn.
    lane = lane_number()
    start = gl.load(jobs_ptr + gl.program_id(0) * SIZE + lane)
    for i in gl.static_range(max(STAGES, Q_STAGES)):
        if i < Q_STAGES:
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=GROUPS)
        if i < STAGES:
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(kv_empty.index(i), count=GROUPS)
    if QUEUED:
        for i in gl.static_range(PASSED):
            mbarrier.init(passed_on.index(i), count=1)
    # The zeros that stand for the tile before the first are there.
    mbarrier.arrive(v_full.index(0), count=1)
    fence_async_shared()
    if not AT_RUN_TIME:
        wait_turn(CHAINED)
    job_count = of_lane(start, 12)
    record = of_lane(start, lane + FIELDS)
    b = of_lane(start, 1)
    kv_head = of_lane(start, 2) // heads_per_group
    slab_head = of_lane(start, 2) // heads_per_slab
    copy_tile(record, b, kv_head, slab_head, k_desc, k_slab_desc, k_smem,
               slabs_of(k_smem, BLOCK_N, D, SLAB, STAGES), 0,
               k_full.index(0), kv_step, k_residue_stride, BLOCK_N, D, SLAB,
               bias_bytes(GROUPS, BLOCK_N, HAS_BIAS))  # fmt: skip
    if HAS_BIAS:
        copy_bias(start, record, bias_desc, bias_smem, 0, k_full.index(0), bias_batch, bias_heads, GROUPS, BLOCK_N)
    copy_rows(start, q_desc, q_smem, 0, q_full.index(0), rows_per_residue, q_residue_stride, GROUPS, D)
    copy_tile(record, b, kv_head, slab_head, v_desc, v_slab_desc, v_smem,
               slabs_of(v_smem, BLOCK_N, D, SLAB, STAGES), 1,
               v_full.index(1), kv_step, v_residue_stride, BLOCK_N, D, SLAB, 0)  # fmt: skip

    own_bitmaps = (0, 0)
    left_out = (0, 0)
    if PAIRED:
        own_bitmaps = (of_lane(start, BITMAP), of_lane(start, BITMAP + 1))
        left_out = (of_lane(start, LEFT_OUT), of_lane(start, LEFT_OUT + 1))
    shared = (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr + 1, row_order_ptr, jobs_ptr,
        job_count, records, passed_on, whose_first(start, SPLIT, SPLIT and GROUPS == 1), of_lane(start, 3),
        of_lane(start, 4), of_lane(start, 5), of_lane(start, 10), tile_bitmap_ptr, bitmaps_ptr,
        q_smem, k_smem, v_smem, bias_smem, out_smem, q_full, q_empty, k_full, v_full, kv_empty, q_len, heads,
        rows_per_residue, out_residue_stride, scale, softcap, own_bitmaps, left_out,
    )  # fmt: skip
    lists = (
        q_desc, jobs_ptr, job_count, counters_ptr, records, passed_on, tiles_ptr, q_smem,
        q_full, q_empty, heads_per_group, rows_per_residue, q_residue_stride, kv_step, heads_per_slab,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, False, PAIRED)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, QUEUED, False, PAIRED)),
            ],
            [1],
            [PRODUCER],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, False, PAIRED)),
                (consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, IDLE, PAIRED)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, QUEUED, False, PAIRED)),
            ],
            [4, 1],
            [252 - PRODUCER // 2, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, False, PAIRED)),
                (consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, IDLE, PAIRED)),
                (consumer, (shared, 2, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, IDLE, PAIRED)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, QUEUED, False, PAIRED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
