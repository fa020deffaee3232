"""Where the chunks of a split row block meet: each leaves what it has, and the last to come adds it all up."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stof.kernels.hopper.device import cleared, rounded, thread_barrier

# Values that a chunk leaves beside its output: maxima and sums of two rows for each thread, as these hold them.
MAXIMA_AND_SUMS = 4 * 128
_LEFT = gl.constexpr(MAXIMA_AND_SUMS)


@gluon.jit
@no_type_check
def take_ticket(counter_ptr, parts):
    """How many chunks of the row block came to their end before this one, known to the warpgroup's first thread.

    The answer is not waited for here. There is none where it is whole, of one part.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
        "setp.gt.and.s32 p, $2, 1, p; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), parts], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _is_last(ticket, parts):
    """Whether the first thread holds the last of so many tickets; the warpgroup's threads wait for each other."""
    answer = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; add.u32 t, $1, 1; setp.eq.u32 p, t, $2; barrier.cta.red.or.pred p, 11, 128, p; "
        "selp.u32 $0, 1, 0, p; }",
        "=r,r,r", [ticket, parts], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return answer == 1


@gluon.jit
@no_type_check
def _tell(counter_ptr):
    """Count this warp; whoever awaits the count then sees what it stored before."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; bar.warp.sync 0xffffffff; "
        "@p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [counter_ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _await(counter_ptr, count):
    """Wait until so many warps were counted."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; AGAIN: ld.acquire.gpu.global.u32 t, [$1]; setp.ne.u32 p, t, $2; @p bra AGAIN; "
        "mov.b32 $0, 0; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _own(ptr):
    """The address of four values of this thread, where those of the warpgroup's threads lie side by side.

    Told from its number where this stands: what comes from a tensor of numbers would be kept in registers all along.
    """
    number = gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )
    return ptr.to(gl.int64, bitcast=True) + number * 16


@gluon.constexpr_function
def _own_layout():  # type: ignore[no-untyped-def]
    """Four values of a thread next to each other: 16 bytes to an access, and 512 to a warp's."""
    return gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])


@gluon.jit
@no_type_check
def _own_places(ptr, D: gl.constexpr):
    """Addresses of this thread's values of a chunk's output, `[D / 2, 128]`, each four of them at that of the first."""
    line = gl.arange(0, D // 2, layout=gl.SliceLayout(1, _own_layout()))
    along = gl.full([1, 128], 0, gl.int64, layout=_own_layout())
    return _own(ptr) + ((line // 4) * 2048).to(gl.int64)[:, None] + along


@gluon.jit
@no_type_check
def _leave(acc, m, total, out_ptr, ml_ptr):
    """Store what a chunk has, in the order of the threads that hold it: the same ones will read it."""
    D: gl.constexpr = acc.shape[1]
    # [warp, second row, row, group of columns, thread of the row, column] -> [group, warp, row, thread, second, column]
    parts = acc.reshape([4, 2, 8, D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([D // 2, 128])
    parts = gl.convert_layout(parts, _own_layout(), assert_trivial=True)
    gl.inline_asm_elementwise(
        "st.global.v4.f32 [$8], {$4, $5, $6, $7}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,f,f,f,f,l,l,l,l", [parts, _own_places(out_ptr, D)], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        "st.global.v4.f32 [$6], {$2, $3, $4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,f,f,f,f,l,l", [m, total, _own(ml_ptr)], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _left(out_ptr, ml_ptr, number, rows_layout: gl.constexpr, D: gl.constexpr):
    """What a chunk has left: output `[D / 2, 128]` as it lies there, maxima, sums."""
    number = number.to(gl.int64)
    ml_at = _own(ml_ptr + number * _LEFT) + gl.full([64], 0, gl.int64, layout=rows_layout)
    # .cg: written by another multiprocessor
    m, total = gl.inline_asm_elementwise(
        "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,l", [ml_at],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip
    parts = gl.inline_asm_elementwise(
        "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,l,l,l",
        [_own_places(out_ptr + number * (64 * D), D)], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip
    return parts, m, total


@gluon.jit
@no_type_check
def _added(acc, m, total, acc_c, m_c, l_c):
    """Output, maxima and sums of two parts of the keys as of one; the same bits in either order."""
    m_new = gl.maximum(m, m_c)
    m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2(m - m_use)
    new = gl.exp2(m_c - m_use)
    total = rounded(total, old) + rounded(l_c, new)
    return rounded(acc, old[:, None]) + rounded(acc_c, new[:, None]), m_new, total


@gluon.jit
@no_type_check
def _added_up(acc, m, out_ptr, ml_ptr, parts, AHEAD: gl.constexpr):
    """All chunks in their order, whoever adds them up, so that sums are the same every time: `(acc, m, total)`."""
    D: gl.constexpr = acc.shape[1]
    acc_layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = m.type.layout
    acc = cleared(acc)
    m = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    total = gl.full([64], 0.0, gl.float32, layout=rows_layout)
    if AHEAD:
        following = _left(out_ptr, ml_ptr, parts * 0, rows_layout, D)
    for number in range(parts):
        if AHEAD:
            x, m_c, l_c = following
            # At the end the last one once more.
            following = _left(out_ptr, ml_ptr, gl.minimum(number + 1, parts - 1), rows_layout, D)
        else:
            x, m_c, l_c = _left(out_ptr, ml_ptr, number, rows_layout, D)
        x = x.reshape([D // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, D])
        x = gl.convert_layout(x, acc_layout, assert_trivial=True)
        acc, m, total = _added(acc, m, total, x, m_c, l_c)
    return acc, m, total


@gluon.jit
@no_type_check
def meet_at_once(
    acc, m, total, slot, chunk, parts, ticket, chunk_out_ptr, chunk_ml_ptr, counters_ptr, AHEAD: gl.constexpr
):  # fmt: skip
    """What a chunk has or, of the last to come, what all have: `(acc, m, total, whether it is the last)`.

    For thread blocks of one warpgroup. All leave what they have and go on with their next jobs, but the one with the
    last ticket: it waits until the others' stores, which are on their way, are there, and reads them. It waits for
    nobody who has not come to its end, so it does not matter whether all thread blocks run at the same time.

    Args:
        ticket: see `take_ticket`; its counter is at `slot`, that of the warps that have left all at the next.
        AHEAD: whether the next chunk is asked for before one is added, which takes registers.
    """
    D: gl.constexpr = acc.shape[1]
    mine = slot + chunk.to(gl.int64)
    _leave(acc, m, total, chunk_out_ptr + mine * (64 * D), chunk_ml_ptr + mine * _LEFT)
    last = _is_last(ticket, parts)
    if last:
        # Four warps of each.
        _await(counters_ptr + slot + 1, 4 * (parts - 1))
        out_ptr = chunk_out_ptr + slot * (64 * D)
        acc, m, total = _added_up(acc, m, out_ptr, chunk_ml_ptr + slot * _LEFT, parts, AHEAD)
        thread_barrier()
        gl.store(counters_ptr + slot, 0)
        gl.store(counters_ptr + slot + 1, 0)
    else:
        _tell(counters_ptr + slot + 1)
    return acc, m, total, last


@gluon.jit
@no_type_check
def meet_in_pairs(
    acc, m, total, slot, chunk, parts, chunk_out_ptr, chunk_ml_ptr, counters_ptr, GROUPS: gl.constexpr
):  # fmt: skip
    """The same of several warpgroups, which miss the registers for that elsewhere.

    Chunks meet in pairs, and pairs in pairs: whoever comes first leaves what it has and goes on with its next job,
    whoever comes second adds that to its own.
    """
    D: gl.constexpr = acc.shape[1]
    rows_layout: gl.constexpr = m.type.layout
    r = gl.arange(0, 64, layout=rows_layout)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
    at = (r * D)[:, None] + d[None, :]
    write = True
    span = 1
    while (span < parts) & write:
        left = chunk & -2 * span
        right = left + span
        if right < parts:
            second = chunk & span
            mine = slot + (left + second).to(gl.int64) * GROUPS
            other = slot + (right - second).to(gl.int64) * GROUPS
            gl.store(chunk_out_ptr + mine * (64 * D) + at, acc)
            gl.store(chunk_ml_ptr + mine * 128 + r, m)
            gl.store(chunk_ml_ptr + mine * 128 + 64 + r, total)
            # All threads' stores come before the one thread's release.
            thread_barrier()
            counter_ptr = counters_ptr + slot + right.to(gl.int64) * GROUPS
            write = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == 1
            if write:
                thread_barrier()
                # .cg: written by another multiprocessor
                m_c = gl.load(chunk_ml_ptr + other * 128 + r, cache_modifier=".cg")
                l_c = gl.load(chunk_ml_ptr + other * 128 + 64 + r, cache_modifier=".cg")
                acc_c = gl.load(chunk_out_ptr + other * (64 * D) + at, cache_modifier=".cg")
                acc, m, total = _added(acc, m, total, acc_c, m_c, l_c)
                gl.store(counter_ptr, 0)
        span = span * 2
    return acc, m, total, write
