"""PTX of the backward kernel that Gluon has no function for: TMA sums, counters in memory, a barrier of warpgroups."""

from __future__ import annotations

from typing import no_type_check

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _async_add(descriptor, coord, source, _semantic=None):  # type: ignore[no-untyped-def]
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coord, source.handle)


# Add a tile of shared memory to memory by TMA (`cp.reduce.async.bulk.tensor`, in L2). Public since Triton 3.9.
async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _async_add


@gluon.constexpr_function
def _named_barrier(operation, threads):  # type: ignore[no-untyped-def]
    """PTX of `bar`, which all lanes of a warp are to execute together."""
    return f"bar.warp.sync 0xffffffff; bar.{operation} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
@no_type_check
def arrive_named(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier of so many threads. A warp does not wait for the other warps."""
    gl.inline_asm_elementwise(
        _named_barrier("arrive", THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@no_type_check
def wait_named(barrier, THREADS: gl.constexpr):
    """Wait at a named barrier until so many threads, with those that wait, have come to it."""
    gl.inline_asm_elementwise(_named_barrier("sync", THREADS), "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def wait_stores_read():
    """Wait until this warp's TMA stores have read shared memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
@no_type_check
def wait_stores_and_count(counter_ptr, count):
    """Wait until this warp's TMA stores are in memory, then add to a counter that other thread blocks read.

    Only the lane that issued the stores can wait for them, so all lanes do before one of them counts.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; "
        "mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p red.release.gpu.global.add.s32 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def read_count(counter_ptr):
    """Return a counter of `wait_stores_and_count`."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr.to(gl.int64, bitcast=True)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def wait_count(counter_ptr, count):
    """Wait until a counter has reached `count`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 seen; AGAIN: ld.acquire.gpu.global.s32 seen, [$1]; setp.lt.s32 p, seen, $2; "
        "@p bra AGAIN; mov.u32 $0, 0; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def fence_async():
    """Order what this thread has read of counters before its later TMA stores."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
