"""Two row blocks of 64 rows in one job of the Hopper kernel, a warpgroup for each.

Tiles that both want are copied once. Tiles that one wants alone are computed by its warpgroup, while the other leaves
them out. So the tensor cores do no more than for the row blocks by themselves, and the L2 cache is read less.

A job's tiles lie in this order: one of both row blocks; those of the first alone and of the second alone, by turns as
far as there are both; the others of both with bits for either; and those that both keep whole. So a warpgroup leaves
out tiles between two of its own. Meanwhile it keeps a place of the ring, for the values of the one before: it may leave
out no more than `MOST_LEFT_OUT` in a row.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.hopper.begins import best_first
from stof.kernels.hopper.jobs import SMALL_TILE, TileLists, check_reads, past_the_end, slabs_and_reads
from stof.kernels.triton.work import accumulator_order, parts_of
from stof.layout import Layout
from stof.layout.build import shared

# One less than the stages of K and V there are at least.
MOST_LEFT_OUT = 3
# A tile's copies, in computed tiles of one warpgroup: a guess.
_COPY_COST = 0.5
# Kinds of tiles, in their order.
_FIRST, _SECOND, _BOTH, _WHOLE = range(4)
# Numbers of the bits of slabs that keep nothing, and everything.
_NOTHING, _EVERYTHING = 0, 1


def make_paired_lists(layout: Layout, split_tiles: int = 0) -> TileLists:
    """Prepare a layout; as `make_tile_lists`, which see.

    Args:
        layout: tiles of 64 x 64, contiguous or in slabs of 16, rows in their own order.
        split_tiles: pairs with more tiles are cut into about equal chunks of at most so many; 0 never cuts.

    Raises:
        UnfitLayoutError: other layouts; tiles hold keys that no query sees.
    """
    config = layout.config
    if (config.block_m, config.block_n) != SMALL_TILE or config.slab not in (None, 16) or layout.row_order is not None:
        raise UnfitLayoutError("pairs of row blocks have tiles of 64 x 64, contiguous or in slabs of 16, in order")
    check_reads(layout, slabs_and_reads(layout)[1])
    per_tile = config.slabs_per_tile
    parts, slabs = _slabs(layout)
    blocks = -(-layout.row_blocks // 2)
    kind, chunks, tiles = _kinds(slabs, layout.patterns * blocks, per_tile, split_tiles)
    order = torch.argsort(slabs.pair * 4 + kind, stable=True)
    group = (slabs.pair * 4 + kind)[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(group, group)
    tile = (tiles.flatten().cumsum(0) - tiles.flatten())[group] + torch.div(rank, per_tile, rounding_mode="floor")
    slot = torch.remainder(rank, per_tile)
    count = int(tiles.sum())
    columns = torch.full((count, per_tile), -1, dtype=torch.int64, device=order.device)
    columns[tile, slot] = slabs.column[order]
    numbers = torch.full((count, 2, per_tile), _NOTHING, dtype=torch.int64, device=order.device)
    numbers[tile, :, slot] = slabs.bits[order]
    covered = (parts != 0).any(2)[numbers].any(2).flatten(1).sum(1)
    placed = _placed(tiles, chunks, covered)
    bitmaps, number = _bitmaps(parts, numbers[placed.tile], per_tile)
    tile_bitmap = _by_half(placed, number.view(count, 2))
    items, item_ptr, most = _items(placed, chunks.cpu(), layout.patterns, blocks)
    items[:, 7:9] = tile_bitmap.cpu()[items[:, 1].long()]
    columns = torch.nn.functional.pad(columns[placed.tile], (0, 0, 0, 2), value=-1)
    return TileLists(
        pattern_of=layout.pattern_of.contiguous(),
        items=items,
        item_ptr=item_ptr,
        tile_columns=_coded(columns, config.slab or 0, past_the_end(layout.kv_len)).int().contiguous(),
        tile_bitmap=tile_bitmap.int().contiguous(),
        bitmaps=bitmaps.contiguous(),
        row_order=layout.pattern_of.new_empty(0),
        ranges=layout.pattern_of.new_empty(0),
        aside=layout.pattern_of.new_empty(0),
        block_m=2 * config.block_m,
        block_n=config.block_n,
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        slab=config.slab or 0,
        row_step=1,
        column_step=1,
        chunks=most,
        has_full=bool((items[:, 2] < items[:, 3]).any()),
        paired=True,
    )


class _Slabs(NamedTuple):
    """Slabs of pairs in order, `n` of them; contiguous tiles are slabs as wide as a tile.

    Attributes:
        pair: int64 `[n]`, of all patterns.
        column: int64 `[n]`, the first.
        bits: int64 `[n, 2]`, what each of the two row blocks keeps of it.
    """

    pair: Tensor
    column: Tensor
    bits: Tensor


def _slabs(layout: Layout) -> tuple[Tensor, _Slabs]:
    """Distinct bits of slabs, int32 `[n, 64, 4]` as `TileLists.bitmaps`, first none and all; and the slabs."""
    per_tile, slab = layout.config.slabs_per_tile, layout.config.slab_columns
    words = accumulator_order(layout.bitmaps, layout.config.block_n)
    width = slab // 4
    own = torch.stack([(words >> (width * s)) & ((1 << width) - 1) for s in range(per_tile)], 1).flatten(0, 1)
    known = torch.stack([torch.zeros_like(own[0]), torch.full_like(own[0], (1 << width) - 1)])
    distinct, number = shared(torch.cat([known, own]))
    # The two known ones to the front.
    front = torch.full((len(distinct),), 2, device=number.device)
    front[number[0]], front[number[1]] = _NOTHING, _EVERYTHING
    order = torch.argsort(front, stable=True)
    number = torch.argsort(order)[number][2:].view(-1, per_tile)

    base = layout.tile_base.long()
    along = torch.arange(per_tile, device=base.device) * slab
    columns = base[:, None] + along
    columns[base < 0] = layout.gathered.long()[~base[base < 0]]
    bits = torch.full_like(columns, _EVERYTHING)
    partial = layout.tile_bitmap >= 0
    bits[partial] = number[layout.tile_bitmap[partial].long()]
    live = (columns >= 0) & (columns < layout.kv_len) & (bits != _NOTHING)
    tile, slot = live.nonzero(as_tuple=True)
    owner = layout.tile_row_block()[tile]
    pattern = torch.div(owner, layout.row_blocks, rounding_mode="floor")
    block = torch.remainder(owner, layout.row_blocks)
    pair = pattern * -(-layout.row_blocks // 2) + torch.div(block, 2, rounding_mode="floor")
    across = -(-layout.kv_len // slab)
    found, place = torch.unique(
        pair * across + torch.div(columns[tile, slot], slab, rounding_mode="floor"), return_inverse=True
    )
    both = torch.full((len(found), 2), _NOTHING, dtype=torch.int64, device=base.device)
    both[place, torch.remainder(block, 2)] = bits[tile, slot]
    return distinct[order], _Slabs(
        torch.div(found, across, rounding_mode="floor"), torch.remainder(found, across) * slab, both
    )


def _kinds(slabs: _Slabs, pairs: int, per_tile: int, split_tiles: int) -> tuple[Tensor, Tensor, Tensor]:
    """Kind of tile that each slab goes to, chunks of each pair, and tiles of each kind, int64 `[pairs, 4]`."""
    first, second = slabs.bits.unbind(1)
    kind = torch.where(first == _NOTHING, _SECOND, torch.where(second == _NOTHING, _FIRST, _BOTH))
    kind = torch.where((slabs.bits == _EVERYTHING).all(1), _WHOLE, kind)
    group = slabs.pair * 4 + kind
    count = torch.bincount(group, minlength=4 * pairs)
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[group[order]]
    # Few numbers, in many small steps: on the CPU.
    count = count.view(pairs, 4).cpu()
    total = count.sum(1)
    whole = count[:, _WHOLE] - torch.remainder(count[:, _WHOLE], per_tile)
    chunks = parts_of(_tiles(total, per_tile), split_tiles)
    apart = _apart(count, whole, chunks, per_tile)
    kept = torch.stack([apart[:, 0], apart[:, 1], count[:, _BOTH], whole], 1)
    tiles = _tiles(torch.stack([apart[:, 0], apart[:, 1], total - apart.sum(1) - whole, whole], 1), per_tile)
    # What has no tile gets one that keeps nothing.
    tiles[:, _BOTH] += tiles.sum(1) == 0
    chunks = torch.minimum(chunks, tiles[:, _BOTH:].sum(1))
    moved = (kind != _BOTH) & (rank >= kept.flatten().to(rank.device)[group])
    return torch.where(moved, _BOTH, kind), chunks.to(rank.device), tiles.to(rank.device)


def _tiles(slabs: Tensor, per_tile: int) -> Tensor:
    return torch.div(slabs + per_tile - 1, per_tile, rounding_mode="floor")


def _apart(count: Tensor, whole: Tensor, chunks: Tensor, per_tile: int) -> Tensor:
    """How many slabs of the first and of the second row block alone get tiles of their own, int64 `[pairs, 2]`.

    The others join tiles of both, where there may be room. Every chunk needs a tile of both to begin with, and one to
    go on with behind those that are apart; of which one row block may not have many more than the other.

    Args:
        count: int64 `[pairs, 4]`, slabs of each kind.
        whole: int64 `[pairs]`, of those that both keep whole, the ones that fill tiles.
        chunks: int64 `[pairs]`.
    """
    uneven = torch.where(chunks > 1, chunks, MOST_LEFT_OUT - 1)
    sizes = count[:, _FIRST], count[:, _SECOND]
    options = []
    for n, other in (sizes, sizes[::-1]):
        even = torch.minimum(n, (_tiles(other, per_tile) + uneven) * per_tile)
        options.append((n, n - torch.remainder(n, per_tile), (n - per_tile).clamp(min=0), even, n * 0))
    best = torch.full((len(count),), float("inf"))
    chosen = torch.zeros(len(count), 2, dtype=torch.int64)
    for first, second in itertools.product(*options):
        both = _tiles(count.sum(1) - whole - first - second, per_tile) + _tiles(whole, per_tile)
        first_tiles, second_tiles = _tiles(first, per_tile), _tiles(second, per_tile)
        apart = first_tiles + second_tiles
        serves = (apart == 0) | ((both >= 2 * chunks) & ((first_tiles - second_tiles).abs() <= uneven))
        cost = torch.where(serves, apart + 2 * both + _COPY_COST * (apart + both), float("inf"))
        chosen = torch.where((cost < best)[:, None], torch.stack([first, second], 1), chosen)
        best = torch.minimum(best, cost)
    return chosen


class _Placed(NamedTuple):
    """All tiles in the order of jobs; `n` of them, in `i` items.

    Attributes:
        tile: int64 `[n]`, which tile, of those by pair, kind and number among these.
        kind, item: int64 `[n]`.
        tiles: int64 `[i, 4]`, those of each kind of an item.
        whole_first: bool `[i]`, whether an item begins with a tile that both keep whole.
    """

    tile: Tensor
    kind: Tensor
    item: Tensor
    tiles: Tensor
    whole_first: Tensor


def _placed(tiles: Tensor, chunks: Tensor, covered: Tensor) -> _Placed:
    """Share out each pair's tiles, `[pairs, 4]`, to its chunks, given the rows that keep something of each tile."""
    flat = tiles.flatten()
    group = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), flat)
    rank = torch.arange(len(group), device=flat.device) - (flat.cumsum(0) - flat)[group]
    pair, kind = torch.div(group, 4, rounding_mode="floor"), torch.remainder(group, 4)
    # Those of both row blocks are shared out together: each chunk gets one.
    of_both = tiles[:, _BOTH] + tiles[:, _WHOLE]
    among = torch.where(kind == _WHOLE, rank + tiles[pair, _BOTH], rank)
    total = torch.where(kind >= _BOTH, of_both[pair], flat[group])
    chunk = torch.div(among * chunks[pair], total, rounding_mode="floor")
    item = (chunks.cumsum(0) - chunks)[pair] + chunk
    first = best_first(item, torch.where(kind >= _BOTH, covered, -1), kind == _WHOLE)
    # Those apart by turns, by their number in the chunk.
    number = rank - torch.div(chunk * flat[group] + chunks[pair] - 1, chunks[pair], rounding_mode="floor")
    most = int(flat.max()) + 1
    place = torch.where(kind < _BOTH, 2 * number + kind, 2 * most + kind)
    place = torch.where(first, -1, place)
    order = torch.argsort(item * (2 * most + 8) + place, stable=True)
    count = torch.bincount(item * 4 + kind, minlength=4 * int(chunks.sum())).view(-1, 4)
    whole_first = torch.zeros(len(count), dtype=torch.bool, device=flat.device)
    whole_first[item[first]] = kind[first] == _WHOLE
    return _Placed(order, kind[order], item[order], count, whole_first)


def _by_half(placed: _Placed, number: Tensor) -> Tensor:
    """Bitmaps of the tiles that each half computes, in its own order from an item's begin: int64 `[n + 3, 2]`.

    Args:
        number: int64 `[n, 2]`, for each place.
    """
    total = placed.tiles.sum(1)
    begin = (total.cumsum(0) - total)[placed.item]
    out = torch.zeros(len(number) + 3, 2, dtype=torch.int64, device=number.device)
    for half, other in enumerate((_SECOND, _FIRST)):
        mine = placed.kind != other
        before = mine.long().cumsum(0) - mine.long()
        out[(begin + before - before[begin])[mine], half] = number[mine, half]
    return out


def _items(placed: _Placed, chunks: Tensor, patterns: int, blocks: int) -> tuple[Tensor, Tensor, int]:
    """`TileLists.items` without bitmaps, `item_ptr`, and the most chunks of a pattern's split pairs; on the CPU."""
    count, whole_first = placed.tiles.cpu(), placed.whole_first.cpu()
    pair = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
    chunk = torch.arange(len(pair)) - (chunks.cumsum(0) - chunks)[pair]
    end = count.sum(1).cumsum(0)
    begin = end - count.sum(1)
    apart = count[:, _FIRST] + count[:, _SECOND]
    # The tile with which a warpgroup goes on after those it leaves out is one that may have bits.
    rest = torch.maximum(count[:, _BOTH] - (~whole_first).long(), (apart > 0).long())
    split = torch.where(chunks > 1, chunks, 0).view(patterns, blocks)
    first_chunk = (split.cumsum(1) - split).flatten()
    zero = torch.zeros_like(chunk)
    fields = [pair % blocks, begin, begin + 1 + apart + rest, end, chunks[pair], first_chunk[pair], chunk, zero, zero,
              count[:, _FIRST], count[:, _SECOND]]  # fmt: skip
    pattern = torch.div(pair, blocks, rounding_mode="floor")
    item_ptr = torch.nn.functional.pad(torch.bincount(pattern, minlength=patterns).cumsum(0), (1, 0)).int()
    return torch.stack(fields, 1).int(), item_ptr, int(split.sum(1).max())


def _bitmaps(parts: Tensor, numbers: Tensor, per_tile: int) -> tuple[Tensor, Tensor]:
    """Distinct bitmaps, int32 `[U, 64, 4]`, and their numbers `[2 n]`, of tiles with such slabs `[n, 2, per_tile]`."""
    distinct, number = torch.unique(numbers.flatten(0, 1), dim=0, return_inverse=True)
    width = 16 // per_tile
    words = parts[distinct[:, 0]]
    for slot in range(1, per_tile):
        words = words | (parts[distinct[:, slot]] << (width * slot))
    return words, number


def _coded(columns: Tensor, slab: int, past: int) -> Tensor:
    """`TileLists.tile_columns` of first columns of slabs, -1 in slots that are not used."""
    used = (columns >= 0).sum(1, keepdim=True)
    # Unused slots repeat the tile's slabs from the first; tiles without any lie past the end.
    columns = columns.gather(1, torch.arange(columns.shape[1], device=columns.device) % used.clamp(min=1))
    columns = torch.where(used > 0, columns, past)
    if not slab:
        return columns
    follow = (columns == columns[:, :1] + slab * torch.arange(columns.shape[1], device=columns.device)).all(1)
    return torch.where((follow & (used[:, 0] > 0))[:, None], -1 - columns[:, :1], columns)
