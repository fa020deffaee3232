"""Matrix product with its epilogue on Hopper, in Gluon: one warp copies by TMA, two warpgroups compute.

A thread block stays on its multiprocessor and walks output tiles. The two warpgroups of consumers either

- take turns (*pingpong*): each has a tile of its own, and the tensor cores work on one tile while the other's epilogue
  (bias, activation, residual, store) runs on the ordinary cores; or
- share a tile (*together*), each with half of its rows: the columns are copied once for both.

Source: structure of CUTLASS's persistent warp-specialised Hopper kernels, cooperative and ping-pong.
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

from stof.fusion.templates.device import activate, tile_place

# Triton 3.7 has another name for it.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.constexpr_function
def _shared_layout(dtype, width):  # type: ignore[no-untyped-def]
    """Shared memory of a tile whose rows are `width` elements long, as TMA and the tensor cores want it."""
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, width * bits // 8), element_bitwidth=bits, rank=2)


@gluon.jit
@no_type_check
def first_step(number, k_tiles, STAGES: gl.constexpr):
    """Stage and phase of the first step of a tile, `number` tiles of the thread block having come before."""
    count = number * k_tiles
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
@no_type_check
def turn_phase(number, NUMBER: gl.constexpr):
    """Phase of a consumer's turn: the other consumer's tile before it; the first tile of all waits for nobody."""
    return ((number // 2) & 1) ^ (1 - NUMBER)


@gluon.jit
@no_type_check
def _producer(
    a_desc, b_desc, a_smem, b_smem, full, empty, tiles_m, tiles_n, k_tiles, columns,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    SHARES: gl.constexpr, GATED: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The warp that copies: the steps of all tiles of this thread block, one after the other."""
    dtype: gl.constexpr = a_smem.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(k_tiles):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (SHARES * ROWS + BLOCK_N) * BLOCK_K * (dtype.primitive_bitwidth // 8))
            for share in gl.static_range(SHARES):
                tma.async_copy_global_to_shared(
                    a_desc, [(m * SHARES + share) * ROWS, k * BLOCK_K], bar, a_smem.index(stage * SHARES + share)
                )
            for part in gl.static_range(PARTS):
                b = b_smem.index(stage * PARTS + part)
                column = n * WIDTH + part * columns
                if TRANSPOSED:
                    tma.async_copy_global_to_shared(b_desc, [k * BLOCK_K, column], bar, b)
                else:
                    tma.async_copy_global_to_shared(b_desc, [column, k * BLOCK_K], bar, b)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit
@no_type_check
def _halves(acc, layout: gl.constexpr):
    """Left and right half of a tile's columns. Both lie in the same threads, so nothing moves."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    left, right = acc.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
@no_type_check
def _consumer(
    shared, NUMBER: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, SHARES: gl.constexpr, GATED: gl.constexpr, TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_SCALE: gl.constexpr,
):  # fmt: skip
    """One warpgroup of those that compute: every other tile, or half the rows of every tile."""
    (
        a_smem, b_smem, c_smem, full, empty, turn, residual_full, c_desc, residual_desc, bias_ptr, row_scale_ptr,
        tiles_m, tiles_n, k_tiles, rows, columns,
    ) = shared  # fmt: skip
    dtype: gl.constexpr = a_smem.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TURNS: gl.constexpr = 2 // SHARES
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    b_tiles = b_smem
    if GATED:
        # The rows of gate and up lie one after the other: one product for both.
        b_tiles = b_smem._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_K], _shared_layout(dtype, BLOCK_K))
    staged = c_smem.index(NUMBER)
    TURN: gl.constexpr = 0 if SHARES == 2 else NUMBER
    SHARE: gl.constexpr = NUMBER if SHARES == 2 else 0
    # How many tiles of this thread block came before.
    number = gl.to_tensor(TURN)
    for tile in range(gl.program_id(0) + TURN * gl.num_programs(0), tiles_m * tiles_n, TURNS * gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row = (m * SHARES + SHARE) * ROWS
        if HAS_RESIDUAL:
            # Into the place of the output, once the output before has left it; all of the products hide it.
            tma.store_wait(0)
            _barrier()
            mbarrier.expect(residual_full.index(NUMBER), ROWS * WIDTH * (dtype.primitive_bitwidth // 8))
            tma.async_copy_global_to_shared(residual_desc, [row, n * WIDTH], residual_full.index(NUMBER), staged)
        stage, phase = first_step(number, k_tiles, STAGES)
        before = stage
        acc = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=acc_layout)
        if SHARES == 1:
            # Until the other consumer has seen all its stages filled. Earlier, a stage could be two fills behind the
            # one waited for, which a barrier's single phase bit does not tell from none behind.
            mbarrier.wait(turn.index(NUMBER), turn_phase(number, NUMBER))
        for k in range(k_tiles):
            mbarrier.wait(full.index(stage), phase)
            b = b_tiles.index(stage)
            if not TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a_smem.index(stage * SHARES + SHARE), b, acc, use_acc=k > 0, is_async=True)
            # The step before is done: its stage may be filled again.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        if SHARES == 1:
            mbarrier.arrive(turn.index(1 - NUMBER), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)

        if HAS_SCALE:
            r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))
            acc = acc * gl.load(row_scale_ptr + r, mask=r < rows, other=0.0)[:, None]
        if HAS_BIAS:
            j = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_layout))
            column = n * WIDTH + j
            exists = column < columns
            if GATED:
                inside = n * WIDTH + j % WIDTH
                exists = inside < columns
                column = inside + (j // WIDTH) * columns
            acc = acc + gl.load(bias_ptr + column, mask=exists, other=0.0).to(gl.float32)[None, :]
        if GATED:
            gate, up = _halves(acc, out_layout)
            out = activate(gate, ACTIVATION, True) * up
        else:
            out = activate(acc, ACTIVATION, True)
        if HAS_RESIDUAL:
            mbarrier.wait(residual_full.index(NUMBER), (number // TURNS) & 1)
            out = out + staged.load(out_layout).to(gl.float32)
            # Every thread has read what others are about to overwrite.
            _barrier()
        else:
            tma.store_wait(0)
            _barrier()
        staged.store(out.to(dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(c_desc, [row, n * WIDTH], staged)
        number += TURNS
    tma.store_wait(0)


@gluon.jit
@no_type_check
def hopper_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    residual_desc,
    bias_ptr,
    row_scale_ptr,
    rows,
    columns,
    depth,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SHARES: gl.constexpr,
    GATED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_SCALE: gl.constexpr,
):
    """`C[m, n] = act(scale[m] * (A @ B.T)[m, n] + bias[n]) + residual[m, n]`, or act(gate) * up.

    ROWS: of one consumer, 64 or 128. SHARES: consumers that share a tile, 1 or 2. GATED: BLOCK_N columns of products,
    half of them gate, half up; `columns` counts the output's.
    """
    dtype: gl.constexpr = a_desc.dtype
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * SHARES, ROWS, BLOCK_K], _shared_layout(dtype, BLOCK_K))
    if TRANSPOSED:
        b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], _shared_layout(dtype, BLOCK_N))
    else:
        b_smem = gl.allocate_shared_memory(
            dtype, [STAGES * (BLOCK_N // WIDTH), WIDTH, BLOCK_K], _shared_layout(dtype, BLOCK_K)
        )
    c_smem = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], _shared_layout(dtype, WIDTH))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    residual_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=SHARES)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(residual_full.index(i), count=1)
    fence_async_shared()

    tiles_m = gl.cdiv(rows, ROWS * SHARES)
    tiles_n = gl.cdiv(columns, WIDTH)
    k_tiles = gl.cdiv(depth, BLOCK_K)
    shared = (
        a_smem, b_smem, c_smem, full, empty, turn, residual_full, c_desc, residual_desc, bias_ptr, row_scale_ptr,
        tiles_m, tiles_n, k_tiles, rows, columns,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (shared, 0, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, SHARES, GATED, TRANSPOSED, ACTIVATION,
                         HAS_BIAS, HAS_RESIDUAL, HAS_SCALE)),
            (_consumer, (shared, 1, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, SHARES, GATED, TRANSPOSED, ACTIVATION,
                         HAS_BIAS, HAS_RESIDUAL, HAS_SCALE)),
            (_producer, (a_desc, b_desc, a_smem, b_smem, full, empty, tiles_m, tiles_n, k_tiles, columns, ROWS,
                         BLOCK_N, BLOCK_K, STAGES, GROUP_M, SHARES, GATED, TRANSPOSED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
