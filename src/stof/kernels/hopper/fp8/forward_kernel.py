"""Masked attention on Hopper with FP8 (e4m3) operands, in Gluon: roles and pipeline of `hopper/forward_kernel.py`.

What differs from the kernel for 16 bits:

- FP8 wgmma reads both operands with the summed dimension contiguous, so V comes transposed, `[D, keys]`, with its keys
  in the order in which a thread holds the probabilities of a row (`transpose_v.py`).
- FP8 wgmma accumulates with few bits. So the PV matmul of each tile starts from zero and is added to the output in
  float32, in the instruction that rescales the output.
- Probabilities are multiplied by `2**SHIFT` before they are rounded to e4m3, which uses its range; the factor cancels.
- One factor a head stands for the scales of Q and K in the exponent, another one for the scale of V in the output.

Source: FlashAttention-3 (arXiv 2407.08608), section 3.3, for the order of the probabilities and per-block scales.
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

from stof.kernels.hopper.epilogue import epilogue
from stof.kernels.hopper.fp8.softmax import halves, pack_halves, probabilities_operand, quad_layout
from stof.kernels.hopper.intrinsics import (
    arrive_turn_barrier,
    bit_layout,
    cleared,
    hide_from_compiler,
    lane_number,
    shfl_idx,
    thread_barrier,
    tile_layout,
    wait_turn_barrier,
)
from stof.kernels.hopper.producer import (
    DESCRIPTOR_STAGES,
    INDEX_FIELD,
    carry_coordinates,
    copy_q,
    copy_tile,
    descriptor_field,
    descriptor_layout,
    first_coordinates,
    load_coordinates,
    producer,
    slab_view,
)
from stof.kernels.hopper.softmax import exponents, masked, thread_sums
from stof.kernels.hopper.tile_scheduler import WORK_FIELDS, WORK_SIZE
from stof.runtime.pdl import launch_next_and_wait

FIELDS = gl.constexpr(WORK_FIELDS)
SIZE = gl.constexpr(WORK_SIZE)
# The largest probability becomes 256; the smallest that does not round to 0 is 2**-10, 18 powers of two below.
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
def _accumulate(acc, alpha, pv):
    """Rescale the output to the present maximum and add the PV matmul of one more tile."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None] + pv


@gluon.jit
@no_type_check
def _tile(
    kv_buffers, count, q_rows, packed, acc, alpha, m_i, words, partial, factor, softcap,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
    HAS_SCORE_MOD: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of a tile, while the PV matmul of the previous tile runs and is added to `acc`.

    Returns `(packed, acc, alpha, m_i, sums)`; `alpha` is the factor of `acc` before this tile's PV is added.
    """
    k_smem, v_smem, k_full, v_full, kv_empty = kv_buffers
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = acc.type.layout
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)
    zero_acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    p8 = probabilities_operand(packed, gl.DotOperandLayout(0, acc_layout, 4))
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    wait_turn_barrier(GROUP, GROUPS)
    s = warpgroup_mma(q_rows, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    pv = warpgroup_mma(p8, v_smem.index(stage).permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    arrive_turn_barrier(GROUP, GROUPS)
    s = warpgroup_mma_wait(1, deps=(s,))
    if PARTIAL:
        if partial:
            s = masked(s, words, BLOCK_N)
    x, m_new, m_use = exponents(s, m_i, factor, softcap, PARTIAL, HAS_SCORE_MOD, HAS_SOFTCAP, False, BLOCK_N, SHIFT)
    next_alpha = gl.exp2(m_i - m_use)
    left, right = halves(x)
    left = gl.exp2(left)
    sums = thread_sums(left, BLOCK_N)
    # Never blocks; it ends the basic block, across which ptxas does not move the wait for PV up. The instructions after
    # the wait (sum, rounding) fill the issue slots that the other half of the exponentials leaves.
    mbarrier.wait(v_full.index(stage), phase)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(kv_empty.index(stage), count=1)
    right = gl.exp2(right)
    acc = _accumulate(acc, alpha, pv)
    return pack_halves(left, right), acc, next_alpha, m_new, sums + thread_sums(right, BLOCK_N)


@gluon.jit
@no_type_check
def _consumer(
    shared, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SCORE_MOD: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Consumer loop of one warpgroup: 64 rows of every work tile."""
    (
        out_desc, lse_ptr, sinks_ptr, scales_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, work_list_ptr, work_count,
        descriptors, descriptor_full, current, begin, partial_end, end, first_bitmap, tile_bitmap_ptr, bitmaps_ptr,
        q_smem, out_smem, kv_buffers, q_full, q_empty, q_len, heads, scale, softcap,
    ) = shared  # fmt: skip
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bit_layout(BLOCK_N)))
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    v_smem, v_full = kv_buffers[1], kv_buffers[3]
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
    # The first PV matmul has no previous tile. It reads zeros: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    v_smem.index(0)._reinterpret(gl.int32, [D, BLOCK_N // 4], tile_layout(gl.int32, D, BLOCK_N // 4, 2)).store(
        gl.full([D, BLOCK_N // 4], 0, gl.int32, layout=zeros_layout)
    )
    fence_async_shared()
    thread_barrier()
    if GROUP == GROUPS - 1:
        arrive_turn_barrier(GROUP, GROUPS)
    number = gl.program_id(0)
    # Triton would take a copy of `number` for loop-invariant.
    previous_number = hide_from_compiler(number)
    previous_tile = carry_coordinates(current, SPLIT, False)
    work_index = 0
    while number < work_count:
        q_stage = work_index % Q_STAGES
        q_rows = q_smem.index(q_stage * GROUPS + GROUP)
        mbarrier.wait(q_full.index(q_stage), (work_index // Q_STAGES) & 1)
        rest = gl.maximum(begin + 1, partial_end) if HAS_FULL else end
        for tile in range(begin, rest):
            words = next_words
            next_words = _words(words_ptr, bitmap)
            bitmap = gl.load(tile_bitmap_ptr + tile + 2)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            packed, acc, alpha, m_new, sums = _tile(
                kv_buffers, count, q_rows, packed, acc, alpha, m_old, words,
                tile < partial_end, factor, softcap, GROUP, BLOCK_N, STAGES, True, HAS_SCORE_MOD, HAS_SOFTCAP,
            )  # fmt: skip
            if PERSISTENT:
                if tile == begin:
                    if work_index > 0:
                        epilogue(
                            acc, m_i - SHIFT, l_i, work_list_ptr + previous_number * SIZE, previous_tile,
                            out_smem.index(GROUP), out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr,
                            counters_ptr, sinks_ptr, q_len, heads, q_len, D, GROUP, GROUPS, D, True, False, SPLIT,
                            HAS_SINKS, False, scales_ptr=scales_ptr,
                        )  # fmt: skip
                        acc = cleared(acc)
                        l_i = cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, word_layout))[:, None] + sums
            count += 1

        if HAS_FULL:
            # Full tiles: no bitmaps, and no epilogue of the previous work tile.
            for _ in range(rest, end):
                packed, acc, alpha, m_i, sums = _tile(
                    kv_buffers, count, q_rows, packed, acc, alpha, m_i, next_words,
                    False, factor, softcap, GROUP, BLOCK_N, STAGES, False, HAS_SCORE_MOD, HAS_SOFTCAP,
                )  # fmt: skip
                l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, word_layout))[:, None] + sums
                count += 1
        mbarrier.arrive(q_empty.index(q_stage), count=1)
        previous_number = number
        previous_tile = current
        number = work_count
        if PERSISTENT:
            mbarrier.wait(descriptor_full.index(work_index % DESCRIPTOR_STAGES), (work_index // DESCRIPTOR_STAGES) & 1)
            number = descriptor_field(descriptors, work_index, INDEX_FIELD)
            begin = hide_from_compiler(descriptor_field(descriptors, work_index, 3))
            partial_end = hide_from_compiler(descriptor_field(descriptors, work_index, 4))
            end = hide_from_compiler(descriptor_field(descriptors, work_index, 5))
            current = load_coordinates(descriptors, work_index, SPLIT, False)
            factor = scale * gl.load(scales_ptr + (current[1] * heads + current[2]) * 2)
            next_words = _words(words_ptr, descriptor_field(descriptors, work_index, 10))
            bitmap = gl.load(tile_bitmap_ptr + begin + 1)
        work_index += 1

    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    p8 = probabilities_operand(packed, gl.DotOperandLayout(0, acc_layout, 4))
    zero_acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    pv = warpgroup_mma(p8, v_smem.index(stage).permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    epilogue(
        _accumulate(acc, alpha, pv), m_i - SHIFT, l_i, work_list_ptr + previous_number * SIZE, previous_tile,
        out_smem.index(GROUP), out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, sinks_ptr,
        q_len, heads, q_len, D, GROUP, GROUPS, D, True, False, SPLIT, HAS_SINKS, False, scales_ptr=scales_ptr,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
@no_type_check
def fp8_forward_kernel(
    q_desc,
    k_desc,
    v_desc,  # transposed, see `transpose_v.py`
    k_compacted_desc,
    v_compacted_desc,
    out_desc,
    lse_ptr,
    sinks_ptr,
    scales_ptr,  # [B, H, 2] float32: of scores, and of the output
    chunk_out_ptr,
    chunk_ml_ptr,
    counters_ptr,
    work_list_ptr,
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
    SLAB: gl.constexpr,  # 0, or BLOCK_N with compacted columns
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_SCORE_MOD: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr,
    PERSISTENT: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    launch_next_and_wait(USE_PDL)
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
    descriptors = q_full
    descriptor_full = q_full
    if PERSISTENT:
        # Only here, as in the kernel for 16 bits.
        descriptors = gl.allocate_shared_memory(gl.int32, [DESCRIPTOR_STAGES, 32], descriptor_layout())
        descriptor_full = gl.allocate_shared_memory(gl.int64, [DESCRIPTOR_STAGES, 1], mbarrier.MBarrierLayout())
    lane = lane_number()
    start = gl.load(work_list_ptr + gl.program_id(0) * SIZE + lane)
    for i in gl.static_range(max(STAGES, Q_STAGES)):
        if i < Q_STAGES:
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=GROUPS)
        if i < STAGES:
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(kv_empty.index(i), count=GROUPS)
    if PERSISTENT:
        for i in gl.static_range(DESCRIPTOR_STAGES):
            mbarrier.init(descriptor_full.index(i), count=1)
    # Stage 0 of V, the zeros before the first tile, counts as full.
    mbarrier.arrive(v_full.index(0), count=1)
    fence_async_shared()
    work_count = shfl_idx(start, 12)
    columns = shfl_idx(start, lane + FIELDS)
    b = shfl_idx(start, 1)
    h = shfl_idx(start, 2)
    kv_head = h // heads_per_group
    slab_head = h // heads_per_slab
    copy_tile(columns, b, kv_head, slab_head, k_desc, k_compacted_desc, k_smem,
               slab_view(k_smem, BLOCK_N, D, SLAB, STAGES), 0, k_full.index(0), 1, 0, BLOCK_N, D, SLAB, 0)  # fmt: skip
    copy_q(start, q_desc, q_smem, 0, q_full.index(0), q_len, D, GROUPS, D)
    copy_tile(columns, b, kv_head, slab_head, v_desc, v_compacted_desc, v_smem, v_smem, 1, v_full.index(1), 1, 0,
               BLOCK_N, D, SLAB, 0, True)  # fmt: skip

    kv_buffers = (k_smem, v_smem, k_full, v_full, kv_empty)
    shared = (
        out_desc, lse_ptr, sinks_ptr, scales_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr + 1, work_list_ptr,
        work_count, descriptors, descriptor_full, first_coordinates(start, SPLIT, False), shfl_idx(start, 3),
        shfl_idx(start, 4), shfl_idx(start, 5), shfl_idx(start, 10), tile_bitmap_ptr, bitmaps_ptr, q_smem, out_smem,
        kv_buffers, q_full, q_empty, q_len, heads, scale, softcap,
    )  # fmt: skip
    # One residue of q_len rows; rows past it are past the width, so TMA fills in zeros.
    lists = (
        q_desc, work_list_ptr, work_count, counters_ptr, descriptors, descriptor_full, tiles_ptr, q_smem, q_full,
        q_empty, heads_per_group, q_len, D, 1, heads_per_slab,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (shared, 0, BLOCK_N, STAGES, Q_STAGES, SPLIT, HAS_SCORE_MOD, HAS_SOFTCAP, HAS_SINKS, HAS_FULL,
                         PERSISTENT)),
            (_consumer, (shared, 1, BLOCK_N, STAGES, Q_STAGES, SPLIT, HAS_SCORE_MOD, HAS_SOFTCAP, HAS_SINKS, HAS_FULL,
                         PERSISTENT)),
            (producer, (lists, k_desc, v_desc, k_compacted_desc, v_compacted_desc, k_smem, v_smem, k_full, v_full,
            kv_empty,
                         0, 0, None, k_smem, 0, 0, GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, False, PERSISTENT,
                         True)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
