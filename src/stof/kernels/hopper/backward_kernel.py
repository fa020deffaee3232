"""dQ, dK and dV on Hopper in one pass, in Gluon: the scores of a tile are computed once for all three gradients.

A thread block owns 128 keys of one key head. K and V stay in shared memory, dK and dV in the registers of two consumer
warpgroups, 64 keys each. The thread block goes through the tiles of the transposed layout: 64 or 128 queries, some of
which see one of its keys. Scores are transposed, `[keys, queries]`: P and dS are then left operands of dV and dK, which
may be in registers.

    S = K Q^T          P = exp2(scale * S - lse)         dV += P dO
    dP = V dO^T        dS = P * (dP - delta)             dK += dS Q         dQ = dS^T K

dQ needs all 128 keys: both warpgroups write dS to shared memory, and each computes half of dQ's columns. One warp adds
dQ to float32 memory by TMA.

Equal calls give equal bits, because thread blocks add to the dQ of a tile in a fixed order. A counter says how many
have added. The `rank` of a thread block is the number of those that come before it; the first one stores, so nothing
has to be cleared. Work items are taken in the order of the work list, and those that come before an item in the order
of addition also come before it in the work list (`backward_lists.py`): a thread block waits only for others that have
started, so all of them end, whatever the number of multiprocessors.

| barrier  | stages | producer warp                | consumer warpgroups              | accumulator warp            |
|----------|--------|------------------------------|----------------------------------|-----------------------------|
| kv_full  | 1      | copies K and V               | wait before the first tile       | -                           |
| q_full   | 2      | copies Q, dO, lse and delta  | wait before S                    | -                           |
| q_empty  | 2      | wait before it copies        | arrive after dK                  | -                           |
| dq_full  | 2 x 2  | -                            | each writes its half of dQ and   | wait before it adds a half  |
|          |        |                              | arrives at the barrier for it    |                             |
| dq_empty | 2      | -                            | wait before they write dQ        | arrive when both are read   |
| named 8  | 1      | -                            | wait until both have written dS  | -                           |

    consumer, tile i:  dP issue | P | wait dP, dV issue | dS, write | wait dV | named 8 |
                       dQ, dK issue, S of tile i + 1 issue | wait dQ, write | wait all | release stage

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2; roles of warps as FlashAttention-3 (arXiv 2407.08608),
section 3.1.
"""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stof.kernels.hopper.backward_intrinsics import (
    async_add,
    fence_async,
    read_count,
    wait_consumers,
    wait_count,
    wait_stores_and_count,
    wait_stores_read,
)
from stof.kernels.hopper.backward_lists import ITEM, KEYS_OF_BLOCK, TILE
from stof.kernels.hopper.intrinsics import (
    async_load,
    async_store,
    bit_layout,
    hide_from_compiler,
    lane_number,
    reinterpret,
    shfl_idx,
    thread_barrier,
    tile_layout,
)
from stof.kernels.hopper.softmax import kept
from stof.kernels.hopper.tile_fetch import fetch_next
from stof.runtime.pdl import launch_next_and_wait

# Keys of a thread block, and stages of Q and dO.
KEYS = gl.constexpr(KEYS_OF_BLOCK)
STAGES = gl.constexpr(2)
# Triton's cache keys hold constants of a module that are named, not fields of an object.
Q_BLOCK, BITMAP, RANK, SUM = (gl.constexpr(field) for field in TILE)
TILE_SIZE = gl.constexpr(len(TILE))
ROW_BLOCK, PART, PARTS, SLOT = (gl.constexpr(field) for field in ITEM)
ITEM_SIZE = gl.constexpr(len(ITEM))
# What is added to a work item in shared memory, and how many items there is room for, 32 fields each.
HEAD, BEGIN, END = (gl.constexpr(len(ITEM) + field) for field in range(3))
ITEM_STAGES = gl.constexpr(2)

# Arguments that are often 1. Specialised for 1, `heads_per_group` makes Triton 3.6 fail.
_COUNTS = [
    "items", "is_split", "slots", "row_blocks", "patterns", "heads", "all_heads", "heads_per_group", "mask_b", "mask_h",
    "q_blocks", "sums",
]  # fmt: skip

# What all warps read.
BackwardArgs = namedtuple(
    "BackwardArgs",
    "q_desc k_desc v_desc d_out_desc stats_desc dq_desc dk_ptr dv_ptr kv_sums_ptr counters_ptr kv_counters_ptr "
    "items_ptr tiles_ptr row_block_ptr bitmaps_ptr pattern_of_ptr q_smem k_smem v_smem d_out_smem stats_smem ds_smem "
    "dq_smem items_smem item_full item_empty kv_full kv_empty q_full q_empty dq_full dq_empty items is_split slots "
    "row_blocks patterns heads all_heads heads_per_group mask_b mask_h q_blocks sums kv_len stride_dk stride_dv scale "
    "score_scale",
)


@gluon.jit
@no_type_check
def _item_field(args, index, field: gl.constexpr, WARPS: gl.constexpr):
    """Return a field of the work item of a number; the caller has waited for it."""
    fields = reinterpret(args.items_smem, gl.int32, [ITEM_STAGES * 32, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    everyone: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(fields.index((index % ITEM_STAGES) * 32 + field).load(everyone), 0)


@gluon.jit
@no_type_check
def _wait_item(args, index, WARPS: gl.constexpr):
    """Wait for the work item of a number; return its tiles, `(begin, end)`; `begin` is below 0 after the last item."""
    mbarrier.wait(args.item_full.index(index % ITEM_STAGES), (index // ITEM_STAGES) & 1)
    return _item_field(args, index, BEGIN, WARPS), _item_field(args, index, END, WARPS)


@gluon.jit
@no_type_check
def _send_item(args, index, field):
    """Pass a work item to the other warps; each lane has a field."""
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    args.items_smem.index(index % ITEM_STAGES).store(gl.full([32], field, gl.int32, layout=by_lane))
    mbarrier.arrive(args.item_full.index(index % ITEM_STAGES), count=1)


@gluon.jit
@no_type_check
def _producer(args, config: gl.constexpr):
    """Take work items; copy K and V of each, and Q, dO and the statistics of each tile's queries."""
    D: gl.constexpr = config.width
    QUERIES: gl.constexpr = config.queries
    dtype: gl.constexpr = args.q_smem.dtype
    rows: gl.constexpr = tile_layout(dtype, QUERIES, D, 4)
    keys: gl.constexpr = tile_layout(dtype, KEYS, D, 4)
    lane = lane_number()
    count = args.all_heads * args.items
    # Thread blocks at work, over the mean number of tiles of an item: see `BackwardLists`.
    tiles = gl.maximum(gl.load(args.row_block_ptr + args.patterns * args.row_blocks), 1)
    at_once = gl.num_programs(0) * args.patterns * args.row_blocks + tiles - 1
    at_once = (at_once // tiles + args.heads_per_group - 1) // args.heads_per_group * args.heads_per_group
    at_once = gl.minimum(gl.maximum(at_once, args.heads_per_group), args.all_heads)
    # A ticket, because the hardware does not promise to start thread blocks in order.
    ticket = shfl_idx(fetch_next(args.counters_ptr - 1, lane), 0)
    index = 0
    stage = 0
    phase = 1
    kv_phase = 1
    while ticket < count:
        first_head = ticket // (at_once * args.items) * at_once
        heads = gl.minimum(at_once, args.all_heads - first_head)
        place = ticket - first_head * args.items
        row_block = args.items - 1 - place // heads
        part = 0
        parts = 1
        slot = row_block
        if args.is_split > 0:
            item_ptr = args.items_ptr + place // heads * ITEM_SIZE
            row_block = gl.load(item_ptr + ROW_BLOCK)
            part = gl.load(item_ptr + PART)
            parts = gl.load(item_ptr + PARTS)
            slot = gl.load(item_ptr + SLOT)
        bh = first_head + place % heads
        b = bh // args.heads
        head = bh % args.heads
        number = gl.load(args.pattern_of_ptr + b * args.mask_b + head * args.mask_h) * args.row_blocks + row_block
        first = gl.load(args.row_block_ptr + number)
        tiles = gl.load(args.row_block_ptr + number + 1) - first
        begin = first + tiles * part // parts
        end = first + tiles * (part + 1) // parts
        mbarrier.wait(args.item_empty.index(index % ITEM_STAGES), ((index // ITEM_STAGES) & 1) ^ 1)
        field = gl.where(lane == BEGIN, begin, gl.where(lane == END, end, gl.where(lane == HEAD, bh, row_block)))
        field = gl.where(lane == PART, part, gl.where(lane == PARTS, parts, gl.where(lane == SLOT, slot, field)))
        _send_item(args, index, field)
        for tile in range(begin, end):
            q_block = gl.load(args.tiles_ptr + tile * TILE_SIZE + Q_BLOCK)
            mbarrier.wait(args.q_empty.index(stage), phase)
            full = args.q_full.index(stage)
            mbarrier.expect(full, 2 * QUERIES * D * 2 + 2 * QUERIES * 4)
            q_tile = reinterpret(args.q_smem.index(stage), dtype, [1, 1, QUERIES, D], rows)
            d_out_tile = reinterpret(args.d_out_smem.index(stage), dtype, [1, 1, QUERIES, D], rows)
            async_load(args.q_desc, [b, head, q_block * QUERIES, 0], full, q_tile)
            if tile == begin:
                mbarrier.wait(args.kv_empty, kv_phase)
                kv_phase = kv_phase ^ 1
                mbarrier.expect(args.kv_full, 2 * KEYS * D * 2)
                k_tile = reinterpret(args.k_smem.index(0), dtype, [1, 1, KEYS, D], keys)
                v_tile = reinterpret(args.v_smem.index(0), dtype, [1, 1, KEYS, D], keys)
                kv_head = head // args.heads_per_group
                async_load(args.k_desc, [b, kv_head, row_block * KEYS, 0], args.kv_full, k_tile)
                async_load(args.v_desc, [b, kv_head, row_block * KEYS, 0], args.kv_full, v_tile)
            async_load(args.stats_desc, [bh * args.q_blocks + q_block, 0], full, args.stats_smem.index(stage))
            async_load(args.d_out_desc, [b, head, q_block * QUERIES, 0], full, d_out_tile)
            phase = phase ^ stage
            stage = stage ^ 1
        ticket = shfl_idx(fetch_next(args.counters_ptr - 1, lane), 0)
        index += 1
    mbarrier.wait(args.item_empty.index(index % ITEM_STAGES), ((index // ITEM_STAGES) & 1) ^ 1)
    _send_item(args, index, -1)


@gluon.jit
@no_type_check
def _accumulator(args, STAGE: gl.constexpr, config: gl.constexpr):
    """Add dQ of every second tile to memory, when those that come before have."""
    QUERIES: gl.constexpr = config.queries
    # Half of dQ is 64 of 128 columns, or of 128 queries.
    OF_COLUMNS: gl.constexpr = config.width == 128
    index = 0
    stage = 0
    phase = 0
    begin, end = _wait_item(args, 0, 1)
    while begin >= 0:
        first_sum = _item_field(args, index, HEAD, 1) * args.sums
        mbarrier.arrive(args.item_empty.index(index % ITEM_STAGES), count=1)
        first = begin + (stage ^ STAGE)
        rank = gl.load(args.tiles_ptr + first * TILE_SIZE + RANK)
        place = first_sum + gl.load(args.tiles_ptr + first * TILE_SIZE + SUM)
        seen = 0
        for tile in range(first, end, 2):
            # The next tile's fields; past the last tile, those of any tile.
            next_ptr = args.tiles_ptr + (tile + 2) * TILE_SIZE
            next_rank = gl.load(next_ptr + RANK)
            next_place = first_sum + gl.load(next_ptr + SUM)
            counter_ptr = args.counters_ptr + place
            row = place * QUERIES
            if seen < rank:
                wait_count(counter_ptr, rank)
            fence_async()
            for g in gl.static_range(2):
                mbarrier.wait(args.dq_full.index(STAGE * 2 + g), phase)
                at = [row, g * 64] if OF_COLUMNS else [row + g * 64, 0]
                if rank == 0:
                    async_store(args.dq_desc, at, args.dq_smem.index(STAGE * 2 + g))
                else:
                    async_add(args.dq_desc, at, args.dq_smem.index(STAGE * 2 + g))
            wait_stores_read()
            mbarrier.arrive(args.dq_empty.index(STAGE), count=1)
            # Read while the stores are under way.
            seen = read_count(args.counters_ptr + next_place)
            wait_stores_and_count(counter_ptr)
            rank = next_rank
            place = next_place
            phase = phase ^ 1
        stage = stage ^ ((end - begin) & 1)
        index += 1
        begin, end = _wait_item(args, index, 1)


@gluon.jit
@no_type_check
def _stats(args, stage, number: gl.constexpr, layout: gl.constexpr, config: gl.constexpr):
    """Load lse (0) or delta (1) of a tile's queries."""
    QUERIES: gl.constexpr = config.queries
    memory: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats = reinterpret(args.stats_smem, gl.float32, [STAGES * 2, QUERIES], memory)
    return stats.index(stage * 2 + number).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
@no_type_check
def _keys(smem, GROUP: gl.constexpr):
    """Return this warpgroup's 64 rows of K or V.

    Hidden from the compiler, which would keep the addresses of all its operands in registers and spill others.
    """
    return smem.index(hide_from_compiler(0)).slice(GROUP * 64, 64, dim=0)


@gluon.jit
@no_type_check
def _issue_product(left, right, GROUP: gl.constexpr, config: gl.constexpr):
    """Issue this warpgroup's rows of K or V (`left`), times Q or dO transposed."""
    QUERIES: gl.constexpr = config.queries
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    none = gl.zeros([64, QUERIES], gl.float32, layout)
    return warpgroup_mma(_keys(left, GROUP), right.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
@no_type_check
def _score_gradients(args, s, dv, stage, words, bitmap, GROUP: gl.constexpr, config: gl.constexpr):
    """Write dS of a tile to shared memory; return it in 16 bits, and dv with this tile's part."""
    QUERIES: gl.constexpr = config.queries
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    dtype: gl.constexpr = args.q_smem.dtype
    dp = _issue_product(args.v_smem, args.d_out_smem.index(stage), GROUP, config)
    p = gl.exp2(s * args.score_scale - _stats(args, stage, 0, layout, config))
    if bitmap >= 0:
        p = kept(p, words, QUERIES)
    p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv = warpgroup_mma(p16, args.d_out_smem.index(stage), dv, is_async=True)
    ds = p * (dp - _stats(args, stage, 1, layout, config))
    if bitmap >= 0:
        ds = kept(ds, words, QUERIES)  # what is dropped may be NaN, and 0 * NaN is NaN
    ds = ds.to(dtype)
    # Two stages: when both warpgroups are past the barrier that follows, dQ of the previous tile is computed.
    args.ds_smem.index(stage).slice(GROUP * 64, 64, dim=0).store(ds)
    # P leaves its registers before dQ and the next S take theirs.
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return ds, dv


@gluon.jit
@no_type_check
def _issue_gradients(args, ds, dk, stage, GROUP: gl.constexpr, config: gl.constexpr):
    """Issue this warpgroup's half of dQ, and its dK, when both have written dS."""
    D: gl.constexpr = config.width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    fence_async_shared()  # for dS; where it is written, the fence makes ptxas 12.8 and 12.9 fail
    wait_consumers()
    ds_of_both = args.ds_smem.index(stage)
    k = args.k_smem.index(hide_from_compiler(0))
    if D == 128:
        k = k.slice(GROUP * 64, 64, dim=1)
    else:
        ds_of_both = ds_of_both.slice(GROUP * 64, 64, dim=1)
    no_dq = gl.zeros([64, 64], gl.float32, layout)
    dq = warpgroup_mma(ds_of_both.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, operand), args.q_smem.index(stage), dk, is_async=True)
    return dq, dk


@gluon.jit
@no_type_check
def _send_dq(args, dq, stage, phase, GROUP: gl.constexpr):
    """Pass half of a tile's dQ to the accumulator warp."""
    mbarrier.wait(args.dq_empty.index(stage), phase ^ 1)
    args.dq_smem.index(stage * 2 + GROUP).store(dq)
    fence_async_shared()
    mbarrier.arrive(args.dq_full.index(stage * 2 + GROUP), count=1)


@gluon.jit
@no_type_check
def _consumer(args, GROUP: gl.constexpr, config: gl.constexpr):
    """Compute 64 keys' dK and dV, and half of each tile's dQ.

    S of a tile is issued with dQ and dK of the one before: the tensor cores have work while dQ goes to shared memory.
    An iteration ends where no product is in flight: ptxas would serialise those that are.
    """
    QUERIES: gl.constexpr = config.queries
    D: gl.constexpr = config.width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    word_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, bit_layout(QUERIES)))
    word_row = gl.arange(0, 64, layout=gl.SliceLayout(1, word_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, word_layout))
    words_ptr = args.bitmaps_ptr + GROUP * 256 + word_row[:, None] * 4 + word[None, :]
    index = 0
    stage = 0
    phase = 0
    kv_phase = 0
    begin, end = _wait_item(args, 0, 4)
    while begin >= 0:
        dk = gl.zeros([64, D], gl.float32, layout)
        dv = gl.zeros([64, D], gl.float32, layout)
        if begin < end:
            # The bitmap of a tile is loaded a tile ahead, its number two.
            bitmap = gl.load(args.tiles_ptr + begin * TILE_SIZE + BITMAP)
            words = gl.load(words_ptr + gl.maximum(bitmap, 0) * (KEYS * 4))
            next_bitmap = gl.load(args.tiles_ptr + (begin + 1) * TILE_SIZE + BITMAP)
            mbarrier.wait(args.kv_full, kv_phase)
            mbarrier.wait(args.q_full.index(stage), phase)
            s = _issue_product(args.k_smem, args.q_smem.index(stage), GROUP, config)
            s = warpgroup_mma_wait(0, deps=(s,))
            ds, dv = _score_gradients(args, s, dv, stage, words, bitmap, GROUP, config)
            for tile in range(begin + 1, end):
                bitmap = next_bitmap
                words = gl.load(words_ptr + gl.maximum(bitmap, 0) * (KEYS * 4))
                next_bitmap = gl.load(args.tiles_ptr + (tile + 1) * TILE_SIZE + BITMAP)
                dq, dk = _issue_gradients(args, ds, dk, stage, GROUP, config)
                mbarrier.wait(args.q_full.index(stage ^ 1), phase ^ stage)
                s = _issue_product(args.k_smem, args.q_smem.index(stage ^ 1), GROUP, config)
                dq = warpgroup_mma_wait(2, deps=(dq,))
                _send_dq(args, dq, stage, phase, GROUP)
                s, dk = warpgroup_mma_wait(0, deps=(s, dk))
                mbarrier.arrive(args.q_empty.index(stage), count=1)
                phase = phase ^ stage
                stage = stage ^ 1
                ds, dv = _score_gradients(args, s, dv, stage, words, bitmap, GROUP, config)
            dq, dk = _issue_gradients(args, ds, dk, stage, GROUP, config)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            _send_dq(args, dq, stage, phase, GROUP)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(args.q_empty.index(stage), count=1)
            mbarrier.arrive(args.kv_empty, count=1)
            phase = phase ^ stage
            stage = stage ^ 1
            kv_phase = kv_phase ^ 1
        _store(args, index, dk, dv, GROUP, config)
        mbarrier.arrive(args.item_empty.index(index % ITEM_STAGES), count=1)
        index += 1
        begin, end = _wait_item(args, index, 4)


@gluon.jit
@no_type_check
def _store(args, index, dk, dv, GROUP: gl.constexpr, config: gl.constexpr):
    """Write 64 keys' dK and dV. Items that share keys add theirs one after another."""
    D: gl.constexpr = config.width
    layout: gl.constexpr = dk.type.layout
    dtype: gl.constexpr = args.q_smem.dtype
    row_block = _item_field(args, index, ROW_BLOCK, 4)
    bh = _item_field(args, index, HEAD, 4)
    kv_head = bh // args.heads_per_group
    adding = args.heads_per_group * _item_field(args, index, PARTS, 4)
    rank = args.heads_per_group * _item_field(args, index, PART, 4) + bh % args.heads_per_group
    key = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    if adding > 1:
        block = kv_head * args.slots + _item_field(args, index, SLOT, 4)
        counter_ptr = args.kv_counters_ptr + (block * 2 + GROUP)
        sums = args.kv_sums_ptr + block.to(gl.int64) * (2 * KEYS * D) + (key * D)[:, None] + column
        if rank > 0:
            wait_count(counter_ptr, rank)
            dk += gl.load(sums)
            dv += gl.load(sums + KEYS * D)
        if rank + 1 < adding:
            gl.store(sums, dk)
            gl.store(sums + KEYS * D, dv)
            thread_barrier()
            gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")
    if rank + 1 == adding:
        kv_heads = args.heads // args.heads_per_group
        row = row_block * KEYS + key
        exists = (row < args.kv_len)[:, None] & (column < config.head_dim)
        b, h, rows = (kv_head // kv_heads).to(gl.int64), (kv_head % kv_heads).to(gl.int64), row.to(gl.int64)[:, None]
        to_dk, to_dv = args.stride_dk, args.stride_dv
        dk_ptrs = args.dk_ptr + b * to_dk.b + h * to_dk.h + rows * to_dk.s + column
        dv_ptrs = args.dv_ptr + b * to_dv.b + h * to_dv.h + rows * to_dv.s + column
        gl.store(dk_ptrs, (dk * args.scale).to(dtype), exists)
        gl.store(dv_ptrs, dv.to(dtype), exists)


@gluon.jit(do_not_specialize=_COUNTS)
@no_type_check
def backward_kernel(
    q_desc,  # [B, H, Sq, D], a box of `queries` rows
    k_desc,  # [B, Hkv, Skv, D], 128 rows
    v_desc,
    d_out_desc,  # as q_desc
    stats_desc,  # [B * H * blocks of queries, 2 * queries] float32, a row; see `backward_rows_kernel`
    dq_desc,  # [B * H * sums * queries, width] float32, 64 rows and 64 columns
    dk_ptr,  # [B, Hkv, Skv, D]
    dv_ptr,
    kv_sums_ptr,  # [B, Hkv, slots, 2, 128, width] float32: sums of dK and dV of several items
    counters_ptr,  # [1 + B * H * sums + 2 * B * Hkv * slots] int32, zero: items that were taken,
    #                additions to each sum of dQ, additions to sums of dK and dV by each warpgroup
    items_ptr,  # int32 [items, 4], fields as `ItemFields`; without `is_split` not read, one item is one block of keys
    tiles_ptr,  # and the following four: `BackwardLists`
    row_block_ptr,
    bitmaps_ptr,
    pattern_of_ptr,
    items,  # of a head
    is_split,
    slots,  # of a key head
    row_blocks,
    patterns,
    heads,
    all_heads,  # B * H
    heads_per_group,
    mask_b,
    mask_h,
    q_blocks,  # of a head
    sums,  # of dQ, of a head
    kv_len,
    stride_dk,  # `Strides`
    stride_dv,
    scale,
    score_scale,  # times log2(e)
    CONFIG: gl.constexpr,  # `BackwardConfig`
    USE_PDL: gl.constexpr,
):
    """See the module."""
    launch_next_and_wait(USE_PDL)
    D: gl.constexpr = CONFIG.width
    QUERIES: gl.constexpr = CONFIG.queries
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [1, KEYS, D], tile_layout(dtype, KEYS, D, 2))
    v_smem = gl.allocate_shared_memory(dtype, [1, KEYS, D], tile_layout(dtype, KEYS, D, 2))
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, D], tile_layout(dtype, QUERIES, D, 2))
    d_out_smem = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, D], tile_layout(dtype, QUERIES, D, 2))
    ds_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, QUERIES], tile_layout(dtype, KEYS, QUERIES, 2))
    dq_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64, 64], tile_layout(gl.float32, 64, 64, 2))
    stats_smem = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, 2 * QUERIES], gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    )
    items_smem = gl.allocate_shared_memory(gl.int32, [ITEM_STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [ITEM_STAGES, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [ITEM_STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(ITEM_STAGES):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=4)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(dq_full.index(2 * i), count=1)
        mbarrier.init(dq_full.index(2 * i + 1), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    args = BackwardArgs(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, d_out_desc=d_out_desc, stats_desc=stats_desc, dq_desc=dq_desc,
        dk_ptr=dk_ptr, dv_ptr=dv_ptr, kv_sums_ptr=kv_sums_ptr, counters_ptr=counters_ptr + 1,
        kv_counters_ptr=counters_ptr + 1 + sums * all_heads, items_ptr=items_ptr, tiles_ptr=tiles_ptr,
        row_block_ptr=row_block_ptr, bitmaps_ptr=bitmaps_ptr, pattern_of_ptr=pattern_of_ptr, q_smem=q_smem,
        k_smem=k_smem, v_smem=v_smem, d_out_smem=d_out_smem, stats_smem=stats_smem, ds_smem=ds_smem, dq_smem=dq_smem,
        items_smem=items_smem, item_full=item_full, item_empty=item_empty, kv_full=kv_full, kv_empty=kv_empty,
        q_full=q_full, q_empty=q_empty, dq_full=dq_full, dq_empty=dq_empty, items=items, is_split=is_split,
        slots=slots, row_blocks=row_blocks, patterns=patterns, heads=heads, all_heads=all_heads,
        heads_per_group=heads_per_group, mask_b=mask_b, mask_h=mask_h, q_blocks=q_blocks, sums=sums, kv_len=kv_len,
        stride_dk=stride_dk, stride_dv=stride_dv, scale=scale, score_scale=score_scale,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (args, 0, CONFIG)), (_consumer, (args, 1, CONFIG)), (_producer, (args, CONFIG)),
         (_accumulator, (args, 0, CONFIG)), (_accumulator, (args, 1, CONFIG))],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip
