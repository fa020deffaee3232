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
from stof.kernels.hopper.backward_lists import (
    DQ_HALF,
    ITEM,
    ITEM_COST,
    KEYS_OF_BLOCK,
    LAST_ITEMS,
    LONG_OVER_MEAN,
    LONGEST_OVER_MEAN,
    LONGEST_SHARE,
    PART_OVER_MEAN,
    SHORT_BLOCK,
    TILE,
    slots_of,
)
from stof.kernels.hopper.backward_lists import MOST_PARTS as _MOST_PARTS
from stof.kernels.hopper.intrinsics import async_load, async_store, lane_number, reinterpret, shfl_idx, tile_layout
from stof.kernels.hopper.tile_fetch import fetch_next

# Keys of a thread block, and stages of Q and dO.
KEYS = gl.constexpr(KEYS_OF_BLOCK)
STAGES = gl.constexpr(2)
# Triton's cache keys hold constants of a module that are named, not fields of an object.
Q_BLOCK, BITMAP, RANK, SUM = (gl.constexpr(field) for field in TILE)
TILE_SIZE = gl.constexpr(len(TILE))
ROW_BLOCK, SLOT, HEAD, HEADS, RANK_OF_ITEM, ADDING, PART, PARTS = (gl.constexpr(field) for field in ITEM)
ITEM_SIZE = gl.constexpr(len(ITEM))
# What is added to a work item in shared memory, and how many items there is room for, 32 fields each. There, `HEAD` is
# not set, `PART` and `PARTS` say which part of one of the last items it is, and how many there are, and `PART_SLOT` is
# the first slot for sums of these parts.
BATCH_HEAD, BEGIN, END, PART_SLOT = (gl.constexpr(len(ITEM) + field) for field in range(4))
ITEM_STAGES = gl.constexpr(2)
_SHORT_BLOCK, _ITEM_COST = gl.constexpr(SHORT_BLOCK), gl.constexpr(ITEM_COST)
MOST_PARTS, _PART_SLOTS = gl.constexpr(_MOST_PARTS), gl.constexpr(slots_of(_MOST_PARTS))
_LAST_ITEMS, _LONG_OVER_MEAN, _PART_OVER_MEAN = (
    gl.constexpr(int(12 * share)) for share in (LAST_ITEMS, LONG_OVER_MEAN, PART_OVER_MEAN)
)
_OVER_MEAN, _SHARES = gl.constexpr(LONGEST_OVER_MEAN), gl.constexpr(int(1 / LONGEST_SHARE))
# Named barriers; Triton uses the first few of the sixteen itself. `Q_EMPTY` has one for each stage, `DQ_FULL` one for
# each half of each stage.
DS_FULL, Q_EMPTY, DQ_FULL = gl.constexpr(8), gl.constexpr(9), gl.constexpr(11)
# How many threads meet there: both consumer warpgroups, these with the producer, or one of them with an accumulator.
CONSUMERS, WITH_PRODUCER, WITH_ACCUMULATOR = gl.constexpr(256), gl.constexpr(288), gl.constexpr(160)
DQ_ROWS, DQ_COLUMNS = (gl.constexpr(size) for size in DQ_HALF)

# What all warps read.
BackwardArgs = namedtuple(
    "BackwardArgs",
    "q_desc k_desc v_desc d_out_desc stats_desc dq_desc dk_ptr dv_ptr kv_sums_ptr ticket_ptr dq_counters_ptr "
    "head_counters_ptr kv_counters_ptr items_ptr tiles_ptr row_block_ptr bitmaps_ptr pattern_of_ptr q_smem k_smem "
    "v_smem d_out_smem stats_smem ds_smem dq_smem items_smem item_full item_empty kv_full k_empty v_empty q_full "
    "dq_empty items has_items slots first_part_slot row_blocks patterns heads all_heads heads_per_group mask_b mask_h "
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
def _send_item(args, index, field):
    """Pass a work item to the other warps; each lane has a field."""
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    args.items_smem.index(index % ITEM_STAGES).store(gl.full([32], field, gl.int32, layout=by_lane))
    mbarrier.arrive(args.item_full.index(index % ITEM_STAGES), count=1)


@gluon.jit
@no_type_check
def _longest(args):
    """Return the most tiles of a block of keys."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    longest = gl.zeros([128], gl.int32, layout)
    for first in range(0, args.patterns * args.row_blocks, 128):
        number = first + gl.arange(0, 128, layout=layout)
        exists = number < args.patterns * args.row_blocks
        begin = gl.load(args.row_block_ptr + number, exists, other=0)
        longest = gl.maximum(longest, gl.load(args.row_block_ptr + number + 1, exists, other=0) - begin)
    return gl.max(longest, 0)


@gluon.jit
@no_type_check
def _schedule(args):
    """Return the query heads of a ticket head, and the number of ticket heads that successive tickets go around.

    Also how many of the last items may be split, and the mean number of tiles of a block of keys.

    A ticket head is a key head if `items_ptr` has its items, or if each item has all query heads; else a query head.
    """
    programs = gl.num_programs(0)
    group = args.heads_per_group
    total_tiles = gl.maximum(gl.load(args.row_block_ptr + args.patterns * args.row_blocks), 1)
    mean_tiles = total_tiles // (args.patterns * args.row_blocks)
    key_blocks = args.all_heads // group * args.row_blocks
    # As `longest_group`, in integers, and with the mean of all patterns.
    is_short = (mean_tiles <= _SHORT_BLOCK) & (mean_tiles * programs <= _ITEM_COST * key_blocks)
    heads_of_ticket = 1
    if args.has_items > 0:
        heads_of_ticket = group
    elif (group > 1) & (args.mask_h == 0) & is_short:
        over_mean = _OVER_MEAN * total_tiles // (args.patterns * args.row_blocks)
        if _longest(args) <= gl.maximum(over_mean, mean_tiles * key_blocks // (_SHARES * programs)):
            heads_of_ticket = group
    # Where there are enough ticket heads, no more thread blocks work on one of them than a block of keys has tiles in
    # the mean: so they seldom wait for the same sum of dQ. No more heads than that: they share the L2 cache.
    heads_at_once = (programs * args.patterns * args.row_blocks + total_tiles - 1) // total_tiles
    if (args.has_items > 0) & ((args.mask_h > 0) | (not is_short)):
        # Each item has one query head.
        heads_at_once = (heads_at_once + group - 1) // group
    heads_at_once = gl.minimum(heads_at_once, args.all_heads // heads_of_ticket)
    last_items = gl.minimum(programs * _LAST_ITEMS // 12, args.all_heads // heads_of_ticket * args.items)
    # The first block of keys is taken last.
    first_tiles = gl.load(args.row_block_ptr + 1) - gl.load(args.row_block_ptr)
    is_long = (mean_tiles > _SHORT_BLOCK) & (12 * first_tiles > _LONG_OVER_MEAN * mean_tiles)
    last_items = gl.where(is_long, last_items, 0)
    return heads_of_ticket, heads_at_once, last_items, mean_tiles


@gluon.jit
@no_type_check
def _item(args, number, heads_of_ticket, heads_at_once):
    """Return a work item by its place among all.

    That is: row block, slot, first query head (counted over the batch), number of heads, rank, how many items add,
    begin and end of its tiles.
    """
    first_head = number // (heads_at_once * args.items) * heads_at_once
    at_once = gl.minimum(heads_at_once, args.all_heads // heads_of_ticket - first_head)
    place = number - first_head * args.items
    ticket_head = first_head + place % at_once
    adding = args.heads_per_group // heads_of_ticket
    row_block = args.items - 1 - place // at_once
    slot = row_block * ((adding + 1) // 2)
    head = 0
    heads = heads_of_ticket
    rank = ticket_head % adding
    part = 0
    parts = 1
    if args.has_items > 0:
        item_ptr = args.items_ptr + place // at_once * ITEM_SIZE
        row_block = gl.load(item_ptr + ROW_BLOCK)
        slot = gl.load(item_ptr + SLOT)
        head = gl.load(item_ptr + HEAD)
        heads = gl.load(item_ptr + HEADS)
        rank = gl.load(item_ptr + RANK_OF_ITEM)
        adding = gl.load(item_ptr + ADDING)
        part = gl.load(item_ptr + PART)
        parts = gl.load(item_ptr + PARTS)
    bh = ticket_head * heads_of_ticket + head
    pattern = gl.load(args.pattern_of_ptr + bh // args.heads * args.mask_b + bh % args.heads * args.mask_h)
    block_ptr = args.row_block_ptr + pattern * args.row_blocks + row_block
    first = gl.load(block_ptr)
    tiles = gl.load(block_ptr + 1) - first
    return row_block, slot, bh, heads, rank, adding, first + tiles * part // parts, first + tiles * (part + 1) // parts


@gluon.jit
@no_type_check
def _part(args, begin, end, part, length):
    """Return a part of an item's tiles, `(begin, end)`, and how many parts there are.

    Items are cut at the same queries. Were they cut at the same shares, most parts would begin with tiles that add to
    the same sums of dQ as the last tiles of another part of the block of keys before, and wait for it.
    """
    first_query = gl.load(args.tiles_ptr + begin * TILE_SIZE + Q_BLOCK)
    # Search for the first tile that continues at the first query; the end if there is none.
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if gl.load(args.tiles_ptr + middle * TILE_SIZE + Q_BLOCK) < first_query:
            high = middle
        else:
            low = middle + 1
    # The first and the last part have between half and one and a half times the length.
    cut = (low - begin) % length
    cut = begin + gl.where(2 * cut < length, cut + length, cut)
    parts = gl.minimum(1 + gl.maximum(2 * (end - cut) + length, 0) // (2 * length), MOST_PARTS)
    first = gl.where(part == 0, begin, cut + (part - 1) * length)
    return first, gl.where(part == parts - 1, end, cut + part * length), parts


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
    """Take work items; copy K and V of each, and Q, dO and the statistics of each tile's queries."""
    lane = lane_number()
    heads_of_ticket, heads_at_once, last_items, mean_tiles = _schedule(args)
    # Each part of the last items has a ticket.
    first_split = args.all_heads // heads_of_ticket * args.items - last_items
    tickets = first_split + last_items * MOST_PARTS
    # A ticket, because the hardware does not promise to start thread blocks in order.
    ticket = shfl_idx(fetch_next(args.ticket_ptr, lane), 0)
    index = 0
    stage = 0
    kv_phase = 1
    while ticket < tickets:
        past_first = gl.maximum(ticket - first_split, 0)
        number = gl.minimum(ticket, first_split + past_first // MOST_PARTS)
        row_block, slot, bh, heads, rank, adding, begin, end = _item(args, number, heads_of_ticket, heads_at_once)
        part = past_first % MOST_PARTS
        parts = 1
        if (ticket >= first_split) & (12 * (end - begin) > _LONG_OVER_MEAN * mean_tiles):
            begin, end, parts = _part(args, begin, end, part, _PART_OVER_MEAN * mean_tiles // 12)
        if part < parts:
            mbarrier.wait(args.item_empty.index(index % ITEM_STAGES), ((index // ITEM_STAGES) & 1) ^ 1)
            part_slot = args.first_part_slot + past_first // MOST_PARTS * _PART_SLOTS
            field = gl.where(lane == BATCH_HEAD, bh, gl.where(lane == HEADS, heads, row_block))
            field = gl.where(lane == BEGIN, begin, gl.where(lane == END, end, field))
            field = gl.where(lane == SLOT, slot, gl.where(lane == PART_SLOT, part_slot, field))
            field = gl.where(lane == RANK_OF_ITEM, rank, gl.where(lane == ADDING, adding, field))
            field = gl.where(lane == PART, part, gl.where(lane == PARTS, parts, field))
            _send_item(args, index, field)
            stage, kv_phase = _copy_item(args, row_block, bh, heads, begin, end, stage, kv_phase, config)
            index += 1
        ticket = shfl_idx(fetch_next(args.ticket_ptr, lane), 0)
    mbarrier.wait(args.item_empty.index(index % ITEM_STAGES), ((index // ITEM_STAGES) & 1) ^ 1)
    _send_item(args, index, -1)
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
        first_head = item_field(args, index, BATCH_HEAD, 1)
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
