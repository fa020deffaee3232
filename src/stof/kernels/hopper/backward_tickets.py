"""The table of tickets of the backward kernel of Hopper: which work is done, and in what order.

Thread blocks of `backward_kernel` take tickets one after another by an atomic counter, so tickets are started in the
order of the table. The kernel that runs before (`backward_rows.py`) writes the table in each call: under a dynamic plan
the device fills the lists that it depends on, and other calls do the same.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.backward_lists import (
    ITEM,
    ITEM_COST,
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


class TicketFields(NamedTuple):
    """Where a ticket holds what: a work item, or a part of one of the last items.

    Each of the last items has `MOST_PARTS` tickets; those whose `part` is not below `parts` have no work. The table
    ends with end tickets, whose `begin` is below 0: at least one for each thread block.

    Attributes:
        row_block: its block of keys.
        slot: the first slot for sums of dK and dV of the items that share the block, among the slots of all key heads.
        head, heads: its first query head, counted over the batch, and how many it goes through.
        rank, adding: number of the item among those that share the block, and how many share it.
        begin, end: its tiles.
        part, parts: it is part `part` of `parts` of the item.
        part_slot: the first slot for sums of these parts.
    """

    row_block: int = 0
    slot: int = 1
    head: int = 2
    heads: int = 3
    rank: int = 4
    adding: int = 5
    begin: int = 6
    end: int = 7
    part: int = 8
    parts: int = 9
    part_slot: int = 10


TICKET = TicketFields()
# Room for fields of a ticket: 64 bytes, of which the last are not written.
TICKET_SIZE = tl.constexpr(16)
# Triton's cache keys hold constants of a module that are named, not fields of an object.
_ROW_BLOCK, _SLOT, _HEAD, _HEADS, _RANK, _ADDING, _CHUNK, _CHUNKS = (tl.constexpr(field) for field in ITEM)
_ITEM_SIZE = tl.constexpr(len(ITEM))
_Q_BLOCK, _TILE_SIZE = tl.constexpr(TILE.q_block), tl.constexpr(len(TILE))
(
    _T_ROW_BLOCK, _T_SLOT, _T_HEAD, _T_HEADS, _T_RANK, _T_ADDING, _T_BEGIN, _T_END, _T_PART, _T_PARTS, _T_PART_SLOT,
) = (tl.constexpr(field) for field in TICKET)  # fmt: skip
_SHORT_BLOCK, _ITEM_COST = tl.constexpr(SHORT_BLOCK), tl.constexpr(ITEM_COST)
_OVER_MEAN, _SHARES = tl.constexpr(LONGEST_OVER_MEAN), tl.constexpr(int(1 / LONGEST_SHARE))
MOST_PARTS, _PART_SLOTS = tl.constexpr(_MOST_PARTS), tl.constexpr(slots_of(_MOST_PARTS))
# These shares are whole numbers of twelfths.
_LAST_ITEMS, _LONG_OVER_MEAN, _PART_OVER_MEAN = (
    tl.constexpr(round(12 * share)) for share in (LAST_ITEMS, LONG_OVER_MEAN, PART_OVER_MEAN)
)
# Tickets that a program writes at a time, and blocks of keys whose tiles are compared at a time.
_TICKETS = tl.constexpr(128)

# What tickets are made of, see `backward_rows_kernel`.
TicketArgs = namedtuple(
    "TicketArgs",
    "tickets_ptr items_ptr tiles_ptr row_block_ptr pattern_of_ptr tickets thread_blocks items heads_of_items slots "
    "first_part_slot row_blocks patterns heads all_heads heads_per_group mask_b mask_h",
)


@triton.jit
@no_type_check
def _most_tiles(args, step):
    """Return the most tiles that any of the blocks of keys 0, `step`, `2 * step`, ... of all patterns has."""
    most = tl.zeros([_TICKETS], tl.int32)
    for first in range(0, args.patterns * args.row_blocks, step * _TICKETS):
        block = first + tl.arange(0, _TICKETS) * step
        exists = block < args.patterns * args.row_blocks
        begin = tl.load(args.row_block_ptr + block, mask=exists, other=0)
        most = tl.maximum(most, tl.load(args.row_block_ptr + block + 1, mask=exists, other=0) - begin)
    return tl.max(most, 0)


@triton.jit
@no_type_check
def _schedule(args):
    """Return four numbers: heads_of_ticket, heads_at_once, last_items, mean_tiles.

    heads_of_ticket: query heads of a ticket head. That is a key head if `items_ptr` has its items, or if each item has
        all query heads; else a query head.
    heads_at_once: successive tickets are those of one block of keys for so many ticket heads, then those of the next.
    last_items: how many of the last items may be split.
    mean_tiles: tiles of a block of keys in the mean, rounded down.
    """
    group = args.heads_per_group
    blocks = args.patterns * args.row_blocks
    total_tiles = tl.maximum(tl.load(args.row_block_ptr + blocks), 1)
    mean_tiles = total_tiles // blocks
    key_blocks = args.all_heads // group * args.row_blocks
    has_short_blocks = total_tiles <= blocks * _SHORT_BLOCK
    heads_of_ticket = 1
    if args.heads_of_items > 0:
        heads_of_ticket = group
    elif (group > 1) & (args.mask_h == 0) & has_short_blocks:
        # As `longest_group`, with the mean of all patterns.
        if mean_tiles * args.thread_blocks <= key_blocks * _ITEM_COST:
            over_mean = total_tiles * _OVER_MEAN // blocks
            share = mean_tiles * key_blocks // (args.thread_blocks * _SHARES)
            if _most_tiles(args, 1) <= tl.maximum(over_mean, share):
                heads_of_ticket = group
    # Where there are enough ticket heads, no more thread blocks work on one of them than a block of keys has tiles in
    # the mean: so they seldom wait for the same sum of dQ. No more heads than that: they share the L2 cache.
    heads_at_once = (args.thread_blocks * blocks + total_tiles - 1) // total_tiles
    if args.heads_of_items == 1:
        heads_at_once = (heads_at_once + group - 1) // group
    heads_at_once = tl.minimum(heads_at_once, args.all_heads // heads_of_ticket)
    last_items = 0
    # The first blocks of keys are taken last.
    if (not has_short_blocks) & (_most_tiles(args, args.row_blocks) * 12 > mean_tiles * _LONG_OVER_MEAN):
        last_items = tl.minimum(args.thread_blocks * _LAST_ITEMS // 12, args.all_heads // heads_of_ticket * args.items)
    return heads_of_ticket, heads_at_once, last_items, mean_tiles


@triton.jit
@no_type_check
def _item(args, number, heads_of_ticket, heads_at_once):
    """Return work items by their places among all.

    That is: row block, slot, first query head, number of heads, rank, how many items add, begin and end of its tiles.
    """
    first_head = number // (heads_at_once * args.items) * heads_at_once
    at_once = tl.minimum(heads_at_once, args.all_heads // heads_of_ticket - first_head)
    place = number - first_head * args.items
    ticket_head = first_head + place % at_once
    head = ticket_head * heads_of_ticket
    if args.heads_of_items > 0:
        item_ptr = args.items_ptr + place // at_once * _ITEM_SIZE
        row_block = tl.load(item_ptr + _ROW_BLOCK)
        slot = tl.load(item_ptr + _SLOT)
        head += tl.load(item_ptr + _HEAD)
        heads = tl.load(item_ptr + _HEADS)
        rank = tl.load(item_ptr + _RANK)
        adding = tl.load(item_ptr + _ADDING)
        chunk = tl.load(item_ptr + _CHUNK)
        chunks = tl.load(item_ptr + _CHUNKS)
    else:
        row_block = args.items - 1 - place // at_once
        adding = tl.full([_TICKETS], args.heads_per_group // heads_of_ticket, tl.int32)
        slot = row_block * ((adding + 1) // 2)  # not used if the item is alone
        heads = tl.full([_TICKETS], heads_of_ticket, tl.int32)
        rank = ticket_head % adding
        chunk = tl.full([_TICKETS], 0, tl.int32)
        chunks = tl.full([_TICKETS], 1, tl.int32)
    slot += head // args.heads_per_group * args.slots
    pattern = tl.load(args.pattern_of_ptr + head // args.heads * args.mask_b + head % args.heads * args.mask_h)
    block_ptr = args.row_block_ptr + pattern * args.row_blocks + row_block
    first = tl.load(block_ptr)
    tiles = tl.load(block_ptr + 1) - first
    begin, end = first + tiles * chunk // chunks, first + tiles * (chunk + 1) // chunks
    return row_block, slot, head, heads, rank, adding, begin, end


@triton.jit
@no_type_check
def _part(args, begin, end, is_split, part, length):
    """Return parts of items' tiles, `(begin, end)`, and how many parts an item has; items that are not split have one.

    Cuts are whole lengths away from the tile at which an item's queries start over (see `BackwardLists`), or from its
    end if they do not: so items are cut at the same queries. Were they cut at the same shares, most parts would begin
    with tiles that add to the same sums of dQ as the last tiles of another part of the block of keys before, and wait
    for it. Items that would have more than `MOST_PARTS` parts have longer ones.
    """
    first_query = tl.load(args.tiles_ptr + begin * _TILE_SIZE + _Q_BLOCK, mask=is_split, other=0)
    # Search for the first tile whose queries are before those of the item's first tile; the end if there is none.
    low, high = begin, tl.where(is_split, end, begin)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        searched = low < high
        query = tl.load(args.tiles_ptr + middle * _TILE_SIZE + _Q_BLOCK, mask=searched, other=0)
        low, high = (
            tl.where(searched & (query >= first_query), middle + 1, low),
            tl.where(searched & (query < first_query), middle, high),
        )
    # The first and the last part have between half and one and a half times the length.
    length = tl.maximum(length, (end - begin + MOST_PARTS - 1) // MOST_PARTS)
    cut = (low - begin) % length
    cut = begin + tl.where(cut * 2 < length, cut + length, cut)
    parts = tl.minimum(tl.maximum((end - cut) * 2 + length, 0) // (length * 2) + 1, MOST_PARTS)
    first = tl.where(part == 0, begin, cut + (part - 1) * length)
    last = tl.where(part == parts - 1, end, cut + part * length)
    return tl.where(is_split, first, begin), tl.where(is_split, last, end), tl.where(is_split, parts, 1)


@triton.jit
@no_type_check
def write_tickets(args):
    """Write this program's share of the table of `args.tickets` tickets."""
    program = tl.program_id(0)
    if program * _TICKETS < args.tickets:
        heads_of_ticket, heads_at_once, last_items, mean_tiles = _schedule(args)
        first_split = args.all_heads // heads_of_ticket * args.items - last_items
        end_ticket = first_split + last_items * MOST_PARTS
        for first in range(program * _TICKETS, args.tickets, tl.num_programs(0) * _TICKETS):
            ticket = first + tl.arange(0, _TICKETS)
            past_first = tl.maximum(ticket - first_split, 0)
            number = tl.where(ticket < end_ticket, tl.minimum(ticket, first_split + past_first // MOST_PARTS), 0)
            row_block, slot, head, heads, rank, adding, begin, end = _item(args, number, heads_of_ticket, heads_at_once)
            part = past_first % MOST_PARTS
            is_last = (ticket >= first_split) & (ticket < end_ticket)
            is_split = is_last & ((end - begin) * 12 > mean_tiles * _LONG_OVER_MEAN)
            length = tl.maximum(mean_tiles * _PART_OVER_MEAN // 12, 1)
            begin, end, parts = _part(args, begin, end, is_split, part, length)
            at = args.tickets_ptr + ticket.to(tl.int64) * TICKET_SIZE
            exists = ticket < args.tickets
            tl.store(at + _T_ROW_BLOCK, row_block, mask=exists)
            tl.store(at + _T_SLOT, slot, mask=exists)
            tl.store(at + _T_HEAD, head, mask=exists)
            tl.store(at + _T_HEADS, heads, mask=exists)
            tl.store(at + _T_RANK, rank, mask=exists)
            tl.store(at + _T_ADDING, adding, mask=exists)
            tl.store(at + _T_BEGIN, tl.where(ticket < end_ticket, begin, -1), mask=exists)
            tl.store(at + _T_END, end, mask=exists)
            tl.store(at + _T_PART, part, mask=exists)
            tl.store(at + _T_PARTS, parts, mask=exists)
            tl.store(at + _T_PART_SLOT, args.first_part_slot + past_first // MOST_PARTS * _PART_SLOTS, mask=exists)
