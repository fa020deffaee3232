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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stof.kernels.hopper.device import (
    any_above,
    await_turn,
    bit_layout,
    cleared,
    declare_highest,
    lane_number,
    of_lane,
    opaque,
    pass_turn,
    scaled,
    thread_barrier,
    tile_layout,
)
from stof.kernels.hopper.finish import finish
from stof.kernels.hopper.jobs import JOB_FIELDS
from stof.kernels.hopper.producer import (
    NUMBER,
    PASSED,
    bias_bytes,
    copy_bias,
    copy_rows,
    copy_tile,
    field_of,
    producer,
    record_layout,
    slabs_of,
)
from stof.kernels.hopper.softmax import LARGEST, LOG2E, biased, masked, operand, packed_weights, steady_weights, weights
from stof.kernels.triton.turns import take_turn

FIELDS = gl.constexpr(JOB_FIELDS)


@gluon.jit
@no_type_check
def _words(words_ptr, number, GROUPS: gl.constexpr):
    return gl.load(words_ptr + number * (GROUPS * 256))


@gluon.jit
@no_type_check
def _consumer(
    shared,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PERMUTED: gl.constexpr, SPLIT: gl.constexpr, MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_FULL: gl.constexpr,
    AT_RUN_TIME: gl.constexpr, QUEUED: gl.constexpr, IDLE: gl.constexpr,
):  # fmt: skip
    """One warpgroup of those that compute: 64 rows of every job."""
    (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, jobs_ptr,
        job_count, records, passed_on, row_block, begin, partial_end, end, first_bitmap, tile_bitmap_ptr, bitmaps_ptr,
        q_smem, k_smem, v_smem, bias_smem, out_smem, q_full, q_empty, k_full, v_full, kv_empty, q_len, heads,
        rows_per_residue, out_residue_stride, scale, softcap,
    ) = shared  # fmt: skip
    # A bias is added, and what else changes scores done, before they are masked.
    CHANGED: gl.constexpr = MODIFIED and not HAS_BIAS
    CAPPED: gl.constexpr = HAS_SOFTCAP and not HAS_BIAS
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    # Q in registers for full tiles, where there is room: read once a job, not once a tile.
    HELD: gl.constexpr = D == 128 and GROUPS == 2 and Q_STAGES > 1
    LAZY: gl.constexpr = D > 64
    # Full tiles go by the maximum so far.
    STEADY: gl.constexpr = HAS_FULL and not MODIFIED
    bits: gl.constexpr = bit_layout(BLOCK_N)
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bits))
    sums_layout: gl.constexpr = word_layout
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = bitmaps_ptr + GROUP * 256 + word_row[:, None] * 4 + word[None, :]
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)

    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    l_i = gl.full([64, 4], 0.0, gl.float32, layout=sums_layout)
    packed = gl.full([64, BLOCK_N // 8, 4, 2], 0, gl.int32, layout=bits)
    if STEADY:
        declare_highest(GROUP)
    count = 0
    factor = scale
    if HAS_BIAS:
        factor = LOG2E
    next_words = _words(words_ptr, first_bitmap, GROUPS)
    bitmap = gl.load(tile_bitmap_ptr + begin + 1)
    # What the product with V reads before there is a tile before: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    v_smem.index(0).store(gl.full([BLOCK_N, D], 0.0, dtype, layout=zeros_layout))
    fence_async_shared()
    thread_barrier()
    if GROUP == GROUPS - 1:
        pass_turn(GROUP, GROUPS)
    number = gl.program_id(0)
    # Not the same value: Triton takes what then equals `number` in one turn for something that no turn changes.
    before = opaque(number)
    turn = 0
    while number < job_count:
        q_rows = q_smem.index((turn % Q_STAGES) * GROUPS + GROUP)
        mbarrier.wait(q_full.index(turn % Q_STAGES), (turn // Q_STAGES) & 1)
        rest = gl.maximum(begin + 1, partial_end) if HAS_FULL else end
        last = end
        if IDLE:
            if row_block * (64 * GROUPS) + GROUP * 64 >= q_len:
                last = begin + 1
                rest = last
        for tile in range(begin, rest):
            # The weights of the tile before are multiplied with V under this tile's softmax: also when that one ended
            # the job before. Before the first tile of all, zeros are.
            words = next_words
            next_words = _words(words_ptr, bitmap, GROUPS)
            bitmap = gl.load(tile_bitmap_ptr + tile + 2)
            p16 = operand(packed, dtype, p_layout)
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            await_turn(GROUP, GROUPS)
            s = warpgroup_mma(q_rows, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            pv = warpgroup_mma(p16, v_smem.index(stage), acc, is_async=True)
            pass_turn(GROUP, GROUPS)
            s = warpgroup_mma_wait(1, deps=(s,))
            if HAS_BIAS:
                bias = bias_smem.index(stage * GROUPS + GROUP).load(score_layout)
                s = biased(s, bias, scale, softcap, HAS_SOFTCAP)
            if Q_STAGES == 1:
                if tile + 1 == end:
                    mbarrier.arrive(q_empty.index(0), count=1)
            if tile < partial_end:
                s = masked(s, words, BLOCK_N)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            p, m_new, alpha, sums = weights(s, m_old, factor, softcap, True, CHANGED, CAPPED, LAZY, BLOCK_N)
            # Never blocks; it ends the basic block, across which the assembler does not move the wait for PV up.
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma_wait(0, deps=(pv,))
            mbarrier.arrive(kv_empty.index(stage), count=1)
            packed = packed_weights(p, dtype, BLOCK_N)
            if QUEUED:
                if tile == begin:
                    if turn > 0:
                        q_before = (turn + Q_STAGES - 1) % Q_STAGES
                        finish(
                            acc, m_i, l_i, jobs_ptr + before * FIELDS, out_smem.index(q_before * GROUPS + GROUP),
                            out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr,
                            row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride, GROUP, GROUPS, D,
                            Q_STAGES, PERMUTED, SPLIT, HAS_SINKS, AT_RUN_TIME,
                        )  # fmt: skip
                        if Q_STAGES > 1:
                            # The output of the job before that one has left its buffer long ago.
                            tma.store_wait(1)
                            mbarrier.arrive(q_empty.index((turn + Q_STAGES - 2) % Q_STAGES), count=1, pred=turn > 1)
                        acc = cleared(acc)
                        l_i = cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
            # Rescaled here: between the two products it would make the assembler serialise them.
            acc = scaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), LAZY, D // 2)
            count += 1

        if HAS_FULL:
            # The same without bits and ends of jobs.
            q = q_rows
            if HELD:
                q = q_rows.load(q_layout)
            for tile in range(rest, last):
                p16 = operand(packed, dtype, p_layout)
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                await_turn(GROUP, GROUPS)
                s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), phase)
                pv = warpgroup_mma(p16, v_smem.index(stage), acc, is_async=True)
                pass_turn(GROUP, GROUPS)
                s = warpgroup_mma_wait(1, deps=(s,))
                if HAS_BIAS:
                    bias = bias_smem.index(stage * GROUPS + GROUP).load(score_layout)
                    s = biased(s, bias, scale, softcap, HAS_SOFTCAP)
                if STEADY:
                    p, sums = steady_weights(s, m_i, factor, BLOCK_N)
                    too_large = any_above(sums, LARGEST, GROUP)
                    acc = warpgroup_mma_wait(0, deps=(pv,))
                    if too_large != 0:
                        # The scores are gone; their keys are not.
                        s = warpgroup_mma(
                            q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
                        )
                        s = warpgroup_mma_wait(0, deps=(s,))
                        p, m_i, alpha, sums = weights(s, m_i, factor, softcap, False, CHANGED, CAPPED, False, BLOCK_N)
                        l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None]
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout))[:, None]
                    l_i += sums
                else:
                    p, m_i, alpha, sums = weights(s, m_i, factor, softcap, HAS_BIAS, CHANGED, CAPPED, LAZY, BLOCK_N)
                    mbarrier.wait(v_full.index(stage), phase)
                    acc = warpgroup_mma_wait(0, deps=(pv,))
                    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
                    acc = scaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), LAZY, D // 2)
                mbarrier.arrive(kv_empty.index(stage), count=1)
                if Q_STAGES == 1:
                    if tile + 1 == end:
                        mbarrier.arrive(q_empty.index(0), count=1)
                packed = packed_weights(p, dtype, BLOCK_N)
                count += 1
        if IDLE:
            # Rows past the last one: what is copied for the others is waited for and let go.
            for tile in range(last, end):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                await_turn(GROUP, GROUPS)
                pass_turn(GROUP, GROUPS)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(kv_empty.index(stage), count=1)
                if Q_STAGES == 1:
                    if tile + 1 == end:
                        mbarrier.arrive(q_empty.index(0), count=1)
                count += 1
        before = number
        number = job_count
        if QUEUED:
            mbarrier.wait(passed_on.index(turn % PASSED), (turn // PASSED) & 1)
            number = field_of(records, turn, NUMBER)
            if IDLE:
                row_block = opaque(field_of(records, turn, 0))
            begin = opaque(field_of(records, turn, 3))
            partial_end = opaque(field_of(records, turn, 4))
            end = opaque(field_of(records, turn, 5))
            next_words = _words(words_ptr, field_of(records, turn, 10), GROUPS)
            bitmap = gl.load(tile_bitmap_ptr + begin + 1)
        turn += 1

    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    pv = warpgroup_mma(operand(packed, dtype, p_layout), v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    finish(
        acc, m_i, l_i, jobs_ptr + before * FIELDS, out_smem.index(((turn - 1) % Q_STAGES) * GROUPS + GROUP), out_desc,
        lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, q_len, heads,
        rows_per_residue, out_residue_stride, GROUP, GROUPS, D, Q_STAGES, PERMUTED, SPLIT,
        HAS_SINKS, AT_RUN_TIME,
    )  # fmt: skip
    tma.store_wait(0)


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
    starts_ptr,
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
    CHAINED: gl.constexpr,
):
    take_turn(CHAINED)
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
    # A thread block's first job and the columns of that job's first tile lie in one line. While memory answers, the
    # barriers are set up; then the first copies start, and the warpgroups, which are told the first job.
    lane = lane_number()
    start = gl.load(starts_ptr + gl.program_id(0) * (2 * FIELDS) + lane)
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

    shared = (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr + 1, row_order_ptr, jobs_ptr,
        job_count, records, passed_on, of_lane(start, 0), of_lane(start, 3), of_lane(start, 4), of_lane(start, 5),
        of_lane(start, 10), tile_bitmap_ptr, bitmaps_ptr, q_smem, k_smem, v_smem, bias_smem, out_smem, q_full, q_empty,
        k_full, v_full, kv_empty, q_len, heads, rows_per_residue, out_residue_stride, scale, softcap,
    )  # fmt: skip
    lists = (
        q_desc, jobs_ptr, job_count, counters_ptr, records, passed_on, tiles_ptr, q_smem,
        q_full, q_empty, heads_per_group, rows_per_residue, q_residue_stride, kv_step, heads_per_slab,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, False)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, QUEUED)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, False)),
                (_consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, IDLE)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, QUEUED)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, False)),
                (_consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, IDLE)),
                (_consumer, (shared, 2, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, MODIFIED, HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, AT_RUN_TIME, QUEUED, IDLE)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, QUEUED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
