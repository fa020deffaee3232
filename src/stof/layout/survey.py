"""How many tiles a mask would take under several block sizes, counted in one pass and without building any.

Choosing a layout needs only the counts of each row block; building one needs the bitmaps too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stof.layout.builders.build import checked_order
from stof.layout.builders.strips import strips
from stof.layout.compaction import column_use, compaction_counts, find_compaction, is_searched, is_worthwhile
from stof.layout.config import LayoutConfig
from stof.layout.fill.slab_counts import SlabCounts, device_counts
from stof.layout.head_mask import HeadMask
from stof.layout.layout import Layout
from stof.masks import Mask

# Masks of a batch or of heads counted before the rest is taken to be like them: counting is linear in them.
MASKS_COUNTED = 8


@dataclass(frozen=True, eq=False)
class TileCounts:
    """Tiles of one geometry: int64 `[masks, row_blocks]` on the CPU.

    Attributes:
        partial, full: tiles of each kind of every row block, as `build_layout` would make them.
        compacted_keys: length of the list of compacted keys, in whole tiles; of several masks the longest.
    """

    partial: Tensor
    full: Tensor
    compacted_keys: int = 0


@dataclass(frozen=True, eq=False)
class Survey:
    """What the cost model knows of a mask.

    Attributes:
        counts: tiles by geometry.
        kept: int64 `[masks, q_len]`, keys each row keeps, on the CPU.
        mask_batch, mask_heads: leading sizes of the mask; `masks` above is their product, 8 at most.
    """

    counts: dict[LayoutConfig, TileCounts]
    kept: Tensor
    mask_batch: int
    mask_heads: int

    @property
    def waste(self) -> float:
        """`waste_of` the geometry where that is least."""
        return min(map(self.waste_of, self.counts), default=0.0)

    def waste_of(self, geometry: LayoutConfig) -> float:
        """`scores_of` over scores kept; 0 if none is."""
        return self.scores_of(geometry) / max(1, int(self.kept.sum()))

    def scores_of(self, geometry: LayoutConfig) -> int:
        """Scores of all tiles, unused slots but no rows past the end included."""
        counts = self.counts[geometry]
        tiles = counts.partial + counts.full
        rows = torch.full(tiles.shape[1:], geometry.block_m, device=tiles.device)
        rows[-1] = self.kept.shape[1] - (len(rows) - 1) * geometry.block_m
        return int((tiles * rows).sum()) * geometry.block_n


def survey(
    mask: Mask,
    q_len: int,
    kv_len: int,
    geometries: Iterable[LayoutConfig],
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
    row_order: Tensor | None = None,
) -> Survey:
    """Count the tiles `build_layout` would make, for every geometry in one evaluation of the mask.

    Geometries with compacted columns are counted as contiguous ones where compaction can hardly save time, unless only
    such geometries are asked for.

    Args:
        mask, q_len, kv_len, batch, heads, device, row_order: as for `build_layout`.
        geometries: block sizes to count.
    """
    asked = set(geometries)
    # Without compaction tiles are contiguous. Columns gathered one by one bound what compaction can save.
    compacting = sorted((g for g in asked if g.compact_columns), key=lambda g: (g.block_m * g.block_n, g.block_m))
    configs = {replace(g, compact_columns=False) for g in compacting[:1]} | {g.contiguous() for g in compacting}
    wanted = sorted(
        {g for g in asked if not g.compact_columns} | configs, key=lambda g: (g.block_m, g.block_n, g.slab or 0)
    )
    order = checked_order(row_order, q_len, device)
    mask_batch, mask_heads = mask.dims(batch, heads, device)
    ids = mask.pattern_ids(mask_batch, mask_heads).expand(mask_batch, mask_heads).flatten()[:MASKS_COUNTED].tolist()
    distinct = list(dict.fromkeys(ids))
    counted = [divmod(ids.index(one), mask_heads) for one in distinct]
    row = [distinct.index(one) for one in ids]
    device_counted = None
    where = torch.device(device)
    if order is None and where.type == "cuda":
        entries = [b * mask_heads + h for b, h in counted]
        heights = sorted({geometry.block_m for geometry in wanted}) or [64]
        slabs = device_counts(mask, q_len, kv_len, heights, mask_heads, entries, device=where)
        if slabs is not None:
            tiles = {geometry: TileCounts(*tiles_of_slabs(slabs, geometry)) for geometry in wanted}
            device_counted = tiles, slabs.kept.long()
    of_heads = [HeadMask(mask, q_len, kv_len, b, h, order, where) for b, h in counted]
    counts, kept = _strip_counts(of_heads, wanted) if device_counted is None else device_counted
    counts |= _compacted_counts(of_heads, counts, compacting, always=len(compacting) == len(asked))
    counts = {
        g: TileCounts(each.partial[row], each.full[row], each.compacted_keys)
        for g, each in counts.items()
        if g in asked
    }
    return Survey(counts, kept[row], mask_batch, mask_heads)


def _compacted_counts(
    of_heads: list[HeadMask], counts: dict[LayoutConfig, TileCounts], compacting: list[LayoutConfig], always: bool
) -> dict[LayoutConfig, TileCounts]:
    """Tiles with compacted columns, given the contiguous ones, and those gathered singly of the first geometry."""
    plain = {geometry: counts[geometry.contiguous()] for geometry in compacting}
    with_lists = {geometry: TileCounts(tiles.partial.clone(), tiles.full.clone()) for geometry, tiles in plain.items()}
    # What tall row blocks see follows from what low ones see: evaluate once, at the common divisor of the heights.
    height = math.gcd(*(geometry.block_m for geometry in compacting))
    if not compacting or not is_searched(of_heads[0].row_blocks(height), of_heads[0].kv_len):
        return with_lists
    for n, one in enumerate(of_heads):
        both = (counts[how] for how in (compacting[0].contiguous(), replace(compacting[0], compact_columns=False)))
        if not always and not is_worthwhile(*(int((each.partial[n] + each.full[n]).sum()) for each in both)):
            continue
        use = column_use(one, height)
        for geometry in compacting:
            columns_used = use.joined(geometry.block_m // height)
            compaction = find_compaction(columns_used.some, geometry.block_n)
            if compaction is not None:
                tiles = with_lists[geometry]
                tiles.partial[n], tiles.full[n] = compaction_counts(columns_used, compaction)
                compacted = -(-len(compaction.keys) // geometry.block_n) * geometry.block_n
                with_lists[geometry] = replace(tiles, compacted_keys=max(compacted, tiles.compacted_keys))
    return with_lists


def _strip_counts(
    of_heads: list[HeadMask], wanted: list[LayoutConfig]
) -> tuple[dict[LayoutConfig, TileCounts], Tensor]:
    """Tiles of each geometry and scores of each row `[heads, q_len]`, by evaluating the masks strip by strip."""
    rows_of_strip = math.lcm(64, *(g.block_m for g in wanted))
    kept: list[Tensor] = []
    tiles_of_strips: dict[LayoutConfig, list[tuple[Tensor, Tensor]]] = {geometry: [] for geometry in wanted}
    for one in of_heads:
        for strip in strips(one, rows_of_strip):
            kept.append(strip.keep.sum(-1, dtype=torch.int32).flatten())
            for block_m in {geometry.block_m for geometry in wanted}:
                keep = strip.keep.view(-1, block_m, strip.keep.shape[-1])
                per_column = keep.sum(1, dtype=torch.int32)
                first = torch.arange(0, rows_of_strip, block_m, device=keep.device)
                rows = (strip.valid_rows[:, None] - first).clamp(0, block_m).flatten()
                for geometry in wanted:
                    if geometry.block_m == block_m:
                        tiles_of_strips[geometry].append(_count(per_column, rows, geometry))
    q_len, padded = of_heads[0].q_len, of_heads[0].row_blocks(rows_of_strip) * rows_of_strip
    counts = {}
    for geometry, parts in tiles_of_strips.items():
        blocks = of_heads[0].row_blocks(geometry.block_m)
        partial, full = (torch.cat(part).view(len(of_heads), -1)[:, :blocks].cpu() for part in zip(*parts, strict=True))
        counts[geometry] = TileCounts(partial, full)
    return counts, torch.cat(kept).view(len(of_heads), padded)[:, :q_len].long().cpu()


def survey_of_layout(layout: Layout) -> Survey:
    """The survey of a layout that is there: its own geometry only."""
    shape = (layout.patterns, layout.row_blocks)
    tiles, partial = layout.row_block_ptr.diff().view(shape).long(), layout.partial_count.view(shape).long()
    lists = layout.compacted_keys() if layout.config.compact_columns else None
    compacted = 0 if lists is None else lists[0].shape[1]
    counts = {layout.config: TileCounts(partial.cpu(), (tiles - partial).cpu(), compacted)}
    # Scores of the row block's tiles, spread over its rows: close enough for an estimate.
    per_row = (tiles * layout.config.block_n).cpu().repeat_interleave(layout.config.block_m, 1)[:, : layout.q_len]
    return Survey(counts, per_row, layout.mask_batch, layout.mask_heads)


def _count(per_column: Tensor, rows: Tensor, geometry: LayoutConfig) -> tuple[Tensor, Tensor]:
    """Partial and full tiles of each row block, from the scores kept of each column `[blocks, kv_len]`."""
    slab, per_tile = geometry.slab_columns, geometry.slabs_per_tile
    if slab > 1:
        per_column = torch.nn.functional.pad(per_column, (0, -per_column.shape[1] % slab))
        per_column = per_column.view(len(per_column), -1, slab)
        needed, full = (per_column > 0).any(-1), (per_column == rows[:, None, None]).all(-1)
    else:
        needed, full = per_column > 0, per_column == rows[:, None]
    return _tiles(needed.sum(1), torch.where(rows > 0, full.sum(1), 0), per_tile)


def tiles_of_slabs(slabs: SlabCounts, geometry: LayoutConfig) -> tuple[Tensor, Tensor]:
    """The same, int64 `[masks, row blocks]`, from slabs counted before."""
    slab_counts = slabs.slabs[geometry.block_m][:, :, geometry.slab_columns.bit_length() - 1].long()
    return _tiles(slab_counts[..., 0], slab_counts[..., 1], geometry.slabs_per_tile)


def _tiles(needed: Tensor, full: Tensor, per_tile: int) -> tuple[Tensor, Tensor]:
    """Partial and full tiles of row blocks that need so many slabs; full slabs left over join the partial tiles."""
    full_tiles = torch.div(full, per_tile, rounding_mode="floor")
    left = needed - full_tiles * per_tile
    return torch.div(left + per_tile - 1, per_tile, rounding_mode="floor").clamp(min=0), full_tiles
