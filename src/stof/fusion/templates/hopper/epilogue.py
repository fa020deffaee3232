"""Shared parts of the Hopper GEMM kernels: pipeline stages, and the epilogue (scale, bias, activation, residual)."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from stof.fusion.templates.device_functions import activate
from stof.kernels.hopper.intrinsics import async_load, async_store

# Triton 3.7 has another name for it.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# What the warps of a thread block share: descriptors, pointers and sizes, buffers and barriers in shared memory.
GemmArgs = namedtuple(
    "GemmArgs",
    "a_desc b_desc side_desc c_desc residual_desc bias_ptr row_scale_ptr cos_ptr sin_ptr positions turned rows columns "
    "tiles_m tiles_n k_tiles a_smem b_smem side_smem c_smem a_full a_empty b_full b_empty turn residual_full",
)


@dataclass(frozen=True)
class GemmOptions:
    """Compile-time options of both kernels; fields alone, since Triton's cache keys hold values but no code of a class.

    Kernels take the options one by one and make this of them: candidates are compiled in threads by what Triton writes
    of a kernel's arguments as JSON, which has no dataclasses.

    Attributes:
        rows: of a consumer's tile, 64 or 128.
        block_n: columns of a tile's accumulators (gated: gate and up together).
        side: columns of a tile beyond block_n, with an accumulator of their own.
        width: columns of output of block_n columns of accumulators.
        a_stages, b_stages: pipeline stages of a consumer's rows, and of columns.
        consumers: warpgroups that share a tile (ping-pong: 1).
        lag: steps that the second consumer is behind the first.
        group_m: rows of tiles that are rasterized together.
        head_dim: of heads that are rotated, 0 for none.
    """

    rows: int
    block_n: int
    block_k: int
    a_stages: int
    b_stages: int
    group_m: int
    gated: bool
    transposed: bool
    activation: str
    has_bias: bool
    has_residual: bool
    has_scale: bool
    width: int
    side: int
    consumers: int
    lag: int
    head_dim: int


@gluon.constexpr_function
def gemm_options(**options):  # type: ignore[no-untyped-def]
    """Return `GemmOptions` as one compile-time value."""
    return GemmOptions(**options, width=options["block_n"] // (2 if options["gated"] else 1))


@gluon.constexpr_function
def shared_layout(dtype, width):  # type: ignore[no-untyped-def]
    """Shared memory of a tile whose rows are `width` elements long, as TMA and the tensor cores want it."""
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, width * bits // 8), element_bitwidth=bits, rank=2)


@gluon.jit
@no_type_check
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the next pipeline stage and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
@no_type_check
def fetch_columns(args, desc, smem, bar, stage, first, k, PARTS: gl.constexpr, options: gl.constexpr):
    """Start the TMA copies of one step of a tile's columns from `first` on: one box, or gate and up."""
    for part in gl.static_range(PARTS):
        box = smem.index(stage * PARTS + part)
        column = first + part * args.columns
        if options.transposed:
            async_load(desc, [k * options.block_k, column], bar, box)
        else:
            async_load(desc, [column, k * options.block_k], bar, box)


@gluon.jit
@no_type_check
def allocate_columns(dtype, PARTS: gl.constexpr, WIDTH: gl.constexpr, options: gl.constexpr):
    """Allocate the stages of a tile's columns: PARTS boxes of WIDTH columns each, side by side where transposed."""
    STAGES: gl.constexpr = options.b_stages
    DEPTH: gl.constexpr = options.block_k
    if options.transposed:
        return gl.allocate_shared_memory(dtype, [STAGES, DEPTH, PARTS * WIDTH], shared_layout(dtype, PARTS * WIDTH))
    else:  # noqa: RET505 (Triton compiles what follows a compile-time branch)
        return gl.allocate_shared_memory(dtype, [STAGES * PARTS, WIDTH, DEPTH], shared_layout(dtype, DEPTH))


@gluon.jit
@no_type_check
def previous_stage(stage, STAGES: gl.constexpr):
    """Return the previous pipeline stage.

    It is recomputed: Triton 3.6 and 3.7 read a loop-carried previous stage as its value before the loop.
    """
    return (stage + (STAGES - 1)) % STAGES


@gluon.jit
@no_type_check
def split_halves(acc):
    """Return the left and right half of a tile's columns. Both lie in the same threads: no data moves."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
@no_type_check
def apply_rotary(acc, cos_ptr, sin_ptr, row, rows, positions, HEAD_DIM: gl.constexpr):
    """Heads side by side in a tile's columns, the halves of each rotated against each other.

    cos_ptr, sin_ptr: `[positions, HEAD_DIM]`; row r of the tile has position `(row + r) % positions`. Both halves of a
    head lie in the same threads, so nothing moves. Source: Su et al. 2021, equation 34.
    """
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = HEAD_DIM // 2
    HEADS: gl.constexpr = acc.shape[1] // HEAD_DIM
    layout: gl.constexpr = acc.type.layout
    first, second = acc.reshape([ROWS, HEADS, 2, HALF]).permute((0, 1, 3, 2)).split()
    cube: gl.constexpr = first.type.layout
    r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, cube)))
    j = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    # Rows that do not exist read the last one's.
    place = (gl.minimum(r, rows - 1) % positions) * HEAD_DIM
    at = gl.expand_dims(gl.expand_dims(place, 1), 2) + gl.expand_dims(gl.expand_dims(j, 0), 1)  # [ROWS, 1, HALF]
    cos = gl.load(cos_ptr + at).to(gl.float32)
    sin = gl.load(sin_ptr + at).to(gl.float32)
    left = first * cos - second * sin
    cos = gl.load(cos_ptr + at + HALF).to(gl.float32)
    sin = gl.load(sin_ptr + at + HALF).to(gl.float32)
    right = second * cos + first * sin
    joined = gl.join(left, right).permute((0, 1, 3, 2)).reshape([ROWS, HEADS * HEAD_DIM])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
@no_type_check
def fetch_residual(args, place, row, column):
    """Start the TMA copy of a residual piece into its output buffer, once the previous store has read that buffer."""
    staged, bar = args.c_smem.index(place), args.residual_full.index(place)
    tma.store_wait(0)
    _barrier()
    mbarrier.expect(bar, staged.shape[0] * staged.shape[1] * (staged.dtype.primitive_bitwidth // 8))
    async_load(args.residual_desc, [row, column], bar, staged)


@gluon.jit
@no_type_check
def _write(out, args, place, row, column, fill, FETCHED: gl.constexpr, OTHERS: gl.constexpr, options: gl.constexpr):
    """Add the residual to a piece of a tile, round it and store it by way of a place in `c_smem`.

    `fill` counts the residuals that came to this place, for the barrier; FETCHED: this one is on its way. OTHERS:
    pieces in other places, which may still be leaving.
    """
    staged = args.c_smem.index(place)
    if options.has_residual:
        if not FETCHED:
            fetch_residual(args, place, row, column)
        mbarrier.wait(args.residual_full.index(place), fill & 1)
        out = out + staged.load(out.type.layout).to(gl.float32)
        # Every thread has read what others are about to overwrite.
        _barrier()
    else:
        tma.store_wait(OTHERS)
        _barrier()
    staged.store(out.to(staged.dtype))
    fence_async_shared()
    _barrier()
    async_store(args.c_desc, [row, column], staged)


@gluon.jit
@no_type_check
def write_tile(acc, args, place, row, first, number, PLACES: gl.constexpr, options: gl.constexpr):
    """Run the epilogue of a tile and store it, in pieces as wide as a buffer in `c_smem`.

    acc: accumulators `[ROWS, BLOCK_N]`, gate and up side by side where GATED. row, first: its first row and column.
    place: where in `c_smem` the first piece goes. PLACES: 1 when all pieces go there, the first one's residual being
    on its way; else the places this consumer has, one for each piece and all residuals on their way. number: tiles
    that this consumer has written.
    """
    GATED: gl.constexpr = options.gated
    ACTIVATION: gl.constexpr = options.activation
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PIECE: gl.constexpr = args.c_smem.shape[2]
    PIECES: gl.constexpr = WIDTH // PIECE
    OWN: gl.constexpr = PLACES > 1
    acc_layout: gl.constexpr = acc.type.layout
    if options.has_scale:
        r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))
        acc = acc * gl.load(args.row_scale_ptr + r, mask=r < args.rows, other=0.0)[:, None]
    if options.has_bias:
        j = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_layout))
        inside = first + j % WIDTH
        at = inside + (j // WIDTH) * args.columns
        acc = acc + gl.load(args.bias_ptr + at, mask=inside < args.columns, other=0.0).to(gl.float32)[None, :]
    if options.head_dim > 0:
        # Whole tiles are rotated, or none of their columns.
        if first < args.turned:
            acc = apply_rotary(acc, args.cos_ptr, args.sin_ptr, row, args.rows, args.positions, options.head_dim)
    if GATED:
        acc, up = split_halves(acc)
    for quarter in gl.static_range(PIECES):
        gl.static_assert(PIECES <= 4)
        part = acc
        if PIECES == 4:
            left, right = split_halves(acc)
            part = left if quarter < 2 else right
        if PIECES > 1:
            left, right = split_halves(part)
            part = left if quarter % 2 == 0 else right
        out = activate(part, ACTIVATION, True)
        if GATED:
            other = up
            if PIECES == 2:
                left, right = split_halves(up)
                other = left if quarter == 0 else right
            out = out * other
        at = place + quarter if OWN else place
        fill = number if OWN else number * PIECES + quarter
        _write(out, args, at, row, first + quarter * PIECE, fill,
               OWN or quarter == 0, PLACES - 1, options)  # fmt: skip
