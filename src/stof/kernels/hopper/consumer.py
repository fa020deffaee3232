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

from stof.kernels.hopper.device import (
    any_above,
    await_turn,
    bit_layout,
    cleared,
    declare_highest,
    opaque,
    pass_turn,
    scaled,
    thread_barrier,
)
from stof.kernels.hopper.finish import finish
from stof.kernels.hopper.jobs import JOB_FIELDS
from stof.kernels.hopper.producer import (
    NUMBER,
    PASSED,
    field_of,
    whose,
)
from stof.kernels.hopper.softmax import LARGEST, LOG2E, biased, masked, operand, packed_weights, steady_weights, weights

FIELDS = gl.constexpr(JOB_FIELDS)


@gluon.jit
@no_type_check
def _words(words_ptr, number, GROUPS: gl.constexpr):
    return gl.load(words_ptr + number * (GROUPS * 256))


@gluon.jit
@no_type_check
def _bitmap_number(tile_bitmap_ptr, tile, GROUP: gl.constexpr, PAIRED: gl.constexpr):
    """Of a tile; where row blocks are pairs, of the one that this warpgroup computes in its place."""
    return gl.load(tile_bitmap_ptr + (tile * 2 + GROUP if PAIRED else tile))


@gluon.jit
@no_type_check
def _own_tiles(begin, partial_end, end, firsts, seconds, GROUP: gl.constexpr):
    """Tiles that one of a pair computes, counted from the job's first: where those with bits, and all, end, and jumps.

    Behind the job's first tile, those of the first row block alone and of the second alone lie by turns, as far as
    there are both. Returns `(partial end, end, low, high, jump, gap)`: the warpgroup leaves out one of the job's tiles
    before each of its own from `low` to `high`, and `gap` of them before its own number `jump`.
    """
    fewer = gl.minimum(firsts, seconds)
    if GROUP == 0:
        others = seconds
        low = begin + 2
        high = low + gl.minimum(fewer, firsts - 1)
        jump = begin + 1 + firsts
        gap = gl.where(firsts <= seconds, seconds - gl.maximum(firsts - 1, 0), 0)
    else:
        others = firsts
        low = begin + 1
        high = low + fewer
        jump = low + seconds
        gap = gl.maximum(firsts - seconds, 0)
    return opaque(partial_end - others), opaque(end - others), opaque(low), opaque(high), opaque(jump), opaque(gap)


@gluon.jit
@no_type_check
def _leaving_place(turn, Q_STAGES: gl.constexpr):
    """Where the output of the job before a turn leaves from: its own Q's place.

    With two of them, that of the turn's own, which is in registers by then.
    """
    return turn % 2 if Q_STAGES == 2 else (turn + Q_STAGES - 1) % Q_STAGES


@gluon.jit
@no_type_check
def _let_go(begin, end, v_full, kv_empty, STAGES: gl.constexpr):
    """Let go of places of the ring that this warpgroup does not compute with, once they are filled."""
    for place in range(begin, end):
        # Else it would be taken for letting go of what was there before.
        mbarrier.wait(v_full.index(place % STAGES), (place // STAGES) & 1)
        mbarrier.arrive(kv_empty.index(place % STAGES), count=1)


@gluon.jit
@no_type_check
def _steady_tile(
    q, rings, count, v_count, packed, acc, m_i, l_i, words, factor, no_scores,
    GROUP: gl.constexpr, TURNS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """A tile that goes by the maximum of those before it: `(weights, acc, m_i, l_i)`.

    Args:
        count, v_count: places of the ring where its keys, and the values of the tile before, are.
    """
    k_smem, v_smem, k_full, v_full = rings
    dtype: gl.constexpr = k_smem.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    sums_layout: gl.constexpr = l_i.type.layout
    p16 = operand(packed, dtype, p_layout)
    keys = k_smem.index(count % STAGES).permute((1, 0))
    mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
    await_turn(GROUP, TURNS)
    s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_count % STAGES), (v_count // STAGES) & 1)
    pv = warpgroup_mma(p16, v_smem.index(v_count % STAGES), acc, is_async=True)
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
            s = masked(s, words, BLOCK_N)
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
        rows_per_residue, out_residue_stride, scale, softcap, second_bitmap, firsts, seconds,
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
    HELD: gl.constexpr = PAIRED or (D == 128 and GROUPS == 2 and Q_STAGES > 1)
    LAZY: gl.constexpr = D > 64
    # Of a pair, each warpgroup has tiles of its own, so they take no turns, and bitmaps of its own.
    TURNS: gl.constexpr = 1 if PAIRED else GROUPS
    # Full tiles go by the maximum so far, and where tiles are small all of a job's but its first: with 128 columns, or
    # three warpgroups, the code for that costs short jobs up to 9 % and saves nothing (an H200).
    STEADY: gl.constexpr = not MODIFIED
    ALL_STEADY: gl.constexpr = STEADY and BLOCK_N == 64 and D <= 128 and (GROUPS == 1 or PAIRED > 0)
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
    count = 0
    factor = scale
    if HAS_BIAS:
        factor = LOG2E
    rings = (k_smem, v_smem, k_full, v_full)
    low = 0
    high = 0
    jump = 0
    gap = 0
    if PAIRED:
        partial_end, end, low, high, jump, gap = _own_tiles(begin, partial_end, end, firsts, seconds, GROUP)
        if GROUP == 1:
            first_bitmap = second_bitmap
    next_words = _words(words_ptr, first_bitmap, TURNS)
    bitmap = _bitmap_number(tile_bitmap_ptr, begin + 1, GROUP, PAIRED)
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
    known = (opaque(current[0]), opaque(current[1]), opaque(current[2]), opaque(current[3]) if SPLIT else 1)
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
            next_words = _words(words_ptr, bitmap, TURNS)
            bitmap = _bitmap_number(tile_bitmap_ptr, tile + 2, GROUP, PAIRED)
            p16 = operand(packed, dtype, p_layout)
            stage = count % STAGES
            phase = (count // STAGES) & 1
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
                        place = _leaving_place(turn, Q_STAGES)
                        finish(
                            acc, m_i, l_i, jobs_ptr + before * FIELDS, known, out_smem.index(place * GROUPS + GROUP),
                            out_desc, lse_ptr, sinks_ptr, chunk_out_ptr, chunk_ml_ptr, counters_ptr,
                            row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride, GROUP, GROUPS, D,
                            Q_STAGES == 1, PERMUTED, SPLIT, HAS_SINKS, AT_RUN_TIME,
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
            count += 1

        full_from = rest
        if HELD and HAS_FULL and not PAIRED:
            q = q_rows.load(q_layout)
        if ALL_STEADY:
            full_from = gl.minimum(gl.maximum(rest, partial_end), last)
            for tile in range(rest, full_from):
                words = next_words
                next_words = _words(words_ptr, bitmap, TURNS)
                bitmap = _bitmap_number(tile_bitmap_ptr, tile + 2, GROUP, PAIRED)
                v_count = count
                if PAIRED:
                    if tile == jump:
                        # V of the tile before lies in the first place that is left out.
                        _let_go(count + 1, count + gap, v_full, kv_empty, STAGES)
                        count += gap
                    if (tile >= low) & (tile < high):
                        count += 1
                p, acc, m_i, l_i = _steady_tile(
                    q, rings, count, v_count, packed, acc, m_i, l_i, words, factor, no_scores,
                    GROUP, TURNS, BLOCK_N, STAGES, True,
                )  # fmt: skip
                mbarrier.arrive(kv_empty.index(v_count % STAGES), count=1)
                if PAIRED:
                    mbarrier.arrive(kv_empty.index(count % STAGES), count=1, pred=v_count != count)
                if Q_STAGES == 1:
                    if tile + 1 == end:
                        mbarrier.arrive(q_empty.index(0), count=1)
                packed = packed_weights(p, dtype, BLOCK_N)
                count += 1
        if HAS_FULL:
            # The same without bits and ends of jobs.
            if STEADY:
                for tile in range(full_from, last):
                    p, acc, m_i, l_i = _steady_tile(
                        q, rings, count, count, packed, acc, m_i, l_i, next_words, factor, no_scores,
                        GROUP, TURNS, BLOCK_N, STAGES, False,
                    )  # fmt: skip
                    mbarrier.arrive(kv_empty.index(count % STAGES), count=1)
                    if Q_STAGES == 1:
                        if tile + 1 == end:
                            mbarrier.arrive(q_empty.index(0), count=1)
                    packed = packed_weights(p, dtype, BLOCK_N)
                    count += 1
            else:
                for tile in range(rest, last):
                    p16 = operand(packed, dtype, p_layout)
                    stage = count % STAGES
                    phase = (count // STAGES) & 1
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
                    count += 1
        if IDLE:
            # Rows past the last one: what is copied for the others is waited for and let go.
            for tile in range(last, end):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                await_turn(GROUP, GROUPS)
                pass_turn(GROUP, GROUPS)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(kv_empty.index(stage), count=1)
                if Q_STAGES == 1:
                    if tile + 1 == end:
                        mbarrier.arrive(q_empty.index(0), count=1)
                count += 1
        before = number
        known = current
        number = job_count
        if QUEUED:
            mbarrier.wait(passed_on.index(turn % PASSED), (turn // PASSED) & 1)
            number = field_of(records, turn, NUMBER)
            current = whose(records, turn, SPLIT)
            begin = opaque(field_of(records, turn, 3))
            partial_end = opaque(field_of(records, turn, 4))
            end = opaque(field_of(records, turn, 5))
            if PAIRED:
                partial_end, end, low, high, jump, gap = _own_tiles(
                    begin, partial_end, end, field_of(records, turn, 13), field_of(records, turn, 14), GROUP
                )
            next_words = _words(words_ptr, field_of(records, turn, 11 if PAIRED and GROUP == 1 else 10), TURNS)
            bitmap = _bitmap_number(tile_bitmap_ptr, begin + 1, GROUP, PAIRED)
        turn += 1

    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    pv = warpgroup_mma(operand(packed, dtype, p_layout), v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    finish(
        acc, m_i, l_i, jobs_ptr + before * FIELDS, known,
        out_smem.index(_leaving_place(turn, Q_STAGES) * GROUPS + GROUP), out_desc, lse_ptr, sinks_ptr, chunk_out_ptr,
        chunk_ml_ptr, counters_ptr, row_order_ptr, q_len, heads, rows_per_residue, out_residue_stride, GROUP, GROUPS, D,
        Q_STAGES == 1, PERMUTED, SPLIT, HAS_SINKS, AT_RUN_TIME,
    )  # fmt: skip
    tma.store_wait(0)
