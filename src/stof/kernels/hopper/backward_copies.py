"""The warps of the backward kernel that move data: the producer, and the two that add dQ to memory.

`backward_kernel.py` says who waits for whom.
"""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from stof.kernels.hopper.backward_intrinsics import (
    async_add,
    fence_async,
    read_count,
    wait_count,
    wait_named,
    wait_stores_and_count,
    wait_stores_read,
)
from stof.kernels.hopper.backward_lists import DQ_HALF, KEYS_OF_BLOCK, TILE
from stof.kernels.hopper.backward_tickets import MOST_PARTS, TICKET, TICKET_SIZE
from stof.kernels.hopper.intrinsics import async_load, async_store, lane_number, reinterpret, shfl_idx, tile_layout
from stof.kernels.hopper.tile_fetch import fetch_next

# Keys of a thread block, and stages of Q and dO.
KEYS = gl.constexpr(KEYS_OF_BLOCK)
STAGES = gl.constexpr(2)
# Triton's cache keys hold constants of a module that are named, not fields of an object.
Q_BLOCK, BITMAP, RANK, SUM = (gl.constexpr(field) for field in TILE)
TILE_SIZE = gl.constexpr(len(TILE))
ROW_BLOCK, SLOT, HEAD, HEADS, RANK_OF_ITEM, ADDING, BEGIN, END, PART, PARTS, PART_SLOT = (
    gl.constexpr(field) for field in TICKET
)
# Work items in shared memory: tickets, with room for 32 fields each.
ITEM_STAGES = gl.constexpr(2)
# Named barriers; Triton uses the first few of the sixteen itself. `Q_EMPTY` has one for each stage, `DQ_FULL` one for
# each half of each stage.
DS_FULL, Q_EMPTY, DQ_FULL = gl.constexpr(8), gl.constexpr(9), gl.constexpr(11)
# How many threads meet there: both consumer warpgroups, these with the producer, or one of them with an accumulator.
CONSUMERS, WITH_PRODUCER, WITH_ACCUMULATOR = gl.constexpr(256), gl.constexpr(288), gl.constexpr(160)
DQ_ROWS, DQ_COLUMNS = (gl.constexpr(size) for size in DQ_HALF)

# What all warps read.
BackwardArgs = namedtuple(
    "BackwardArgs",
    "q_desc k_desc v_desc d_out_desc stats_desc dq_desc dk_ptr dv_ptr kv_sums_ptr next_ticket_ptr dq_counters_ptr "
    "head_counters_ptr kv_counters_ptr tickets_ptr tiles_ptr bitmaps_ptr q_smem k_smem v_smem d_out_smem stats_smem "
    "ds_smem dq_smem items_smem item_full item_empty kv_full k_empty v_empty q_full dq_empty heads heads_per_group "
    "q_blocks sums kv_len stride_dk stride_dv scale score_scale softcap",
)


@gluon.jit
@no_type_check
def item_field(args, index, field: gl.constexpr, WARPS: gl.constexpr):
    """Return a field of the thread block's work item `index`; the caller has waited for it."""
    fields = reinterpret(args.items_smem, gl.int32, [ITEM_STAGES * 32, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    everyone: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(fields.index((index % ITEM_STAGES) * 32 + field).load(everyone), 0)


@gluon.jit
@no_type_check
def wait_item(args, index, WARPS: gl.constexpr):
    """Wait for the thread block's work item `index`; return its tiles, `(begin, end)`.

    `begin` is below 0 after the last item.
    """
    mbarrier.wait(args.item_full.index(index % ITEM_STAGES), (index // ITEM_STAGES) & 1)
    return item_field(args, index, BEGIN, WARPS), item_field(args, index, END, WARPS)


@gluon.jit
@no_type_check
def _take_ticket(args, lane):
    """Take the next ticket; return its fields, one a lane."""
    ticket = shfl_idx(fetch_next(args.next_ticket_ptr, lane), 0)
    field_ptr = args.tickets_ptr + ticket.to(gl.int64) * TICKET_SIZE + lane % TICKET_SIZE
    return gl.load(field_ptr, cache_modifier=".cg")  # other multiprocessors wrote it


@gluon.jit
@no_type_check
def _send_item(args, index, ticket):
    """Pass a ticket to the other warps as the thread block's work item `index`."""
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    args.items_smem.index(index % ITEM_STAGES).store(gl.full([32], ticket, gl.int32, layout=by_lane))
    mbarrier.arrive(args.item_full.index(index % ITEM_STAGES), count=1)


@gluon.jit
@no_type_check
def _copy_item(args, row_block, bh, heads, begin, end, stage, kv_phase, config: gl.constexpr):
    """Copy K and V of an item, and Q, dO and the statistics of its tiles; return the next stage and phase of K, V."""
    D: gl.constexpr = config.width
    QUERIES: gl.constexpr = config.queries
    dtype: gl.constexpr = args.q_smem.dtype
    rows: gl.constexpr = tile_layout(dtype, QUERIES, D, 4)
    keys: gl.constexpr = tile_layout(dtype, KEYS, D, 4)
    b = bh // args.heads
    for head in range(bh % args.heads, bh % args.heads + heads):
        for tile in range(begin, end):
            q_block = gl.load(args.tiles_ptr + tile * TILE_SIZE + Q_BLOCK)
            wait_named(Q_EMPTY + stage, WITH_PRODUCER)
            full = args.q_full.index(stage)
            mbarrier.expect(full, 2 * QUERIES * D * 2 + 2 * QUERIES * 4)
            q_tile = reinterpret(args.q_smem.index(stage), dtype, [1, 1, QUERIES, D], rows)
            d_out_tile = reinterpret(args.d_out_smem.index(stage), dtype, [1, 1, QUERIES, D], rows)
            stats_row = (b * args.heads + head) * args.q_blocks + q_block
            async_load(args.q_desc, [b, head, q_block * QUERIES, 0], full, q_tile)
            async_load(args.stats_desc, [stats_row, 0], full, args.stats_smem.index(stage))
            async_load(args.d_out_desc, [b, head, q_block * QUERIES, 0], full, d_out_tile)
            if (tile == begin) & (head == bh % args.heads):
                # After Q and dO, because K and V of the previous item are in use until its last tile.
                kv_head = head // args.heads_per_group
                k_tile = reinterpret(args.k_smem.index(0), dtype, [1, 1, KEYS, D], keys)
                v_tile = reinterpret(args.v_smem.index(0), dtype, [1, 1, KEYS, D], keys)
                mbarrier.wait(args.v_empty, kv_phase)
                # Only now: while copies of the previous item are in flight, `expect` would add to their phase.
                mbarrier.expect(args.kv_full, 2 * KEYS * D * 2)
                async_load(args.v_desc, [b, kv_head, row_block * KEYS, 0], args.kv_full, v_tile)
                mbarrier.wait(args.k_empty, kv_phase)
                async_load(args.k_desc, [b, kv_head, row_block * KEYS, 0], args.kv_full, k_tile)
                kv_phase = kv_phase ^ 1
            stage = stage ^ 1
    return stage, kv_phase


@gluon.jit
@no_type_check
def producer(args, config: gl.constexpr):
    """Take tickets; copy K and V of each, and Q, dO and the statistics of each tile's queries."""
    lane = lane_number()
    # Tickets, because the hardware does not promise to start thread blocks in order.
    ticket = _take_ticket(args, lane)
    begin = shfl_idx(ticket, BEGIN)
    index = 0
    stage = 0
    kv_phase = 1
    while begin >= 0:
        if shfl_idx(ticket, PART) < shfl_idx(ticket, PARTS):
            mbarrier.wait(args.item_empty.index(index % ITEM_STAGES), ((index // ITEM_STAGES) & 1) ^ 1)
            _send_item(args, index, ticket)
            stage, kv_phase = _copy_item(
                args, shfl_idx(ticket, ROW_BLOCK), shfl_idx(ticket, HEAD), shfl_idx(ticket, HEADS), begin,
                shfl_idx(ticket, END), stage, kv_phase, config,
            )  # fmt: skip
            index += 1
        ticket = _take_ticket(args, lane)
        begin = shfl_idx(ticket, BEGIN)
    mbarrier.wait(args.item_empty.index(index % ITEM_STAGES), ((index // ITEM_STAGES) & 1) ^ 1)
    _send_item(args, index, ticket)
    # Consumers arrive at each stage once more than tiles use it: before the first one.
    for last in gl.static_range(STAGES):
        wait_named(Q_EMPTY + last, WITH_PRODUCER)


@gluon.jit
@no_type_check
def _add_dq(args, bh, begin, end, first_stage, STAGE: gl.constexpr):
    """Add dQ of a head's tiles that are in one stage; the first tile is in `first_stage`."""
    first_sum = bh * args.sums
    first = begin + (first_stage ^ STAGE)
    rank = gl.load(args.tiles_ptr + first * TILE_SIZE + RANK)
    place = first_sum + gl.load(args.tiles_ptr + first * TILE_SIZE + SUM)
    seen = 0
    for tile in range(first, end, 2):
        # The next tile's fields; past the last tile, those of any tile.
        next_ptr = args.tiles_ptr + (tile + 2) * TILE_SIZE
        next_rank = gl.load(next_ptr + RANK)
        next_place = first_sum + gl.load(next_ptr + SUM)
        counter_ptr = args.dq_counters_ptr + place
        row = place * (2 * DQ_ROWS)
        if seen < rank:
            wait_count(counter_ptr, rank)
        fence_async()
        for g in gl.static_range(2):
            wait_named(DQ_FULL + STAGE * 2 + g, WITH_ACCUMULATOR)
            at = [row + g * DQ_ROWS, 0]
            if rank == 0:
                async_store(args.dq_desc, at, args.dq_smem.index(STAGE * 2 + g))
            else:
                async_add(args.dq_desc, at, args.dq_smem.index(STAGE * 2 + g))
        wait_stores_read()
        mbarrier.arrive(args.dq_empty.index(STAGE), count=1)
        # Read while the stores are under way.
        seen = read_count(args.dq_counters_ptr + next_place)
        wait_stores_and_count(counter_ptr, 1)
        rank = next_rank
        place = next_place


@gluon.jit
@no_type_check
def accumulator(args, STAGE: gl.constexpr):
    """Add dQ of the tiles of one stage to memory, each when all contributions of lower rank to its sum are complete."""
    index = 0
    first_stage = 0  # of an item's first tile
    begin, end = wait_item(args, 0, 1)
    while begin >= 0:
        first_head = item_field(args, index, HEAD, 1)
        heads = item_field(args, index, HEADS, 1)
        parts = item_field(args, index, PARTS, 1)
        # `convert_dq_kernel` waits for `MOST_PARTS` an item, because the host does not know how many parts it has: the
        # last part counts those that are missing.
        counted = gl.where(item_field(args, index, PART, 1) == parts - 1, MOST_PARTS - parts + 1, 1)
        mbarrier.arrive(args.item_empty.index(index % ITEM_STAGES), count=1)
        for bh in range(first_head, first_head + heads):
            _add_dq(args, bh, begin, end, first_stage, STAGE)
            wait_stores_and_count(args.head_counters_ptr + bh, counted)  # of an item without tiles, too
            first_stage = first_stage ^ ((end - begin) & 1)
        index += 1
        begin, end = wait_item(args, index, 1)
