"""A consumer warpgroup of the Hopper kernel: matmuls, masks and softmax of 64 rows of every work tile.

The loop is software-pipelined by one tile: while the softmax of a tile is computed, the tensor cores multiply the
probabilities of the previous tile with V. This holds across work tiles, so the epilogue of a work tile runs inside the
first tile of the next one.
"""

from __future__ import annotations

from collections import namedtuple
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

from stof.kernels.hopper.epilogue import epilogue
from stof.kernels.hopper.intrinsics import (
    any_greater,
    arrive_turn_barrier,
    bit_layout,
    cleared,
    declare_max_register,
    hide_from_compiler,
    lane_number,
    reload_by_lane,
    rescale,
    thread_barrier,
    wait_turn_barrier,
)
from stof.kernels.hopper.softmax import (
    LOG2E,
    MAX_THREAD_SUM,
    biased,
    masked,
    pack_probabilities,
    probabilities,
    probabilities_operand,
    probabilities_over_old_maximum,
)
from stof.kernels.hopper.split_kv_merge import take_ticket
from stof.kernels.hopper.tile_fetch import (
    BEGIN,
    BITMAP,
    END,
    PAIR_BITMAP,
    PAIR_SKIPPED,
    PARTIAL_END,
    carry_work_tile,
    descriptor_field,
    last_merges,
    load_work_tile,
    wait_descriptor,
)
from stof.kernels.hopper.tile_scheduler import WORK_SIZE
from stof.kernels.triton.packed_integers import pair_bitmap_row, pair_skipped

SIZE = gl.constexpr(WORK_SIZE)


# What the consumer warpgroups of both forward kernels read, and the fields of the first work tile.
ConsumerArgs = namedtuple(
    "ConsumerArgs",
    "out_desc lse_ptr sinks_ptr chunk_out_ptr chunk_ml_ptr counters_ptr row_order_ptr work_list_ptr work_count "
    "descriptors descriptor_full work_tile begin partial_end end bitmap tile_bitmap_ptr bitmaps_ptr q_smem k_smem "
    "v_smem bias_smem out_smem q_full q_empty k_full v_full kv_empty q_len heads rows_per_residue "
    "out_residue_stride scale softcap pair scales_ptr",
)


@gluon.jit
@no_type_check
def _words(words_ptr, number, GROUPS: gl.constexpr):
    return gl.load(words_ptr + number * (GROUPS * 256))


@gluon.jit
@no_type_check
def _bitmap_of(tile_bitmap_ptr, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr, PAIRED: gl.constexpr):
    """Load the bitmap entry of a tile; in a pair of row blocks each warpgroup has entries of its own."""
    return gl.load(tile_bitmap_ptr + (tile * GROUPS + GROUP if PAIRED else tile))


@gluon.jit
@no_type_check
def _split_bitmap(bitmap, PAIRED: gl.constexpr):
    """Split a bitmap entry into the bitmap's number and the tiles that this warpgroup skips before it (pairs only)."""
    if PAIRED:
        number = pair_bitmap_row(bitmap)
        gap = pair_skipped(bitmap)
    else:
        number = bitmap
        gap = 0
    return number, gap


@gluon.jit
@no_type_check
def out_stage(work_index, Q_STAGES: gl.constexpr):
    """Return the stage of Q in which the previous work tile's output is staged.

    With three stages its own; with two that of the current work tile, whose Q is in registers by then.
    """
    return work_index % 2 if Q_STAGES == 2 else (work_index + Q_STAGES - 1) % Q_STAGES


@gluon.jit
@no_type_check
def advance(kv_state, STAGES: gl.constexpr):
    """Return the pipeline state, stage and phase, after one step."""
    stage, phase = kv_state
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
@no_type_check
def _skip_tiles(args, kv_state, number, STAGES: gl.constexpr):
    """Skip `number` tiles and return the pipeline state of the next one, whose stage the caller releases.

    `kv_state` is the state of the first skipped tile. Its stage holds V of the previous tile and is not released here.

    A warpgroup waits for every phase of every full barrier, also of tiles it skips. A wait names a phase by its parity
    alone: a wait for phase n + 1 would end at once while the copy of phase n is still under way, and a release would
    count for the tile that was in the stage before.
    """
    mbarrier.wait(args.k_full.index(kv_state[0]), kv_state[1])
    kv_state = advance(kv_state, STAGES)
    for _ in range(number - 1):
        mbarrier.wait(args.k_full.index(kv_state[0]), kv_state[1])
        mbarrier.wait(args.v_full.index(kv_state[0]), kv_state[1])
        mbarrier.arrive(args.kv_empty.index(kv_state[0]), count=1)
        kv_state = advance(kv_state, STAGES)
    return kv_state


@gluon.jit
@no_type_check
def _release_q(args, tile, end, config: gl.constexpr):
    """Release Q's only stage after the last QK matmul of a work tile; further stages are released in the epilogue."""
    if config.q_stages == 1:
        if tile + 1 == end:
            mbarrier.arrive(args.q_empty.index(0), count=1)


@gluon.jit
@no_type_check
def _issue_matmuls(q, p16, acc, args, kv_state, v_state, no_scores, GROUP: gl.constexpr, PINGPONG: gl.constexpr):
    """Issue QK of a tile and PV of the previous one, and wait for QK.

    Args:
        p16: probabilities of the previous tile.
        kv_state, v_state: pipeline states of this tile's K and of the previous tile's V.

    Returns:
        The scores, and the output, on which PV is still in flight.
    """
    mbarrier.wait(args.k_full.index(kv_state[0]), kv_state[1])
    wait_turn_barrier(GROUP, PINGPONG)
    keys = args.k_smem.index(kv_state[0]).permute((1, 0))
    s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
    mbarrier.wait(args.v_full.index(v_state[0]), v_state[1])
    pv = warpgroup_mma(p16, args.v_smem.index(v_state[0]), acc, is_async=True)
    arrive_turn_barrier(GROUP, PINGPONG)
    s = warpgroup_mma_wait(1, deps=(s,))
    return s, pv


@gluon.jit
@no_type_check
def _lazy_tile(
    q, args, kv_state, v_state, packed, acc, m_i, l_i, words, factor, no_scores,
    GROUP: gl.constexpr, PINGPONG: gl.constexpr, BLOCK_N: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """One tile with lazy rescaling: scores are taken against the maxima of earlier tiles.

    Where a probability would be too large for 16 bits, the scores are computed again and the maxima follow them.

    Args:
        kv_state, v_state: see `_issue_matmuls`.

    Returns:
        `(probabilities, acc, m_i, l_i)`.
    """
    sums_layout: gl.constexpr = l_i.type.layout
    p16 = probabilities_operand(packed, args.k_smem.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    keys = args.k_smem.index(kv_state[0]).permute((1, 0))
    s, pv = _issue_matmuls(q, p16, acc, args, kv_state, v_state, no_scores, GROUP, PINGPONG)
    if PARTIAL:
        s = masked(s, words, BLOCK_N)
    p, sums = probabilities_over_old_maximum(s, m_i, factor, BLOCK_N, PARTIAL)
    too_large = any_greater(sums, MAX_THREAD_SUM, GROUP)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    if too_large != 0:
        # The scores are overwritten; K is still in shared memory.
        s = warpgroup_mma(q, keys, no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if PARTIAL:
            # Without `reload_by_lane`, ptxas keeps each bit's predicate for this rare branch in every tile: 27 more
            # dependent instructions.
            s = masked(s, reload_by_lane(words), BLOCK_N)
        p, m_i, alpha, sums = probabilities(s, m_i, factor, 0.0, PARTIAL, False, False, False, BLOCK_N)
        l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None]
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m_i, l_i + sums


@gluon.jit
@no_type_check
def consumer(args, GROUP: gl.constexpr, config: gl.constexpr):
    """Consumer loop of one warpgroup: 64 rows of every work tile."""
    GROUPS: gl.constexpr = config.groups
    BLOCK_N: gl.constexpr = config.block_n
    D: gl.constexpr = config.width
    STAGES: gl.constexpr = config.stages
    Q_STAGES: gl.constexpr = config.q_stages
    PAIRED: gl.constexpr = config.paired
    SKIP_EMPTY: gl.constexpr = config.skip_empty and GROUP > 0
    # With a bias, scale, softcap and bias are applied before the mask.
    SCALED: gl.constexpr = config.has_score_mod and not config.has_bias
    CAPPED: gl.constexpr = config.has_softcap and not config.has_bias
    dtype: gl.constexpr = args.q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    # Where registers allow, Q is loaded into them once a work tile: for its full tiles, or, with paired row blocks, for
    # all tiles.
    Q_IN_REGISTERS: gl.constexpr = D == 128 and GROUPS == 2 and Q_STAGES > 1
    LAZY: gl.constexpr = D > 64
    # Warpgroups of a pair have tiles and bitmaps of their own: no ping-pong barriers.
    PINGPONG: gl.constexpr = 1 if PAIRED else GROUPS
    # Full tiles use lazy rescaling. So do a work tile's partial tiles after its first `exact_tiles`, where there are no
    # full tiles or thread blocks are small. Elsewhere a loop of its own costs short work tiles up to 9 % (H200).
    LAZY_MAXIMUM: gl.constexpr = not config.has_score_mod
    SMALL: gl.constexpr = BLOCK_N == 64 and (GROUPS == 1 or PAIRED > 0)
    ALL_LAZY: gl.constexpr = LAZY_MAXIMUM and D <= 128 and (SMALL or not config.has_full)
    bits: gl.constexpr = bit_layout(BLOCK_N)
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bits))
    sums_layout: gl.constexpr = word_layout
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = args.bitmaps_ptr + (0 if PAIRED else GROUP * 256) + word_row[:, None] * 4 + word[None, :]
    no_scores = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=score_layout)

    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc = gl.full([64, D], 0.0, gl.float32, layout=acc_layout)
    m_i = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
    l_i = gl.full([64, 4], 0.0, gl.float32, layout=sums_layout)
    packed = gl.full([64, BLOCK_N // 8, 4, 2], 0, gl.int32, layout=bits)
    if LAZY_MAXIMUM:
        declare_max_register(GROUP)
    # Pipeline state of K and V, stage and phase: a tile count would take a division a tile.
    kv_state = (0, 0)
    factor = args.scale
    if config.has_bias:
        factor = LOG2E
    work_tile = args.work_tile
    begin = args.begin
    partial_end = args.partial_end
    end = args.end
    first_bitmap = args.bitmap
    next_gap = 0
    if PAIRED:
        # Tile numbers count only the tiles that this warpgroup computes.
        partial_end = hide_from_compiler(partial_end - args.pair.skipped[GROUP])
        end = hide_from_compiler(end - args.pair.skipped[GROUP])
        first_bitmap = args.pair.bitmaps[GROUP]
    # A zero that ptxas does not know to be uniform. Otherwise it moves a loaded bitmap number to a uniform register at
    # once, and so waits for memory in every tile.
    tile_bitmap_ptr = args.tile_bitmap_ptr
    if not PAIRED:
        lane = lane_number()
        tile_bitmap_ptr += reload_by_lane(lane) - lane
    next_words = _words(words_ptr, first_bitmap, PINGPONG)
    bitmap = _bitmap_of(tile_bitmap_ptr, begin + 1, GROUP, GROUPS, PAIRED)
    # The first PV matmul has no previous tile. It reads zeros: 0 * NaN is NaN.
    zeros_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    args.v_smem.index(0).store(gl.full([BLOCK_N, D], 0.0, dtype, layout=zeros_layout))
    fence_async_shared()
    thread_barrier()
    if GROUP == GROUPS - 1:
        arrive_turn_barrier(GROUP, PINGPONG)
    number = gl.program_id(0)
    # Triton would take a copy of `number` for loop-invariant.
    previous_number = hide_from_compiler(number)
    previous_tile = carry_work_tile(work_tile, config)
    ticket = hide_from_compiler(number)
    work_index = 0
    while number < args.work_count:
        q_rows = args.q_smem.index((work_index % Q_STAGES) * GROUPS + GROUP)
        mbarrier.wait(args.q_full.index(work_index % Q_STAGES), (work_index // Q_STAGES) & 1)
        if ALL_LAZY:
            rest = begin + 1
            if config.exact_tiles > 1:
                rest = gl.maximum(gl.minimum(begin + config.exact_tiles, partial_end), rest)
        else:
            rest = gl.maximum(begin + 1, partial_end) if config.has_full else end
        last = end
        if SKIP_EMPTY:
            if work_tile.row_block * (64 * GROUPS) + GROUP * 64 >= args.q_len:
                last = begin + 1
                rest = last
        q = q_rows
        if PAIRED:
            q = q_rows.load(q_layout)
        for tile in range(begin, rest):
            # The PV matmul of the previous tile runs under this tile's softmax, also where that tile ended the previous
            # work tile. Before the very first tile, the probabilities and V are zeros.
            words = next_words
            number_of, next_gap = _split_bitmap(bitmap, PAIRED)
            next_words = _words(words_ptr, number_of, PINGPONG)
            bitmap = _bitmap_of(tile_bitmap_ptr, tile + 2, GROUP, GROUPS, PAIRED)
            stage, phase = kv_state
            p16 = probabilities_operand(packed, dtype, p_layout)
            s, pv = _issue_matmuls(q, p16, acc, args, kv_state, kv_state, no_scores, GROUP, PINGPONG)
            if config.has_bias:
                bias = args.bias_smem.index(stage * GROUPS + GROUP).load(score_layout)
                s = biased(s, bias, args.scale, args.softcap, config.has_softcap)
            _release_q(args, tile, end, config)
            if tile < partial_end:
                s = masked(s, words, BLOCK_N)
            m_old = m_i
            if tile == begin:
                m_old = gl.full([64], float("-inf"), gl.float32, layout=rows_layout)
            p, m_new, alpha, sums = probabilities(s, m_old, factor, args.softcap, True, SCALED, CAPPED, LAZY, BLOCK_N)
            # Never blocks; it ends the basic block, across which ptxas does not move the wait for PV up.
            mbarrier.wait(args.v_full.index(stage), phase)
            acc = warpgroup_mma_wait(0, deps=(pv,))
            mbarrier.arrive(args.kv_empty.index(stage), count=1)
            packed = pack_probabilities(p, dtype, BLOCK_N)
            if config.persistent:
                if tile == begin:
                    if work_index > 0:
                        staging = out_stage(work_index, Q_STAGES)
                        epilogue(
                            acc, m_i, l_i, args.work_list_ptr + previous_number * SIZE, previous_tile, ticket,
                            args.out_smem.index(staging * GROUPS + GROUP), args, GROUP, Q_STAGES == 1, False,
                            config,
                        )  # fmt: skip
                        if Q_STAGES > 1:
                            # Only the store just issued may be pending: release the stage of the output before it.
                            tma.store_wait(1)
                            mbarrier.arrive(
                                args.q_empty.index((work_index + 1) % Q_STAGES), count=1, pred=work_index > Q_STAGES - 2
                            )
                        acc = cleared(acc)
                        l_i = cleared(l_i)
            m_i = m_new
            l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
            # Rescaling between the two matmuls would make ptxas serialise them.
            acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), LAZY, D // 2)
            kv_state = advance(kv_state, STAGES)

        full_from = rest
        if Q_IN_REGISTERS and config.has_full and not PAIRED:
            q = q_rows.load(q_layout)
        if ALL_LAZY:
            full_from = gl.minimum(gl.maximum(rest, partial_end), last)
            for tile in range(rest, full_from):
                words = next_words
                gap = next_gap
                number_of, next_gap = _split_bitmap(bitmap, PAIRED)
                next_words = _words(words_ptr, number_of, PINGPONG)
                bitmap = _bitmap_of(tile_bitmap_ptr, tile + 2, GROUP, GROUPS, PAIRED)
                v_state = kv_state
                if PAIRED:
                    if gap > 0:
                        kv_state = _skip_tiles(args, kv_state, gap, STAGES)
                p, acc, m_i, l_i = _lazy_tile(
                    q, args, kv_state, v_state, packed, acc, m_i, l_i, words, factor, no_scores,
                    GROUP, PINGPONG, BLOCK_N, True,
                )  # fmt: skip
                mbarrier.arrive(args.kv_empty.index(v_state[0]), count=1)
                if PAIRED:
                    if gap > 0:
                        # V of the last skipped tile; see `_skip_tiles`.
                        mbarrier.wait(args.v_full.index(kv_state[0]), kv_state[1])
                        mbarrier.arrive(args.kv_empty.index(kv_state[0]), count=1)
                _release_q(args, tile, end, config)
                packed = pack_probabilities(p, dtype, BLOCK_N)
                kv_state = advance(kv_state, STAGES)
        if config.has_full:
            # Full tiles: no bitmaps, and no epilogue of the previous work tile.
            if LAZY_MAXIMUM:
                for tile in range(full_from, last):
                    p, acc, m_i, l_i = _lazy_tile(
                        q, args, kv_state, kv_state, packed, acc, m_i, l_i, next_words, factor, no_scores,
                        GROUP, PINGPONG, BLOCK_N, False,
                    )  # fmt: skip
                    mbarrier.arrive(args.kv_empty.index(kv_state[0]), count=1)
                    _release_q(args, tile, end, config)
                    packed = pack_probabilities(p, dtype, BLOCK_N)
                    kv_state = advance(kv_state, STAGES)
            else:
                for tile in range(rest, last):
                    stage, phase = kv_state
                    p16 = probabilities_operand(packed, dtype, p_layout)
                    s, pv = _issue_matmuls(q, p16, acc, args, kv_state, kv_state, no_scores, GROUP, PINGPONG)
                    if config.has_bias:
                        bias = args.bias_smem.index(stage * GROUPS + GROUP).load(score_layout)
                        s = biased(s, bias, args.scale, args.softcap, config.has_softcap)
                    p, m_i, alpha, sums = probabilities(
                        s, m_i, factor, args.softcap, config.has_bias, SCALED, CAPPED, LAZY, BLOCK_N
                    )
                    mbarrier.wait(args.v_full.index(stage), phase)
                    acc = warpgroup_mma_wait(0, deps=(pv,))
                    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums_layout))[:, None] + sums
                    acc = rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc_layout)), LAZY, D // 2)
                    mbarrier.arrive(args.kv_empty.index(stage), count=1)
                    _release_q(args, tile, end, config)
                    packed = pack_probabilities(p, dtype, BLOCK_N)
                    kv_state = advance(kv_state, STAGES)
        if SKIP_EMPTY:
            # This warpgroup has no rows: wait for each stage that the others need and release it.
            for tile in range(last, end):
                stage, phase = kv_state
                mbarrier.wait(args.k_full.index(stage), phase)
                wait_turn_barrier(GROUP, GROUPS)
                arrive_turn_barrier(GROUP, GROUPS)
                mbarrier.wait(args.v_full.index(stage), phase)
                mbarrier.arrive(args.kv_empty.index(stage), count=1)
                _release_q(args, tile, end, config)
                kv_state = advance(kv_state, STAGES)
        previous_number = number
        previous_tile = work_tile
        if last_merges(config):
            ticket = take_ticket(args.counters_ptr + work_tile.slot.to(gl.int64), work_tile.parts)
        number = args.work_count
        if config.persistent:
            descriptors = args.descriptors
            number = wait_descriptor(descriptors, args.descriptor_full, work_index)
            work_tile = load_work_tile(descriptors, work_index, config)
            begin = hide_from_compiler(descriptor_field(descriptors, work_index, BEGIN))
            partial_end = hide_from_compiler(descriptor_field(descriptors, work_index, PARTIAL_END))
            end = hide_from_compiler(descriptor_field(descriptors, work_index, END))
            if PAIRED:
                skipped_tiles = descriptor_field(descriptors, work_index, PAIR_SKIPPED + GROUP)
                partial_end = hide_from_compiler(partial_end - skipped_tiles)
                end = hide_from_compiler(end - skipped_tiles)
            words_number = descriptor_field(descriptors, work_index, PAIR_BITMAP + GROUP if PAIRED else BITMAP)
            next_words = _words(words_ptr, words_number, PINGPONG)
            bitmap = _bitmap_of(tile_bitmap_ptr, begin + 1, GROUP, GROUPS, PAIRED)
        work_index += 1

    stage, phase = kv_state
    mbarrier.wait(args.v_full.index(stage), phase)
    pv = warpgroup_mma(probabilities_operand(packed, dtype, p_layout), args.v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    epilogue(
        acc, m_i, l_i, args.work_list_ptr + previous_number * SIZE, previous_tile, ticket,
        args.out_smem.index(out_stage(work_index, Q_STAGES) * GROUPS + GROUP), args, GROUP, Q_STAGES == 1, D == 64,
        config,
    )  # fmt: skip
    tma.store_wait(0)
