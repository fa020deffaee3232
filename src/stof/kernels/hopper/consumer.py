"""One warpgroup of those in the Hopper kernel that compute: products, softmax and bits of 64 rows of every job."""

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

from stof.kernels.hopper.chunks import take_ticket
from stof.kernels.hopper.device import (
    any_above,
    await_turn,
    bit_layout,
    cleared,
    declare_highest,
    lane_number,
    opaque,
    pass_turn,
    read_again,
    scaled,
    thread_barrier,
)
from stof.kernels.hopper.finish import finish
from stof.kernels.hopper.jobs import JOB_SIZE, LEFT_OUT_BIT, PAIR_BITMAP, PAIR_LEFT_OUT
from stof.kernels.hopper.producer import (
    NUMBER,
    PASSED,
    field_of,
    settled,
    whose,
)
from stof.kernels.hopper.softmax import LARGEST, LOG2E, biased, masked, operand, packed_weights, steady_weights, weights

SIZE = gl.constexpr(JOB_SIZE)
LEFT_OUT = gl.constexpr(PAIR_LEFT_OUT)
BITMAP = gl.constexpr(PAIR_BITMAP)
LEFT_OUT_AT = gl.constexpr(LEFT_OUT_BIT)


@gluon.jit
@no_type_check
def _words(words_ptr, number, GROUPS: gl.constexpr):
    return gl.load(words_ptr + number * (GROUPS * 256))


@gluon.jit
@no_type_check
def _bitmap_of(tile_bitmap_ptr, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr, PAIRED: gl.constexpr):
    """Its number; of a pair that of the tile this warpgroup computes in its place, and what it leaves out before."""
    return gl.load(tile_bitmap_ptr + (tile * GROUPS + GROUP if PAIRED else tile))


@gluon.jit
@no_type_check
def _of_tile(bitmap, PAIRED: gl.constexpr):
    """A bitmap's number, and how many tiles are left out before the one that it is of."""
    if PAIRED:
        number = bitmap & (1 << LEFT_OUT_AT) - 1
        gap = bitmap >> LEFT_OUT_AT
    else:
        number = bitmap
        gap = 0
    return number, gap


@gluon.jit
@no_type_check
def _leaving_place(turn, Q_STAGES: gl.constexpr):
    """Where the output of the job before a turn leaves from: its own Q's place.

    With two of them, that of the turn's own, which is in registers by then.
    """
    return turn % 2 if Q_STAGES == 2 else (turn + Q_STAGES - 1) % Q_STAGES


@gluon.jit
@no_type_check
def _after(place, STAGES: gl.constexpr):
    """The place of the ring that follows one: its stage, and the phase of the barriers there."""
    stage, phase = place
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
@no_type_check
def _let_go(place, number, v_full, kv_empty, STAGES: gl.constexpr):
    """Let go of places behind one, with which this warpgroup does not compute, once they are filled; the last."""
    for _ in range(number):
        place = _after(place, STAGES)
        # Else it would be taken for letting go of what was there before.
        mbarrier.wait(v_full.index(place[0]), place[1])
        mbarrier.arrive(kv_empty.index(place[0]), count=1)
    return place


@gluon.jit
@no_type_check
def _steady_tile(
    q, rings, place, v_place, packed, acc, m_i, l_i, words, factor, no_scores,
    GROUP: gl.constexpr, TURNS: gl.constexpr, BLOCK_N: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """A tile that goes by the maximum of those before it: `(weights, acc, m_i, l_i)`.

    Args:
        place, v_place: of the ring where its keys, and the values of the tile before, are (`_after`).
    """
    k_smem, v_smem, k_full, v_full = rings
    dtype: gl.constexpr = k_smem.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    sums_layout: gl.constexpr = l_i.type.layout
    p16 = operand(packed, dtype, p_layout)
    keys = k_smem.index(place[0]).permute((1, 0))
    mbarrier.wait(k_full.index(place[0]), place[1])
    await_turn(GROUP, TURNS)
    s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_place[0]), v_place[1])
    pv = warpgroup_mma(p16, v_smem.index(v_place[0]), acc, is_async=True)
    pass_turn(GROUP, TURNS)
    s = warpgroup_mma_wait(1, deps=(s,))
    if PARTIAL:
        s = masked(s, words, BLOCK_N)
    p, sums = steady_weights(s, m_i, factor, BLOCK_N, PARTIAL)
    too_large = any_above(sums, LARGEST, GROUP)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    if too_large != 0:
        # The scores are gone; their keys are not.
        s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if PARTIAL:
            # Else each bit's predicate would be kept for this in every tile: 27 instructions, one after the other.
            s = masked(s, read_again(words), BLOCK_N)
        p, m_i, alpha, sums = weights(s, m_i, factor, 0.0, PARTIAL, False, False, False, BLOCK_N)
        l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None]
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m_i, l_i + sums


@gluon.jit
@no_type_check
def consumer(
    shared,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, PERMUTED: gl.constexpr, SPLIT: gl.constexpr, MODIFIED: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_FULL: gl.constexpr,
    AT_RUN_TIME: gl.constexpr, QUEUED: gl.constexpr, IDLE: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """One warpgroup of those that compute: 64 rows of every job."""
    (
        out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr, row_order_ptr, jobs_ptr,
        job_count, records, passed_on, current, begin, partial_end, end, first_bitmap, tile_bitmap_ptr, bitmaps_ptr,
        q_smem, k_smem, v_smem, bias_smem, out_smem, q_full, q_empty, k_full, v_full, kv_empty, q_len, heads,
        rows_per_residue, out_residue_stride, scale, softcap, own_bitmaps, left_out,
    ) = shared  # fmt: skip
    # A bias is added, and what else changes scores done, before they are masked.
    CHANGED: gl.constexpr = MODIFIED and not HAS_BIAS
    CAPPED: gl.constexpr = HAS_SOFTCAP and not HAS_BIAS
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    # Q in registers for full tiles, where there is room: read once a job, not once a tile. Of pairs for all tiles.
    HELD: gl.constexpr = D == 128 and GROUPS == 2 and Q_STAGES > 1
    LAZY: gl.constexpr = D > 64
    # Of a pair, each warpgroup has tiles of its own, so they take no turns, and bitmaps of its own.
    TURNS: gl.constexpr = 1 if PAIRED else GROUPS
    # Full tiles go by the maximum so far, and where tiles are small all of a job's but its first: with 128 columns, or
    # three warpgroups, the code for that costs short jobs up to 9 % and saves nothing (an H200).
    STEADY: gl.constexpr = not MODIFIED
    ALL_STEADY: gl.constexpr = STEADY and BLOCK_N == 64 and D <= 128 and (GROUPS == 1 or PAIRED > 0)
    # Chunks meet all at once, of one warpgroup: with more of them the registers for that are missed elsewhere.
    AT_ONCE: gl.constexpr = SPLIT and GROUPS == 1
    bits: gl.constexpr = bit_layout(BLOCK_N)
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bits))
    sums_layout: gl.constexpr = word_layout
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = bitmaps_ptr + (0 if PAIRED else GROUP * 256) + word_row[:, None] * 4 + word[None, :]
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)

    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    l_i = gl.full([64, 4], 0.0, gl.float32, layout=sums_layout)
    packed = gl.full([64, BLOCK_N // 8, 4, 2], 0, gl.int32, layout=bits)
    if STEADY:
        declare_highest(GROUP)
    # Of the ring, stage and phase: counting would take a division for each tile.
    place = (0, 0)
    factor = scale
    if HAS_BIAS:
        factor = LOG2E
    rings = (k_smem, v_smem, k_full, v_full)
    next_gap = 0
    if PAIRED:
        # Counted from the job's first, without those that others compute.
        partial_end = opaque(partial_end - left_out[GROUP])
        end = opaque(end - left_out[GROUP])
        first_bitmap = own_bitmaps[GROUP]
    # A zero, of which the assembler does not know that all threads have the same. Else it would have a tile's number in
    # a register that they share as soon as it is asked for, and wait for memory in every tile.
    if not PAIRED:
        lane = lane_number()
        tile_bitmap_ptr += read_again(lane) - lane
    next_words = _words(words_ptr, first_bitmap, TURNS)
    bitmap = _bitmap_of(tile_bitmap_ptr, begin + 1, GROUP, GROUPS, PAIRED)
    # What the product with V reads before there is a tile before: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    v_smem.index(0).store(gl.full([BLOCK_N, D], 0.0, dtype, layout=zeros_layout))
    fence_async_shared()
    thread_barrier()
    if GROUP == GROUPS - 1:
        pass_turn(GROUP, TURNS)
    number = gl.program_id(0)
    # Not the same value: Triton takes what then equals `number` in one turn for something that no turn changes.
    before = opaque(number)
    known = settled(current, SPLIT, AT_ONCE)
    ticket = opaque(number)
    turn = 0
    while number < job_count:
        q_rows = q_smem.index((turn % Q_STAGES) * GROUPS + GROUP)
        mbarrier.wait(q_full.index(turn % Q_STAGES), (turn // Q_STAGES) & 1)
        if ALL_STEADY:
            rest = begin + 1
        else:
            rest = gl.maximum(begin + 1, partial_end) if HAS_FULL else end
        last = end
        if IDLE:
            if current[0] * (64 * GROUPS) + GROUP * 64 >= q_len:
                last = begin + 1
                rest = last
        q = q_rows
        if PAIRED:
            q = q_rows.load(q_layout)
        for tile in range(begin, rest):
            # The weights of the tile before are multiplied with V under this tile's softmax: also when that one ended
            # the job before. Before the first tile of all, zeros are.
            words = next_words
            number_of, next_gap = _of_tile(bitmap, PAIRED)
            next_words = _words(words_ptr, number_of, TURNS)
            bitmap = _bitmap_of(tile_bitmap_ptr, tile + 2, GROUP, GROUPS, PAIRED)
            p16 = operand(packed, dtype, p_layout)
            stage, phase = place
            mbarrier.wait(k_full.index(stage), phase)
            await_turn(GROUP, TURNS)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            pv = warpgroup_mma(p16, v_smem.index(stage), acc, is_async=True)
            pass_turn(GROUP, TURNS)
            s = warpgroup_mma_wait(1, deps=(s,))
            if HAS_BIAS:
                bias = bias_smem.index(stage * GROUPS + GROUP).load(score_layout)
                s = biased(s, bias, scale, softcap, HAS_SOFTCAP)
            if Q_STAGES == 1:
                if tile + 1 == end:
                    mbarrier.arrive(q_empty.index(0), count=1)
            if tile < partial_end:
                s = masked(s, words, BLOCK_N)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            p, m_new, alpha, sums = weights(s, m_old, factor, softcap, True, CHANGED, CAPPED, LAZY, BLOCK_N)
            # Never blocks; it ends the basic block, across which the assembler does not move the wait for PV up.
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma_wait(0, deps=(pv,))
            mbarrier.arrive(kv_empty.index(stage), count=1)
            packed = packed_weights(p, dtype, BLOCK_N)
            if QUEUED:
                if tile == begin:
                    if turn > 0:
                        leaving = _leaving_place(turn, Q_STAGES)
                        finish(
                            acc, m_i, l_i, jobs_ptr + before * SIZE, known, out_smem.index(leaving * GROUPS + GROUP),
                            out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr,
                            row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride, GROUP, GROUPS, D,
                            Q_STAGES == 1, PERMUTED, SPLIT, HAS_SINKS, AT_RUN_TIME, AT_ONCE, False, ticket,
                        )  # fmt: skip
                        if Q_STAGES > 1:
                            # The output of the job before that one has left its buffer long ago.
                            tma.store_wait(1)
                            mbarrier.arrive(q_empty.index((turn + 1) % Q_STAGES), count=1, pred=turn > Q_STAGES - 2)
                        acc = cleared(acc)
                        l_i = cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
            # Rescaled here: between the two products it would make the assembler serialise them.
            acc = scaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), LAZY, D // 2)
            place = _after(place, STAGES)

        full_from = rest
        if HELD and HAS_FULL and not PAIRED:
            q = q_rows.load(q_layout)
        if ALL_STEADY:
            full_from = gl.minimum(gl.maximum(rest, partial_end), last)
            for tile in range(rest, full_from):
                words = next_words
                gap = next_gap
                number_of, next_gap = _of_tile(bitmap, PAIRED)
                next_words = _words(words_ptr, number_of, TURNS)
                bitmap = _bitmap_of(tile_bitmap_ptr, tile + 2, GROUP, GROUPS, PAIRED)
                v_place = place
                if PAIRED:
                    if gap > 0:
                        # V of the tile before lies in the first place that is left out.
                        place = _after(_let_go(place, gap - 1, v_full, kv_empty, STAGES), STAGES)
                p, acc, m_i, l_i = _steady_tile(
                    q, rings, place, v_place, packed, acc, m_i, l_i, words, factor, no_scores,
                    GROUP, TURNS, BLOCK_N, True,
                )  # fmt: skip
                mbarrier.arrive(kv_empty.index(v_place[0]), count=1)
                if PAIRED:
                    if gap > 0:
                        mbarrier.arrive(kv_empty.index(place[0]), count=1)
                if Q_STAGES == 1:
                    if tile + 1 == end:
                        mbarrier.arrive(q_empty.index(0), count=1)
                packed = packed_weights(p, dtype, BLOCK_N)
                place = _after(place, STAGES)
        if HAS_FULL:
            # The same without bits and ends of jobs.
            if STEADY:
                for tile in range(full_from, last):
                    p, acc, m_i, l_i = _steady_tile(
                        q, rings, place, place, packed, acc, m_i, l_i, next_words, factor, no_scores,
                        GROUP, TURNS, BLOCK_N, False,
                    )  # fmt: skip
                    mbarrier.arrive(kv_empty.index(place[0]), count=1)
                    if Q_STAGES == 1:
                        if tile + 1 == end:
                            mbarrier.arrive(q_empty.index(0), count=1)
                    packed = packed_weights(p, dtype, BLOCK_N)
                    place = _after(place, STAGES)
            else:
                for tile in range(rest, last):
                    p16 = operand(packed, dtype, p_layout)
                    stage, phase = place
                    mbarrier.wait(k_full.index(stage), phase)
                    await_turn(GROUP, TURNS)
                    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                    mbarrier.wait(v_full.index(stage), phase)
                    pv = warpgroup_mma(p16, v_smem.index(stage), acc, is_async=True)
                    pass_turn(GROUP, TURNS)
                    s = warpgroup_mma_wait(1, deps=(s,))
                    if HAS_BIAS:
                        bias = bias_smem.index(stage * GROUPS + GROUP).load(score_layout)
                        s = biased(s, bias, scale, softcap, HAS_SOFTCAP)
                    p, m_i, alpha, sums = weights(s, m_i, factor, softcap, HAS_BIAS, CHANGED, CAPPED, LAZY, BLOCK_N)
                    mbarrier.wait(v_full.index(stage), phase)
                    acc = warpgroup_mma_wait(0, deps=(pv,))
                    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
                    acc = scaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), LAZY, D // 2)
                    mbarrier.arrive(kv_empty.index(stage), count=1)
                    if Q_STAGES == 1:
                        if tile + 1 == end:
                            mbarrier.arrive(q_empty.index(0), count=1)
                    packed = packed_weights(p, dtype, BLOCK_N)
                    place = _after(place, STAGES)
        if IDLE:
            # Rows past the last one: what is copied for the others is waited for and let go.
            for tile in range(last, end):
                stage, phase = place
                mbarrier.wait(k_full.index(stage), phase)
                await_turn(GROUP, GROUPS)
                pass_turn(GROUP, GROUPS)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(kv_empty.index(stage), count=1)
                if Q_STAGES == 1:
                    if tile + 1 == end:
                        mbarrier.arrive(q_empty.index(0), count=1)
                place = _after(place, STAGES)
        before = number
        known = current
        if AT_ONCE:
            ticket = take_ticket(counters_ptr + current[4].to(gl.int64), current[3])
        number = job_count
        if QUEUED:
            mbarrier.wait(passed_on.index(turn % PASSED), (turn // PASSED) & 1)
            number = field_of(records, turn, NUMBER)
            current = whose(records, turn, SPLIT, AT_ONCE)
            begin = opaque(field_of(records, turn, 3))
            partial_end = opaque(field_of(records, turn, 4))
            end = opaque(field_of(records, turn, 5))
            if PAIRED:
                left = field_of(records, turn, LEFT_OUT + GROUP)
                partial_end = opaque(partial_end - left)
                end = opaque(end - left)
            next_words = _words(words_ptr, field_of(records, turn, BITMAP + GROUP if PAIRED else 10), TURNS)
            bitmap = _bitmap_of(tile_bitmap_ptr, begin + 1, GROUP, GROUPS, PAIRED)
        turn += 1

    stage, phase = place
    mbarrier.wait(v_full.index(stage), phase)
    pv = warpgroup_mma(operand(packed, dtype, p_layout), v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    finish(
        acc, m_i, l_i, jobs_ptr + before * SIZE, known,
        out_smem.index(_leaving_place(turn, Q_STAGES) * GROUPS + GROUP), out_desc, lse_ptr, sinks_ptr, chunk_out_ptr,
        chunk_ml_ptr, counters_ptr, row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride,
        GROUP, GROUPS, D, Q_STAGES == 1, PERMUTED, SPLIT, HAS_SINKS, AT_RUN_TIME, AT_ONCE, D == 64, ticket,
    )  # fmt: skip
    tma.store_wait(0)
