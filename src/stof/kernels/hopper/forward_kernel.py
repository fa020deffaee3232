"""Masked attention on Hopper, in Gluon: one warp copies by TMA, one to three warpgroups compute.

Thread blocks are persistent and take work tiles from the list of the tile scheduler (`tile_scheduler.py`): some tiles
of one row block, for one batch entry and one head. One producer warp copies Q, K and V to shared memory; each consumer
warpgroup owns 64 rows of the row block.

Roles, barriers and pipeline stages. A phase of a "full" barrier completes when the TMA bytes that the producer expects
have landed, a phase of an "empty" one when all consumer warpgroups (GROUPS) have arrived. `i` counts tiles over all
work tiles of a thread block. The first copies are issued before the warps specialise; stage 0 of V counts as full.

| barrier         | stages   | producer warp                        | each consumer warpgroup                      |
|-----------------|----------|--------------------------------------|----------------------------------------------|
| q_full          | Q_STAGES | copies Q of a work tile              | wait before the work tile's first QK matmul  |
| q_empty         | Q_STAGES | wait before it copies the Q that is  | arrive when neither Q nor the output staged  |
|                 |          | Q_STAGES work tiles later            | in this stage is read any more               |
| k_full          | STAGES   | copies K of tile i (and the bias)    | wait before QK of tile i                     |
| v_full          | STAGES   | copies V of tile i to stage i + 1    | wait before PV of tile i                     |
| kv_empty        | STAGES   | wait before it copies V of tile i;   | arrive after QK of tile i + 1 and PV of      |
|                 |          | K of tile i + 1 needs no other wait  | tile i, or when it skips the stage           |
| descriptor_full | 3        | writes the next work tile            | wait at the end of a work tile (PERSISTENT)  |
| named 8 to 10   | GROUPS   | -                                    | ping-pong: wait on 8 + g, issue QK and PV,   |
|                 |          |                                      | arrive at 8 + (g + 1) % GROUPS               |
| named 11 to 13  | GROUPS   | -                                    | votes of a warpgroup (`any_greater`)         |

A warpgroup that skips a tile releases its stage early; the other warpgroups, which compute it, still hold the stage.
Descriptors need no "empty" barrier: the producer waits for the release of Q before it is a whole ring ahead.
Stage i % STAGES holds K of tile i and V of tile i - 1; before the first tile, the consumers write zeros for V.

    consumer, tile i:   QK(i) issue | PV(i-1) issue | wait QK | mask, softmax(i) | wait PV | release stage | pack P(i)

Source: STOF (arXiv 2506.06095), section 4.1; warp specialisation and the overlap of softmax and matmuls as
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
from stof.kernels.hopper.intrinsics import (
    lane_number,
    shfl_idx,
    tile_layout,
)
from stof.kernels.hopper.producer import (
    DESCRIPTOR_STAGES,
    bias_bytes,
    copy_bias,
    copy_q,
    copy_tile,
    descriptor_layout,
    first_coordinates,
    producer,
    slab_view,
)
from stof.kernels.hopper.tile_scheduler import PAIR_BITMAP, PAIR_LEFT_OUT, WORK_FIELDS, WORK_SIZE
from stof.runtime.pdl import launch_next, wait_previous

FIELDS = gl.constexpr(WORK_FIELDS)
SIZE = gl.constexpr(WORK_SIZE)
SKIPPED = gl.constexpr(PAIR_LEFT_OUT)
BITMAP = gl.constexpr(PAIR_BITMAP)


@gluon.jit
@no_type_check
def forward_kernel(
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
    work_list_ptr,
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
    HAS_SCORE_MOD: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_FULL: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PERSISTENT: gl.constexpr,
    SKIP_EMPTY: gl.constexpr,
    PAIRED: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    launch_next(USE_PDL)
    if DYNAMIC:
        wait_previous(USE_PDL)
    # Registers of a producer thread: 24, but where its addresses would spill 56 or 72.
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
    # Output is staged in a stage of Q: of three that of the finished work tile, of two that of the current one, whose Q
    # is in registers by then.
    if Q_STAGES > 1:
        out_smem = q_smem
    else:
        OUT_WIDTH: gl.constexpr = out_desc.block_type.shape[3]
        out_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, OUT_WIDTH], tile_layout(dtype, 64, OUT_WIDTH, 2))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    descriptors = q_full
    descriptor_full = q_full
    if PERSISTENT:
        # Allocated only if used: Triton may reuse the memory of barriers that are initialised but never waited on, and
        # the initialisation could land after the new owner's write.
        descriptors = gl.allocate_shared_memory(gl.int32, [DESCRIPTOR_STAGES, 32], descriptor_layout())
        descriptor_full = gl.allocate_shared_memory(gl.int64, [DESCRIPTOR_STAGES, 1], mbarrier.MBarrierLayout())
    # A descriptor and the columns of its first tile are one load of 128 bytes. Barriers are initialised while it is
    # under way. Then the first copies start, before the warps specialise. No kernel writes a list made on the host, so
    # all this comes before the wait for the previous kernel (PDL).
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
    if not DYNAMIC:
        wait_previous(USE_PDL)
    work_count = shfl_idx(start, 12)
    columns = shfl_idx(start, lane + FIELDS)
    b = shfl_idx(start, 1)
    kv_head = shfl_idx(start, 2) // heads_per_group
    slab_head = shfl_idx(start, 2) // heads_per_slab
    copy_tile(columns, b, kv_head, slab_head, k_desc, k_slab_desc, k_smem,
               slab_view(k_smem, BLOCK_N, D, SLAB, STAGES), 0,
               k_full.index(0), kv_step, k_residue_stride, BLOCK_N, D, SLAB,
               bias_bytes(GROUPS, BLOCK_N, HAS_BIAS))  # fmt: skip
    if HAS_BIAS:
        copy_bias(start, columns, bias_desc, bias_smem, 0, k_full.index(0), bias_batch, bias_heads, GROUPS, BLOCK_N)
    copy_q(start, q_desc, q_smem, 0, q_full.index(0), rows_per_residue, q_residue_stride, GROUPS, D)
    copy_tile(columns, b, kv_head, slab_head, v_desc, v_slab_desc, v_smem,
               slab_view(v_smem, BLOCK_N, D, SLAB, STAGES), 1,
               v_full.index(1), kv_step, v_residue_stride, BLOCK_N, D, SLAB, 0)  # fmt: skip

    own_bitmaps = (0, 0)
    skipped = (0, 0)
    if PAIRED:
        own_bitmaps = (shfl_idx(start, BITMAP), shfl_idx(start, BITMAP + 1))
        skipped = (shfl_idx(start, SKIPPED), shfl_idx(start, SKIPPED + 1))
    shared = (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr + 1, row_order_ptr, work_list_ptr,
        work_count, descriptors, descriptor_full, first_coordinates(start, SPLIT, SPLIT and GROUPS == 1),
        shfl_idx(start, 3), shfl_idx(start, 4), shfl_idx(start, 5), shfl_idx(start, 10), tile_bitmap_ptr, bitmaps_ptr,
        q_smem, k_smem, v_smem, bias_smem, out_smem, q_full, q_empty, k_full, v_full, kv_empty, q_len, heads,
        rows_per_residue, out_residue_stride, scale, softcap, own_bitmaps, skipped,
    )  # fmt: skip
    lists = (
        q_desc, work_list_ptr, work_count, counters_ptr, descriptors, descriptor_full, tiles_ptr, q_smem,
        q_full, q_empty, heads_per_group, rows_per_residue, q_residue_stride, kv_step, heads_per_slab,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, HAS_SCORE_MOD,
                HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, DYNAMIC, PERSISTENT, False, PAIRED)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, PERSISTENT, False, PAIRED)),
            ],
            [1],
            [PRODUCER],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, HAS_SCORE_MOD,
                HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, DYNAMIC, PERSISTENT, False, PAIRED)),
                (consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, HAS_SCORE_MOD,
                HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, DYNAMIC, PERSISTENT, SKIP_EMPTY, PAIRED)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, PERSISTENT, False, PAIRED)),
            ],
            [4, 1],
            [252 - PRODUCER // 2, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (shared, 0, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, HAS_SCORE_MOD,
                HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, DYNAMIC, PERSISTENT, False, PAIRED)),
                (consumer, (shared, 1, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, HAS_SCORE_MOD,
                HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, DYNAMIC, PERSISTENT, SKIP_EMPTY, PAIRED)),
                (consumer, (shared, 2, GROUPS, BLOCK_N, D, STAGES, Q_STAGES, PERMUTED, SPLIT, HAS_SCORE_MOD,
                HAS_SOFTCAP,
                             HAS_BIAS, HAS_SINKS, HAS_FULL, DYNAMIC, PERSISTENT, SKIP_EMPTY, PAIRED)),
                (producer, (lists, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
                             k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
                             GROUPS, BLOCK_N, D, SLAB, STAGES, Q_STAGES, HAS_BIAS, PERSISTENT, False, PAIRED)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
