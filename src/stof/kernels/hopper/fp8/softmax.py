"""FP8 probabilities, from exponentials to the operand of the PV matmul, in registers."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stof.kernels.hopper.intrinsics import halves_layout


@gluon.constexpr_function
def quad_layout(block_n):  # type: ignore[no-untyped-def]
    """Layout of a 64 x block_n accumulator as [row, group of 16 columns, thread of the group, column of four].

    A thread's four are columns 2q, 2q + 1, 8 + 2q and 9 + 2q of the group; those of an operand are neighbours, 4q on.
    """
    groups = [[0, 1 << i, 0, 0] for i in range((block_n // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [8, 0, 0, 0], *groups],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block_n // 16, 4, 4],
    )


@gluon.jit
@no_type_check
def _packed(p):
    """Pack probabilities to 8 bits, four a word: int32 `[64, N / 16, 4]`."""
    BLOCK_N: gl.constexpr = p.shape[1]
    quads: gl.constexpr = quad_layout(BLOCK_N)
    words: gl.constexpr = gl.SliceLayout(3, quads)
    split = p.reshape([64, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    first, second = gl.split(split)
    a, c = gl.split(first)
    b, d = gl.split(second)
    packed = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(packed, words, assert_trivial=True)


@gluon.jit
@no_type_check
def halves(x):
    """Split columns into their left and right half without moving registers."""
    COLUMNS: gl.constexpr = x.shape[1]
    split = x.reshape([64, 2, COLUMNS // 2]).permute((0, 2, 1))
    return gl.split(gl.convert_layout(split, halves_layout(COLUMNS), assert_trivial=True))


@gluon.jit
@no_type_check
def pack_halves(left, right):
    """Pack two halves of N columns to 8 bits, four a word: int32 `[64, N / 16, 4]`."""
    COLUMNS: gl.constexpr = 2 * left.shape[1]
    both = gl.join(_packed(left), _packed(right)).permute((0, 3, 1, 2)).reshape([64, COLUMNS // 16, 4])
    return gl.convert_layout(both, gl.SliceLayout(3, quad_layout(COLUMNS)), assert_trivial=True)


@gluon.jit
@no_type_check
def probabilities_operand(packed, layout: gl.constexpr):
    """Unpack probabilities to the left operand of the PV matmul."""
    BLOCK_N: gl.constexpr = packed.shape[1] * 16
    quads: gl.constexpr = quad_layout(BLOCK_N)
    every = packed.expand_dims(3) + gl.full([64, BLOCK_N // 16, 4, 4], 0, gl.int32, layout=quads)
    eighths = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [every], dtype=gl.float8e4nv, is_pure=True, pack=4
    )
    return gl.convert_layout(eighths.reshape([64, BLOCK_N]), layout, assert_trivial=True)
