"""The warp that copies Q, K and V to shared memory by TMA."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from stof.kernels.hopper.device import lane_number, of_lane, opaque, tile_layout
from stof.kernels.hopper.jobs import ASIDE, JOB_FIELDS, JOB_SIZE

FIELDS = gl.constexpr(JOB_FIELDS)
SIZE = gl.constexpr(JOB_SIZE)
ASIDE_AT = gl.constexpr(ASIDE)
# Records of jobs that the producer passes on. It waits for the rows of the job three before to be used up, so it is
# never further ahead; and the field of a record that says which job it is.
PASSED = gl.constexpr(3)
NUMBER = gl.constexpr(JOB_FIELDS - 1)
# A job is claimed so many tiles before the one before it has been copied: the answer takes a microsecond, and whoever
# claims early keeps a job waiting while others have none. Tiles of pairs are small, and a job has many: from `LONG` on
# it is claimed earlier, so that its record, which takes as long again, is asked for a tile before it is needed.
AHEAD = gl.constexpr(2)
EARLIER = gl.constexpr(4)
LONG = gl.constexpr(5)


@gluon.constexpr_function
def record_layout():  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
@no_type_check
def _pass_on(turn, job, number, lane, records, passed_on):
    """Tell the warpgroups the job that follows a turn, a field to a lane."""
    place = turn % PASSED
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    records.index(place).store(gl.full([32], gl.where(lane == NUMBER, number, job), gl.int32, layout=by_lane))
    mbarrier.arrive(passed_on.index(place), count=1)


@gluon.jit
@no_type_check
def field_of(records, turn, number: gl.constexpr):
    """A field of the job that follows a turn, which was waited for."""
    fields = records._reinterpret(gl.int32, [PASSED * 32, 1], record_layout())
    everyone: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(fields.index((turn % PASSED) * 32 + number).load(everyone), 0)


@gluon.jit
@no_type_check
def whose(records, turn, SPLIT: gl.constexpr, AT_ONCE: gl.constexpr):
    """Row block, batch entry, head, and chunks of its row block, of the job that follows a turn.

    Where chunks meet `AT_ONCE`, then also the slot of the first of them, and which this is.
    """
    parts = field_of(records, turn, 6) if SPLIT else 1
    slot = field_of(records, turn, 7) if AT_ONCE else 0
    chunk = field_of(records, turn, 8) if AT_ONCE else 0
    return (
        opaque(field_of(records, turn, 0)),
        field_of(records, turn, 1),
        field_of(records, turn, 2),
        parts,
        slot,
        chunk,
    )


@gluon.jit
@no_type_check
def whose_first(start, SPLIT: gl.constexpr, AT_ONCE: gl.constexpr):
    """The same of a thread block's first job, whose fields `start` holds by lane."""
    parts = of_lane(start, 6) if SPLIT else 1
    slot = of_lane(start, 7) if AT_ONCE else 0
    chunk = of_lane(start, 8) if AT_ONCE else 0
    return of_lane(start, 0), of_lane(start, 1), of_lane(start, 2), parts, slot, chunk


@gluon.jit
@no_type_check
def settled(whose, SPLIT: gl.constexpr, AT_ONCE: gl.constexpr):
    """The same values, which Triton then does not take for some that no turn changes."""
    parts = opaque(whose[3]) if SPLIT else 1
    slot = opaque(whose[4]) if AT_ONCE else 0
    chunk = opaque(whose[5]) if AT_ONCE else 0
    return opaque(whose[0]), opaque(whose[1]), opaque(whose[2]), parts, slot, chunk


@gluon.jit
@no_type_check
def _claimed(queue_ptr, lane):
    """The first of the warp's threads takes the next number of the queue; only it holds it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.b32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }",
        "=r,l,r", [queue_ptr.to(gl.int64, bitcast=True), lane], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def copy_tile(
    record, b, h, slab_h, desc, slab_desc, buffer, slab_buffer, stage, bar, kv_step, residue_stride,
    BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr, MORE: gl.constexpr, ACROSS: gl.constexpr = False,
):  # fmt: skip
    """Start copying a tile of K or V, as `record` says by lane; `MORE` bytes follow that the same barrier waits for.

    It comes all at once, or in runs of 64 columns and slabs; or whole from one of two places, the keys and those of
    them that were put side by side before. `ACROSS`, whole tiles alone, have a key to a column: `[D, keys]`.
    """
    dtype: gl.constexpr = buffer.dtype
    mbarrier.expect(bar, BLOCK_N * D * (dtype.primitive_bitwidth // 8) + MORE)
    if ACROSS:
        column = of_lane(record, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, D, BLOCK_N], tile_layout(dtype, D, BLOCK_N, 4))
        if SLAB == 0:
            tma.async_copy_global_to_shared(desc, [b, h, 0, column], bar, tile)
        elif column >= ASIDE_AT:
            tma.async_copy_global_to_shared(slab_desc, [b, slab_h, 0, column - ASIDE_AT], bar, tile)
        else:
            tma.async_copy_global_to_shared(desc, [b, h, 0, column], bar, tile)
    elif SLAB == 0:
        column = of_lane(record, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 4))
        tma.async_copy_global_to_shared(desc, [b, h, column // kv_step, (column % kv_step) * residue_stride], bar, tile)
    elif SLAB == BLOCK_N:
        column = of_lane(record, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 4))
        if column >= ASIDE_AT:
            tma.async_copy_global_to_shared(slab_desc, [b, slab_h, column - ASIDE_AT, 0], bar, tile)
        else:
            tma.async_copy_global_to_shared(desc, [b, h, column, 0], bar, tile)
    else:
        slabs: gl.constexpr = BLOCK_N // SLAB
        per_run: gl.constexpr = 64 // SLAB
        for start in gl.static_range(0, slabs, per_run):
            place = stage * (D // 64) * slabs + start
            first = of_lane(record, start)
            if first < 0:
                for chunk in gl.static_range(D // 64):
                    run = slab_buffer.index(place + chunk * slabs)
                    run = run._reinterpret(dtype, [1, 1, 64, 64], tile_layout(dtype, 64, 64, 4))
                    tma.async_copy_global_to_shared(desc, [b, h, -1 - first, chunk * 64], bar, run)
            else:
                # No loop: each turn of it would wait for its own shuffle.
                for i in gl.static_range(per_run):
                    column = of_lane(record, start + i)
                    for chunk in gl.static_range(D // 64):
                        slab = slab_buffer.index(place + chunk * slabs + i)
                        slab = slab._reinterpret(dtype, [1, 1, SLAB, 64], tile_layout(dtype, SLAB, 64, 4))
                        tma.async_copy_global_to_shared(slab_desc, [b, h, column, chunk * 64], bar, slab)


@gluon.jit
@no_type_check
def slabs_of(buffer, BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of K or V in shared memory, slab by slab and 64 elements of each row at a time."""
    rows: gl.constexpr = SLAB if SLAB > 0 else 8
    layout: gl.constexpr = tile_layout(buffer.dtype, rows, 64, 2)
    return buffer._reinterpret(buffer.dtype, [STAGES * (D // 64) * (BLOCK_N // rows), rows, 64], layout)


@gluon.jit
@no_type_check
def copy_rows(
    job, q_desc, q_smem, stage, bar, rows_per_residue, residue_stride, GROUPS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Start copying Q of a job, whose fields `job` says by lane."""
    dtype: gl.constexpr = q_smem.dtype
    row_block = of_lane(job, 0)
    b = of_lane(job, 1)
    h = of_lane(job, 2)
    mbarrier.expect(bar, GROUPS * 64 * D * (dtype.primitive_bitwidth // 8))
    for group in gl.static_range(GROUPS):
        position = (row_block * GROUPS + group) * 64
        residue = position // rows_per_residue
        row = position - residue * rows_per_residue
        rows = q_smem.index(stage * GROUPS + group)._reinterpret(dtype, [1, 1, 64, D], tile_layout(dtype, 64, D, 4))
        tma.async_copy_global_to_shared(q_desc, [b, h, row, residue * residue_stride], bar, rows)


@gluon.constexpr_function
def bias_bytes(groups, block_n, has_bias):  # type: ignore[no-untyped-def]
    """Of a tile's bias, which comes in 16 bits."""
    return groups * 64 * block_n * 2 if has_bias else 0


@gluon.jit
@no_type_check
def copy_bias(
    job, record, bias_desc, bias_smem, stage, bar, bias_batch, bias_heads,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's bias; `bias_batch` and `bias_heads` are 0 where all share one."""
    dtype: gl.constexpr = bias_smem.dtype
    row = of_lane(job, 0) * (GROUPS * 64)
    b = of_lane(job, 1) * bias_batch
    h = of_lane(job, 2) * bias_heads
    column = of_lane(record, 0)
    for group in gl.static_range(GROUPS):
        place = bias_smem.index(stage * GROUPS + group)
        place = place._reinterpret(dtype, [1, 1, 64, BLOCK_N], tile_layout(dtype, 64, BLOCK_N, 4))
        tma.async_copy_global_to_shared(bias_desc, [b, h, row + group * 64, column], bar, place)


@gluon.jit
@no_type_check
def producer(
    shared, k_desc, v_desc, k_slab_desc, v_slab_desc, k_smem, v_smem, k_full, v_full, kv_empty,
    k_residue_stride, v_residue_stride, bias_desc, bias_smem, bias_batch, bias_heads,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, QUEUED: gl.constexpr, V_ACROSS: gl.constexpr = False,
    PAIRED: gl.constexpr = False,
):  # fmt: skip
    """The warp that copies. A word of jobs and tiles to a lane; the first tile is on its way."""
    (
        q_desc, jobs_ptr, job_count, queue_ptr, records, passed_on, tiles_ptr, q_smem, q_full, q_empty,
        heads_per_group, rows_per_residue, q_residue_stride, kv_step, heads_per_slab,
    ) = shared  # fmt: skip
    slabs: gl.constexpr = BLOCK_N // SLAB if SLAB > 0 else 1
    k_slabs = slabs_of(k_smem, BLOCK_N, D, SLAB, STAGES)
    v_slabs = slabs_of(v_smem, BLOCK_N, D, SLAB, STAGES)
    lane = lane_number()
    # Lists end with a job and tiles that nobody computes, for reading ahead.
    jobs_ptr += lane
    tiles_ptr += gl.minimum(lane, slabs - 1)
    number = gl.program_id(0)
    job = gl.load(jobs_ptr + number * SIZE)
    count = 0
    turn = 0
    while number < job_count:
        b = of_lane(job, 1)
        kv_head = of_lane(job, 2) // heads_per_group
        slab_head = of_lane(job, 2) // heads_per_slab
        begin = of_lane(job, 3)
        end = of_lane(job, 5)
        claim_at = gl.maximum(begin, end - AHEAD)
        read_at = end - 1
        if PAIRED:
            claim_at = gl.where(end - begin >= LONG, end - EARLIER, claim_at)
            read_at = gl.where(end - begin >= LONG, end - 2, read_at)
        if Q_STAGES > 1:
            if turn > 0:
                q_stage = turn % Q_STAGES
                mbarrier.wait(q_empty.index(q_stage), (turn // Q_STAGES + 1) & 1)
                copy_rows(
                    job, q_desc, q_smem, q_stage, q_full.index(q_stage), rows_per_residue, q_residue_stride, GROUPS, D
                )
        claimed = lane
        next_tile = of_lane(job, lane + FIELDS)
        following = job_count
        next_job = job
        for tile in range(begin, end):
            record = next_tile
            next_tile = gl.load(tiles_ptr + (tile + 1) * slabs)
            if QUEUED:
                if tile == claim_at:
                    claimed = _claimed(queue_ptr, lane)
            if count > 0:
                stage = count % STAGES
                copy_tile(record, b, kv_head, slab_head, k_desc, k_slab_desc, k_smem, k_slabs, stage,
                           k_full.index(stage), kv_step, k_residue_stride, BLOCK_N, D, SLAB,
                           bias_bytes(GROUPS, BLOCK_N, HAS_BIAS))  # fmt: skip
                if HAS_BIAS:
                    copy_bias(job, record, bias_desc, bias_smem, stage, k_full.index(stage), bias_batch, bias_heads,
                              GROUPS, BLOCK_N)  # fmt: skip
                if Q_STAGES == 1:
                    # Its place is free after the last product of the job before; by then K has long been on its way.
                    if tile == begin:
                        mbarrier.wait(q_empty.index(0), (turn + 1) & 1)
                        copy_rows(
                            job, q_desc, q_smem, 0, q_full.index(0), rows_per_residue, q_residue_stride, GROUPS, D
                        )
            if QUEUED:
                if tile == read_at:
                    # While this tile's values wait for room.
                    claim = of_lane(claimed, 0)
                    if claim == job_count - 1:
                        # Each thread block claims one too many, so this is the last claim; the next call starts from 0.
                        gl.store(queue_ptr, 0)
                    following = gl.minimum(gl.num_programs(0) + claim, job_count)
                    next_job = gl.load(jobs_ptr + following * SIZE)
                if tile + 1 == end:
                    _pass_on(turn, next_job, following, lane, records, passed_on)
            if count > 0:
                # V's ring is one ahead: its first place holds zeros, for the tile before the first.
                stage = (count + 1) % STAGES
                mbarrier.wait(kv_empty.index(stage), ((count + 1) // STAGES + 1) & 1)
                copy_tile(record, b, kv_head, slab_head, v_desc, v_slab_desc, v_smem, v_slabs, stage,
                           v_full.index(stage), kv_step, v_residue_stride, BLOCK_N, D, SLAB, 0, V_ACROSS)  # fmt: skip
            count += 1
        job = next_job
        number = following
        turn += 1
