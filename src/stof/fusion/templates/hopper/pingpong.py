"""Warp-specialized ping-pong GEMM with a fused epilogue for Hopper, in Gluon.

Thread blocks are persistent. One producer warp copies operands by TMA. Each of two consumer warpgroups computes tiles
of its own: the tensor cores work on the tile of one consumer while the CUDA cores run the epilogue (bias, activation,
residual, store) of the other.

Roles, barriers and pipeline stages. `k` counts steps over all tiles of a thread block, in order; consumer `c` takes
tiles c, c + 2, ... A phase of a "full" barrier completes when the TMA bytes that are expected have landed.

| barrier       | stages | producer warp                     | consumer warpgroup c                               |
|---------------|--------|-----------------------------------|----------------------------------------------------|
| full          | STAGES | copies rows and columns of step k | wait before MMA of step k                          |
| empty         | STAGES | wait before it copies the step    | arrive when MMA of step k is done, in step k + 1   |
|               |        | STAGES later                      | (the tile's last step: at its end)                 |
| turn          | 2      | -                                 | wait on turn[c] before the main loop, arrive at    |
|               |        |                                   | turn[1 - c] when all steps of the tile are issued  |
| residual_full | 2      | -                                 | copies the residual before the main loop, waits in |
|               |        |                                   | the epilogue                                       |

    consumer 0   | tile 0 MMA ... | epilogue | wait turn | tile 2 MMA ... | epilogue
    consumer 1   | wait turn      | tile 1 MMA ... | epilogue | wait turn | tile 3

Source: structure of CUTLASS's persistent warp-specialized ping-pong kernel for Hopper.
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

from stof.fusion.templates.device_functions import tile_coordinates
from stof.fusion.templates.hopper.epilogue import (
    GemmArgs,
    advance,
    allocate_columns,
    fetch_columns,
    fetch_residual,
    gemm_options,
    previous_stage,
    shared_layout,
    write_tile,
)
from stof.kernels.hopper.intrinsics import async_load, reinterpret
from stof.runtime.pdl import launch_next_and_wait


@gluon.jit
@no_type_check
def first_step(number, k_tiles, STAGES: gl.constexpr):
    """Return the pipeline stage and phase of the first step of this thread block's tile `number`."""
    count = number * k_tiles
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
@no_type_check
def turn_phase(number, NUMBER: gl.constexpr):
    """Return the phase of a consumer's ping-pong barrier; the first tile of all does not wait."""
    return ((number // 2) & 1) ^ (1 - NUMBER)


@gluon.jit
@no_type_check
def _producer(args, options: gl.constexpr):
    """Producer warp: copy the steps of all tiles of this thread block in order."""
    ROWS: gl.constexpr = options.rows
    BLOCK_N: gl.constexpr = options.block_n
    BLOCK_K: gl.constexpr = options.block_k
    a_smem, full, empty = args.a_smem, args.b_full, args.b_empty
    dtype: gl.constexpr = a_smem.dtype
    WIDTH: gl.constexpr = options.width
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        m, n = tile_coordinates(tile, args.tiles_m, args.tiles_n, options.group_m)
        for k in range(args.k_tiles):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (ROWS + BLOCK_N) * BLOCK_K * (dtype.primitive_bitwidth // 8))
            async_load(args.a_desc, [m * ROWS, k * BLOCK_K], bar, a_smem.index(stage))
            fetch_columns(args, args.b_desc, args.b_smem, bar, stage, n * WIDTH, k, PARTS, options)
            stage, phase = advance(stage, phase, options.b_stages)


@gluon.jit
@no_type_check
def _consumer(args, NUMBER: gl.constexpr, options: gl.constexpr):
    """Consumer warpgroup: compute every second tile of this thread block."""
    ROWS: gl.constexpr = options.rows
    BLOCK_N: gl.constexpr = options.block_n
    STAGES: gl.constexpr = options.b_stages
    a_smem, full, empty, turn, k_tiles = args.a_smem, args.b_full, args.b_empty, args.turn, args.k_tiles
    dtype: gl.constexpr = a_smem.dtype
    WIDTH: gl.constexpr = options.width
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    b_tiles = args.b_smem
    if options.gated:
        # The rows of gate and up lie one after the other: one GEMM for both.
        b_tiles = reinterpret(b_tiles, dtype, [STAGES, BLOCK_N, options.block_k], shared_layout(dtype, options.block_k))
    # The number of this tile among the tiles of this thread block.
    number = gl.to_tensor(NUMBER)
    tiles = args.tiles_m * args.tiles_n
    for tile in range(gl.program_id(0) + NUMBER * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        m, n = tile_coordinates(tile, args.tiles_m, args.tiles_n, options.group_m)
        if options.has_residual:
            # The copy overlaps the whole main loop.
            fetch_residual(args, NUMBER, m * ROWS, n * WIDTH)
        stage, phase = first_step(number, k_tiles, STAGES)
        acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=acc_layout)
        # Wait until the other consumer has seen all its stages filled. Before that, a stage could be two fills behind
        # the expected one, which the single phase bit of a barrier cannot tell from the expected one.
        mbarrier.wait(turn.index(NUMBER), turn_phase(number, NUMBER))
        for k in range(k_tiles):
            mbarrier.wait(full.index(stage), phase)
            b = b_tiles.index(stage)
            if not options.transposed:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_smem.index(stage), b, acc, use_acc=k > 0, is_async=True)
            # The previous step is done: release its stage.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = advance(stage, phase, STAGES)
        mbarrier.arrive(turn.index(1 - NUMBER), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1)
        write_tile(acc, args, NUMBER, m * ROWS, n * WIDTH, number // 2, 1, options)
        number += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "positions"])
@no_type_check
def pingpong_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    residual_desc,
    bias_ptr,
    row_scale_ptr,
    rows,
    columns,
    depth,
    cos_ptr,
    sin_ptr,
    positions,
    turned,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    PIECE: gl.constexpr,
    GATED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """`C[m, n] = act(scale[m] * (A @ B.T)[m, n] + bias[n]) + residual[m, n]`, or act(gate) * up.

    ROWS: of a tile, 64 or 128. GATED: BLOCK_N columns of GEMMs, half of them gate, half up; `columns` counts the
    output's. PIECE: columns of the output that leave at once. HEAD_DIM: of heads
    that are rotated in the first `turned` columns, whole tiles of them; 0 for none.
    """
    options: gl.constexpr = gemm_options(
        rows=ROWS, block_n=BLOCK_N, block_k=BLOCK_K, a_stages=STAGES, b_stages=STAGES, group_m=GROUP_M, gated=GATED,
        transposed=TRANSPOSED, activation=ACTIVATION, has_bias=HAS_BIAS, has_residual=HAS_RESIDUAL,
        has_scale=HAS_SCALE, head_dim=HEAD_DIM, side=0, consumers=1, lag=0,
    )  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    WIDTH: gl.constexpr = options.width
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], shared_layout(dtype, BLOCK_K))
    b_smem = allocate_columns(dtype, BLOCK_N // WIDTH, WIDTH, options)
    c_smem = gl.allocate_shared_memory(dtype, [2, ROWS, PIECE], shared_layout(dtype, PIECE))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    residual_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(residual_full.index(i), count=1)
    fence_async_shared()
    launch_next_and_wait(True)

    args = GemmArgs(
        a_desc=a_desc, b_desc=b_desc, side_desc=None, c_desc=c_desc, residual_desc=residual_desc, bias_ptr=bias_ptr,
        row_scale_ptr=row_scale_ptr, cos_ptr=cos_ptr, sin_ptr=sin_ptr, positions=positions, turned=turned, rows=rows,
        columns=columns, tiles_m=gl.cdiv(rows, ROWS), tiles_n=gl.cdiv(columns, WIDTH),
        k_tiles=gl.cdiv(depth, BLOCK_K), a_smem=a_smem, b_smem=b_smem, side_smem=None, c_smem=c_smem, a_full=None,
        a_empty=None, b_full=full, b_empty=empty, turn=turn, residual_full=residual_full,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (args, 0, options)), (_consumer, (args, 1, options)), (_producer, (args, options))],
        [4, 1], [240, 24],
    )  # fmt: skip
