"""What runs before and after the backward kernel of Hopper: lse, delta and tickets; dQ in 16 bits."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.backward_tickets import TicketArgs, write_tickets
from stof.runtime.pdl import launch_next, launch_next_and_wait, wait_previous

LOG2E = tl.constexpr(1.4426950408889634)


# Integers that change with the mask: Triton does not specialise the kernel for their values, such as 1.
_NOT_SPECIALIZED = [
    "counters", "tickets", "thread_blocks", "items", "heads_of_items", "slots", "first_part_slot", "row_blocks",
    "patterns", "all_heads", "heads_per_group", "mask_b", "mask_h",
]  # fmt: skip
_COUNTERS = tl.constexpr(128)  # cleared at a time


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
@no_type_check
def backward_rows_kernel(
    out_ptr,  # [B, H, Sq, D]
    d_out_ptr,  # [B, H, Sq, D]
    lse_ptr,  # [B, H, Sq] float32, contiguous, as d_lse
    d_lse_ptr,
    sinks_ptr,  # [H]
    of_sink_ptr,  # [B * H * blocks of queries, ROWS] float32: minus the row's gradient of its sink
    stats_ptr,  # [B * H * blocks of queries, 2, ROWS] float32: lse, delta
    counters_ptr,  # int32 [counters], of `backward_kernel`
    tickets_ptr,  # int32 [tickets, TICKET_SIZE], fields as `TicketFields`
    items_ptr,  # int32 [items, 8], fields as `ItemFields`; read if `heads_of_items` is not 0
    tiles_ptr,  # this and the next two: tensors of `BackwardLists`
    row_block_ptr,
    pattern_of_ptr,
    stride_out,  # `Strides`; columns are contiguous
    stride_d_out,
    heads,
    q_len,
    q_blocks,
    counters,
    tickets,  # with at least one end ticket for each thread block
    thread_blocks,  # of `backward_kernel`
    items,  # of a key head; if `heads_of_items` is 0, blocks of keys
    heads_of_items,  # most query heads of an item; 0 if every item is a block of keys, and the kernel groups heads
    slots,  # for sums of dK and dV, of a key head
    first_part_slot,  # the first slot for sums of parts
    row_blocks,
    patterns,
    all_heads,  # B * H
    heads_per_group,
    mask_b,
    mask_h,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_D_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write lse in units of log 2 and `delta = rowsum(d_out * out) - d_lse` of a block of queries; clear counters.

    The first programs also write the tickets of `backward_kernel`.

    lse is +inf where a row keeps nothing or does not exist: its weights are 0 then. It counts the sink, whose gradient
    is `-weight * delta`. With a sink there is no d_lse.
    """
    launch_next_and_wait(USE_PDL)
    ticket_args = TicketArgs(
        tickets_ptr=tickets_ptr, items_ptr=items_ptr, tiles_ptr=tiles_ptr, row_block_ptr=row_block_ptr,
        pattern_of_ptr=pattern_of_ptr, tickets=tickets, thread_blocks=thread_blocks, items=items,
        heads_of_items=heads_of_items, slots=slots, first_part_slot=first_part_slot, row_blocks=row_blocks,
        patterns=patterns, heads=heads, all_heads=all_heads, heads_per_group=heads_per_group, mask_b=mask_b,
        mask_h=mask_h,
    )  # fmt: skip
    write_tickets(ticket_args)
    block = tl.program_id(0)
    group = block // q_blocks
    r = tl.arange(0, ROWS)
    row = (block % q_blocks) * ROWS + r
    d = tl.arange(0, BLOCK_D)
    ok = row < q_len
    mask = ok[:, None] & (d < HEAD_DIM)[None, :]
    b, h, at = (group // heads).to(tl.int64), (group % heads).to(tl.int64), row.to(tl.int64)[:, None]
    out_base = out_ptr + b * stride_out.b + h * stride_out.h
    d_out_base = d_out_ptr + b * stride_d_out.b + h * stride_d_out.h
    out = tl.load(out_base + at * stride_out.s + d[None, :], mask=mask, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_base + at * stride_d_out.s + d[None, :], mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + group.to(tl.int64) * q_len + row, mask=ok, other=float("-inf"))
    some = lse != float("-inf")  # also if it is NaN
    delta = tl.where(some, tl.sum(out * d_out, 1), 0.0)
    if HAS_D_LSE:
        d_lse = tl.load(d_lse_ptr + group.to(tl.int64) * q_len + row, mask=ok, other=0.0)
        delta -= tl.where(some, d_lse, 0.0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + group % heads).to(tl.float32)
        of_sink = tl.where(some, delta / (1.0 + tl.exp2((lse - sink) * LOG2E)), 0.0)
        tl.store(of_sink_ptr + block.to(tl.int64) * ROWS + r, of_sink)
        most = tl.maximum(lse, sink)
        together = most + tl.log(tl.exp2((lse - most) * LOG2E) + tl.exp2((sink - most) * LOG2E))
        lse = tl.where(sink == float("inf"), sink, together)
    stats = stats_ptr + block.to(tl.int64) * (2 * ROWS) + r
    tl.store(stats, tl.where(some, lse * LOG2E, float("inf")))
    tl.store(stats + ROWS, delta)
    for first in range(block * _COUNTERS, counters, tl.num_programs(0) * _COUNTERS):
        counter = first + tl.arange(0, _COUNTERS)
        tl.store(counters_ptr + counter, 0, mask=counter < counters)


@triton.jit(do_not_specialize=["all_heads", "additions", "sums", "mask_b", "mask_h"])
@no_type_check
def convert_dq_kernel(
    sums_ptr,  # [B, H, sums, 2, 8, 4, 8, 4, 2, 2] float32, see below
    dq_ptr,  # [B, H, Sq, D]
    counters_ptr,  # of `backward_kernel`
    sum_ptr,  # [patterns, blocks of queries + 1], see `BackwardLists`
    pattern_of_ptr,
    stride,  # `Strides`; columns are contiguous
    heads,
    q_len,
    q_blocks,
    all_heads,  # B * H
    additions,  # to a head's counter when its sums are complete
    sums,
    mask_b,
    mask_h,
    scale,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write dQ of blocks of queries: their sums, added in order, times the scale.

    Thread blocks start on multiprocessors that have no more work of `backward_kernel`, and wait for the sums of one
    head after another. They take blocks of queries by tickets, and end when that kernel has ended.

    A sum is two halves of columns, or at D 64 of queries. A half, 64 x 64, is an accumulator of wgmma: [columns / 8,
    warp, lane / 4, lane % 4, 2 rows 8 apart, 2 columns].
    """
    launch_next(USE_PDL)
    head_counters_ptr = counters_ptr + 2 + sums * all_heads
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    values = tl.arange(0, ROWS * BLOCK_D)
    block = tl.atomic_add(counters_ptr, 1, sem="relaxed")
    while block < all_heads * q_blocks:
        next_block = tl.atomic_add(counters_ptr, 1, sem="relaxed")
        group = block // q_blocks
        row = (block % q_blocks) * ROWS + r
        mask = (row < q_len)[:, None] & (d < HEAD_DIM)[None, :]
        added = tl.atomic_add(head_counters_ptr + group, 0, sem="acquire")
        while added < additions:
            added = tl.atomic_add(head_counters_ptr + group, 0, sem="acquire")
        # What kernels before have written, all lists too, is read from here on.
        pattern = tl.load(pattern_of_ptr + group // heads * mask_b + group % heads * mask_h)
        place = pattern * (q_blocks + 1) + block % q_blocks
        first, end = tl.load(sum_ptr + place), tl.load(sum_ptr + place + 1)
        acc = tl.zeros([ROWS * BLOCK_D], tl.float32)
        for n in range(first, end):
            sum_of_block_ptr = sums_ptr + (group * sums + n).to(tl.int64) * (ROWS * BLOCK_D)
            acc += tl.load(sum_of_block_ptr + values, cache_modifier=".cg")  # other multiprocessors wrote it
        acc = tl.reshape(acc, [2, 8, 4, 8, 4, 2, 2])
        acc = tl.permute(acc, [2, 5, 3, 0, 1, 4, 6]) if BLOCK_D == 128 else tl.permute(acc, [0, 2, 5, 3, 1, 4, 6])
        acc = tl.reshape(acc, [ROWS, BLOCK_D])
        b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
        base = dq_ptr + b * stride.b + h * stride.h + row.to(tl.int64)[:, None] * stride.s
        tl.store(base + d[None, :], (acc * scale).to(dq_ptr.dtype.element_ty), mask=mask)
        block = next_block
    # The kernels that follow wait for this one, and read what `backward_kernel` writes.
    wait_previous(USE_PDL)
