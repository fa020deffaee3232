"""Register layouts, and PTX instructions that Gluon has no function for."""

from __future__ import annotations

from typing import no_type_check

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Functions that Triton renamed: `barrier` in 3.7, copies in 3.8, `reinterpret` in 3.9. `_reinterpret` is private before
# that, and the only way to give shared memory a second layout.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
if hasattr(gl.shared_memory_descriptor, "reinterpret"):
    reinterpret = gl.shared_memory_descriptor.reinterpret
else:
    reinterpret = gl.shared_memory_descriptor._reinterpret

# From Triton 3.8 on, LLVM repeats the products of `rescale` behind the loop that they end. It then copies their
# operands from registers that a wgmma still writes, and ptxas serialises all wgmmas (C7511).
PINNED_PRODUCTS = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8))


@gluon.constexpr_function
def bit_layout(block_n):  # type: ignore[no-untyped-def]
    """Layout of a 64 x block_n wgmma accumulator as [row, group of 8 columns, thread of the group, column pair]."""
    groups = [[0, 1 << i, 0, 0] for i in range((block_n // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *groups],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block_n // 8, 4, 2],
    )


@gluon.constexpr_function
def store_layout(width):  # type: ignore[no-untyped-def]
    """Layout of 64 x width values of 16 bits in which each thread has 8 neighbours in a row, see `in_store_layout`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *[[0, 32 << i] for i in range((width // 32).bit_length() - 1)]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.constexpr_function
def _quad_layout(width):  # type: ignore[no-untyped-def]
    """Layout of a 64 x width wgmma accumulator: [row, group of 32 columns, group of 8, thread of quad, column of pair].

    8 registers that follow each other are a thread's pairs in the four groups of 8, in one row.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [8, 0, 0, 0, 0],
            *[[0, 1 << i, 0, 0, 0] for i in range((width // 32).bit_length() - 1)],
        ],
        lane_bases=[[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]],
        block_bases=[],
        shape=[64, width // 32, 4, 4, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _transpose_quads(is_fp16):  # type: ignore[no-untyped-def]
    """PTX that rounds 8 values of a thread to 4 words, and transposes the 4 x 4 words of 4 neighbouring threads."""
    kind = "f16x2" if is_fp16 else "bf16x2"
    rounded = "".join(f"cvt.rn.{kind}.f32 w{n}, ${2 * n + 5}, ${2 * n + 4};" for n in range(4))
    return (
        "{ .reg .pred p, q; .reg .b32 l, m, a, b, w0, w1, w2, w3;" + rounded
        + "mov.u32 l, %laneid; and.b32 m, l, 1; setp.ne.b32 p, m, 0; and.b32 m, l, 2; setp.ne.b32 q, m, 0;"
        "selp.b32 a, w0, w1, p; selp.b32 b, w2, w3, p;"
        "shfl.sync.bfly.b32 a, a, 1, 0x1f, 0xffffffff; shfl.sync.bfly.b32 b, b, 1, 0x1f, 0xffffffff;"
        "selp.b32 w0, a, w0, p; selp.b32 w1, w1, a, p; selp.b32 w2, b, w2, p; selp.b32 w3, w3, b, p;"
        "selp.b32 a, w0, w2, q; selp.b32 b, w1, w3, q;"
        "shfl.sync.bfly.b32 a, a, 2, 0x1f, 0xffffffff; shfl.sync.bfly.b32 b, b, 2, 0x1f, 0xffffffff;"
        "selp.b32 $0, a, w0, q; selp.b32 $2, w2, a, q; selp.b32 $1, b, w1, q; selp.b32 $3, w3, b, q; }"
    )  # fmt: skip


@gluon.jit
@no_type_check
def in_store_layout(x, dtype: gl.constexpr):
    """Round a 64 x N accumulator to 16 bits, in `store_layout`: a thread then stores 16 bytes at a time, not 4.

    Triton's own conversion goes through shared memory.
    """
    N: gl.constexpr = x.shape[1]
    quads = gl.convert_layout(x.reshape([64, N // 32, 4, 4, 2]), _quad_layout(N), assert_trivial=True)
    constraints: gl.constexpr = "=r,=r,=r,=r,f,f,f,f,f,f,f,f"
    # Not pure: all threads of a warp take part. Two calls, because Triton 3.7 does not unwrap a constexpr `dtype`.
    if dtype == gl.float16:
        asm: gl.constexpr = _transpose_quads(True)
        rows = gl.inline_asm_elementwise(asm, constraints, [quads], dtype=gl.float16, is_pure=False, pack=8)
    else:
        asm: gl.constexpr = _transpose_quads(False)
        rows = gl.inline_asm_elementwise(asm, constraints, [quads], dtype=gl.bfloat16, is_pure=False, pack=8)
    # After the transposition, each thread of a quad has one group of 8, and its registers have the group's pairs.
    return gl.convert_layout(rows.permute([0, 1, 3, 2, 4]).reshape([64, N]), store_layout(N), assert_trivial=True)


@gluon.constexpr_function
def halves_layout(width):  # type: ignore[no-untyped-def]
    """Layout of a 64 x width wgmma accumulator as [row, column of a half, half]."""
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
    """Shared memory layout of a tile, which TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, width * dtype.primitive_bitwidth // 8),
        element_bitwidth=dtype.primitive_bitwidth,
        rank=rank,
    )


@gluon.constexpr_function
def _turn(operation, group):  # type: ignore[no-untyped-def]
    """PTX of a named barrier of two warpgroups. Triton uses the first few of the sixteen itself."""
    return f"bar.{operation} {8 + group}, 256; mov.u32 $0, 0;"


@gluon.jit
@no_type_check
def wait_turn_barrier(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Ping-pong scheduling: wait until the previous warpgroup has issued its matmuls.

    One warpgroup computes exponentials while another uses the tensor cores. Without the barrier all warpgroups want the
    same unit at the same time (FlashAttention-3, section 3.1).
    """
    if GROUPS > 1:
        gl.inline_asm_elementwise(_turn("sync", GROUP), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def arrive_turn_barrier(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Let the next warpgroup issue its matmuls."""
    if GROUPS > 1:
        following: gl.constexpr = (GROUP + 1) % GROUPS
        gl.inline_asm_elementwise(_turn("arrive", following), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def lane_number():
    """Return the lane number, as a scalar that differs between threads."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [0], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
@no_type_check
def mul_rn(a, b):
    """Multiply without fusing into an FMA, so that `mul_rn(a, b) + mul_rn(c, d)` has the same bits in either order."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _scaling(count):  # type: ignore[no-untyped-def]
    """PTX that multiplies `count` values by factors, unless all factors in the warp are 1."""
    scale = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    same = f"setp.eq.f32 p, ${2 * count}, 1.0; setp.eq.and.f32 p, ${2 * count + 2}, 1.0, p;"
    return f"{{ .reg .pred p; {same} vote.sync.all.pred p, p, 0xffffffff; @p bra.uni DONE; {scale} DONE: }}"


@gluon.constexpr_function
def _scaled_operands(count):  # type: ignore[no-untyped-def]
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
@no_type_check
def rescale(x, factors, LAZY: gl.constexpr, PACK: gl.constexpr):
    """Multiply an accumulator by a factor a row. If LAZY, a warp skips this where all its factors are 1.

    `PACK` elements of a thread go through one block of PTX; they alternate between the thread's two rows.
    """
    if LAZY:
        x = gl.inline_asm_elementwise(
            _scaling(PACK), _scaled_operands(PACK), [x, factors[:, None]], dtype=gl.float32, is_pure=True, pack=PACK
        )
    elif PINNED_PRODUCTS:
        x = gl.inline_asm_elementwise(
            "mul.f32 $0, $1, $2;", "=f,f,f", [x, factors[:, None]], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        x = x * factors[:, None]
    return x


@gluon.jit
@no_type_check
def hide_from_compiler(value):
    """Identity that Triton's loop-invariant analysis cannot see through.

    Triton 3.6 and 3.7 replace a loop-carried scalar that only bounds an inner loop by its value before the outer loop.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def reload_by_lane(x):
    """Identity that ptxas cannot see through either: a shuffle in which each lane reads itself.

    Without it, ptxas keeps intermediate values for a rare branch in registers on every path. All lanes must be active.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 me; mov.u32 me, %laneid; shfl.sync.idx.b32 $0, $1, me, 31, 0xffffffff; }",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def cleared(x):
    """Return zeros like x, written at this place: ptxas turns plain zeros into one select an element for every tile."""
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
def declare_max_register(GROUP: gl.constexpr):
    """Declare the PTX register in which `any_greater` collects a maximum, one name for the whole kernel.

    Triton's reductions go through shared memory and synchronise all warps more than once.
    """
    gl.inline_asm_elementwise(_declaration(GROUP), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def any_greater(x, bound, GROUP: gl.constexpr):
    """Return 1 if a value of `x` (two a thread) is greater than `bound` or NaN, for the whole warpgroup, else 0."""
    gl.inline_asm_elementwise(_noting(GROUP), "=r,=r,f,f", [x], dtype=gl.int32, is_pure=False, pack=2)
    return gl.inline_asm_elementwise(_asking(GROUP), "=r,f", [bound], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def shfl_idx(value, lane):
    """Return the value that lane `lane` of the warp holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [value, lane], dtype=gl.int32, is_pure=False, pack=1
    )
