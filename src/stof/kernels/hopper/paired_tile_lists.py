"""Two row blocks of 64 rows in one work tile of the Hopper kernel, a warpgroup for each, with tiles of its own.

Tiles that both row blocks need are copied once. A warpgroup skips tiles that only the other one needs. So the tensor
cores do no more work than for single row blocks, and the L2 cache is read less.

An item begins with a tile that both compute, and tiles that both keep in full come last. Between these, each class of
tiles (needed by the first, by the second, by both) is spread evenly, and the last tile with a bitmap is again one of
both. While a warpgroup skips tiles, it holds one pipeline stage for the V of its previous tile. So it may skip at most
`MOST_SKIPPED` tiles in a row, and computes the next one, of which it keeps nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.config import SMALL_TILE
from stof.kernels.hopper.tile_lists import (
    TILE_ITEM,
    TileLists,
    check_reads,
    choose_first_tile,
    oob_column,
    slabs_and_reads,
)
from stof.kernels.packed_integers import pair_bitmap, run_column
from stof.layout import Layout
from stof.layout.builders.build import deduplicate
from stof.layout.layout import gathered_row

# The least number of stages of K and V, less one.
MOST_SKIPPED = 3
# A tile's copies, in computed tiles of one warpgroup: a guess.
_COPY_COST = 0.5
# Indices of the slab bitmaps that keep nothing, and everything.
_NOTHING, _EVERYTHING = 0, 1
# Row blocks of an item. Classes of tiles: class w - 1 is needed by the row blocks whose bits are set in w; tiles that
# both keep in full are the last class.
_ROW_BLOCKS = 2
_CLASSES = 2**_ROW_BLOCKS
_NEEDED_BY_BOTH, _FULL_IN_BOTH = _CLASSES - 2, _CLASSES - 1
# Resolution of the positions of tiles within an item.
_FINE = 2**20


def make_paired_lists(layout: Layout) -> TileLists:
    """Prepare a layout; as `make_tile_lists`, which see. No row block is split.

    Args:
        layout: tiles of 64 x 64, contiguous or in slabs of 16, rows in their own order.

    Raises:
        UnfitLayoutError: other layouts; tiles hold keys that no query sees.
    """
    config = layout.config
    if (config.block_m, config.block_n) != SMALL_TILE or config.slab not in (None, 16) or layout.row_order is not None:
        raise UnfitLayoutError("pairs of row blocks have tiles of 64 x 64, contiguous or in slabs of 16, in order")
    check_reads(layout, slabs_and_reads(layout)[1])
    per_tile = config.slabs_per_tile
    parts, slabs = _slabs(layout)
    blocks = -(-layout.row_blocks // _ROW_BLOCKS)
    tile_class, tiles = _tile_classes(slabs, layout.patterns * blocks, per_tile)
    order = torch.argsort(slabs.item * _CLASSES + tile_class, stable=True)
    group = (slabs.item * _CLASSES + tile_class)[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(group, group)
    tile = (tiles.flatten().cumsum(0) - tiles.flatten())[group] + torch.div(rank, per_tile, rounding_mode="floor")
    slot = torch.remainder(rank, per_tile)
    count = int(tiles.sum())
    columns = torch.full((count, per_tile), -1, dtype=torch.int64, device=order.device)
    columns[tile, slot] = slabs.column[order]
    numbers = torch.full((count, _ROW_BLOCKS, per_tile), _NOTHING, dtype=torch.int64, device=order.device)
    numbers[tile, :, slot] = slabs.bits[order]
    covered = (parts != 0).any(2)[numbers].any(2).flatten(1).sum(1)
    placed = _placed(tiles, covered)
    bitmaps, number = _bitmaps(parts, numbers[placed.order], per_tile)
    tile_bitmap, skipped = _by_row_block(placed, number.view(count, _ROW_BLOCKS))
    items = _items(placed, skipped, tile_bitmap, blocks)
    item_ptr = torch.arange(layout.patterns + 1, dtype=torch.int32) * blocks
    columns = torch.nn.functional.pad(columns[placed.order], (0, 0, 0, 2), value=-1)
    return TileLists(
        pattern_of=layout.pattern_of.contiguous(),
        items=items,
        item_ptr=item_ptr,
        tile_columns=_coded(columns, config.slab or 0, oob_column(layout.kv_len)).int().contiguous(),
        tile_bitmap=tile_bitmap.int().contiguous(),
        bitmaps=bitmaps.contiguous(),
        row_order=layout.pattern_of.new_empty(0),
        ranges=layout.pattern_of.new_empty(0),
        compacted_keys=layout.pattern_of.new_empty(0),
        block_m=_ROW_BLOCKS * config.block_m,
        block_n=config.block_n,
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        slab=config.slab or 0,
        chunks=0,
        has_full=bool((items[:, TILE_ITEM.partial_end] < items[:, TILE_ITEM.end]).any()),
        paired=True,
    )


class _Slabs(NamedTuple):
    """Slabs of items in order, `n` of them; contiguous tiles are slabs as wide as a tile.

    Attributes:
        item: int64 `[n]`, of all patterns.
        column: int64 `[n]`, the first.
        bits: int64 `[n, row blocks]`, what each of the item's row blocks keeps of it.
    """

    item: Tensor
    column: Tensor
    bits: Tensor


def _slabs(layout: Layout) -> tuple[Tensor, _Slabs]:
    """Distinct bits of slabs, int32 `[n, 64, 4]` as `TileLists.bitmaps`, first none and all; and the slabs."""
    per_tile, slab = layout.config.slabs_per_tile, layout.config.slab_columns
    words = accumulator_order(layout.bitmaps, layout.config.block_n)
    width = slab // 4
    slab_words = torch.stack([(words >> (width * s)) & ((1 << width) - 1) for s in range(per_tile)], 1).flatten(0, 1)
    known = torch.stack([torch.zeros_like(slab_words[0]), torch.full_like(slab_words[0], (1 << width) - 1)])
    distinct, number = deduplicate(torch.cat([known, slab_words]))
    # The two known ones to the front.
    front = torch.full((len(distinct),), 2, device=number.device)
    front[number[0]], front[number[1]] = _NOTHING, _EVERYTHING
    order = torch.argsort(front)
    number = torch.argsort(order)[number][2:].view(-1, per_tile)

    base = layout.tile_base.long()
    along = torch.arange(per_tile, device=base.device) * slab
    columns = base[:, None] + along
    columns[base < 0] = layout.gathered.long()[gathered_row(base[base < 0])]
    bits = torch.full_like(columns, _EVERYTHING)
    partial = layout.tile_bitmap >= 0
    bits[partial] = number[layout.tile_bitmap[partial].long()]
    live = (columns >= 0) & (columns < layout.kv_len) & (bits != _NOTHING)
    tile, slot = live.nonzero(as_tuple=True)
    owner = layout.tile_row_block()[tile]
    pattern = torch.div(owner, layout.row_blocks, rounding_mode="floor")
    block = torch.remainder(owner, layout.row_blocks)
    item = pattern * -(-layout.row_blocks // _ROW_BLOCKS) + torch.div(block, _ROW_BLOCKS, rounding_mode="floor")
    across = -(-layout.kv_len // slab)
    item_columns, place = torch.unique(
        item * across + torch.div(columns[tile, slot], slab, rounding_mode="floor"), return_inverse=True
    )
    both = torch.full((len(item_columns), _ROW_BLOCKS), _NOTHING, dtype=torch.int64, device=base.device)
    both[place, torch.remainder(block, _ROW_BLOCKS)] = bits[tile, slot]
    return distinct[order], _Slabs(
        torch.div(item_columns, across, rounding_mode="floor"), torch.remainder(item_columns, across) * slab, both
    )


def _tile_classes(slabs: _Slabs, items: int, per_tile: int) -> tuple[Tensor, Tensor]:
    """Class of tile that each slab goes to, and tiles of each class, int64 `[items, classes]`."""
    who = torch.arange(_ROW_BLOCKS, device=slabs.bits.device)
    tile_class = ((slabs.bits != _NOTHING).long() << who).sum(1) - 1
    tile_class = torch.where((slabs.bits == _EVERYTHING).all(1), _FULL_IN_BOTH, tile_class)
    group = slabs.item * _CLASSES + tile_class
    count = torch.bincount(group, minlength=_CLASSES * items)
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (count.cumsum(0) - count)[group[order]]
    count = count.view(items, _CLASSES)
    left = torch.remainder(count, per_tile)
    moved = left * _joining(left, per_tile)
    kept = count - moved
    kept[:, _NEEDED_BY_BOTH] += moved.sum(1)
    tiles = torch.div(kept + per_tile - 1, per_tile, rounding_mode="floor")
    # An item without tiles gets one that keeps nothing.
    tiles[:, _NEEDED_BY_BOTH] += tiles.sum(1) == 0
    joins = (tile_class != _NEEDED_BY_BOTH) & (rank >= kept.flatten()[group])
    return torch.where(joins, _NEEDED_BY_BOTH, tile_class), tiles


def _joining(left: Tensor, per_tile: int) -> Tensor:
    """The classes whose slabs that fill no tile join the tiles needed by both, so that tiles cost least.

    Args:
        left: int64 `[items, classes]`, slabs that fill no tile, fewer than `per_tile`.
    """
    alike, number = torch.unique(left.cpu(), dim=0, return_inverse=True)
    options = (torch.arange(2**_NEEDED_BY_BOTH)[:, None] >> torch.arange(_CLASSES)) & 1
    # Full slabs always join: a full tile has no bitmap, so it cannot leave a slot unused.
    options[:, _FULL_IN_BOTH] = 1
    needed_by = torch.tensor([(w + 1).bit_count() for w in range(_NEEDED_BY_BOTH)] + [_ROW_BLOCKS] * 2)
    joined = (alike[:, None] * options).sum(2) + alike[:, _NEEDED_BY_BOTH, None]
    together = torch.div(joined + per_tile - 1, per_tile, rounding_mode="floor")
    apart = (alike[:, None] > 0) & (options == 0)
    apart[:, :, _NEEDED_BY_BOTH] = False
    cost = together * (needed_by[_NEEDED_BY_BOTH] + _COPY_COST) + (apart * (needed_by + _COPY_COST)).sum(2)
    return options[cost.argmin(1)][number].to(left.device)


class _Placed(NamedTuple):
    """All tiles in the order of items; `n` of them, in `j` items.

    Attributes:
        order: int64 `[n]`, which tile, of those by item, class and number among these.
        item: int64 `[n]`.
        computed: bool `[n, row blocks]`, which row blocks compute it.
        begin, with_bits, tiles: int64 `[j]`, an item's first tile, how many tiles have bits, and how many there are.
    """

    order: Tensor
    item: Tensor
    computed: Tensor
    begin: Tensor
    with_bits: Tensor
    tiles: Tensor


def _placed(tiles: Tensor, covered: Tensor) -> _Placed:
    """Put each item's tiles, `[items, classes]`, in order, given the rows that keep something of each."""
    items = len(tiles)
    flat = tiles.flatten()
    group = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), flat)
    rank = torch.arange(len(group), device=flat.device) - (flat.cumsum(0) - flat)[group]
    item, tile_class = torch.div(group, _CLASSES, rounding_mode="floor"), torch.remainder(group, _CLASSES)
    shared_one = tile_class >= _NEEDED_BY_BOTH
    begins = shared_one | ~(tiles[:, _NEEDED_BY_BOTH:].sum(1) > 0)[item]
    first = choose_first_tile(item, torch.where(begins, covered, -1), tile_class == _FULL_IN_BOTH)
    # Another tile needed by both is the last one with a bitmap.
    closing = (tile_class == _NEEDED_BY_BOTH) & ~first
    last = torch.full((items,), -1, device=flat.device).scatter_reduce(0, item[closing], rank[closing], "amax")
    closing &= rank == last[item]
    place = torch.div((2 * rank + 1) * _FINE, 2 * flat[group], rounding_mode="floor") * _CLASSES
    place += tile_class
    place = torch.where(
        closing, _FINE * _CLASSES, torch.where(tile_class == _FULL_IN_BOTH, _FINE * _CLASSES + 1, place)
    )
    place = torch.where(first, -1, place)
    order = torch.argsort(item * (_FINE * _CLASSES + 3) + place, stable=True)
    item, tile_class, first, shared_one = item[order], tile_class[order], first[order], shared_one[order]

    count = tiles.sum(1)
    begin = count.cumsum(0) - count
    with_bits = torch.bincount(item[(tile_class != _FULL_IN_BOTH) | first], minlength=items)
    who = torch.arange(_ROW_BLOCKS, device=flat.device)
    computed = ((((tile_class + 1)[:, None] >> who) & 1) > 0) | shared_one[:, None]
    computed[begin] = True
    # Where only one row block needs the last tile with a bitmap, the full tile behind it takes a bitmap as well; where
    # there is none, both compute that tile.
    lacks = ~shared_one[begin + with_bits - 1]
    more = lacks & (with_bits < count)
    computed[(begin + with_bits - 1)[lacks & ~more]] = True
    with_bits = with_bits + more.long()
    # Neither skips more than `MOST_SKIPPED` in a row.
    skipped = torch.arange(len(item), device=flat.device)[:, None] - _last_computed(computed)
    computed |= (skipped > 0) & (torch.remainder(skipped, MOST_SKIPPED + 1) == 0)
    return _Placed(order, item, computed, begin, with_bits, count)


def _last_computed(computed: Tensor) -> Tensor:
    """The last place up to each at which a row block computes a tile, int64 `[n, row blocks]`, from the first on."""
    at = torch.arange(len(computed), device=computed.device)[:, None]
    return torch.where(computed, at, -1).cummax(0).values


def _by_row_block(placed: _Placed, number: Tensor) -> tuple[Tensor, Tensor]:
    """`TileLists.tile_bitmap`, int64 `[n + 3, row blocks]`, and tiles that each skips, `[j, row blocks]`.

    Args:
        number: int64 `[n, row blocks]`, bitmaps for each place.
    """
    computed = placed.computed
    before = computed.long().cumsum(0) - computed.long()
    entry = placed.begin[placed.item, None] + before - before[placed.begin][placed.item]
    gap = torch.zeros_like(number)
    gap[1:] = torch.arange(len(number) - 1, device=number.device)[:, None] - _last_computed(computed)[:-1]
    gap[placed.begin] = 0
    out = number.new_zeros(len(number) + 3, number.shape[1])
    for row_block in range(number.shape[1]):
        mine = computed[:, row_block]
        out[entry[mine, row_block], row_block] = pair_bitmap(number, gap)[mine, row_block]
    skipped = torch.zeros(len(placed.tiles), number.shape[1], dtype=torch.int64, device=number.device)
    return out, skipped.index_add_(0, placed.item, (~computed).long())


def _items(placed: _Placed, skipped: Tensor, tile_bitmap: Tensor, blocks: int) -> Tensor:
    """`TileLists.items`, on the CPU."""
    begin, end = placed.begin, placed.begin + placed.tiles
    item = torch.arange(len(begin), device=begin.device)
    fields = torch.stack([item % blocks, begin, begin + placed.with_bits, end, item * 0 + 1, item * 0, item * 0], 1)
    return torch.cat([fields, tile_bitmap[begin], skipped], 1).int().cpu()


def _bitmaps(parts: Tensor, numbers: Tensor, per_tile: int) -> tuple[Tensor, Tensor]:
    """Distinct bitmaps, int32 `[U, 64, 4]`, and numbers of tiles with such slabs `[n, row blocks, per_tile]`."""
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
    return torch.where((follow & (used[:, 0] > 0))[:, None], run_column(columns[:, :1]), columns)
