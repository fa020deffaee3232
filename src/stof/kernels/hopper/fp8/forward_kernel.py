"""Masked attention on Hopper with FP8 (e4m3) operands, in Gluon: roles and barriers of `hopper/forward_kernel.py`.

Two consumer warpgroups of 64 rows each. `i` counts tiles over all work tiles of a thread block.

| barrier         | stages   | producer warp                        | each consumer warpgroup                      |
|-----------------|----------|--------------------------------------|----------------------------------------------|
| q_full          | Q_STAGES | copies Q of a work tile              | wait before the work tile's first QK matmul  |
| q_empty         | Q_STAGES | wait before it copies the Q that is  | arrive after the work tile's last tile; the  |
|                 |          | Q_STAGES work tiles later            | output is staged elsewhere                   |
| k_full          | STAGES   | copies K of tile i                   | wait before QK of tile i                     |
| v_full          | STAGES   | copies V of tile i to stage i + 1    | wait before PV of tile i                     |
| kv_empty        | STAGES   | wait before it copies V of tile i    | arrive after QK of tile i + 1, PV of tile i  |
| descriptor_full | 3        | writes the next work tile            | wait at the end of a work tile (PERSISTENT)  |
| named 8, 9      | 2        | -                                    | ping-pong: wait on 8 + g, issue QK and PV,   |
|                 |          |                                      | arrive at 8 + (1 - g)                        |

    consumer, tile i:   QK(i) issue | PV(i-1) issue | wait QK | mask, half of exp(i) | wait PV | release stage |
                        other half of exp(i) | acc = acc * alpha + PV(i-1) | pack P(i)

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

from stof.kernels.hopper.consumer import ConsumerArgs
from stof.kernels.hopper.epilogue import epilogue
from stof.kernels.hopper.fp8.softmax import halves, pack_halves, probabilities_operand, quad_layout
from stof.kernels.hopper.intrinsics import (
    arrive_turn_barrier,
    bit_layout,
    cleared,
    hide_from_compiler,
    lane_number,
    reinterpret,
    shfl_idx,
    thread_barrier,
    tile_layout,
    wait_turn_barrier,
)
from stof.kernels.hopper.producer import ProducerArgs, producer
from stof.kernels.hopper.prologue import allocate_barriers, init_barriers, start_copies
from stof.kernels.hopper.softmax import exponents, masked, thread_sums
from stof.kernels.hopper.tile_fetch import (
    BEGIN,
    BITMAP,
    END,
    PARTIAL_END,
    WORK_COUNT,
    carry_work_tile,
    descriptor_field,
    first_pair,
    first_work_tile,
    load_work_tile,
    wait_descriptor,
)
from stof.kernels.hopper.tile_scheduler import WORK_SIZE
from stof.runtime.pdl import launch_next_and_wait

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
    args, count, q_rows, packed, acc, alpha, m_i, words, partial, factor,
    GROUP: gl.constexpr, PARTIAL: gl.constexpr, config: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of a tile, while the PV matmul of the previous tile runs and is added to `acc`.

    Returns `(packed, acc, alpha, m_i, sums)`; `alpha` is the factor of `acc` before this tile's PV is added.
    """
    BLOCK_N: gl.constexpr = config.block_n
    STAGES: gl.constexpr = config.stages
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = acc.type.layout
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)
    zero_acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    p8 = probabilities_operand(packed, gl.DotOperandLayout(0, acc_layout, 4))
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(args.k_full.index(stage), phase)
    wait_turn_barrier(GROUP, GROUPS)
    s = warpgroup_mma(q_rows, args.k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(args.v_full.index(stage), phase)
    pv = warpgroup_mma(p8, args.v_smem.index(stage).permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    arrive_turn_barrier(GROUP, GROUPS)
    s = warpgroup_mma_wait(1, deps=(s,))
    if PARTIAL:
        if partial:
            s = masked(s, words, BLOCK_N)
    x, m_new, m_use = exponents(
        s, m_i, factor, args.softcap, PARTIAL, config.has_score_mod, config.has_softcap, False,
        BLOCK_N, SHIFT,
    )  # fmt: skip
    next_alpha = gl.exp2(m_i - m_use)
    left, right = halves(x)
    left = gl.exp2(left)
    sums = thread_sums(left, BLOCK_N)
    # Never blocks; it ends the basic block, across which ptxas does not move the wait for PV up. The instructions after
    # the wait (sum, rounding) fill the issue slots that the other half of the exponentials leaves.
    mbarrier.wait(args.v_full.index(stage), phase)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(args.kv_empty.index(stage), count=1)
    right = gl.exp2(right)
    acc = _accumulate(acc, alpha, pv)
    return pack_halves(left, right), acc, next_alpha, m_new, sums + thread_sums(right, BLOCK_N)


@gluon.jit
@no_type_check
def _consumer(args, GROUP: gl.constexpr, config: gl.constexpr):
    """Consumer loop of one warpgroup: 64 rows of every work tile."""
    BLOCK_N: gl.constexpr = config.block_n
    STAGES: gl.constexpr = config.stages
    Q_STAGES: gl.constexpr = config.q_stages
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bit_layout(BLOCK_N)))
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = args.bitmaps_ptr + GROUP * 256 + word_row[:, None] * 4 + word[None, :]

    acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    alpha = gl.full([64], 0.0, gl.float32, layout=rows_layout)
    l_i = gl.full([64, 4], 0.0, gl.float32, layout=word_layout)
    packed = gl.full([64, BLOCK_N // 16, 4], 0, gl.int32, layout=gl.SliceLayout(3, quad_layout(BLOCK_N)))
    count = 0
    work_tile = args.work_tile
    begin = args.begin
    partial_end = args.partial_end
    end = args.end
    tile_bitmap_ptr = args.tile_bitmap_ptr
    factor = args.scale * gl.load(args.scales_ptr + (work_tile.b * args.heads + work_tile.h) * 2)
    next_words = _words(words_ptr, args.bitmap)
    bitmap = gl.load(tile_bitmap_ptr + begin + 1)
    # The first PV matmul has no previous tile. It reads zeros: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    reinterpret(args.v_smem.index(0), gl.int32, [D, BLOCK_N // 4], tile_layout(gl.int32, D, BLOCK_N // 4, 2)).store(
        gl.full([D, BLOCK_N // 4], 0, gl.int32, layout=zeros_layout)
    )
    fence_async_shared()
    thread_barrier()
    if GROUP == GROUPS - 1:
        arrive_turn_barrier(GROUP, GROUPS)
    number = gl.program_id(0)
    # Triton would take a copy of `number` for loop-invariant.
    previous_number = hide_from_compiler(number)
    previous_tile = carry_work_tile(work_tile, config)
    work_index = 0
    while number < args.work_count:
        q_stage = work_index % Q_STAGES
        q_rows = args.q_smem.index(q_stage * GROUPS + GROUP)
        mbarrier.wait(args.q_full.index(q_stage), (work_index // Q_STAGES) & 1)
        rest = gl.maximum(begin + 1, partial_end) if config.has_full else end
        for tile in range(begin, rest):
            words = next_words
            next_words = _words(words_ptr, bitmap)
            bitmap = gl.load(tile_bitmap_ptr + tile + 2)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            packed, acc, alpha, m_new, sums = _tile(
                args, count, q_rows, packed, acc, alpha, m_old, words, tile < partial_end, factor, GROUP, True, config
            )  # fmt: skip
            if config.persistent:
                if tile == begin:
                    if work_index > 0:
                        epilogue(
                            acc, m_i - SHIFT, l_i, args.work_list_ptr + previous_number * SIZE, previous_tile, 0,
                            args.out_smem.index(GROUP), args, GROUP, True, False, config,
                        )  # fmt: skip
                        acc = cleared(acc)
                        l_i = cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, word_layout))[:, None] + sums
            count += 1

        if config.has_full:
            # Full tiles: no bitmaps, and no epilogue of the previous work tile.
            for _ in range(rest, end):
                packed, acc, alpha, m_i, sums = _tile(
                    args, count, q_rows, packed, acc, alpha, m_i, next_words, False, factor, GROUP, False, config
                )  # fmt: skip
                l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, word_layout))[:, None] + sums
                count += 1
        mbarrier.arrive(args.q_empty.index(q_stage), count=1)
        previous_number = number
        previous_tile = work_tile
        number = args.work_count
        if config.persistent:
            descriptors = args.descriptors
            number = wait_descriptor(descriptors, args.descriptor_full, work_index)
            begin = hide_from_compiler(descriptor_field(descriptors, work_index, BEGIN))
            partial_end = hide_from_compiler(descriptor_field(descriptors, work_index, PARTIAL_END))
            end = hide_from_compiler(descriptor_field(descriptors, work_index, END))
            work_tile = load_work_tile(descriptors, work_index, config)
            factor = args.scale * gl.load(args.scales_ptr + (work_tile.b * args.heads + work_tile.h) * 2)
            next_words = _words(words_ptr, descriptor_field(descriptors, work_index, BITMAP))
            bitmap = gl.load(tile_bitmap_ptr + begin + 1)
        work_index += 1

    stage = count % STAGES
    mbarrier.wait(args.v_full.index(stage), (count // STAGES) & 1)
    p8 = probabilities_operand(packed, gl.DotOperandLayout(0, acc_layout, 4))
    zero_acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    pv = warpgroup_mma(p8, args.v_smem.index(stage).permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    epilogue(
        _accumulate(acc, alpha, pv), m_i - SHIFT, l_i, args.work_list_ptr + previous_number * SIZE, previous_tile, 0,
        args.out_smem.index(GROUP), args, GROUP, True, False, config,
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
    CONFIG: gl.constexpr,  # ForwardConfig with `transposed_v`; slab is 0, or block_n with compacted columns
    USE_PDL: gl.constexpr,
):
    launch_next_and_wait(USE_PDL)
    BLOCK_N: gl.constexpr = CONFIG.block_n
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [CONFIG.q_stages * GROUPS, 64, D], tile_layout(dtype, 64, D, 2))
    k_smem = gl.allocate_shared_memory(dtype, [CONFIG.stages, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 2))
    v_smem = gl.allocate_shared_memory(dtype, [CONFIG.stages, D, BLOCK_N], tile_layout(dtype, D, BLOCK_N, 2))
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 64, D], tile_layout(out_desc.dtype, 64, D, 2))
    barriers = allocate_barriers(CONFIG)
    lane = lane_number()
    start = gl.load(work_list_ptr + gl.program_id(0) * SIZE + lane)
    init_barriers(barriers, CONFIG)
    work_count = shfl_idx(start, WORK_COUNT)
    # One residue of q_len rows; rows past it are past the width, so TMA fills in zeros.
    producer_args = ProducerArgs(
        q_desc=q_desc, work_list_ptr=work_list_ptr, work_count=work_count, counter_ptr=counters_ptr,
        descriptors=barriers.descriptors, descriptor_full=barriers.descriptor_full, tiles_ptr=tiles_ptr,
        q_smem=q_smem, q_full=barriers.q_full, q_empty=barriers.q_empty, heads_per_group=heads_per_group,
        rows_per_residue=q_len, q_residue_stride=D, kv_step=1, heads_per_slab=heads_per_slab, k_desc=k_desc,
        v_desc=v_desc, k_slab_desc=k_compacted_desc, v_slab_desc=v_compacted_desc, k_smem=k_smem, v_smem=v_smem,
        k_full=barriers.k_full, v_full=barriers.v_full, kv_empty=barriers.kv_empty, k_residue_stride=0,
        v_residue_stride=0, bias_desc=None, bias_smem=k_smem, bias_batch=0, bias_heads=0,
    )  # fmt: skip
    start_copies(producer_args, start, lane, CONFIG)
    args = ConsumerArgs(
        out_desc=out_desc, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, chunk_out_ptr=chunk_out_ptr,
        chunk_ml_ptr=chunk_ml_ptr, counters_ptr=counters_ptr + 1, row_order_ptr=sinks_ptr,
        work_list_ptr=work_list_ptr, work_count=work_count, descriptors=barriers.descriptors,
        descriptor_full=barriers.descriptor_full, work_tile=first_work_tile(start, CONFIG),
        begin=shfl_idx(start, BEGIN), partial_end=shfl_idx(start, PARTIAL_END),
        end=shfl_idx(start, END), bitmap=shfl_idx(start, BITMAP), tile_bitmap_ptr=tile_bitmap_ptr,
        bitmaps_ptr=bitmaps_ptr, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, bias_smem=k_smem, out_smem=out_smem,
        q_full=barriers.q_full, q_empty=barriers.q_empty, k_full=barriers.k_full, v_full=barriers.v_full,
        kv_empty=barriers.kv_empty, q_len=q_len, heads=heads, rows_per_residue=q_len, out_residue_stride=D,
        scale=scale, softcap=softcap, pair=first_pair(start, CONFIG), scales_ptr=scales_ptr,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (args, 0, CONFIG)), (_consumer, (args, 1, CONFIG)), (producer, (producer_args, CONFIG))],
        [4, 1], [240, 24],
    )  # fmt: skip
