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
    advance,
    fetch_columns,
    fetch_residual,
    previous_stage,
    shared_layout,
    write_tile,
)
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
def _producer(
    a_desc, b_desc, a_smem, b_smem, full, empty, tiles_m, tiles_n, k_tiles, columns,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    GATED: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Producer warp: copy the steps of all tiles of this thread block in order."""
    dtype: gl.constexpr = a_smem.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_coordinates(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(k_tiles):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (ROWS + BLOCK_N) * BLOCK_K * (dtype.primitive_bitwidth // 8))
            tma.async_copy_global_to_shared(a_desc, [m * ROWS, k * BLOCK_K], bar, a_smem.index(stage))
            fetch_columns(b_desc, b_smem, bar, stage, n * WIDTH, k, columns, BLOCK_K, PARTS, TRANSPOSED)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
@no_type_check
def _consumer(
    shared, NUMBER: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, GATED: gl.constexpr, TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_SCALE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: compute every second tile of this thread block."""
    (
        a_smem, b_smem, c_smem, full, empty, turn, residual_full, c_desc, residual_desc, bias_ptr, row_scale_ptr,
        cos_ptr, sin_ptr, positions, turned, tiles_m, tiles_n, k_tiles, rows, columns,
    ) = shared  # fmt: skip
    dtype: gl.constexpr = a_smem.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    b_tiles = b_smem
    if GATED:
        # The rows of gate and up lie one after the other: one GEMM for both.
        b_tiles = b_smem._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_K], shared_layout(dtype, BLOCK_K))
    # The number of this tile among the tiles of this thread block.
    number = gl.to_tensor(NUMBER)
    for tile in range(gl.program_id(0) + NUMBER * gl.num_programs(0), tiles_m * tiles_n, 2 * gl.num_programs(0)):
        m, n = tile_coordinates(tile, tiles_m, tiles_n, GROUP_M)
        if HAS_RESIDUAL:
            # The copy overlaps the whole main loop.
            fetch_residual(residual_desc, c_smem.index(NUMBER), residual_full.index(NUMBER), m * ROWS, n * WIDTH)
        stage, phase = first_step(number, k_tiles, STAGES)
        acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=acc_layout)
        # Wait until the other consumer has seen all its stages filled. Before that, a stage could be two fills behind
        # the expected one, which the single phase bit of a barrier cannot tell from the expected one.
        mbarrier.wait(turn.index(NUMBER), turn_phase(number, NUMBER))
        for k in range(k_tiles):
            mbarrier.wait(full.index(stage), phase)
            b = b_tiles.index(stage)
            if not TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_smem.index(stage), b, acc, use_acc=k > 0, is_async=True)
            # The previous step is done: release its stage.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = advance(stage, phase, STAGES)
        mbarrier.arrive(turn.index(1 - NUMBER), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(previous_stage(stage, STAGES)), count=1)
        write_tile(
            acc, c_smem, NUMBER, c_desc, residual_desc, residual_full, bias_ptr, row_scale_ptr,
            m * ROWS, n * WIDTH, rows, columns, number // 2, 1, GATED, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, HAS_SCALE,
            cos_ptr, sin_ptr, positions, turned, HEAD_DIM,
        )  # fmt: skip
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
    dtype: gl.constexpr = a_desc.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], shared_layout(dtype, BLOCK_K))
    if TRANSPOSED:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], shared_layout(dtype, BLOCK_N))
    else:
        b_smem = gl.allocate_shared_memory(
            dtype, [STAGES * (BLOCK_N // WIDTH), WIDTH, BLOCK_K], shared_layout(dtype, BLOCK_K)
        )
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

    tiles_m = gl.cdiv(rows, ROWS)
    tiles_n = gl.cdiv(columns, WIDTH)
    k_tiles = gl.cdiv(depth, BLOCK_K)
    shared = (
        a_smem, b_smem, c_smem, full, empty, turn, residual_full, c_desc, residual_desc, bias_ptr, row_scale_ptr,
        cos_ptr, sin_ptr, positions, turned, tiles_m, tiles_n, k_tiles, rows, columns,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (shared, 0, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, GATED, TRANSPOSED, ACTIVATION, HAS_BIAS,
                         HAS_RESIDUAL, HAS_SCALE, HEAD_DIM)),
            (_consumer, (shared, 1, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, GATED, TRANSPOSED, ACTIVATION, HAS_BIAS,
                         HAS_RESIDUAL, HAS_SCALE, HEAD_DIM)),
            (_producer, (a_desc, b_desc, a_smem, b_smem, full, empty, tiles_m, tiles_n, k_tiles, columns, ROWS,
                         BLOCK_N, BLOCK_K, STAGES, GROUP_M, GATED, TRANSPOSED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
