"""dQ, dK and dV on Hopper in one pass, in Gluon: the scores of a tile are computed once for all three gradients.

A thread block keeps K and V of 128 keys in shared memory, dK and dV in the registers of two consumer warpgroups, 64
keys each. The 128 keys are a row block of the transposed layout, whose tiles have 64 queries, or 128 at D 64. Scores
are transposed, `[keys, queries]`: P and dS are then left operands of dV and dK, which may be in registers.

    S = K Q^T          P = exp2(scale * log2(e) * S - lse)      dV += P dO
    dP = V dO^T        dS = P * (dP - delta)                    dK += dS Q         dQ = dS^T K

lse is in units of log 2. dK is multiplied by `scale` when it is stored, dQ by `convert_dq_kernel`, which adds its sums
and rounds them. With a softcap, `t = tanh(scale * S / softcap)`, P is `exp2(log2(e) * softcap * t - lse)`, and dS has
the factor `1 - t^2`.

dQ needs all 128 keys: both warpgroups write dS to shared memory, and each computes half of dQ: half of the columns, or
at D 64 of the queries. Two warps add dQ to float32 sums in memory by TMA, in turn: a thread block's tiles alternate
between two stages, through all of its items, and each warp has a stage.

Thread blocks are persistent. A work item is a block of keys and a query head, or a chunk of its tiles, or all query
heads of the key head one after another. Items share keys if query heads share a key head, or if the block is cut into
chunks. Then pairs of them add their dK and dV, then pairs of pairs, in float32 memory; the last one stores the result.
The last items may be split into parts, so that thread blocks end together: each part has a ticket of its own, and their
dK and dV are added first.

Equal calls give equal bits, because pairs of items are the same in all calls, and tiles add to sums of dQ in a fixed
order: each sum has a counter of the contributions that are complete, and the rank of a contribution is the number of
those before it. Rank 0 overwrites the sum, so sums need not be cleared; counters are zero at first.
Work items are taken by tickets (`backward_tickets.py`). An item waits only for contributions of items with smaller
tickets (`backward_lists.py`), which have started: so all of them end, whatever the number of multiprocessors.

| barrier    | stages | producer warp               | consumer warpgroups               | accumulator warps         |
|------------|--------|-----------------------------|-----------------------------------|---------------------------|
| item_full  | 2      | writes the next item        | wait before dK and dV of the item | wait before an item       |
|            |        |                             | before are stored                 |                           |
| item_empty | 2      | waits before it writes      | arrive after dK and dV are stored | arrive when they read it  |
| kv_full    | 1      | copies K and V              | wait before an item's first tile  | -                         |
| k_empty    | 1      | waits before it copies K    | arrive after an item's last dQ    | -                         |
| v_empty    | 1      | waits before it copies V    | arrive after an item's last dP    | -                         |
| q_full     | 2      | copies Q, dO, lse and delta | wait before S                     | -                         |
| dq_empty   | 2      | -                           | wait before they write dQ         | arrive when both are read |
| Q_EMPTY    | 2      | waits before it copies      | arrive after dK                   | -                         |
| DQ_FULL    | 2 x 2  | -                           | each arrives when it has written  | wait before they add a    |
|            |        |                             | its half of dQ                    | half                      |
| DS_FULL    | 1      | -                           | wait until both have written dS   | -                         |

Barriers in capitals are named barriers of the hardware (`bar.sync`, `bar.arrive`): Triton's `mbarrier.arrive` makes a
warpgroup wait for all of its warps first.

    consumer, from S of a tile to S of the next:  dP issue | P | wait dP, dV issue | dS written, dK issue | wait dV |
                                                  DS_FULL | dQ issue, next S issue | wait dK, dQ | Q_EMPTY |
                                                  dQ written | wait next S

With a softcap, P comes before dP is issued.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2; roles of warps as FlashAttention-3 (arXiv 2407.08608),
section 3.1.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stof.kernels.hopper.backward_copies import (
    ADDING,
    BITMAP,
    CONSUMERS,
    DQ_COLUMNS,
    DQ_FULL,
    DQ_ROWS,
    DS_FULL,
    HEAD,
    HEADS,
    ITEM_STAGES,
    KEYS,
    PART,
    PART_SLOT,
    PARTS,
    Q_EMPTY,
    RANK_OF_ITEM,
    ROW_BLOCK,
    SLOT,
    STAGES,
    TILE_SIZE,
    WITH_ACCUMULATOR,
    WITH_PRODUCER,
    BackwardArgs,
    accumulator,
    item_field,
    producer,
    wait_item,
)
from stof.kernels.hopper.backward_intrinsics import arrive_named, wait_count, wait_named
from stof.kernels.hopper.backward_tickets import MOST_PARTS
from stof.kernels.hopper.intrinsics import (
    bit_layout,
    hide_from_compiler,
    in_store_layout,
    reinterpret,
    store_layout,
    thread_barrier,
    tile_layout,
)
from stof.kernels.hopper.softmax import kept, tanh_by_exp2
from stof.runtime.pdl import launch_next, wait_previous

# Arguments that are often 1. Specialised for 1, `heads_per_group` makes Triton 3.6 fail.
_COUNTS = ["heads", "all_heads", "heads_per_group", "q_blocks", "sums"]


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
def _score_gradients(args, s, dk, dv, stage, words, bitmap, GROUP: gl.constexpr, config: gl.constexpr):
    """Write dS of a tile to shared memory; return dk, which is still being computed, and dv, with this tile's parts."""
    QUERIES: gl.constexpr = config.queries
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    dtype: gl.constexpr = args.q_smem.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    if config.has_softcap:
        s = tanh_by_exp2(s * args.score_scale)
        p = gl.exp2(s * args.softcap - _stats(args, stage, 0, layout, config))
        if bitmap >= 0:
            p = kept(p, words, QUERIES)
        p16 = gl.convert_layout(p.to(dtype), operand)
        p *= 1.0 - s * s
        # Issued after the last use of the scores: dP takes their registers.
        dp = _issue_product(args.v_smem, args.d_out_smem.index(stage), GROUP, config)
    else:
        dp = _issue_product(args.v_smem, args.d_out_smem.index(stage), GROUP, config)
        p = gl.exp2(s * args.score_scale - _stats(args, stage, 0, layout, config))
        if bitmap >= 0:
            p = kept(p, words, QUERIES)
        p16 = gl.convert_layout(p.to(dtype), operand)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    dv = warpgroup_mma(p16, args.d_out_smem.index(stage), dv, is_async=True)
    ds = p * (dp - _stats(args, stage, 1, layout, config))
    if bitmap >= 0:
        ds = kept(ds, words, QUERIES)  # what is dropped may be NaN, and 0 * NaN is NaN
    ds = ds.to(dtype)
    # Two stages: both warpgroups finish dQ of the previous tile before the barrier that follows, so the next tile may
    # overwrite its dS.
    args.ds_smem.index(stage).slice(GROUP * 64, 64, dim=0).store(ds)
    # dK keeps the tensor cores busy while the warpgroups wait for each other's dS.
    dk = warpgroup_mma(gl.convert_layout(ds, operand), args.q_smem.index(stage), dk, is_async=True)
    # P leaves its registers before dQ and the next S take theirs.
    dv = warpgroup_mma_wait(1, deps=(dv,))
    return dk, dv


@gluon.jit
@no_type_check
def _issue_dq(args, stage, GROUP: gl.constexpr, config: gl.constexpr):
    """Issue this warpgroup's half of dQ, when both have written dS."""
    D: gl.constexpr = config.width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    fence_async_shared()  # for dS; where it is written, the fence makes ptxas 12.8 and 12.9 fail
    wait_named(DS_FULL, CONSUMERS)
    ds_of_both = args.ds_smem.index(stage)
    k = args.k_smem.index(hide_from_compiler(0))
    if D == 128:  # 64 queries: half of the columns
        k = k.slice(GROUP * 64, 64, dim=1)
    else:  # 128 queries: half of them
        ds_of_both = ds_of_both.slice(GROUP * 64, 64, dim=1)
    no_dq = gl.zeros([64, 64], gl.float32, layout)
    return warpgroup_mma(ds_of_both.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)


@gluon.jit
@no_type_check
def _send_dq(args, dq, stage, phase, GROUP: gl.constexpr):
    """Pass half of a tile's dQ to its accumulator warp."""
    # [warp, half of rows, lane // 4, columns // 8, lane % 4, pair]: so that a thread stores 4 values side by side.
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([DQ_ROWS, DQ_COLUMNS])
    mbarrier.wait(args.dq_empty.index(stage), phase ^ 1)
    args.dq_smem.index(stage * 2 + GROUP).store(dq)
    fence_async_shared()
    arrive_named(DQ_FULL + stage * 2 + GROUP, WITH_ACCUMULATOR)


@gluon.jit
@no_type_check
def _consumer(args, GROUP: gl.constexpr, config: gl.constexpr):
    """Compute 64 keys' dK and dV, and half of each tile's dQ.

    S of a tile is issued behind dK and dQ of the one before: the tensor cores have work while dQ goes to shared memory.
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
    for free in gl.static_range(STAGES):
        arrive_named(Q_EMPTY + free, WITH_PRODUCER)
    begin, end = wait_item(args, 0, 4)
    first_bitmap = gl.load(args.tiles_ptr + gl.maximum(begin, 0) * TILE_SIZE + BITMAP)
    while begin >= 0:
        dk = gl.zeros([64, D], gl.float32, layout)
        dv = gl.zeros([64, D], gl.float32, layout)
        if begin < end:
            # The next tile's bitmap is loaded before dQ of this tile is issued; its row in `bitmaps`, a tile earlier.
            bitmap = first_bitmap
            words = gl.load(words_ptr + gl.maximum(bitmap, 0) * (KEYS * 4))
            next_tile = gl.where(begin + 1 < end, begin + 1, begin)
            next_bitmap = gl.load(args.tiles_ptr + next_tile * TILE_SIZE + BITMAP)
            mbarrier.wait(args.kv_full, kv_phase)
            mbarrier.wait(args.q_full.index(stage), phase)
            s = _issue_product(args.k_smem, args.q_smem.index(stage), GROUP, config)
            s = warpgroup_mma_wait(0, deps=(s,))
            # All heads of an item have the same tiles.
            for _ in range(1, (end - begin) * item_field(args, index, HEADS, 4)):
                dk, dv = _score_gradients(args, s, dk, dv, stage, words, bitmap, GROUP, config)
                bitmap = next_bitmap
                words = gl.load(words_ptr + gl.maximum(bitmap, 0) * (KEYS * 4))
                next_tile = gl.where(next_tile + 1 < end, next_tile + 1, begin)
                next_bitmap = gl.load(args.tiles_ptr + next_tile * TILE_SIZE + BITMAP)
                dq = _issue_dq(args, stage, GROUP, config)
                mbarrier.wait(args.q_full.index(stage ^ 1), phase ^ stage)
                s = _issue_product(args.k_smem, args.q_smem.index(stage ^ 1), GROUP, config)
                dq, dk = warpgroup_mma_wait(1, deps=(dq, dk))
                arrive_named(Q_EMPTY + stage, WITH_PRODUCER)
                _send_dq(args, dq, stage, phase, GROUP)
                s = warpgroup_mma_wait(0, deps=(s,))
                phase = phase ^ stage
                stage = stage ^ 1
            dk, dv = _score_gradients(args, s, dk, dv, stage, words, bitmap, GROUP, config)
            mbarrier.arrive(args.v_empty, count=1)
            dq = _issue_dq(args, stage, GROUP, config)
            dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
            mbarrier.arrive(args.k_empty, count=1)
            arrive_named(Q_EMPTY + stage, WITH_PRODUCER)
            _send_dq(args, dq, stage, phase, GROUP)
            phase = phase ^ stage
            stage = stage ^ 1
            kv_phase = kv_phase ^ 1
        begin, end = wait_item(args, index + 1, 4)
        # The load completes while dK and dV are stored.
        first_bitmap = gl.load(args.tiles_ptr + gl.maximum(begin, 0) * TILE_SIZE + BITMAP)
        _store(args, index, dk, dv, GROUP, config)
        mbarrier.arrive(args.item_empty.index(index % ITEM_STAGES), count=1)
        index += 1


@gluon.jit
@no_type_check
def _in_order(x):
    """Return a warpgroup's `[64, D]` accumulator as one row in which each thread has 4 values side by side."""
    # [warp, half of rows, lane // 4, columns // 8, lane % 4, pair]
    D: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, D // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([D // 8, 128, 4])


@gluon.jit
@no_type_check
def _in_accumulator(x, layout: gl.constexpr):
    """Undo `_in_order`."""
    D: gl.constexpr = x.shape[0] * 8
    x = x.reshape([D // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, D])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
@no_type_check
def _sum_over_items(args, index, dk, dv, GROUP: gl.constexpr):
    """Add dK and dV of parts of an item, and of items that share keys; return the sums, and whether these are complete.

    Sums are taken in a binary tree in which each item, in order of rank, has `MOST_PARTS` leaves. Its parts are the
    first ones of these; an item that is not split begins at its own node. Of two nodes, the one that is complete first
    stores its sums and is done; the other one adds them to its own and goes on. So no thread block waits for another
    one's tiles, and as `a + b` equals `b + a`, sums do not depend on which one is first.
    """
    D: gl.constexpr = dk.shape[1]
    dk, dv = _in_order(dk), _in_order(dv)
    layout: gl.constexpr = dk.type.layout
    # Hidden, so that addresses are not computed before the last tile, where they would be spilled.
    thread = hide_from_compiler(gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))))
    chunk = gl.arange(0, D // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    value = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    sums = args.kv_sums_ptr + GROUP * (2 * 64 * D) + thread * 4
    sums = sums[None, :, None] + (chunk * 512)[:, None, None] + value[None, None, :]
    rank = item_field(args, index, RANK_OF_ITEM, 4)
    adding = item_field(args, index, ADDING, 4)
    slot_of_item = item_field(args, index, SLOT, 4)
    part = item_field(args, index, PART, 4)
    parts = item_field(args, index, PARTS, 4)
    slot_of_part = item_field(args, index, PART_SLOT, 4)
    complete = 1
    leaves = gl.where(parts == 1, MOST_PARTS, 1)  # under this thread block's node
    while leaves < adding * MOST_PARTS:
        # First leaves of this node and its neighbour; then their numbers among parts, or among items.
        first = (rank * MOST_PARTS + part) // leaves * leaves
        other = first ^ leaves
        of_parts = leaves < MOST_PARTS
        first = gl.where(of_parts, first % MOST_PARTS, first // MOST_PARTS)
        other = gl.where(of_parts, other % MOST_PARTS, other // MOST_PARTS)
        if other < gl.where(of_parts, parts, adding):
            # Two neighbours share a slot, because only one of them stores. Nodes above have the slot of their first two
            # parts or items, which is free again. A pair's counter has the number of the later one, minus 1.
            first_slot = gl.where(of_parts, slot_of_part, slot_of_item)
            counter_ptr = args.kv_counters_ptr + first_slot * 4 + (gl.maximum(first, other) - 1) * 2 + GROUP
            if gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu") == 0:
                to = sums + (first_slot + first // 2).to(gl.int64) * (2 * KEYS * D)
                gl.store(to, dk)
                gl.store(to + 64 * D, dv)
                thread_barrier()
                gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")
                complete = 0
                leaves = adding * MOST_PARTS
            else:
                wait_count(counter_ptr, 3)  # two arrivals, and one more when the sums are stored
                other_sums = sums + (first_slot + other // 2).to(gl.int64) * (2 * KEYS * D)
                dk += gl.load(other_sums, cache_modifier=".cg")
                dv += gl.load(other_sums + 64 * D, cache_modifier=".cg")
        leaves *= 2
    return dk, dv, complete


@gluon.jit
@no_type_check
def _store(args, index, dk, dv, GROUP: gl.constexpr, config: gl.constexpr):
    """Write 64 keys' dK and dV; of several items that share keys, the last one writes their sums."""
    D: gl.constexpr = config.width
    layout: gl.constexpr = dk.type.layout
    dtype: gl.constexpr = args.q_smem.dtype
    row_block = item_field(args, index, ROW_BLOCK, 4)
    batch_kv_head = item_field(args, index, HEAD, 4) // args.heads_per_group
    dk, dv, complete = _sum_over_items(args, index, dk, dv, GROUP)
    if complete > 0:
        kv_heads = args.heads // args.heads_per_group
        to: gl.constexpr = store_layout(D)
        row = row_block * KEYS + GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, to))
        if D == 64:
            row += hide_from_compiler(0)  # as above; at D 128 it spills more
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, to))[None, :]
        exists = (row < args.kv_len)[:, None] & (columns < config.head_dim)
        b, h = (batch_kv_head // kv_heads).to(gl.int64), (batch_kv_head % kv_heads).to(gl.int64)
        rows = row.to(gl.int64)[:, None]
        to_dk, to_dv = args.stride_dk, args.stride_dv
        dk_ptrs = args.dk_ptr + b * to_dk.b + h * to_dk.h + rows * to_dk.s + columns
        gl.store(dk_ptrs, in_store_layout(_in_accumulator(dk * args.scale, layout), dtype), exists)
        dv_ptrs = args.dv_ptr + b * to_dv.b + h * to_dv.h + rows * to_dv.s + columns
        gl.store(dv_ptrs, in_store_layout(_in_accumulator(dv, layout), dtype), exists)


@gluon.jit(do_not_specialize=_COUNTS)
@no_type_check
def backward_kernel(
    q_desc,  # [B, H, Sq, D], a box of `queries` rows
    k_desc,  # [B, Hkv, Skv, D], 128 rows
    v_desc,
    d_out_desc,  # as q_desc
    stats_desc,  # [B * H * blocks of queries, 2 * queries] float32, a row; see `backward_rows_kernel`
    dq_desc,  # [B * H * sums * 32, 256] float32, 16 rows
    dk_ptr,  # [B, Hkv, Skv, D]
    dv_ptr,
    kv_sums_ptr,  # [all slots, 2 halves of the keys, 2, 64 * width] float32: sums of dK and dV of several items; slots
    #               are those of key heads, [B, Hkv, slots], and then those of the last items
    counters_ptr,  # [2 + B * H * (sums + 1) + 4 * all slots] int32, zero: what `convert_dq_kernel` took; tickets that
    #                were taken; additions to each sum of dQ; of each head, `MOST_PARTS` for each item that an
    #                accumulator warp ended; and of pairs of sums of dK and dV, by each warpgroup
    tickets_ptr,  # int32 [tickets, TICKET_SIZE], fields as `TicketFields`
    tiles_ptr,  # this and the next one: tensors of `BackwardLists`
    bitmaps_ptr,
    heads,
    all_heads,  # B * H
    heads_per_group,
    q_blocks,  # of a head
    sums,  # of dQ, of a head
    kv_len,
    stride_dk,  # `Strides`
    stride_dv,
    scale,
    score_scale,  # scale * log2(e); with a softcap c, 2 * scale * log2(e) / c
    softcap,  # c * log2(e)
    CONFIG: gl.constexpr,  # `BackwardConfig`
    USE_PDL: gl.constexpr,
):
    """See the module."""
    # In this order: `convert_dq_kernel` reads counters that the previous kernel clears.
    wait_previous(USE_PDL)
    launch_next(USE_PDL)
    D: gl.constexpr = CONFIG.width
    QUERIES: gl.constexpr = CONFIG.queries
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [1, KEYS, D], tile_layout(dtype, KEYS, D, 2))
    v_smem = gl.allocate_shared_memory(dtype, [1, KEYS, D], tile_layout(dtype, KEYS, D, 2))
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, D], tile_layout(dtype, QUERIES, D, 2))
    d_out_smem = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, D], tile_layout(dtype, QUERIES, D, 2))
    ds_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, QUERIES], tile_layout(dtype, KEYS, QUERIES, 2))
    rows: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, DQ_ROWS, DQ_COLUMNS], rows)
    stats_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * QUERIES], rows)
    items_smem = gl.allocate_shared_memory(gl.int32, [ITEM_STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [ITEM_STAGES, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [ITEM_STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(k_empty, count=2)
    mbarrier.init(v_empty, count=2)
    for i in gl.static_range(ITEM_STAGES):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=4)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    args = BackwardArgs(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, d_out_desc=d_out_desc, stats_desc=stats_desc, dq_desc=dq_desc,
        dk_ptr=dk_ptr, dv_ptr=dv_ptr, kv_sums_ptr=kv_sums_ptr, next_ticket_ptr=counters_ptr + 1,
        dq_counters_ptr=counters_ptr + 2, head_counters_ptr=counters_ptr + 2 + sums * all_heads,
        kv_counters_ptr=counters_ptr + 2 + (sums + 1) * all_heads, tickets_ptr=tickets_ptr, tiles_ptr=tiles_ptr,
        bitmaps_ptr=bitmaps_ptr, q_smem=q_smem, k_smem=k_smem, v_smem=v_smem, d_out_smem=d_out_smem,
        stats_smem=stats_smem, ds_smem=ds_smem, dq_smem=dq_smem, items_smem=items_smem, item_full=item_full,
        item_empty=item_empty, kv_full=kv_full, k_empty=k_empty, v_empty=v_empty, q_full=q_full, dq_empty=dq_empty,
        heads=heads, heads_per_group=heads_per_group, q_blocks=q_blocks, sums=sums, kv_len=kv_len,
        stride_dk=stride_dk, stride_dv=stride_dv, scale=scale, score_scale=score_scale, softcap=softcap,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consumer, (args, 0, CONFIG)), (_consumer, (args, 1, CONFIG)), (producer, (args, CONFIG)),
         (accumulator, (args, 0)), (accumulator, (args, 1))],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip
