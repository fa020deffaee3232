"""Shared parts of the Hopper GEMM kernels: pipeline stages, and the epilogue (scale, bias, activation, residual)."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from stof.fusion.templates.device_functions import activate

# Triton 3.7 has another name for it.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


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
def fetch_columns(
    b_desc, b_smem, bar, stage, first, k, columns, BLOCK_K: gl.constexpr, PARTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Start the TMA copies of one step of a tile's columns from `first` on: one box, or gate and up."""
    for part in gl.static_range(PARTS):
        b = b_smem.index(stage * PARTS + part)
        column = first + part * columns
        if TRANSPOSED:
            tma.async_copy_global_to_shared(b_desc, [k * BLOCK_K, column], bar, b)
        else:
            tma.async_copy_global_to_shared(b_desc, [column, k * BLOCK_K], bar, b)


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
def fetch_residual(residual_desc, staged, bar, row, column):
    """Start the TMA copy of a residual piece into its output buffer, once the previous store has read that buffer."""
    tma.store_wait(0)
    _barrier()
    mbarrier.expect(bar, staged.shape[0] * staged.shape[1] * (staged.dtype.primitive_bitwidth // 8))
    tma.async_copy_global_to_shared(residual_desc, [row, column], bar, staged)


@gluon.jit
@no_type_check
def _write(
    out, staged, c_desc, residual_desc, bar, row, column, fill, FETCHED: gl.constexpr, OTHERS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """A piece of a tile: the residual added, rounded, out.

    `fill` counts the residuals that came to this place, for the barrier; FETCHED: this one is on its way. OTHERS:
    pieces in other places, which may still be leaving.
    """
    if HAS_RESIDUAL:
        if not FETCHED:
            fetch_residual(residual_desc, staged, bar, row, column)
        mbarrier.wait(bar, fill & 1)
        out = out + staged.load(out.type.layout).to(gl.float32)
        # Every thread has read what others are about to overwrite.
        _barrier()
    else:
        tma.store_wait(OTHERS)
        _barrier()
    staged.store(out.to(staged.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(c_desc, [row, column], staged)


@gluon.jit
@no_type_check
def write_tile(
    acc, c_smem, place, c_desc, residual_desc, bars, bias_ptr, row_scale_ptr, row, first, rows, columns, number,
    PLACES: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HAS_SCALE: gl.constexpr, cos_ptr=None, sin_ptr=None, positions=0,
    turned=0, HEAD_DIM: gl.constexpr = 0,
):  # fmt: skip
    """Run the epilogue of a tile and store it, in pieces as wide as a buffer in `c_smem`.

    acc: accumulators `[ROWS, BLOCK_N]`, gate and up side by side where GATED. row, first: its first row and column.
    place: where in `c_smem` the first piece goes. PLACES: 1 when all pieces go there, the first one's residual being
    on its way; else the places this consumer has, one for each piece and all residuals on their way. number: tiles
    that this consumer has written.
    row_scale_ptr: factors of the rows, if HAS_SCALE.
    HEAD_DIM: of heads that are rotated in the first `turned` columns, 0 for none; see `apply_rotary`.
    """
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PIECE: gl.constexpr = c_smem.shape[2]
    PIECES: gl.constexpr = WIDTH // PIECE
    OWN: gl.constexpr = PLACES > 1
    acc_layout: gl.constexpr = acc.type.layout
    if HAS_SCALE:
        r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))
        acc = acc * gl.load(row_scale_ptr + r, mask=r < rows, other=0.0)[:, None]
    if HAS_BIAS:
        j = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, acc_layout))
        inside = first + j % WIDTH
        at = inside + (j // WIDTH) * columns
        acc = acc + gl.load(bias_ptr + at, mask=inside < columns, other=0.0).to(gl.float32)[None, :]
    if HEAD_DIM > 0:
        # Whole tiles are rotated, or none of their columns.
        if first < turned:
            acc = apply_rotary(acc, cos_ptr, sin_ptr, row, rows, positions, HEAD_DIM)
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
        _write(out, c_smem.index(at), c_desc, residual_desc, bars.index(at), row, first + quarter * PIECE, fill,
               OWN or quarter == 0, PLACES - 1, HAS_RESIDUAL)  # fmt: skip
