"""Layouts, and single instructions that Gluon has no name for."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.7 has another name for it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.constexpr_function
def bit_layout(block_n):  # type: ignore[no-untyped-def]
    """The accumulator of 64 x block_n scores, seen as [row, group of 8 columns, thread of the group, column pair]."""
    groups = [[0, 1 << i, 0, 0] for i in range((block_n // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *groups],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block_n // 8, 4, 2],
    )


@gluon.constexpr_function
def halves_layout(width):  # type: ignore[no-untyped-def]
    """The accumulator of 64 x width, seen as [row, column of a half, half]."""
    groups = [[0, 8 << i, 0] for i in range((width // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [8, 0, 0], *groups, [0, 0, 1]],
        lane_bases=[[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, width // 2, 2],
    )


@gluon.constexpr_function
def tile_layout(dtype, rows, width, rank):  # type: ignore[no-untyped-def]
    """Shared memory of a tile as TMA writes it and the tensor cores read it."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, width * dtype.primitive_bitwidth // 8),
        element_bitwidth=dtype.primitive_bitwidth,
        rank=rank,
    )


@gluon.constexpr_function
def _turn(operation, group):  # type: ignore[no-untyped-def]
    """Two warpgroups meet at a barrier of the hardware; Triton takes the first few of the sixteen for itself."""
    return f"bar.{operation} {8 + group}, 256; mov.u32 $0, 0;"


@gluon.jit
@no_type_check
def await_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Wait until the warpgroup before this one has handed its products to the tensor cores.

    So one computes exponentials while another multiplies; left alone they fall into step and want one unit at once.
    """
    if GROUPS > 1:
        gl.inline_asm_elementwise(_turn("sync", GROUP), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def pass_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    if GROUPS > 1:
        following: gl.constexpr = (GROUP + 1) % GROUPS
        gl.inline_asm_elementwise(_turn("arrive", following), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def lane_number():
    """This thread's number within its warp, as a scalar that differs from thread to thread."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
@no_type_check
def rounded(a, b):
    """A product that is rounded before it is added to another, so that the sum of two is the same in either order."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _scaling(count):  # type: ignore[no-untyped-def]
    """Instructions that multiply `count` values by factors, unless all factors that the warp's threads hold are 1."""
    scale = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    same = f"setp.eq.f32 p, ${2 * count}, 1.0; setp.eq.and.f32 p, ${2 * count + 2}, 1.0, p;"
    return f"{{ .reg .pred p; {same} vote.sync.all.pred p, p, 0xffffffff; @p bra.uni DONE; {scale} DONE: }}"


@gluon.constexpr_function
def _scaled_operands(count):  # type: ignore[no-untyped-def]
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
@no_type_check
def scaled(x, factors, LAZY: gl.constexpr, PACK: gl.constexpr):
    """An accumulator times factors of its rows; if LAZY, all or none of it in each warp, as most factors are 1.

    `PACK` elements of a thread at once, of two rows by turns.
    """
    if LAZY:
        x = gl.inline_asm_elementwise(
            _scaling(PACK), _scaled_operands(PACK), [x, factors[:, None]], dtype=gl.float32, is_pure=True, pack=PACK
        )
    else:
        x = x * factors[:, None]
    return x


@gluon.jit
@no_type_check
def opaque(value):
    """The value, in a way that the compiler cannot see through.

    Triton 3.6 and 3.7 take a loop-carried scalar whose only use is to bound an inner loop for the one before the loop.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def read_again(x):
    """The values, in a way that not even the assembler can see through: each thread asks itself for them.

    For what a rare branch computes anew: the assembler would keep what it computed of them before, on every path. All
    threads of a warp have to be there.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 me; mov.u32 me, %laneid; shfl.sync.idx.b32 $0, $1, me, 31, 0xffffffff; }",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def cleared(x):
    """Zeros like x, set where this stands: plain zeros would become one select per element for every tile."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.constexpr_function
def _declaration(group):  # type: ignore[no-untyped-def]
    return f".reg .f32 highest_{group}; mov.f32 highest_{group}, 0f00000000; mov.u32 $0, 0;"


@gluon.constexpr_function
def _noting(group):  # type: ignore[no-untyped-def]
    return f"max.NaN.f32 highest_{group}, $2, $3; mov.b32 $0, 0; mov.b32 $1, 0;"


@gluon.constexpr_function
def _asking(group):  # type: ignore[no-untyped-def]
    ask = f"setp.gtu.f32 p, highest_{group}, $1; barrier.cta.red.or.pred p, {11 + group}, 128, p; selp.u32 $0, 1, 0, p;"
    return f"{{ .reg .pred p; {ask} }}"


@gluon.jit
@no_type_check
def declare_highest(GROUP: gl.constexpr):
    """The register, of this name in all of the kernel, by which `any_above` gets from a tensor to one number.

    Triton has reductions for that, which go through shared memory and wait for all warps more than once.
    """
    gl.inline_asm_elementwise(_declaration(GROUP), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def any_above(x, bound, GROUP: gl.constexpr):
    """Whether some value of `x`, two to a thread, is above a bound, or NaN: 1 or 0 for the whole warpgroup."""
    gl.inline_asm_elementwise(_noting(GROUP), "=r,=r,f,f", [x], dtype=gl.int32, is_pure=False, pack=2)
    return gl.inline_asm_elementwise(_asking(GROUP), "=r,f", [bound], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def of_lane(value, lane):
    """The value that thread `lane` of the warp holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [value, lane], dtype=gl.int32, is_pure=False, pack=1
    )
