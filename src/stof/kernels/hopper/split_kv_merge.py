"""Split-KV merge: chunks of a row block store partial results in global memory, and one chunk adds all up.

A partial result is the unnormalised output of 64 rows with its row maxima and row sums. Both ways below give the same
bits on every run, and reset their counters for the next launch.

`merge_by_last` (thread blocks of one warpgroup). A chunk takes a ticket with an atomic when its last scores are done,
and stores its partial result in its epilogue. Every chunk but the last ticket's then releases: each warp adds 1 to a
second counter (`red.release`). The chunk with the last ticket waits until that counter shows all warps of the others
(`ld.acquire`), so their stores are visible, and adds up all partial results in chunk order. It cannot deadlock: all
others hold tickets, and between its ticket and its release a thread block waits only for its own producer.

`merge_pairwise` (thread blocks of two or three warpgroups). Chunks merge in a fixed binary tree. Both chunks of a pair
store their partial results; then each adds 1 to the pair's counter with acquire and release semantics. The chunk that
finds 1 there is the second: it reads the other's partial result, adds it and continues one level up. The other one is
done. Nobody waits. A pair is named by its right chunk, which is in this role on one level only, so one counter a chunk
suffices. The sum of two parts has the same bits in either order.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stof.kernels.hopper.intrinsics import cleared, mul_rn, thread_barrier

# Row maxima and row sums of a chunk: each of 128 threads holds both for two rows.
MAX_AND_SUM_SIZE = 4 * 128
_ML_SIZE = gl.constexpr(MAX_AND_SUM_SIZE)


@gluon.jit
@no_type_check
def take_ticket(counter_ptr, parts):
    """Return how many chunks of the row block ended before this one; only the warpgroup's first thread holds it.

    The atomic is issued and not waited for. A row block of one part takes no ticket.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
        "setp.gt.and.s32 p, $2, 1, p; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), parts], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _is_last(ticket, parts):
    """Whether the first thread holds the last of `parts` tickets; synchronises the warpgroup.

    All other threads hold ticket 0, which is never the last of two or more. Named barrier 11 is also that of
    `any_greater` in warpgroup 0: the same 128 threads, one use after the other.
    """
    answer = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; add.u32 t, $1, 1; setp.eq.u32 p, t, $2; barrier.cta.red.or.pred p, 11, 128, p; "
        "selp.u32 $0, 1, 0, p; }",
        "=r,r,r", [ticket, parts], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return answer == 1


@gluon.jit
@no_type_check
def _signal(counter_ptr):
    """Add this warp to a counter, with release semantics for its earlier stores."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; bar.warp.sync 0xffffffff; "
        "@p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [counter_ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _wait(counter_ptr, count):
    """Spin until the counter is `count`, with acquire semantics."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; AGAIN: ld.acquire.gpu.global.u32 t, [$1]; setp.ne.u32 p, t, $2; @p bra AGAIN; "
        "mov.b32 $0, 0; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _thread_address(ptr):
    """Return this thread's address in an array of four 32-bit values a thread.

    The thread number is read here: the compiler would keep an address tensor in registers throughout the kernel.
    """
    number = gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )
    return ptr.to(gl.int64, bitcast=True) + number * 16


@gluon.constexpr_function
def _partial_layout():  # type: ignore[no-untyped-def]
    """Four neighbouring values a thread: accesses of 16 bytes, 512 for a warp."""
    return gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])


@gluon.jit
@no_type_check
def _partial_addresses(ptr, D: gl.constexpr):
    """Return addresses of this thread's values of a partial output, `[D / 2, 128]`; four values share one address."""
    line = gl.arange(0, D // 2, layout=gl.SliceLayout(1, _partial_layout()))
    along = gl.full([1, 128], 0, gl.int64, layout=_partial_layout())
    return _thread_address(ptr) + ((line // 4) * 2048).to(gl.int64)[:, None] + along


@gluon.jit
@no_type_check
def _store_partial(acc, m, total, out_ptr, ml_ptr):
    """Store a partial result in register order: the threads that read it hold the same elements."""
    D: gl.constexpr = acc.shape[1]
    # [warp, second row, row, group of columns, thread of the row, column] -> [group, warp, row, thread, second, column]
    parts = acc.reshape([4, 2, 8, D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([D // 2, 128])
    parts = gl.convert_layout(parts, _partial_layout(), assert_trivial=True)
    gl.inline_asm_elementwise(
        "st.global.v4.f32 [$8], {$4, $5, $6, $7}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,f,f,f,f,l,l,l,l", [parts, _partial_addresses(out_ptr, D)], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        "st.global.v4.f32 [$6], {$2, $3, $4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,f,f,f,f,l,l", [m, total, _thread_address(ml_ptr)], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _load_partial(out_ptr, ml_ptr, number, rows_layout: gl.constexpr, D: gl.constexpr):
    """Load the partial result of a chunk: output `[D / 2, 128]` in register order, row maxima, row sums."""
    number = number.to(gl.int64)
    ml_at = _thread_address(ml_ptr + number * _ML_SIZE) + gl.full([64], 0, gl.int64, layout=rows_layout)
    # .cg: past the L1 cache, as another multiprocessor may have written it.
    m, total = gl.inline_asm_elementwise(
        "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,l", [ml_at],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip
    parts = gl.inline_asm_elementwise(
        "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,l,l,l",
        [_partial_addresses(out_ptr + number * (64 * D), D)], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip
    return parts, m, total


@gluon.jit
@no_type_check
def _merge(acc, m, total, acc_c, m_c, l_c):
    """Merge output, maxima and sums of two parts of the keys; the result has the same bits in either order."""
    m_new = gl.maximum(m, m_c)
    m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2(m - m_use)
    new = gl.exp2(m_c - m_use)
    total = mul_rn(total, old) + mul_rn(l_c, new)
    return mul_rn(acc, old[:, None]) + mul_rn(acc_c, new[:, None]), m_new, total


@gluon.jit
@no_type_check
def _merge_all(acc, m, out_ptr, ml_ptr, parts, PREFETCH: gl.constexpr):
    """Load all partial results, this chunk's included, and add them up in chunk order: `(acc, m, total)`."""
    D: gl.constexpr = acc.shape[1]
    acc_layout: gl.constexpr = acc.type.layout
    rows_layout: gl.constexpr = m.type.layout
    acc = cleared(acc)
    m = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    total = gl.full([64], 0.0, gl.float32, layout=rows_layout)
    if PREFETCH:
        next_partial = _load_partial(out_ptr, ml_ptr, parts * 0, rows_layout, D)
    for number in range(parts):
        if PREFETCH:
            x, m_c, l_c = next_partial
            # The last iteration loads the last chunk again.
            next_partial = _load_partial(out_ptr, ml_ptr, gl.minimum(number + 1, parts - 1), rows_layout, D)
        else:
            x, m_c, l_c = _load_partial(out_ptr, ml_ptr, number, rows_layout, D)
        x = x.reshape([D // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, D])
        x = gl.convert_layout(x, acc_layout, assert_trivial=True)
        acc, m, total = _merge(acc, m, total, x, m_c, l_c)
    return acc, m, total


@gluon.jit
@no_type_check
def merge_by_last(
    acc, m, total, slot, chunk, parts, ticket, chunk_out_ptr, chunk_ml_ptr, counters_ptr, PREFETCH: gl.constexpr
):  # fmt: skip
    """Store this chunk's partial result; the chunk with the last ticket merges all and returns `write` as true.

    For thread blocks of one warpgroup; see the top of this file. The last chunk waits only for chunks that hold a
    ticket, so thread blocks need not run at the same time.

    Args:
        slot: of the row block's first chunk. The ticket counter is at `slot`, the counter of stored warps behind it.
        ticket: see `take_ticket`.
        PREFETCH: load the next chunk before adding one; this takes registers.

    Returns:
        `(acc, m, total, write)`.
    """
    D: gl.constexpr = acc.shape[1]
    own_slot = slot + chunk.to(gl.int64)
    _store_partial(acc, m, total, chunk_out_ptr + own_slot * (64 * D), chunk_ml_ptr + own_slot * _ML_SIZE)
    last = _is_last(ticket, parts)
    if last:
        # Four warps of each chunk.
        _wait(counters_ptr + slot + 1, 4 * (parts - 1))
        out_ptr = chunk_out_ptr + slot * (64 * D)
        acc, m, total = _merge_all(acc, m, out_ptr, chunk_ml_ptr + slot * _ML_SIZE, parts, PREFETCH)
        # A warp that still waits must not find the counter reset.
        thread_barrier()
        gl.store(counters_ptr + slot, 0)
        gl.store(counters_ptr + slot + 1, 0)
    else:
        _signal(counters_ptr + slot + 1)
    return acc, m, total, last


@gluon.jit
@no_type_check
def merge_pairwise(
    acc, m, total, slot, chunk, parts, chunk_out_ptr, chunk_ml_ptr, counters_ptr, GROUPS: gl.constexpr
):  # fmt: skip
    """Merge chunks in pairs; returns `(acc, m, total, write)`, `write` true for the one that merged all.

    For several warpgroups, which lack the registers that `merge_by_last` takes; see the top of this file.

    Args:
        slot: of the row block's first chunk and this warpgroup: chunks are GROUPS slots apart.
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
            own_slot = slot + (left + second).to(gl.int64) * GROUPS
            other_slot = slot + (right - second).to(gl.int64) * GROUPS
            gl.store(chunk_out_ptr + own_slot * (64 * D) + at, acc)
            gl.store(chunk_ml_ptr + own_slot * 128 + r, m)
            gl.store(chunk_ml_ptr + own_slot * 128 + 64 + r, total)
            # The release below covers the stores of all threads.
            thread_barrier()
            counter_ptr = counters_ptr + slot + right.to(gl.int64) * GROUPS
            write = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == 1
            if write:
                thread_barrier()
                # .cg: past the L1 cache, as another multiprocessor may have written it.
                m_c = gl.load(chunk_ml_ptr + other_slot * 128 + r, cache_modifier=".cg")
                l_c = gl.load(chunk_ml_ptr + other_slot * 128 + 64 + r, cache_modifier=".cg")
                acc_c = gl.load(chunk_out_ptr + other_slot * (64 * D) + at, cache_modifier=".cg")
                acc, m, total = _merge(acc, m, total, acc_c, m_c, l_c)
                gl.store(counter_ptr, 0)
        span = span * 2
    return acc, m, total, write
