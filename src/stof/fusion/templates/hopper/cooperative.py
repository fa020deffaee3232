"""Warp-specialized cooperative GEMM with a fused epilogue for Hopper, in Gluon.

Thread blocks are persistent, and the consumer warpgroups of a thread block share a tile. One producer warp copies
operands by TMA: rows for each consumer, columns once for all. Of two consumers the second runs LAG steps behind the
first, so that the epilogue of each overlaps MMA steps of the other. Three consumers run in step: their tiles are for
problems with few tiles, whose last epilogue nothing overlaps.

A tile may have SIDE extra columns with an accumulator of their own: 128 + 64 columns make 192, not a power of two.

Roles, barriers and pipeline stages. `k` counts steps over all tiles of a thread block; `c` is a consumer's number. A
phase of a "full" barrier completes when the TMA bytes that are expected have landed.

| barrier       | stages               | producer warp                     | consumer warpgroup c                     |
|---------------|----------------------|-----------------------------------|------------------------------------------|
| b_full        | B_STAGES             | copies columns of step k          | wait before MMA of step k                |
| b_empty       | B_STAGES, CONSUMERS  | wait before it copies columns     | arrive when MMA of step k is done, in    |
|               | arrivals             | B_STAGES steps later              | step k + 1 (the tile's last: at its end) |
| a_full        | A_STAGES a consumer  | copies rows of step k for c; for  | wait before MMA of step k                |
|               |                      | c = 1 LAG steps after columns     |                                          |
| a_empty       | A_STAGES a consumer  | wait before it copies these rows  | arrive as for b_empty                    |
| residual_full | a buffer of c_smem   | -                                 | copies the residual before the main      |
|               |                      |                                   | loop, waits in the epilogue              |

    consumer, step k:   wait full | MMA(k) issue | wait MMA(k-1) | release stages of k-1
    end of a tile:      wait MMA | release | epilogue: activation, residual, store by TMA

    LAG > 0:  consumer 0   | tile 0 MMA ......... | epilogue | tile 1 MMA ......
              consumer 1   .. LAG .. | tile 0 MMA ......... | epilogue | tile 1

Source: structure of CUTLASS's persistent warp-specialized cooperative kernel for Hopper; the lag is ours.
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
def _fetch_rows(args, stage, phase, row, k):
    """Start the TMA copy of one step of a consumer's rows."""
    a_smem = args.a_smem
    mbarrier.wait(args.a_empty.index(stage), phase)
    bar = args.a_full.index(stage)
    mbarrier.expect(bar, a_smem.shape[1] * a_smem.shape[2] * (a_smem.dtype.primitive_bitwidth // 8))
    async_load(args.a_desc, [row, k * a_smem.shape[2]], bar, a_smem.index(stage))


@gluon.jit
@no_type_check
def _producer(args, options: gl.constexpr):
    """Producer warp: copy columns and the first consumer's rows of a step, and the second's rows LAG steps later."""
    dtype: gl.constexpr = args.a_smem.dtype
    ROWS: gl.constexpr = options.rows
    BLOCK_N: gl.constexpr = options.block_n
    SIDE: gl.constexpr = options.side
    WIDTH: gl.constexpr = options.width
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    A_STAGES: gl.constexpr = options.a_stages
    CONSUMERS: gl.constexpr = options.consumers
    LAG: gl.constexpr = options.lag
    tiles_m, tiles_n, k_tiles = args.tiles_m, args.tiles_n, args.k_tiles
    tiles = tiles_m * tiles_n
    steps = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0)) * k_tiles
    tile = gl.program_id(0)
    late_tile = tile
    m, n = tile_coordinates(tile, tiles_m, tiles_n, options.group_m)
    late_m = m
    k = 0
    late_k = 0
    a_stage = 0
    a_phase = 1
    late_stage = 0
    late_phase = 1
    b_stage = 0
    b_phase = 1
    for step in range(steps + LAG):
        if step < steps:
            bar = args.b_full.index(b_stage)
            mbarrier.wait(args.b_empty.index(b_stage), b_phase)
            mbarrier.expect(bar, (BLOCK_N + SIDE) * options.block_k * (dtype.primitive_bitwidth // 8))
            first = n * (WIDTH + SIDE)
            fetch_columns(args, args.b_desc, args.b_smem, bar, b_stage, first, k, PARTS, options)
            if SIDE > 0:
                fetch_columns(args, args.side_desc, args.side_smem, bar, b_stage, first + WIDTH, k, 1, options)
            for consumer in gl.static_range(1 if LAG > 0 else CONSUMERS):
                _fetch_rows(args, consumer * A_STAGES + a_stage, a_phase, (CONSUMERS * m + consumer) * ROWS, k)
            b_stage, b_phase = advance(b_stage, b_phase, options.b_stages)
            a_stage, a_phase = advance(a_stage, a_phase, A_STAGES)
            k += 1
            if k == k_tiles:
                k = 0
                tile += gl.num_programs(0)
                m, n = tile_coordinates(tile, tiles_m, tiles_n, options.group_m)
        if LAG > 0 and step >= LAG:
            _fetch_rows(args, A_STAGES + late_stage, late_phase, (2 * late_m + 1) * ROWS, late_k)
            late_stage, late_phase = advance(late_stage, late_phase, A_STAGES)
            late_k += 1
            if late_k == k_tiles:
                late_k = 0
                late_tile += gl.num_programs(0)
                late_m, _late_n = tile_coordinates(late_tile, tiles_m, tiles_n, options.group_m)


@gluon.jit
@no_type_check
def _consumer(args, NUMBER: gl.constexpr, options: gl.constexpr):
    """Consumer warpgroup: compute its share of the rows of every tile."""
    ROWS: gl.constexpr = options.rows
    BLOCK_N: gl.constexpr = options.block_n
    SIDE: gl.constexpr = options.side
    WIDTH: gl.constexpr = options.width
    A_STAGES: gl.constexpr = options.a_stages
    B_STAGES: gl.constexpr = options.b_stages
    CONSUMERS: gl.constexpr = options.consumers
    a_smem, c_smem, k_tiles = args.a_smem, args.c_smem, args.k_tiles
    dtype: gl.constexpr = a_smem.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    b_tiles = args.b_smem
    if options.gated:
        # The rows of gate and up lie one after the other: one GEMM for both.
        shape: gl.constexpr = [B_STAGES, BLOCK_N, options.block_k]
        b_tiles = reinterpret(b_tiles, dtype, shape, shared_layout(dtype, options.block_k))
    side_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    PIECE: gl.constexpr = c_smem.shape[2]
    PLACES: gl.constexpr = c_smem.shape[0] // CONSUMERS
    PLACE: gl.constexpr = NUMBER * PLACES
    FIRST: gl.constexpr = NUMBER * A_STAGES
    number = gl.to_tensor(0)
    a_stage = gl.to_tensor(0)
    a_phase = gl.to_tensor(0)
    b_stage = gl.to_tensor(0)
    b_phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        m, n = tile_coordinates(tile, args.tiles_m, args.tiles_n, options.group_m)
        row = (CONSUMERS * m + NUMBER) * ROWS
        first = n * (WIDTH + SIDE)
        if options.has_residual:
            # The copy overlaps the whole main loop.
            for piece in gl.static_range(PLACES):
                fetch_residual(args, PLACE + piece, row, first + piece * PIECE)
        acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=acc_layout)
        side = acc
        if SIDE > 0:
            side = gl.full([ROWS, SIDE], 0.0, gl.float32, layout=side_layout)
        for k in range(k_tiles):
            mbarrier.wait(args.b_full.index(b_stage), b_phase)
            mbarrier.wait(args.a_full.index(FIRST + a_stage), a_phase)
            b = b_tiles.index(b_stage)
            if not options.transposed:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_smem.index(FIRST + a_stage), b, acc, use_acc=k > 0, is_async=True)
            # The previous step is done: release its stages.
            if SIDE > 0:
                more = args.side_smem.index(b_stage)
                if not options.transposed:
                    more = more.permute((1, 0))
                side = warpgroup_mma(a_smem.index(FIRST + a_stage), more, side, use_acc=k > 0, is_async=True)
                acc, side = warpgroup_mma_wait(2, deps=(acc, side))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(args.a_empty.index(FIRST + previous_stage(a_stage, A_STAGES)), count=1, pred=k > 0)
            mbarrier.arrive(args.b_empty.index(previous_stage(b_stage, B_STAGES)), count=1, pred=k > 0)
            a_stage, a_phase = advance(a_stage, a_phase, A_STAGES)
            b_stage, b_phase = advance(b_stage, b_phase, B_STAGES)
        if SIDE > 0:
            acc, side = warpgroup_mma_wait(0, deps=(acc, side))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(args.a_empty.index(FIRST + previous_stage(a_stage, A_STAGES)), count=1)
        mbarrier.arrive(args.b_empty.index(previous_stage(b_stage, B_STAGES)), count=1)
        write_tile(acc, args, PLACE, row, first, number, PLACES, options)
        if SIDE > 0:
            write_tile(side, args, PLACE + PLACES - 1, row, first + WIDTH, number, PLACES, options)
        number += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
@no_type_check
def cooperative_gemm_kernel(
    a_desc,
    b_desc,
    side_desc,
    c_desc,
    residual_desc,
    bias_ptr,
    row_scale_ptr,
    rows,
    columns,
    depth,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SIDE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    A_STAGES: gl.constexpr,
    B_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    LAG: gl.constexpr,
    GROUP_M: gl.constexpr,
    PIECE: gl.constexpr,
    GATED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_SCALE: gl.constexpr,
):
    """As `pingpong_gemm_kernel`, with tiles of CONSUMERS (2 or 3) times ROWS rows.

    SIDE: 64 or 0 columns that a tile has beyond BLOCK_N, with a descriptor of their own; not for gated GEMMs. LAG is
    at most B_STAGES - 2, as the second consumer gives a stage back while it works on the next, and 0 for three.
    """
    gl.static_assert(CONSUMERS == 2 or LAG == 0)
    options: gl.constexpr = gemm_options(
        rows=ROWS, block_n=BLOCK_N, side=SIDE, block_k=BLOCK_K, a_stages=A_STAGES, b_stages=B_STAGES,
        consumers=CONSUMERS, lag=LAG, group_m=GROUP_M, gated=GATED, transposed=TRANSPOSED, activation=ACTIVATION,
        has_bias=HAS_BIAS, has_residual=HAS_RESIDUAL, has_scale=HAS_SCALE, head_dim=0,
    )  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    WIDTH: gl.constexpr = options.width
    a_smem = gl.allocate_shared_memory(dtype, [CONSUMERS * A_STAGES, ROWS, BLOCK_K], shared_layout(dtype, BLOCK_K))
    b_smem = allocate_columns(dtype, BLOCK_N // WIDTH, WIDTH, options)
    side_smem = b_smem
    if SIDE > 0:
        side_smem = allocate_columns(dtype, 1, SIDE, options)
    # A tile whose width is no power of two has a buffer for each piece instead of one for the tile.
    PLACES: gl.constexpr = (BLOCK_N + SIDE) // PIECE if SIDE > 0 else 1
    c_smem = gl.allocate_shared_memory(dtype, [CONSUMERS * PLACES, ROWS, PIECE], shared_layout(dtype, PIECE))
    a_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * A_STAGES, 1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * A_STAGES, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [B_STAGES, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [B_STAGES, 1], mbarrier.MBarrierLayout())
    residual_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS * A_STAGES):
        mbarrier.init(a_full.index(i), count=1)
        mbarrier.init(a_empty.index(i), count=1)
    for i in gl.static_range(B_STAGES):
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS * PLACES):
        mbarrier.init(residual_full.index(i), count=1)
    fence_async_shared()
    launch_next_and_wait(True)

    args = GemmArgs(
        a_desc=a_desc, b_desc=b_desc, side_desc=side_desc, c_desc=c_desc, residual_desc=residual_desc,
        bias_ptr=bias_ptr, row_scale_ptr=row_scale_ptr, cos_ptr=None, sin_ptr=None, positions=None, turned=None,
        rows=rows, columns=columns, tiles_m=gl.cdiv(rows, CONSUMERS * ROWS), tiles_n=gl.cdiv(columns, WIDTH + SIDE),
        k_tiles=gl.cdiv(depth, BLOCK_K), a_smem=a_smem, b_smem=b_smem, side_smem=side_smem, c_smem=c_smem,
        a_full=a_full, a_empty=a_empty, b_full=b_full, b_empty=b_empty, turn=None, residual_full=residual_full,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (args, 0, options)), (_consumer, (args, 1, options)), (_producer, (args, options))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consumer, (args, 0, options)), (_consumer, (args, 1, options)), (_consumer, (args, 2, options)),
             (_producer, (args, options))],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
