"""A transposed layout as the backward kernel of Hopper reads it: tiles, and the order in which they add to dQ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.common import parts_of
from stof.layout import Layout, LayoutConfig

KEYS_OF_BLOCK = 128
# Half of a tile's dQ in memory, float32. Each thread has four values next to each other, so that consumers write 16
# bytes at a time without bank conflicts; `convert_dq_kernel` says which value is where.
DQ_HALF = (16, 256)
# Tiles of keys x queries, for a head dimension up to so much: wider heads leave no registers for more queries.
LAYOUTS = {64: LayoutConfig(KEYS_OF_BLOCK, 128), 128: LayoutConfig(KEYS_OF_BLOCK, 64)}


class TileFields(NamedTuple):
    """Where a tile holds what.

    Attributes:
        q_block: number of its block of queries.
        bitmap: row of `bitmaps`, below 0 for a full tile.
        rank: how many blocks of keys add to its sum before.
        sum: the sum of dQ that it is added to.
    """

    q_block: int = 0
    bitmap: int = 1
    rank: int = 2
    sum: int = 3


TILE = TileFields()


class ItemFields(NamedTuple):
    """Where a work item of a key head holds what. Several items may share a block of keys.

    A slot is float32 memory for dK and dV of a block of keys, where one of two items leaves its sums for the other.

    Attributes:
        row_block: its block of keys.
        slot: the first slot for sums of the items that share the block.
        head, heads: its first query head among those of the key head, and how many it goes through.
        rank, adding: how many items of the block add to dK and dV before it, and in all.
        chunk, chunks: it has chunk `chunk` of `chunks` of the block's tiles.
    """

    row_block: int = 0
    slot: int = 1
    head: int = 2
    heads: int = 3
    rank: int = 4
    adding: int = 5
    chunk: int = 6
    chunks: int = 7


ITEM = ItemFields()
# Of one query head, a work item has at most so many times the mean number of tiles of a block of keys, this share of
# the tiles that a thread block has in all, or `FEWEST_TILES`, whichever is most. Blocks with more are cut into chunks.
LONGEST_OVER_MEAN, LONGEST_SHARE = 3, 1 / 4
# A work item has all query heads of its key head, whose masks are the same, and adds to dK and dV once, if blocks of
# keys have at most `SHORT_BLOCK` tiles in the mean. With 32 / 8 heads of 128 and 8192 tokens, window 512, mean 10,
# takes 444 us, and 774 us with an item for each head; window 1024, mean 18, 749 and 964 us. Where blocks are longer,
# thread blocks are at different heads, whose dQ, Q and dO exceed the L2 cache: 4 x 4096 tokens, causal, mean 33, take
# 3420 and 2836 us. Grouping also makes the last item longer, by (group - 1) * mean tiles, and saves each thread block
# (group - 1) * ITEM_COST * key_blocks / blocks.
SHORT_BLOCK, ITEM_COST = 24, 6
# Under causal masks the longest items come last, and thread blocks could end one of these apart. So of the last
# `LAST_ITEMS * thread_blocks` items, those with more than `LONG_OVER_MEAN` times the mean number of tiles of a block of
# keys are split into parts of about `PART_OVER_MEAN` times the mean, or longer ones where these would be more than
# `MOST_PARTS`, a power of two: if the mean is more than `SHORT_BLOCK`, and the first block of keys of a pattern is as
# long.
LAST_ITEMS, LONG_OVER_MEAN, PART_OVER_MEAN, MOST_PARTS = 1 / 2, 5 / 4, 2 / 3, 4
# At most so many times the mean number of tiles of a block of queries in its pattern add to one sum of dQ, or
# `FEWEST_TILES`, if that is more.
MOST_OVER_MEAN = 2
FEWEST_TILES = 16
# Kernels index the fields of tiles by 32 bits.
_MOST_TILES = 2**29


@dataclass(frozen=True, eq=False)
class BackwardLists:
    """The transposed layout of `P` patterns with `R` blocks of keys each, and `T` tiles.

    Blocks of keys are taken from the last one on. Each begins at the block of queries at its own relative position, the
    diagonal, goes on to the last query, and then from the first query to the diagonal: thread blocks that started at
    the same time are always at different queries. Within each part, later blocks of keys come to a block of queries
    first; across parts, no order holds. So each block of queries has sums of dQ for each part, and later blocks of keys
    add first. Queries that most blocks of keys see would make these wait for each other; they have several sums for
    each part.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        row_block_ptr: int32 `[P * R + 1]`, tiles of block n are `ptr[n] : ptr[n + 1]`.
        tiles: int32 `[T + 2, 4]`, fields as `TileFields`. The last two rows are padding: the kernel loads ahead.
        sum_ptr: int32 `[P, blocks of queries + 1]`, sums of block n are `ptr[n] : ptr[n + 1]`.
        bitmaps: int32 `[U, 128, 4]`, see `BackwardTiles`.
        row_blocks: R.
        queries: of a tile.
        q_len, kv_len: lengths.
        sums: of dQ, of a head, each of the size of a block of queries; an upper bound of those that are used.
        seen_queries, seen_keys: bool `[P, q_len]` and `[P, kv_len]`, which queries see a key and which keys a query
            sees; None if that is so for all that are in tiles. Others may be NaN, and 0 * NaN is NaN.
        counts: int64 `[R]` on the CPU, tiles of each block of keys, in that pattern in which it has most; None if not
            known.
    """

    pattern_of: Tensor
    row_block_ptr: Tensor
    tiles: Tensor
    sum_ptr: Tensor
    bitmaps: Tensor
    row_blocks: int
    queries: int
    q_len: int
    kv_len: int
    sums: int
    seen_queries: Tensor | None
    seen_keys: Tensor | None
    counts: Tensor | None = None


def longest_item(counts: Tensor, heads: int, blocks: int) -> int:
    """Return the most tiles of a work item.

    Args:
        counts: as `BackwardLists.counts`.
        heads, blocks: as for `split_blocks`.
    """
    mean = float(counts.double().mean())
    of_thread_block = mean * len(counts) * heads / blocks
    return math.ceil(max(LONGEST_OVER_MEAN * mean, LONGEST_SHARE * of_thread_block, FEWEST_TILES))


def longest_group(mean: float, key_blocks: int, blocks: int) -> float:
    """Return the most tiles of a block of keys whose query heads are one work item; 0 if each head is one.

    For lists whose items are not made on the host, the device estimates the same (`_schedule` in `backward_tickets`).

    Args:
        mean: tiles of a block of keys in the mean.
        key_blocks: batch entries times key heads times blocks of keys.
        blocks: thread blocks that run at once.
    """
    if mean > SHORT_BLOCK or mean * blocks > ITEM_COST * key_blocks:
        return 0
    return max(LONGEST_OVER_MEAN * mean, LONGEST_SHARE * mean * key_blocks / blocks)


def slots_of(adding: int) -> int:
    """Return how many slots for sums of dK and dV a block of keys needs that so many items share."""
    return (adding + 1) // 2 if adding > 1 else 0


def split_blocks(lists: BackwardLists, heads: int, group: int, blocks: int) -> Tensor | None:
    """Return the work items of a key head if they differ in heads or chunks, so that no thread block ends late.

    Args:
        lists: the lists of the mask.
        heads: batch entries times query heads.
        group: query heads that share a key head.
        blocks: thread blocks that run at once.

    Returns:
        int32 `[items, 8]` on the CPU, in the order in which they are taken, fields as `ItemFields`; None if each item
        is a block of keys, with one query head or all of a key head: the kernel decides, also if counts are not known.
    """
    if lists.counts is None:
        return None
    counts, chunks = lists.counts.tolist(), parts_of(lists.counts, longest_item(lists.counts, heads, blocks)).tolist()
    longest = 0.0
    if group > 1 and lists.pattern_of.shape[1] == 1:
        longest = longest_group(sum(counts) / len(counts), heads // group * len(counts), blocks)
    if max(chunks) == 1 and (not longest or max(counts) <= longest):
        return None
    items, slots = [], 0
    for row_block in reversed(range(len(chunks))):
        tiles, of_block = counts[row_block], chunks[row_block]
        at_once = group if tiles <= longest and of_block == 1 else 1
        adding = of_block * group // at_once
        for rank in range(adding):
            chunk, head = divmod(rank, group // at_once)
            items.append((row_block, slots, head * at_once, at_once, rank, adding, chunk, of_block))
        slots += slots_of(adding)
    return torch.tensor(items, dtype=torch.int32)


def make_backward_lists(layout: Layout) -> BackwardLists:
    """Prepare the layout of a transposed mask, whose rows are keys.

    Raises:
        UnfitLayoutError: it has other tiles than the kernel, or an order of its rows; see also `_ordered`.
    """
    if layout.config not in LAYOUTS.values() or layout.row_order is not None:
        raise UnfitLayoutError("the Hopper backward kernel takes contiguous tiles of 128 keys x 64 or 128 queries")
    queries, bitmaps = layout.config.block_n, accumulator_order(layout.bitmaps, layout.config.block_n)
    left = layout.q_len % KEYS_OF_BLOCK
    of_full = torch.full((1, KEYS_OF_BLOCK, 4), -1, dtype=bitmaps.dtype, device=bitmaps.device)
    of_full[:, left or KEYS_OF_BLOCK :] = 0
    bitmaps = torch.cat([bitmaps, of_full])
    tiles, sum_ptr, seen_queries, seen_keys = _ordered(
        layout.row_block_ptr.long(), layout.tile_columns()[:, 0].long() // queries, layout.tile_bitmap.long(), bitmaps,
        len(bitmaps) - 1 if left else -1, queries, (layout.kv_len, layout.q_len),
    )  # fmt: skip
    return BackwardLists(
        layout.pattern_of.int().contiguous(), layout.row_block_ptr.int().contiguous(), tiles,
        sum_ptr, bitmaps, layout.row_blocks, queries, layout.kv_len, layout.q_len,
        max(1, int(sum_ptr[:, -1].max())), seen_queries, seen_keys,
        layout.row_block_ptr.diff().view(-1, layout.row_blocks).amax(0).long().cpu(),
    )  # fmt: skip


def check_count(tiles: int) -> None:
    """Refuse more tiles than kernels can number."""
    if tiles >= _MOST_TILES:
        raise UnfitLayoutError(f"{tiles} tiles are more than 32-bit indices reach")


def _ordered(
    row_block_ptr: Tensor, q_block: Tensor, bitmap: Tensor, bitmaps: Tensor, ragged_bitmap: int, queries: int,
    lengths: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`tiles`, `sum_ptr`, `seen_queries` and `seen_keys` of `BackwardLists`.

    Args:
        row_block_ptr: int64 `[P * R + 1]`.
        q_block, bitmap: int64 `[T]`, fields of the tiles of the layout, row block by row block.
        ragged_bitmap: the bitmap that full tiles of the last row block get, -1 for none. Keys past the end are zeros in
            shared memory; without a bitmap their P = exp2(-lse) may overflow, and inf * 0 would make dQ NaN.
        bitmaps: as `BackwardLists`.
        queries: of a tile.
        lengths: q_len and kv_len.

    Raises:
        UnfitLayoutError: there are too many tiles.
    """
    q_len, kv_len = lengths
    check_count(len(q_block))
    row_blocks, q_blocks, count = -(-kv_len // KEYS_OF_BLOCK), -(-q_len // queries), len(q_block)
    # Of each tile: the number of its row block among those of all patterns.
    number = torch.arange(len(row_block_ptr) - 1, device=q_block.device)
    number = torch.repeat_interleave(number, row_block_ptr.diff(), output_size=count)
    row_block, pattern = number % row_blocks, number // row_blocks
    bitmap = torch.where((bitmap < 0) & (row_block == row_blocks - 1), ragged_bitmap, bitmap)
    patterns = (len(row_block_ptr) - 1) // row_blocks
    of_keys, of_queries = _seen(bitmaps, queries)
    of_block = pattern * q_blocks + q_block
    seen = (
        _members_seen(of_block, bitmap, of_queries, patterns, q_len),
        _members_seen(number, bitmap, of_keys, patterns, kv_len),
    )
    diagonal = row_block * (KEYS_OF_BLOCK * q_len) // (kv_len * queries)
    part = (q_block < diagonal).long()  # 0 from the diagonal on, 1 before it
    # Those that add to one part of a block of queries, from the last row block on.
    place = of_block * 2 + part
    in_turn = torch.argsort(place * row_blocks + row_blocks - 1 - row_block)
    adding = torch.zeros(patterns * q_blocks * 2, dtype=torch.int64, device=place.device)
    adding.scatter_add_(0, place, torch.ones_like(place))
    first = adding.cumsum(0) - adding
    steps = torch.arange(count, device=place.device)
    turn = torch.empty_like(place).scatter_(0, in_turn, steps - first[place[in_turn]])
    # Neighbours, which run at the same time, add to different sums.
    adding = adding.view(patterns, -1)
    most = ((MOST_OVER_MEAN * adding.sum(1, keepdim=True) + q_blocks - 1) // q_blocks).clamp(min=FEWEST_TILES)
    sums = (adding + most - 1) // most
    end = sums.cumsum(1)
    sums = sums.flatten()
    number_of_sum = (end.flatten() - sums)[place] + turn % sums[place]
    tiles = torch.stack([q_block, bitmap, turn // sums[place], number_of_sum], 1)
    tiles = tiles[torch.argsort((number * 2 + part) * q_blocks + q_block)]
    pad = torch.nn.functional.pad
    return pad(tiles, (0, 0, 0, 2)).int(), pad(end[:, 1::2], (1, 0)).int().contiguous(), *seen


def _seen(bitmaps: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Which keys and which queries of each bitmap have a kept score: bool `[U, 128]`, `[U, queries]`."""
    of_keys, words = (bitmaps != 0).any(2), bitmaps
    while words.shape[1] > 1:
        words = words[:, 0::2] | words[:, 1::2]
    query = torch.arange(queries, device=bitmaps.device)
    return of_keys, (words[:, 0, query % 8 // 2] >> (2 * (query // 8) + query % 2)) & 1 > 0


def _members_seen(block: Tensor, bitmap: Tensor, seen: Tensor, patterns: int, length: int) -> Tensor | None:
    """Which keys, or queries, have a kept score.

    Args:
        block: int64 `[T]`, the block of each tile, among those of all patterns.
        bitmap: int64 `[T]`, below 0 for full tiles.
        seen: of `_seen`.
        patterns: number of them.
        length: keys or queries of a pattern.

    Returns:
        bool `[patterns, length]`, or None if all members of blocks with tiles have one.
    """
    size, device = seen.shape[1], block.device
    blocks = patterns * -(-length // size)
    is_full = torch.zeros(blocks, dtype=torch.bool, device=device).index_fill_(0, block[bitmap < 0], True)
    partial = ~is_full[block]
    block, bitmap = block[partial], bitmap[partial]
    count = torch.zeros(blocks, size, dtype=torch.int32, device=device)
    count.index_add_(0, block, seen[bitmap].int())
    is_seen = is_full[:, None] | (count > 0)
    has_tiles = torch.zeros(blocks, dtype=torch.bool, device=device).index_fill_(0, block, True)
    is_missing = (has_tiles[:, None] & ~is_seen).view(patterns, -1)[:, :length]
    return is_seen.view(patterns, -1)[:, :length].contiguous() if bool(is_missing.any()) else None


def most_sums(q_blocks: int) -> int:
    """An upper bound of a head's sums, see `_ordered`: one for each part of a block, and one for every `most` tiles."""
    return 2 * q_blocks + -(-q_blocks // MOST_OVER_MEAN)
