"""Masked attention on Hopper with operands of 8 bits (e4m3), in Gluon: the same division of labour, twice the rate.

Thread blocks, jobs, rings and turns are those of `stof.kernels.hopper.warp_specialized`; what differs:

- The tensor cores want both operands of 8 bits with the dimension they sum over side by side, so V comes transposed,
  `[D, keys]` (`stof.kernels.hopper.across`), its keys in the order in which a thread holds the weights of a row.
- They add up with few bits. So the product of each tile starts from zero, and is added to the output in float32: the
  instruction that rescales the output takes it along.
- Weights are rounded to 8 bits after a multiplication by `2**SHIFT`, which fills their range, and cancels out.
- One factor for each head stands for the scales of Q and K in the exponent, one for V's in the output.

Source: FlashAttention-3 (arXiv 2407.08608), section 3.3, for the order of the weights and per-block scales.
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
    await_turn,
    bit_layout,
    cleared,
    lane_number,
    of_lane,
    opaque,
    pass_turn,
    thread_barrier,
    tile_layout,
)
from stof.kernels.hopper.finish import finish
from stof.kernels.hopper.fp8_softmax import halves, operand, packed_halves, quad_layout
from stof.kernels.hopper.jobs import JOB_FIELDS, JOB_SIZE
from stof.kernels.hopper.producer import (
    NUMBER,
    PASSED,
    copy_rows,
    copy_tile,
    field_of,
    producer,
    record_layout,
    settled,
    slabs_of,
    whose,
    whose_first,
)
from stof.kernels.hopper.softmax import exponents, masked, thread_sums
from stof.kernels.triton.turns import take_turn

FIELDS = gl.constexpr(JOB_FIELDS)
SIZE = gl.constexpr(JOB_SIZE)
# The largest weight is 256, the smallest that is not rounded to 0 is 2**-10: 18 powers of two below.
SHIFT = gl.constexpr(8)
# Warpgroups, and the width of heads.
GROUPS = gl.constexpr(2)
D = gl.constexpr(128)


@gluon.jit
@no_type_check
def _words(words_ptr, number):
    return gl.load(words_ptr + number * (GROUPS * 256))


@gluon.jit
@no_type_check
def _add_product(acc, alpha, pv):
    """Output of the tiles so far, brought to the present maximum, and the product of one more."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None] + pv


@gluon.jit
@no_type_check
def _tile(
    rings, count, q_rows, packed, acc, alpha, m_i, words, partial, factor, softcap,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr, MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores and weights of a tile, while the weights of the tile before are multiplied with V and added to `acc`.

    Returns `(packed, acc, alpha, m_i, sums)`: `alpha` is what `acc` is multiplied with before this tile's product.
    """
    k_smem, v_smem, k_full, v_full, kv_empty = rings
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = acc.type.layout
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)
    no_product = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    p8 = operand(packed, gl.DotOperandLayout(0, acc_layout, 4))
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    await_turn(GROUP, GROUPS)
    s = warpgroup_mma(q_rows, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    pv = warpgroup_mma(p8, v_smem.index(stage).permute((1, 0)), no_product, use_acc=False, is_async=True)
    pass_turn(GROUP, GROUPS)
    s = warpgroup_mma_wait(1, deps=(s,))
    if PARTIAL:
        if partial:
            s = masked(s, words, BLOCK_N)
    x, m_new, m_use = exponents(s, m_i, factor, softcap, PARTIAL, MODIFIED, HAS_SOFTCAP, False, BLOCK_N, SHIFT)
    next_alpha = gl.exp2(m_i - m_use)
    left, right = halves(x)
    left = gl.exp2(left)
    sums = thread_sums(left, BLOCK_N)
    # Never blocks; it ends the basic block, across which the assembler does not move the wait for PV up. What follows
    # the wait (the sum, the rounding) takes the turns that the other half of the exponentials leaves.
    mbarrier.wait(v_full.index(stage), phase)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(kv_empty.index(stage), count=1)
    right = gl.exp2(right)
    acc = _add_product(acc, alpha, pv)
    return packed_halves(left, right), acc, next_alpha, m_new, sums + thread_sums(right, BLOCK_N)


@gluon.jit
@no_type_check
def _consumer(
    shared, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    SPLIT: gl.constexpr, MODIFIED: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr, QUEUED: gl.constexpr,
):  # fmt: skip
    """One warpgroup of those that compute: 64 rows of every job."""
    (
        out_desc, lse_ptr, sinks_ptr, scales_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, jobs_ptr, job_count,
        records, passed_on, current, begin, partial_end, end, first_bitmap, tile_bitmap_ptr, bitmaps_ptr, q_smem,
        out_smem, rings, q_full, q_empty, q_len, heads, scale, softcap,
    ) = shared  # fmt: skip
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bit_layout(BLOCK_N)))
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    v_smem, v_full = rings[1], rings[3]
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = bitmaps_ptr + GROUP * 256 + word_row[:, None] * 4 + word[None, :]

    acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    alpha = gl.full([64], 0.0, gl.float32, layout=rows_layout)
    l_i = gl.full([64, 4], 0.0, gl.float32, layout=word_layout)
    packed = gl.full([64, BLOCK_N // 16, 4], 0, gl.int32, layout=gl.SliceLayout(3, quad_layout(BLOCK_N)))
    count = 0
    factor = scale * gl.load(scales_ptr + (current[1] * heads + current[2]) * 2)
    next_words = _words(words_ptr, first_bitmap)
    bitmap = gl.load(tile_bitmap_ptr + begin + 1)
    # What the product with V reads before there is a tile before: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    v_smem.index(0)._reinterpret(gl.int32, [D, BLOCK_N // 4], tile_layout(gl.int32, D, BLOCK_N // 4, 2)).store(
        gl.full([D, BLOCK_N // 4], 0, gl.int32, layout=zeros_layout)
    )
    fence_async_shared()
    thread_barrier()
    if GROUP == GROUPS - 1:
        pass_turn(GROUP, GROUPS)
    number = gl.program_id(0)
    # Not the same value: Triton takes what then equals `number` in one turn for something that no turn changes.
    before = opaque(number)
    known = settled(current, SPLIT, False)
    turn = 0
    while number < job_count:
        q_stage = turn % Q_STAGES
        q_rows = q_smem.index(q_stage * GROUPS + GROUP)
        mbarrier.wait(q_full.index(q_stage), (turn // Q_STAGES) & 1)
        rest = gl.maximum(begin + 1, partial_end) if HAS_FULL else end
        for tile in range(begin, rest):
            words = next_words
            next_words = _words(words_ptr, bitmap)
            bitmap = gl.load(tile_bitmap_ptr + tile + 2)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            packed, acc, alpha, m_new, sums = _tile(
                rings, count, q_rows, packed, acc, alpha, m_old, words,
                tile < partial_end, factor, softcap, GROUP, BLOCK_N, STAGES, True, MODIFIED, HAS_SOFTCAP,
            )  # fmt: skip
            if QUEUED:
                if tile == begin:
                    if turn > 0:
                        finish(
                            acc, m_i - SHIFT, l_i, jobs_ptr + before * SIZE, known, out_smem.index(GROUP), out_desc,
                            lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, sinks_ptr, q_len, heads,
                            q_len, D, GROUP, GROUPS, D, True, False, SPLIT, HAS_SINKS, False, scales_ptr=scales_ptr,
                        )  # fmt: skip
                        acc = cleared(acc)
                        l_i = cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, word_layout))[:, None] + sums
            count += 1

        if HAS_FULL:
            # The same without bits and ends of jobs.
            for _ in range(rest, end):
                packed, acc, alpha, m_i, sums = _tile(
                    rings, count, q_rows, packed, acc, alpha, m_i, next_words,
                    False, factor, softcap, GROUP, BLOCK_N, STAGES, False, MODIFIED, HAS_SOFTCAP,
                )  # fmt: skip
                l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, word_layout))[:, None] + sums
                count += 1
        mbarrier.arrive(q_empty.index(q_stage), count=1)
        before = number
        known = current
        number = job_count
        if QUEUED:
            mbarrier.wait(passed_on.index(turn % PASSED), (turn // PASSED) & 1)
            number = field_of(records, turn, NUMBER)
            begin = opaque(field_of(records, turn, 3))
            partial_end = opaque(field_of(records, turn, 4))
            end = opaque(field_of(records, turn, 5))
            current = whose(records, turn, SPLIT, False)
            factor = scale * gl.load(scales_ptr + (current[1] * heads + current[2]) * 2)
            next_words = _words(words_ptr, field_of(records, turn, 10))
            bitmap = gl.load(tile_bitmap_ptr + begin + 1)
        turn += 1

    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    p8 = operand(packed, gl.DotOperandLayout(0, acc_layout, 4))
    no_product = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    pv = warpgroup_mma(p8, v_smem.index(stage).permute((1, 0)), no_product, use_acc=False, is_async=True)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    finish(
        _add_product(acc, alpha, pv), m_i - SHIFT, l_i, jobs_ptr + before * SIZE, known, out_smem.index(GROUP),
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, sinks_ptr, q_len, heads, q_len, D,
        GROUP, GROUPS, D, True, False, SPLIT, HAS_SINKS, False, scales_ptr=scales_ptr,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
@no_type_check
def fp8_kernel(
    q_desc,
    k_desc,
    v_desc,  # transposed, see `across.py`
    k_aside_desc,
    v_aside_desc,
    out_desc,
    lse_ptr,
    sinks_ptr,
    scales_ptr,  # [B, H, 2] float32: of scores, and of the output
    chunk_out_ptr,
    chunk_ml_ptr,
    counters_ptr,
    jobs_ptr,
    tiles_ptr,
    tile_bitmap_ptr,
    bitmaps_ptr,
    heads,
    heads_per_group,
    heads_per_slab,
    q_len,
    scale,
    softcap,
    BLOCK_N: gl.constexpr,
    SLAB: gl.constexpr,  # 0, or BLOCK_N where keys are put aside
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr,
    QUEUED: gl.constexpr,
    CHAINED: gl.constexpr,
):
    take_turn(CHAINED)
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = tile_layout(dtype, BLOCK_N, D, 2)
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS, 64, D], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, D, BLOCK_N], tile_layout(dtype, D, BLOCK_N, 2))
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 64, D], tile_layout(out_desc.dtype, 64, D, 2))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    records = q_full
    passed_on = q_full
    if QUEUED:
        # Not otherwise, as in the kernel for 16 bits.
        records = gl.allocate_shared_memory(gl.int32, [PASSED, 32], record_layout())
        passed_on = gl.allocate_shared_memory(gl.int64, [PASSED, 1], mbarrier.MBarrierLayout())
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
    job_count = of_lane(start, 12)
    record = of_lane(start, lane + FIELDS)
    b = of_lane(start, 1)
    h = of_lane(start, 2)
    kv_head = h // heads_per_group
    slab_head = h // heads_per_slab
    copy_tile(record, b, kv_head, slab_head, k_desc, k_aside_desc, k_smem,
               slabs_of(k_smem, BLOCK_N, D, SLAB, STAGES), 0, k_full.index(0), 1, 0, BLOCK_N, D, SLAB, 0)  # fmt: skip
    copy_rows(start, q_desc, q_smem, 0, q_full.index(0), q_len, D, GROUPS, D)
    copy_tile(record, b, kv_head, slab_head, v_desc, v_aside_desc, v_smem, v_smem, 1, v_full.index(1), 1, 0,
               BLOCK_N, D, SLAB, 0, True)  # fmt: skip

    rings = (k_smem, v_smem, k_full, v_full, kv_empty)
    shared = (
        out_desc, lse_ptr, sinks_ptr, scales_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr + 1, jobs_ptr, job_count,
        records, passed_on, whose_first(start, SPLIT, False), of_lane(start, 3), of_lane(start, 4), of_lane(start, 5),
        of_lane(start, 10), tile_bitmap_ptr, bitmaps_ptr, q_smem, out_smem, rings, q_full, q_empty, q_len, heads,
        scale, softcap,
    )  # fmt: skip
    # Rows past the last are those of another residue, which lies past the width: none.
    lists = (
        q_desc, jobs_ptr, job_count, counters_ptr, records, passed_on, tiles_ptr, q_smem, q_full, q_empty,
        heads_per_group, q_len, D, 1, heads_per_slab,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (shared, 0, BLOCK_N, STAGES, Q_STAGES, SPLIT, MODIFIED, HAS_SOFTCAP, HAS_SINKS, HAS_FULL,
                         QUEUED)),
            (_consumer, (shared, 1, BLOCK_N, STAGES, Q_STAGES, SPLIT, MODIFIED, HAS_SOFTCAP, HAS_SINKS, HAS_FULL,
                         QUEUED)),
            (producer, (lists, k_desc, v_desc, k_aside_desc, v_aside_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                         0, 0, None, k_smem, 0, 0, GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, False, QUEUED,
                         True)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
