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

from stof.kernels.hopper.consumer import ConsumerArgs, consumer
from stof.kernels.hopper.intrinsics import lane_number, shfl_idx, tile_layout
from stof.kernels.hopper.producer import ProducerArgs, producer
from stof.kernels.hopper.prologue import allocate_barriers, init_barriers, start_copies
from stof.kernels.hopper.tile_fetch import BEGIN, BITMAP, END, PARTIAL_END, WORK_COUNT, first_pair, first_work_tile
from stof.kernels.hopper.tile_scheduler import WORK_SIZE
from stof.runtime.pdl import launch_next, wait_previous

SIZE = gl.constexpr(WORK_SIZE)


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
    CONFIG: gl.constexpr,  # ForwardConfig
    USE_PDL: gl.constexpr,
):
    launch_next(USE_PDL)
    if CONFIG.dynamic:
        wait_previous(USE_PDL)
    GROUPS: gl.constexpr = CONFIG.groups
    BLOCK_N: gl.constexpr = CONFIG.block_n
    D: gl.constexpr = CONFIG.width
    # Registers of a producer thread: 24, but where its addresses would spill 56 or 72.
    PRODUCER: gl.constexpr = 72 if CONFIG.paired else 56 if GROUPS == 1 and D == 128 else 24
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = tile_layout(dtype, BLOCK_N, D, 2)
    q_smem = gl.allocate_shared_memory(dtype, [CONFIG.q_stages * GROUPS, 64, D], layout)
    k_smem = gl.allocate_shared_memory(dtype, [CONFIG.stages, BLOCK_N, D], layout)
    v_smem = gl.allocate_shared_memory(dtype, [CONFIG.stages, BLOCK_N, D], layout)
    if CONFIG.has_bias:
        bias_layout: gl.constexpr = tile_layout(bias_desc.dtype, 64, BLOCK_N, 2)
        bias_smem = gl.allocate_shared_memory(bias_desc.dtype, [CONFIG.stages * GROUPS, 64, BLOCK_N], bias_layout)
    else:
        bias_smem = k_smem
    # Output is staged in a stage of Q: of three that of the finished work tile, of two that of the current one, whose Q
    # is in registers by then.
    if CONFIG.q_stages > 1:
        out_smem = q_smem
    else:
        OUT_WIDTH: gl.constexpr = out_desc.block_type.shape[3]
        out_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, OUT_WIDTH], tile_layout(dtype, 64, OUT_WIDTH, 2))
    barriers = allocate_barriers(CONFIG)
    # A descriptor and the columns of its first tile are one load of 128 bytes. Barriers are initialised while it is
    # under way. Then the first copies start, before the warps specialise. No kernel writes a list made on the host, so
    # all this comes before the wait for the previous kernel (PDL).
    lane = lane_number()
    start = gl.load(work_list_ptr + gl.program_id(0) * SIZE + lane)
    init_barriers(barriers, CONFIG)
    if not CONFIG.dynamic:
        wait_previous(USE_PDL)
    work_count = shfl_idx(start, WORK_COUNT)
    producer_args = ProducerArgs(
        q_desc=q_desc, work_list_ptr=work_list_ptr, work_count=work_count, counter_ptr=counters_ptr,
        descriptors=barriers.descriptors, descriptor_full=barriers.descriptor_full, tiles_ptr=tiles_ptr,
        q_smem=q_smem, q_full=barriers.q_full, q_empty=barriers.q_empty, heads_per_group=heads_per_group,
        rows_per_residue=rows_per_residue, q_residue_stride=q_residue_stride, kv_step=kv_step,
        heads_per_slab=heads_per_slab, k_desc=k_desc, v_desc=v_desc, k_slab_desc=k_slab_desc, v_slab_desc=v_slab_desc,
        k_smem=k_smem, v_smem=v_smem, k_full=barriers.k_full, v_full=barriers.v_full, kv_empty=barriers.kv_empty,
        k_residue_stride=k_residue_stride, v_residue_stride=v_residue_stride, bias_desc=bias_desc,
        bias_smem=bias_smem, bias_batch=bias_batch, bias_heads=bias_heads,
    )  # fmt: skip
    start_copies(producer_args, start, lane, CONFIG)
    pair = first_pair(start, CONFIG)
    args = ConsumerArgs(
        out_desc=out_desc, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, chunk_out_ptr=chunk_out_ptr,
        chunk_ml_ptr=chunk_ml_ptr, counters_ptr=counters_ptr + 1, row_order_ptr=row_order_ptr,
        work_list_ptr=work_list_ptr, work_count=work_count, descriptors=barriers.descriptors,
        descriptor_full=barriers.descriptor_full, work_tile=first_work_tile(start, CONFIG),
        begin=shfl_idx(start, BEGIN), partial_end=shfl_idx(start, PARTIAL_END),
        end=shfl_idx(start, END), bitmap=shfl_idx(start, BITMAP), tile_bitmap_ptr=tile_bitmap_ptr,
        bitmaps_ptr=bitmaps_ptr, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, bias_smem=bias_smem, out_smem=out_smem,
        q_full=barriers.q_full, q_empty=barriers.q_empty, k_full=barriers.k_full, v_full=barriers.v_full,
        kv_empty=barriers.kv_empty, q_len=q_len, heads=heads, rows_per_residue=rows_per_residue,
        out_residue_stride=out_residue_stride, scale=scale, softcap=softcap,
        pair=pair, scales_ptr=None,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [(consumer, (args, 0, CONFIG)), (producer, (producer_args, CONFIG))],
            [1], [PRODUCER],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [(consumer, (args, 0, CONFIG)), (consumer, (args, 1, CONFIG)), (producer, (producer_args, CONFIG))],
            [4, 1], [252 - PRODUCER // 2, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consumer, (args, 0, CONFIG)), (consumer, (args, 1, CONFIG)), (consumer, (args, 2, CONFIG)),
             (producer, (producer_args, CONFIG))],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
