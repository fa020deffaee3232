"""The producer warp: fetches work tiles and copies Q, K, V and biases to shared memory by TMA."""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from stof.kernels.hopper.intrinsics import async_load, lane_number, reinterpret, shfl_idx, tile_layout
from stof.kernels.hopper.tile_fetch import BATCH, BEGIN, COLUMNS, END, HEAD, ROW_BLOCK, fetch_next, send_descriptor
from stof.kernels.hopper.tile_scheduler import WORK_SIZE
from stof.kernels.triton.packed_integers import compacted_position, is_compacted, is_run, run_column

SIZE = gl.constexpr(WORK_SIZE)
# The next work tile is fetched when so many tiles of this one are left to copy. The atomic takes a microsecond, and a
# thread block that fetches early keeps a work tile waiting while others are idle. Tiles of pairs are small: work tiles
# of `LONG_WORK` tiles or more fetch earlier, so that the descriptor is loaded one tile before it is needed.
FETCH_AHEAD = gl.constexpr(2)
FETCH_AHEAD_LONG = gl.constexpr(4)
LONG_WORK = gl.constexpr(5)


# What the producer warp reads; `prologue.py` issues the first copies with it.
ProducerArgs = namedtuple(
    "ProducerArgs",
    "q_desc work_list_ptr work_count counter_ptr descriptors descriptor_full tiles_ptr q_smem q_full q_empty "
    "heads_per_group rows_per_residue q_residue_stride kv_step heads_per_slab k_desc v_desc k_slab_desc v_slab_desc "
    "k_smem v_smem k_full v_full kv_empty k_residue_stride v_residue_stride bias_desc bias_smem bias_batch "
    "bias_heads",
)


# Where K and V of a work tile are: batch entry, key head, and head of the slabs or compacted columns.
KvHeads = namedtuple("KvHeads", "b h slab_h")


@gluon.jit
@no_type_check
def kv_heads(args, work):
    """Return `KvHeads` of a work tile, whose descriptor `work` holds one field a lane."""
    return KvHeads(
        b=shfl_idx(work, BATCH),
        h=shfl_idx(work, HEAD) // args.heads_per_group,
        slab_h=shfl_idx(work, HEAD) // args.heads_per_slab,
    )


@gluon.jit
@no_type_check
def _copy_tile(
    columns, at, desc, slab_desc, buffer, stage, bar, kv_step, residue_stride,
    config: gl.constexpr, MORE: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Start the TMA copies of a tile of K or V.

    Args:
        at: `KvHeads` of the work tile.
        columns: the tile's entries of `TileLists.tile_columns`, one a lane (`packed_integers.py`). Runs occur in slabs
            of 8 or 16, compacted columns in whole tiles.
        slab_desc: tensor map of slabs, or of compacted columns.
        MORE: bytes of other copies that complete on the same barrier.
        TRANSPOSED: tiles are `[D, keys]`; whole tiles only.
    """
    BLOCK_N: gl.constexpr = config.block_n
    D: gl.constexpr = config.width
    SLAB: gl.constexpr = config.slab
    dtype: gl.constexpr = buffer.dtype
    mbarrier.expect(bar, BLOCK_N * D * (dtype.primitive_bitwidth // 8) + MORE)
    if TRANSPOSED:
        column = shfl_idx(columns, 0)
        tile = reinterpret(buffer.index(stage), dtype, [1, 1, D, BLOCK_N], tile_layout(dtype, D, BLOCK_N, 4))
        if SLAB == 0:
            async_load(desc, [at.b, at.h, 0, column], bar, tile)
        elif is_compacted(column):
            async_load(slab_desc, [at.b, at.slab_h, 0, compacted_position(column)], bar, tile)
        else:
            async_load(desc, [at.b, at.h, 0, column], bar, tile)
    elif SLAB == 0:
        column = shfl_idx(columns, 0)
        tile = reinterpret(buffer.index(stage), dtype, [1, 1, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 4))
        async_load(desc, [at.b, at.h, column // kv_step, (column % kv_step) * residue_stride], bar, tile)
    elif SLAB == BLOCK_N:
        column = shfl_idx(columns, 0)
        tile = reinterpret(buffer.index(stage), dtype, [1, 1, BLOCK_N, D], tile_layout(dtype, BLOCK_N, D, 4))
        if is_compacted(column):
            async_load(slab_desc, [at.b, at.slab_h, compacted_position(column), 0], bar, tile)
        else:
            async_load(desc, [at.b, at.h, column, 0], bar, tile)
    else:
        slab_buffer = _row_view(buffer, SLAB, config)
        run_buffer = _row_view(buffer, 64, config)
        slabs: gl.constexpr = BLOCK_N // SLAB
        per_run: gl.constexpr = 64 // SLAB
        for start in gl.static_range(0, slabs, per_run):
            place = stage * (D // 64) * slabs + start
            first = shfl_idx(columns, start)
            if is_run(first):
                for chunk in gl.static_range(D // 64):
                    run = run_buffer.index((place + chunk * slabs) // per_run)
                    run = reinterpret(run, dtype, [1, 1, 64, 64], tile_layout(dtype, 64, 64, 4))
                    async_load(desc, [at.b, at.h, run_column(first), chunk * 64], bar, run)
            else:
                # Unrolled: in a loop each iteration would wait for its own shuffle.
                for i in gl.static_range(per_run):
                    column = shfl_idx(columns, start + i)
                    for chunk in gl.static_range(D // 64):
                        slab = slab_buffer.index(place + chunk * slabs + i)
                        slab = reinterpret(slab, dtype, [1, 1, SLAB, 64], tile_layout(dtype, SLAB, 64, 4))
                        async_load(slab_desc, [at.b, at.h, column, chunk * 64], bar, slab)


@gluon.jit
@no_type_check
def _row_view(buffer, rows: gl.constexpr, config: gl.constexpr):
    """View the stages of K or V as blocks of `rows` rows, 64 elements of each row."""
    blocks: gl.constexpr = config.stages * (config.width // 64) * (config.block_n // rows)
    return reinterpret(buffer, buffer.dtype, [blocks, rows, 64], tile_layout(buffer.dtype, rows, 64, 2))


@gluon.jit
@no_type_check
def copy_k(args, work, at, columns, stage, config: gl.constexpr):
    """Start the TMA copies of a tile of K, and of its bias; `work` holds the work tile's descriptor, a field a lane."""
    _copy_tile(
        columns, at, args.k_desc, args.k_slab_desc, args.k_smem, stage, args.k_full.index(stage), args.kv_step,
        args.k_residue_stride, config, _bias_bytes(config), False,
    )  # fmt: skip
    if config.has_bias:
        _copy_bias(args, work, columns, stage, config)


@gluon.jit
@no_type_check
def copy_v(args, at, columns, stage, config: gl.constexpr):
    """Start the TMA copies of a tile of V."""
    _copy_tile(
        columns, at, args.v_desc, args.v_slab_desc, args.v_smem, stage, args.v_full.index(stage), args.kv_step,
        args.v_residue_stride, config, 0, config.transposed_v,
    )  # fmt: skip


@gluon.jit
@no_type_check
def copy_q(args, work, stage, config: gl.constexpr):
    """Start the TMA copy of a work tile's Q; `work` holds its descriptor, one field a lane."""
    GROUPS: gl.constexpr = config.groups
    D: gl.constexpr = config.width
    dtype: gl.constexpr = args.q_smem.dtype
    bar = args.q_full.index(stage)
    row_block = shfl_idx(work, ROW_BLOCK)
    b = shfl_idx(work, BATCH)
    h = shfl_idx(work, HEAD)
    mbarrier.expect(bar, GROUPS * 64 * D * (dtype.primitive_bitwidth // 8))
    for group in gl.static_range(GROUPS):
        position = (row_block * GROUPS + group) * 64
        residue = position // args.rows_per_residue
        row = position - residue * args.rows_per_residue
        rows = args.q_smem.index(stage * GROUPS + group)
        rows = reinterpret(rows, dtype, [1, 1, 64, D], tile_layout(dtype, 64, D, 4))
        async_load(args.q_desc, [b, h, row, residue * args.q_residue_stride], bar, rows)


@gluon.constexpr_function
def _bias_bytes(config):  # type: ignore[no-untyped-def]
    """Bytes of a tile's bias, which has 16 bits a score."""
    return config.groups * 64 * config.block_n * 2 if config.has_bias else 0


@gluon.jit
@no_type_check
def _copy_bias(args, work, columns, stage, config: gl.constexpr):
    """Start the TMA copy of a tile's bias; `bias_batch` and `bias_heads` are 0 where these dimensions are broadcast."""
    GROUPS: gl.constexpr = config.groups
    BLOCK_N: gl.constexpr = config.block_n
    dtype: gl.constexpr = args.bias_smem.dtype
    row = shfl_idx(work, ROW_BLOCK) * (GROUPS * 64)
    b = shfl_idx(work, BATCH) * args.bias_batch
    h = shfl_idx(work, HEAD) * args.bias_heads
    column = shfl_idx(columns, 0)
    for group in gl.static_range(GROUPS):
        tile = args.bias_smem.index(stage * GROUPS + group)
        tile = reinterpret(tile, dtype, [1, 1, 64, BLOCK_N], tile_layout(dtype, 64, BLOCK_N, 4))
        async_load(args.bias_desc, [b, h, row + group * 64, column], args.k_full.index(stage), tile)


@gluon.jit
@no_type_check
def producer(args, config: gl.constexpr):
    """Producer loop: descriptors and column lists are held one word a lane. The first tile is already being copied."""
    STAGES: gl.constexpr = config.stages
    Q_STAGES: gl.constexpr = config.q_stages
    slabs: gl.constexpr = config.block_n // config.slab if config.slab > 0 else 1
    work_count = args.work_count
    lane = lane_number()
    # The lists end with a padding work tile and padding tiles, for prefetches.
    work_list_ptr = args.work_list_ptr + lane
    tiles_ptr = args.tiles_ptr + gl.minimum(lane, slabs - 1)
    number = gl.program_id(0)
    work = gl.load(work_list_ptr + number * SIZE)
    count = 0
    work_index = 0
    while number < work_count:
        at = kv_heads(args, work)
        begin = shfl_idx(work, BEGIN)
        end = shfl_idx(work, END)
        fetch_at = gl.maximum(begin, end - FETCH_AHEAD)
        read_at = end - 1
        if config.paired:
            fetch_at = gl.where(end - begin >= LONG_WORK, end - FETCH_AHEAD_LONG, fetch_at)
            read_at = gl.where(end - begin >= LONG_WORK, end - 2, read_at)
        if Q_STAGES > 1:
            if work_index > 0:
                q_stage = work_index % Q_STAGES
                mbarrier.wait(args.q_empty.index(q_stage), (work_index // Q_STAGES + 1) & 1)
                copy_q(args, work, q_stage, config)
        fetched = lane
        next_tile = shfl_idx(work, lane + COLUMNS)
        next_number = work_count
        next_work = work
        for tile in range(begin, end):
            columns = next_tile
            next_tile = gl.load(tiles_ptr + (tile + 1) * slabs)
            if config.persistent:
                if tile == fetch_at:
                    fetched = fetch_next(args.counter_ptr, lane)
            if count > 0:
                copy_k(args, work, at, columns, count % STAGES, config)
                if Q_STAGES == 1:
                    # Q's only stage is free after the last QK matmul of the previous work tile.
                    if tile == begin:
                        mbarrier.wait(args.q_empty.index(0), (work_index + 1) & 1)
                        copy_q(args, work, 0, config)
            if config.persistent:
                if tile == read_at:
                    # Overlaps the wait for a free stage of V.
                    taken = shfl_idx(fetched, 0)
                    if taken == work_count - 1:
                        # Every thread block takes one number past the end, so this is the last one; reset the counter.
                        gl.store(args.counter_ptr, 0)
                    next_number = gl.minimum(gl.num_programs(0) + taken, work_count)
                    next_work = gl.load(work_list_ptr + next_number * SIZE)
                if tile + 1 == end:
                    send_descriptor(work_index, next_work, next_number, lane, args.descriptors, args.descriptor_full)
            if count > 0:
                # V is one stage ahead of K: its first stage holds zeros, for the PV matmul before the first tile.
                stage = (count + 1) % STAGES
                mbarrier.wait(args.kv_empty.index(stage), ((count + 1) // STAGES + 1) & 1)
                copy_v(args, at, columns, stage, config)
            count += 1
        work = next_work
        number = next_number
        work_index += 1
