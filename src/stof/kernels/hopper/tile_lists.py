"""Tile lists: a layout in the form that the Hopper kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.common import chunks_of
from stof.kernels.hopper.config import FP8_TILE, ROW_BLOCKS, RUN, SMALL_TILE
from stof.kernels.packed_integers import compacted_column, run_column
from stof.layout import Layout
from stof.layout.layout import gathered_row
from stof.layout.orders.named import by_remainder

# Keys of a group within which the transposition of V permutes (`fp8/transpose_v.py`).
ACROSS = 16
# See `exact_tiles`.
_MOST_EXACT = 4


def oob_column(kv_len: int) -> int:
    """Return the first column of padding tiles, past the last key: TMA fills them with zeros and reads nothing.

    A multiple of 16: bias tiles and transposed V begin there too, and TMA faults at other offsets along a row.
    """
    return -(-kv_len // ACROSS) * ACROSS


class TileItemFields(NamedTuple):
    """Columns of `TileLists.items`; for their meaning see `tile_scheduler.WorkFields`.

    Of pairs of row blocks, `bitmap` and `pair_skipped` are two fields each.
    """

    row_block: int = 0
    begin: int = 1
    partial_end: int = 2
    end: int = 3
    parts: int = 4
    slot: int = 5
    chunk: int = 6
    bitmap: int = 7
    pair_skipped: int = 9


class TileRangeFields(NamedTuple):
    """Columns of `TileLists.ranges`, which kernels write; for their meaning see `tile_scheduler.WorkFields`."""

    begin: int = 0
    partial_end: int = 1
    end: int = 2
    bitmap: int = 3
    nan_or_zero: int = 4


TILE_ITEM = TileItemFields()
TILE_RANGE = TileRangeFields()


@dataclass(frozen=True, eq=False)
class TileLists:
    """A layout as the Hopper kernel reads it. `P` patterns, `I` items, `T` tiles, `U` bitmaps.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`, which pattern (a mask of one head) each batch entry and head has.
        items: int32 `[I, 8]` on the CPU, one work tile for every head of its pattern: `row_block`; tiles `begin` to
            `partial_end`, and full ones to `end`, the best first tile first (`order_first_tiles`); `parts`, chunks of
            the row block; `slot` of its first chunk; `chunk`; `bitmap` of the first tile. For pairs `[I, 11]`: the
            bitmaps of the first tile for both row blocks, and how many tiles each row block skips.
        item_ptr: int32 `[P + 1]` on the CPU, where the items of each pattern begin.
        tile_columns: int32 `[T + 2, slabs of a tile]`, first column of each slab, or a run (`packed_integers.py`).
            Without slabs `[T + 2, 1]`, the first column of the tile.
        tile_bitmap: int32 `[T + 3]`, row of `bitmaps`. For pairs `[T + 3, 2]`, packed integers: the bitmaps of the
            tiles that each row block computes, in order from the item's first tile, and how many it skips before each.
        bitmaps: int32 `[U, block_m, 4]`, for pairs `[U, 64, 4]`; bit `2 j + b` of word `q` is column `8 j + 2 q + b`.
        row_order: int32 `[P, q_len]`, empty when rows keep their order.
        ranges: int32 `[I, 5]`, fields as `TileRangeFields`, for tiles that are made on the device: every call reads the
            items' tiles here, and `items` only serves to order the work list. Empty otherwise.
        compacted_keys: int32 `[mask_batch or 1, mask_heads or 1, n]`, keys that every call first copies to consecutive
            rows, -1 for zeros; n is a multiple of block_n. Empty when all tiles are of the keys themselves.
        block_m, block_n, q_len, kv_len: sizes of the layout.
        slab: columns of a slab; block_n where there are compacted keys; 0 where every tile is contiguous or evenly
            spaced columns of the keys themselves.
        row_step: distance of neighbouring rows: `i`, `i + row_step`, ..., residue after residue.
        column_step: distance of neighbouring columns of evenly spaced tiles.
        chunks: total of the chunks of split row blocks in one pattern, the largest of all patterns.
        has_full: whether there are full tiles.
        exact_tiles: number of tiles at the start of an item that have no lazy rescaling, see `exact_tiles`.
        paired: whether a work tile is two row blocks of 64 rows, each with tiles of its own (`paired_tile_lists.py`).
    """

    pattern_of: Tensor
    items: Tensor
    item_ptr: Tensor
    tile_columns: Tensor
    tile_bitmap: Tensor
    bitmaps: Tensor
    row_order: Tensor
    ranges: Tensor
    compacted_keys: Tensor
    block_m: int
    block_n: int
    q_len: int
    kv_len: int
    slab: int = 0
    row_step: int = 1
    column_step: int = 1
    chunks: int = 0
    has_full: int = 1
    exact_tiles: int = 1
    paired: int = 0


def make_tile_lists(layout: Layout, split_tiles: int = 0, zero_unseen: bool = False) -> TileLists:
    """Prepare a layout.

    Args:
        layout: row blocks of 64, 128 or 192 rows and tiles of 64 or 128 columns: contiguous ones, gathered in slabs of
            8 or 16, or, where gathered one by one, with compacted columns or evenly spaced.
        split_tiles: row blocks with more tiles are cut into equal chunks of at most so many; 0 never cuts.
        zero_unseen: contiguous tiles with keys that no query sees read a copy, in which these keys are zeros.

    Raises:
        UnfitLayoutError: other sizes; columns or rows lie in a way that TMA cannot copy; tiles hold keys that no query
            sees, which are not zeroed.
    """
    config = layout.config
    if config.block_m not in ROW_BLOCKS or config.block_n not in (64, 128):
        raise UnfitLayoutError(
            f"tiles of {config.block_m} x {config.block_n} do not fit the Hopper kernel's warpgroups"
        )
    pointers = layout.row_block_ptr.long().cpu()
    partial = layout.partial_count.long().cpu()
    columns, compacted, slab, column_step = _zeroed_columns(layout) if zero_unseen else _columns(layout)
    bitmaps = accumulator_order(layout.bitmaps, config.block_n)
    # Row blocks without a tile get one that keeps nothing; full tiles may come first in an item and then need a bitmap.
    nothing, everything = len(bitmaps), len(bitmaps) + 1
    bitmaps = torch.cat([bitmaps, torch.zeros_like(bitmaps[:1]), torch.full_like(bitmaps[:1], -1)])
    full = layout.tile_bitmap < 0
    tile_bitmap = torch.where(full, everything, layout.tile_bitmap)
    dummy = len(columns)
    items, item_ptr, chunks = split_items(pointers, partial, layout.patterns, split_tiles, dummy)
    exact = 1
    if dummy and ((config.block_m, config.block_n) == SMALL_TILE or not bool(full.any())):
        # Here partial tiles have lazy rescaling too (`consumer`).
        rows = (bitmaps != 0).any(2)
        items, order = order_first_tiles(items, rows.sum(1)[tile_bitmap.long()], full)
        columns, tile_bitmap = columns[order], tile_bitmap[order]
        exact = exact_tiles(items, rows, tile_bitmap.long())
    spare = columns.new_full((1, columns.shape[1]), oob_column(layout.kv_len))
    columns = torch.cat([columns, spare, spare])
    tile_bitmap = torch.cat([tile_bitmap, tile_bitmap.new_tensor([nothing, nothing, nothing])])

    items[:, TILE_ITEM.bitmap] = tile_bitmap.cpu()[items[:, TILE_ITEM.begin].long()]
    return TileLists(
        pattern_of=layout.pattern_of.contiguous(),
        items=items,
        item_ptr=item_ptr,
        tile_columns=columns.int().contiguous(),
        tile_bitmap=tile_bitmap.int().contiguous(),
        bitmaps=bitmaps.contiguous(),
        row_order=layout.pattern_of.new_empty(0) if layout.row_order is None else layout.row_order.contiguous(),
        ranges=layout.pattern_of.new_empty(0),
        compacted_keys=compacted,
        block_m=config.block_m,
        block_n=config.block_n,
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        slab=slab,
        row_step=_row_step(layout),
        column_step=column_step,
        chunks=chunks,
        has_full=bool((items[:, TILE_ITEM.partial_end] < items[:, TILE_ITEM.end]).any()),
        exact_tiles=exact,
    )


def make_fp8_lists(layout: Layout, split_tiles: int = 0) -> TileLists:
    """Prepare a layout for 8-bit operands; as `make_tile_lists`.

    Raises:
        UnfitLayoutError: also sizes other than `FP8_TILE`, rows in another order, columns that are neither contiguous
            nor compacted, and tiles that do not begin at a multiple of `ACROSS`.
    """
    config = layout.config
    if (config.block_m, config.block_n) != FP8_TILE or not (config.slab is None or config.compact_columns):
        raise UnfitLayoutError("operands of 8 bits take whole tiles of {} x {}".format(*FP8_TILE))
    if layout.row_order is not None:
        raise UnfitLayoutError("operands of 8 bits take rows in their own order")
    lists = make_tile_lists(layout, split_tiles)
    if bool((lists.tile_columns % ACROSS != 0).any()):
        raise UnfitLayoutError(f"operands of 8 bits take tiles that begin at multiples of {ACROSS}")
    return lists


def _columns(layout: Layout) -> tuple[Tensor, Tensor, int, int]:
    """`tile_columns` (int64, without the spare ones), `compacted_keys`, `slab` and `column_step` of `TileLists`."""
    block_n, slab, column_step = layout.config.block_n, layout.config.slab or 0, 1
    compacted = layout.pattern_of.new_empty(0)
    if layout.config.compact_columns:
        columns, read, compacted = _compacted_columns(layout)
        slab = block_n if compacted.numel() else 0
    elif slab == 1:
        first, column_step = _evenly_spaced(layout)
        columns, slab = first[:, None], 0
        read = columns + column_step * torch.arange(block_n, device=columns.device)
    else:
        columns, read = slabs_and_reads(layout)
        slab = slab if columns.shape[1] > 1 else 0
    check_reads(layout, read)
    return columns, compacted, slab, column_step


def _zeroed_columns(layout: Layout) -> tuple[Tensor, Tensor, int, int]:
    """`_columns` of contiguous tiles. Those with keys that no query sees read a copy, in which such keys are zeros."""
    base, block_n = layout.tile_base.long(), layout.config.block_n
    if layout.config.slab is not None or bool((base < 0).any()):
        raise UnfitLayoutError("keys that no query sees become zeros in contiguous tiles only")
    seen = _seen(layout)
    pattern = torch.div(layout.tile_row_block(), layout.row_blocks, rounding_mode="floor")
    along = torch.arange(block_n, device=base.device)
    copied = ~seen[pattern[:, None], (base[:, None] + along).clamp(max=layout.kv_len)].all(1)
    if not bool(copied.any()):
        return base[:, None], layout.pattern_of.new_empty(0), 0, 1
    # Each pattern has a list of the tiles that are copied for it.
    distinct, tile = torch.stack([pattern, base], 1)[copied].unique(dim=0, return_inverse=True)
    owner, first = distinct.T.contiguous()
    place = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
    read = first[:, None] + along
    exists = seen[owner[:, None], read.clamp(max=layout.kv_len)] & (read < layout.kv_len)
    keys = base.new_full((layout.patterns, int(place.max()) + 1, block_n), -1)
    keys[owner, place] = torch.where(exists, read, -1)
    columns = base.masked_scatter(copied, compacted_column(place[tile] * block_n))
    return columns[:, None], _shared(keys.flatten(1)[layout.pattern_of.long()]), block_n, 1


def check_reads(layout: Layout, read: Tensor) -> None:
    """Refuse to read keys that no query of a pattern sees: their values may be anything, and 0 * NaN is NaN.

    Args:
        read: int64 `[T, block_n]`, key columns that copies of the tiles touch; past the end they are zeros.
    """
    pattern = torch.div(layout.tile_row_block(), layout.row_blocks, rounding_mode="floor")
    if not bool(_seen(layout)[pattern[:, None], read.clamp(max=layout.kv_len)].all()):
        raise UnfitLayoutError("its tiles hold keys that no query sees, whose values may be anything", unseen_keys=True)


def _seen(layout: Layout) -> Tensor:
    """Keys that some query of a pattern sees, bool `[P, kv_len + 1]`; the last stands for all past the end."""
    pattern = torch.div(layout.tile_row_block(), layout.row_blocks, rounding_mode="floor")
    columns, live = layout.tile_columns(), layout.tile_live()
    seen = torch.zeros(layout.patterns, layout.kv_len + 1, dtype=torch.bool, device=columns.device)
    seen[pattern[:, None].expand_as(columns)[live], columns[live]] = True
    seen[:, layout.kv_len] = True
    return seen


def slabs_and_reads(layout: Layout) -> tuple[Tensor, Tensor]:
    """`TileLists.tile_columns` of contiguous tiles and slabs, and all columns they read, `[T, block_n]`."""
    base = layout.tile_base.long()
    contiguous = base >= 0
    if bool(contiguous.all()):
        return base[:, None], base[:, None] + torch.arange(layout.config.block_n, device=base.device)
    slab = layout.config.slab_columns
    slots = layout.gathered.long()
    # Unused slots repeat the tile's slabs from the first: runs stay runs, and nothing is read that no row keeps.
    used = (slots >= 0).sum(1, keepdim=True)
    slots = slots.gather(1, torch.arange(slots.shape[1], device=slots.device) % used)
    along = torch.arange(0, layout.config.block_n, slab, device=base.device)
    columns = torch.where(contiguous[:, None], base[:, None] + along, slots[gathered_row(base).clamp(min=0)])
    read = (columns[:, :, None] + torch.arange(slab, device=base.device)).flatten(1)
    halves = read.unflatten(1, (-1, RUN))
    is_run = (halves == halves[..., :1] + torch.arange(RUN, device=base.device)).all(-1)
    coded = torch.where(is_run[..., None], run_column(halves[..., :1]), columns.unflatten(1, (-1, RUN // slab)))
    return coded.flatten(1), read


def _compacted_columns(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """`TileLists.tile_columns`, all columns that tiles read, `[T, block_n]`, and `TileLists.compacted_keys`."""
    base = layout.tile_base.long()
    along = torch.arange(layout.config.block_n, device=base.device)
    read = base[:, None] + along
    lists = layout.compacted_keys()
    if lists is None:
        raise UnfitLayoutError("gathered tiles are not stretches of one list of columns")
    keys, begins = lists
    of_list = base < 0
    begin = begins[gathered_row(base[of_list])]
    columns = base.masked_scatter(of_list, compacted_column(begin))
    pattern = torch.div(layout.tile_row_block()[of_list], layout.row_blocks, rounding_mode="floor")
    # Behind the list are zeros, as behind the last key.
    padded = torch.where(keys < 0, layout.kv_len, keys)
    padded = torch.nn.functional.pad(padded, (0, len(along)), value=layout.kv_len)
    read[of_list] = padded[pattern[:, None], begin[:, None] + along]
    return columns[:, None], read, _shared(keys[layout.pattern_of.long()])


def _shared(keys: Tensor) -> Tensor:
    """`TileLists.compacted_keys` of int64 `[mask_batch, mask_heads, n]`; where all lists are alike, one is left."""
    for dim in (0, 1):
        if torch.equal(keys, keys.narrow(dim, 0, 1).expand_as(keys)):
            keys = keys.narrow(dim, 0, 1)
    return keys.int().contiguous()


def _evenly_spaced(layout: Layout) -> tuple[Tensor, int]:
    """First column of each tile, and the distance of columns, the same in all tiles."""
    columns = layout.tile_columns()
    live = columns >= 0
    pairs = live[:, 1:] & live[:, :-1]
    distances = (columns[:, 1:] - columns[:, :-1])[pairs]
    step = int(distances[0]) if len(distances) else 1
    if step < 1 or bool((distances != step).any()) or bool((live[:, 1:] & ~live[:, :-1]).any()):
        raise UnfitLayoutError("columns gathered one by one are not evenly spaced")
    if layout.kv_len % step:
        raise UnfitLayoutError(f"{layout.kv_len} keys do not divide by the distance of columns, {step}")
    return columns[:, 0], step


def _row_step(layout: Layout) -> int:
    """Distance of neighbouring rows."""
    order = layout.row_order
    if order is None:
        return 1
    step = int(order[0, 1] - order[0, 0]) if layout.q_len > 1 else 1
    per_residue = layout.q_len // max(step, 1)
    if step < 1 or layout.q_len % step or per_residue % 64:
        raise UnfitLayoutError("rows are not in an order that TMA can copy")
    if not bool((order == by_remainder(layout.q_len, step).to(order)).all()):
        raise UnfitLayoutError("rows are not in an order that TMA can copy")
    return step


def split_items(
    pointers: Tensor, partial: Tensor, patterns: int, split_tiles: int, dummy: int
) -> tuple[Tensor, Tensor, int]:
    """`items` `[I, 8]`, `item_ptr` and `chunks` of `TileLists`, on the CPU.

    Args:
        pointers: int64 `[P * R + 1]`, where the tiles of each row block begin.
        partial: int64 `[P * R]`, how many of them are partial.
        patterns: P.
        split_tiles: see `make_tile_lists`.
        dummy: T, the tile of empty row blocks.
    """
    tiles = pointers.diff()
    blocks = len(tiles) // patterns
    chunks = chunks_of(tiles, split_tiles, patterns)
    owner = chunks.row_block
    begin, end = pointers[owner] + chunks.begin, pointers[owner] + chunks.end
    partial_end = torch.minimum(torch.maximum(pointers[owner] + partial[owner], begin), end)
    empty = begin == end
    begin = torch.where(empty, dummy, begin)
    partial_end, end = torch.where(empty, dummy + 1, partial_end), torch.where(empty, dummy + 1, end)
    parts, number = chunks.parts, chunks.number
    items = torch.stack(
        [owner % blocks, begin, partial_end, end, parts, chunks.first_slot, number, torch.zeros_like(number)], 1
    ).int()
    pattern = torch.div(owner, blocks, rounding_mode="floor")
    item_ptr = torch.nn.functional.pad(torch.bincount(pattern, minlength=patterns).cumsum(0), (1, 0)).int()
    return items, item_ptr, chunks.slots


def choose_first_tile(item: Tensor, covered: Tensor, full: Tensor) -> Tensor:
    """Return the tile with which each item begins, bool `[T]`: most rows covered, of equal ones a partial tile.

    With lazy rescaling, the kernel takes scores against the row maxima of earlier tiles. A tile whose scores exceed
    them by too much, as at the first key of a row, is computed again. So an item begins with a tile in which every row
    has a key, if there is one.

    Args:
        item: int64 `[T]`, the item of each tile.
        covered: int64 `[T]`, number of rows that keep a key of the tile.
        full: bool `[T]`, full tiles. The first tile of an item is computed with a bitmap anyway.
    """
    order = torch.argsort(covered * 2 + (~full).long(), descending=True, stable=True)
    order = order[torch.argsort(item[order], stable=True)]
    item = item[order]
    begins = torch.ones_like(item, dtype=torch.bool)
    begins[1:] = item[1:] != item[:-1]
    first = torch.zeros_like(full)
    first[order[begins]] = True
    return first


def order_first_tiles(items: Tensor, covered: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Move the best first tile of each item to its begin; see `choose_first_tile`.

    Args:
        items: int32 `[I, 8]` as `TileLists.items`; their tiles follow each other, but for those of empty row blocks.
        covered, full: see `choose_first_tile`.

    Returns:
        The items, and int64 `[T]`, which tile comes at each position.
    """
    tiles = len(covered)
    ranges = items.to(covered.device).long()
    begin, partial_end, end = ranges[:, TILE_ITEM.begin : TILE_ITEM.end + 1].unbind(1)
    exists = begin < tiles
    numbers = torch.arange(len(items), device=covered.device)
    item = torch.repeat_interleave(numbers[exists], (end - begin)[exists], output_size=tiles)
    first = choose_first_tile(item, covered, full)
    order = torch.argsort(item * 2 + (~first).long(), stable=True)
    # A full tile that moves before partial ones counts as one of them.
    before = torch.zeros(len(items), dtype=torch.bool, device=covered.device)
    before[exists] = full[order[begin[exists]]]
    items = items.clone()
    items[:, TILE_ITEM.partial_end] = (partial_end + (before & (partial_end > begin))).int().to(items.device)
    return items, order


def exact_tiles(items: Tensor, rows: Tensor, tile_bitmap: Tensor) -> int:
    """Return how many tiles at the start of an item have no lazy rescaling, 1 to `_MOST_EXACT`.

    With lazy rescaling, the first key of a row makes its warpgroup compute the tile twice. As long as at least half the
    warpgroups meet such rows in the next tile, that tile takes its own row maxima, as the first one does.

    Args:
        items: int32 `[I, 8]` as `TileLists.items`.
        rows: bool `[U, block_m]`, rows of each bitmap that keep a key.
        tile_bitmap: int64 `[T]`, the bitmap of each tile; items without tiles begin at T.
    """
    begin, _, end = (
        items[items[:, TILE_ITEM.begin] < len(tile_bitmap), TILE_ITEM.begin : TILE_ITEM.end + 1].long().unbind(1)
    )
    begin, end = begin.to(rows.device), end.to(rows.device)
    seen = rows[tile_bitmap[begin]]
    for count in range(1, _MOST_EXACT):
        longer = end - begin > count
        begin, end, seen = begin[longer], end[longer], seen[longer]
        more = rows[tile_bitmap[begin + count]]
        first = (more & ~seen).unflatten(1, (-1, 64)).any(2)  # of each warpgroup's rows
        if not len(begin) or float(first.float().mean()) < 0.5:
            return count
        seen = seen | more
    return _MOST_EXACT
