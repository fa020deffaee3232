"""The producer warp: fetches work tiles and copies Q, K, V and biases to shared memory by TMA."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from stof.kernels.hopper.intrinsics import hide_from_compiler, lane_number, shfl_idx, tile_layout
from stof.kernels.hopper.tile_lists import ASIDE
from stof.kernels.hopper.tile_scheduler import WORK_FIELDS, WORK_SIZE

FIELDS = gl.constexpr(WORK_FIELDS)
SIZE = gl.constexpr(WORK_SIZE)
COMPACTED_AT = gl.constexpr(ASIDE)
# Stages of the ring of work-tile descriptors. The producer waits until Q of the work tile Q_STAGES (at most 3) before
# is released, so it is never further ahead. The last field of a descriptor is its position in the work list.
DESCRIPTOR_STAGES = gl.constexpr(3)
INDEX_FIELD = gl.constexpr(WORK_FIELDS - 1)
# The next work tile is fetched when so many tiles of this one are left to copy. The atomic takes a microsecond, and a
# thread block that fetches early keeps a work tile waiting while others are idle. Tiles of pairs are small: work tiles
# of `LONG_WORK` tiles or more fetch earlier, so that the descriptor is loaded one tile before it is needed.
FETCH_AHEAD = gl.constexpr(2)
FETCH_AHEAD_LONG = gl.constexpr(4)
LONG_WORK = gl.constexpr(5)


@gluon.constexpr_function
def descriptor_layout():  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
@no_type_check
def _send_descriptor(work_index, work, number, lane, descriptors, descriptor_full):
    """Write the descriptor of the next work tile to its stage, one field a lane, and signal the consumers."""
    stage = work_index % DESCRIPTOR_STAGES
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    descriptors.index(stage).store(gl.full([32], gl.where(lane == INDEX_FIELD, number, work), gl.int32, layout=by_lane))
    mbarrier.arrive(descriptor_full.index(stage), count=1)


@gluon.jit
@no_type_check
def descriptor_field(descriptors, work_index, number: gl.constexpr):
    """Return a field of the descriptor that follows a work index; the caller has waited for it."""
    fields = descriptors._reinterpret(gl.int32, [DESCRIPTOR_STAGES * 32, 1], descriptor_layout())
    everyone: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(fields.index((work_index % DESCRIPTOR_STAGES) * 32 + number).load(everyone), 0)


@gluon.jit
@no_type_check
def load_coordinates(descriptors, work_index, SPLIT: gl.constexpr, LAST_MERGES: gl.constexpr):
    """Return `(row block, batch entry, head, chunks of the row block, slot, chunk)` of the next work tile.

    The last two are 0 unless LAST_MERGES: the slot of the row block's first chunk, and the number of this chunk.
    """
    parts = descriptor_field(descriptors, work_index, 6) if SPLIT else 1
    slot = descriptor_field(descriptors, work_index, 7) if LAST_MERGES else 0
    chunk = descriptor_field(descriptors, work_index, 8) if LAST_MERGES else 0
    return (
        hide_from_compiler(descriptor_field(descriptors, work_index, 0)),
        descriptor_field(descriptors, work_index, 1),
        descriptor_field(descriptors, work_index, 2),
        parts,
        slot,
        chunk,
    )


@gluon.jit
@no_type_check
def first_coordinates(start, SPLIT: gl.constexpr, LAST_MERGES: gl.constexpr):
    """The same for a thread block's first work tile, whose descriptor `start` holds one field a lane."""
    parts = shfl_idx(start, 6) if SPLIT else 1
    slot = shfl_idx(start, 7) if LAST_MERGES else 0
    chunk = shfl_idx(start, 8) if LAST_MERGES else 0
    return shfl_idx(start, 0), shfl_idx(start, 1), shfl_idx(start, 2), parts, slot, chunk


@gluon.jit
@no_type_check
def carry_coordinates(coordinates, SPLIT: gl.constexpr, LAST_MERGES: gl.constexpr):
    """Identity that hides the coordinates from Triton's loop-invariant analysis; see `hide_from_compiler`."""
    parts = hide_from_compiler(coordinates[3]) if SPLIT else 1
    slot = hide_from_compiler(coordinates[4]) if LAST_MERGES else 0
    chunk = hide_from_compiler(coordinates[5]) if LAST_MERGES else 0
    return (
        hide_from_compiler(coordinates[0]),
        hide_from_compiler(coordinates[1]),
        hide_from_compiler(coordinates[2]),
        parts,
        slot,
        chunk,
    )


@gluon.jit
@no_type_check
def _fetch_next(counter_ptr, lane):
    """Take the next number from the tile scheduler's counter; only the warp's first lane holds it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.b32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), lane], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def copy_tile(
    columns, b, h, slab_h, desc, slab_desc, buffer, slab_buffer, stage, bar, kv_step, residue_stride,
    BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr, MORE: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Start the TMA copies of a tile of K or V.

    Args:
        columns: first column of each slab of the tile, one a lane.
        slab_desc: tensor map of slabs, or of compacted columns.
        SLAB: 0 for contiguous or evenly spaced tiles; BLOCK_N for whole tiles, of compacted columns if the first column
            is COMPACTED_AT or more; else columns of a slab. An entry `-1 - c` is a run of 64 columns from c.
        MORE: bytes of other copies that complete on the same barrier.
        TRANSPOSED: tiles are `[D, keys]`; whole tiles only.
    """
    dtype: gl.constexpr = buffer.dtype
    mbarrier.expect(bar, BLOCK_N * D * (dtype.primitive_bitwidth // 8) + MORE)
    if TRANSPOSED:
        column = shfl_idx(columns, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, D, BLOCK_N], tile_layout(dtype, D, BLOCK_N, 4))
        if SLAB == 0:
            tma.async_copy_global_to_shared(desc, [b, h, 0, column], bar, tile)
        elif column >= COMPACTED_AT:
            tma.async_copy_global_to_shared(slab_desc, [b, slab_h, 0, column - COMPACTED_AT], bar, tile)
        else:
            tma.async_copy_global_to_shared(desc, [b, h, 0, column], bar, tile)
    elif SLAB == 0:
        column = shfl_idx(columns, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 4))
        tma.async_copy_global_to_shared(desc, [b, h, column // kv_step, (column % kv_step) * residue_stride], bar, tile)
    elif SLAB == BLOCK_N:
        column = shfl_idx(columns, 0)
        tile = buffer.index(stage)._reinterpret(dtype, [1, 1, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 4))
        if column >= COMPACTED_AT:
            tma.async_copy_global_to_shared(slab_desc, [b, slab_h, column - COMPACTED_AT, 0], bar, tile)
        else:
            tma.async_copy_global_to_shared(desc, [b, h, column, 0], bar, tile)
    else:
        slabs: gl.constexpr = BLOCK_N // SLAB
        per_run: gl.constexpr = 64 // SLAB
        for start in gl.static_range(0, slabs, per_run):
            place = stage * (D // 64) * slabs + start
            first = shfl_idx(columns, start)
            if first < 0:
                for chunk in gl.static_range(D // 64):
                    run = slab_buffer.index(place + chunk * slabs)
                    run = run._reinterpret(dtype, [1, 1, 64, 64], tile_layout(dtype, 64, 64, 4))
                    tma.async_copy_global_to_shared(desc, [b, h, -1 - first, chunk * 64], bar, run)
            else:
                # Unrolled: in a loop each iteration would wait for its own shuffle.
                for i in gl.static_range(per_run):
                    column = shfl_idx(columns, start + i)
                    for chunk in gl.static_range(D // 64):
                        slab = slab_buffer.index(place + chunk * slabs + i)
                        slab = slab._reinterpret(dtype, [1, 1, SLAB, 64], tile_layout(dtype, SLAB, 64, 4))
                        tma.async_copy_global_to_shared(slab_desc, [b, h, column, chunk * 64], bar, slab)


@gluon.jit
@no_type_check
def slab_view(buffer, BLOCK_N: gl.constexpr, D: gl.constexpr, SLAB: gl.constexpr, STAGES: gl.constexpr):
    """View the stages of K or V as slabs of 64 elements of each row."""
    rows: gl.constexpr = SLAB if SLAB > 0 else 8
    layout: gl.constexpr = tile_layout(buffer.dtype, rows, 64, 2)
    return buffer._reinterpret(buffer.dtype, [STAGES * (D // 64) * (BLOCK_N // rows), rows, 64], layout)


@gluon.jit
@no_type_check
def copy_q(
    work, q_desc, q_smem, stage, bar, rows_per_residue, residue_stride, GROUPS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Start the TMA copy of a work tile's Q; `work` holds its descriptor, one field a lane."""
    dtype: gl.constexpr = q_smem.dtype
    row_block = shfl_idx(work, 0)
    b = shfl_idx(work, 1)
    h = shfl_idx(work, 2)
    mbarrier.expect(bar, GROUPS * 64 * D * (dtype.primitive_bitwidth // 8))
    for group in gl.static_range(GROUPS):
        position = (row_block * GROUPS + group) * 64
        residue = position // rows_per_residue
        row = position - residue * rows_per_residue
        rows = q_smem.index(stage * GROUPS + group)._reinterpret(dtype, [1, 1, 64, D], tile_layout(dtype, 64, D, 4))
        tma.async_copy_global_to_shared(q_desc, [b, h, row, residue * residue_stride], bar, rows)


@gluon.constexpr_function
def bias_bytes(groups, block_n, has_bias):  # type: ignore[no-untyped-def]
    """Bytes of a tile's bias, which has 16 bits a score."""
    return groups * 64 * block_n * 2 if has_bias else 0


@gluon.jit
@no_type_check
def copy_bias(
    work, columns, bias_desc, bias_smem, stage, bar, bias_batch, bias_heads,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Start the TMA copy of a tile's bias; `bias_batch` and `bias_heads` are 0 where these dimensions are broadcast."""
    dtype: gl.constexpr = bias_smem.dtype
    row = shfl_idx(work, 0) * (GROUPS * 64)
    b = shfl_idx(work, 1) * bias_batch
    h = shfl_idx(work, 2) * bias_heads
    column = shfl_idx(columns, 0)
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
    Q_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, PERSISTENT: gl.constexpr, V_TRANSPOSED: gl.constexpr = False,
    PAIRED: gl.constexpr = False,
):  # fmt: skip
    """Producer loop: descriptors and column lists are held one word a lane. The first tile is already being copied."""
    (
        q_desc, work_list_ptr, work_count, counter_ptr, descriptors, descriptor_full, tiles_ptr, q_smem, q_full,
        q_empty, heads_per_group, rows_per_residue, q_residue_stride, kv_step, heads_per_slab,
    ) = shared  # fmt: skip
    slabs: gl.constexpr = BLOCK_N // SLAB if SLAB > 0 else 1
    k_slabs = slab_view(k_smem, BLOCK_N, D, SLAB, STAGES)
    v_slabs = slab_view(v_smem, BLOCK_N, D, SLAB, STAGES)
    lane = lane_number()
    # The lists end with a padding work tile and padding tiles, for prefetches.
    work_list_ptr += lane
    tiles_ptr += gl.minimum(lane, slabs - 1)
    number = gl.program_id(0)
    work = gl.load(work_list_ptr + number * SIZE)
    count = 0
    work_index = 0
    while number < work_count:
        b = shfl_idx(work, 1)
        kv_head = shfl_idx(work, 2) // heads_per_group
        slab_head = shfl_idx(work, 2) // heads_per_slab
        begin = shfl_idx(work, 3)
        end = shfl_idx(work, 5)
        fetch_at = gl.maximum(begin, end - FETCH_AHEAD)
        read_at = end - 1
        if PAIRED:
            fetch_at = gl.where(end - begin >= LONG_WORK, end - FETCH_AHEAD_LONG, fetch_at)
            read_at = gl.where(end - begin >= LONG_WORK, end - 2, read_at)
        if Q_STAGES > 1:
            if work_index > 0:
                q_stage = work_index % Q_STAGES
                mbarrier.wait(q_empty.index(q_stage), (work_index // Q_STAGES + 1) & 1)
                copy_q(
                    work, q_desc, q_smem, q_stage, q_full.index(q_stage), rows_per_residue, q_residue_stride, GROUPS, D
                )
        fetched = lane
        next_tile = shfl_idx(work, lane + FIELDS)
        next_number = work_count
        next_work = work
        for tile in range(begin, end):
            columns = next_tile
            next_tile = gl.load(tiles_ptr + (tile + 1) * slabs)
            if PERSISTENT:
                if tile == fetch_at:
                    fetched = _fetch_next(counter_ptr, lane)
            if count > 0:
                stage = count % STAGES
                copy_tile(columns, b, kv_head, slab_head, k_desc, k_slab_desc, k_smem, k_slabs, stage,
                           k_full.index(stage), kv_step, k_residue_stride, BLOCK_N, D, SLAB,
                           bias_bytes(GROUPS, BLOCK_N, HAS_BIAS))  # fmt: skip
                if HAS_BIAS:
                    copy_bias(work, columns, bias_desc, bias_smem, stage, k_full.index(stage), bias_batch, bias_heads,
                              GROUPS, BLOCK_N)  # fmt: skip
                if Q_STAGES == 1:
                    # Q's only stage is free after the last QK matmul of the previous work tile.
                    if tile == begin:
                        mbarrier.wait(q_empty.index(0), (work_index + 1) & 1)
                        copy_q(work, q_desc, q_smem, 0, q_full.index(0), rows_per_residue, q_residue_stride, GROUPS, D)
            if PERSISTENT:
                if tile == read_at:
                    # Overlaps the wait for a free stage of V.
                    taken = shfl_idx(fetched, 0)
                    if taken == work_count - 1:
                        # Every thread block takes one number past the end, so this is the last one; reset the counter.
                        gl.store(counter_ptr, 0)
                    next_number = gl.minimum(gl.num_programs(0) + taken, work_count)
                    next_work = gl.load(work_list_ptr + next_number * SIZE)
                if tile + 1 == end:
                    _send_descriptor(work_index, next_work, next_number, lane, descriptors, descriptor_full)
            if count > 0:
                # V is one stage ahead of K: its first stage holds zeros, for the PV matmul before the first tile.
                stage = (count + 1) % STAGES
                mbarrier.wait(kv_empty.index(stage), ((count + 1) // STAGES + 1) & 1)
                copy_tile(columns, b, kv_head, slab_head, v_desc, v_slab_desc, v_smem, v_slabs, stage,
                           v_full.index(stage), kv_step, v_residue_stride, BLOCK_N, D, SLAB, 0,
                           V_TRANSPOSED)  # fmt: skip
            count += 1
        work = next_work
        number = next_number
        work_index += 1
