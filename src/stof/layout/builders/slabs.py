"""Contiguous tiles turned into tiles gathered from slabs: short runs of neighbouring columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.layout import bitmaps as bits
from stof.layout.config import LayoutConfig

# Scores processed at once. Temporaries take some bytes for each column, and one for each score of a partial tile.
_AT_ONCE = 2**25


@dataclass(frozen=True)
class Pattern:
    """Tiles of consecutive row blocks; bitmaps not yet deduplicated, tile order already final."""

    tile_count: Tensor  # [n] tiles of each row block
    partial_count: Tensor  # [n]
    columns: Tensor  # [t, slabs_per_tile] first column of each slab, -1 in unused slots
    partial: Tensor  # [t] bool
    bitmaps: Tensor  # [partial tiles, block_m, words]

    @staticmethod
    def join(parts: list[Pattern]) -> Pattern:
        if len(parts) == 1:
            return parts[0]
        names = ("tile_count", "partial_count", "columns", "partial", "bitmaps")
        return Pattern(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def equals(self, other: Pattern) -> bool:
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("tile_count", "partial", "columns", "bitmaps"))
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


class Slabs(NamedTuple):
    """Slabs that row blocks need, in order of row blocks and then of columns.

    Attributes:
        block: row block of each.
        column: its first column.
        is_full: whether all rows of the block keep all of it.
    """

    block: Tensor
    column: Tensor
    is_full: Tensor


class SlabTiles(NamedTuple):
    """Tiles of some row blocks.

    Attributes:
        tile_count, partial_count, partial: as of `Pattern`.
        owner: row block of each tile.
        slabs: int64 `[t, slabs_per_tile]`, number of each slab in the list they are made of, -1 in unused slots.
    """

    tile_count: Tensor
    partial_count: Tensor
    partial: Tensor
    owner: Tensor
    slabs: Tensor

    def columns(self, slabs: Slabs) -> Tensor:
        """First column of each slab: `Pattern.columns`."""
        if not len(slabs.column):
            return self.slabs
        return torch.where(self.slabs < 0, -1, slabs.column[self.slabs.clamp(min=0)])


def slab_tiles(slabs: Slabs, count: int, config: LayoutConfig) -> SlabTiles:
    """Put the slabs of `count` row blocks into tiles, partial ones first.

    Full slabs fill full tiles; the few left over join the partial ones.
    """
    device, per_tile = slabs.block.device, config.slabs_per_tile
    everywhere = slabs.is_full.nonzero()[:, 0]
    full_slabs = torch.bincount(slabs.block[everywhere], minlength=count)
    full_count = torch.div(full_slabs, per_tile, rounding_mode="floor")
    rank = _rank(slabs.block[everywhere], full_slabs)
    in_full = rank < (full_count * per_tile)[slabs.block[everywhere]]
    full, full_rank = everywhere[in_full], rank[in_full]
    rest = torch.ones_like(slabs.is_full)
    rest[full] = False
    some = rest.nonzero()[:, 0]
    some_slabs = torch.bincount(slabs.block[some], minlength=count)
    partial_count = torch.div(some_slabs + per_tile - 1, per_tile, rounding_mode="floor")

    tile_count = partial_count + full_count
    first_tile = tile_count.cumsum(0) - tile_count
    total = int(tile_count.sum())
    numbers = torch.full((total, per_tile), -1, dtype=torch.int64, device=device)
    for members, ranks, offset in (
        (some, _rank(slabs.block[some], some_slabs), first_tile),
        (full, full_rank, first_tile + partial_count),
    ):
        numbers.view(-1)[offset[slabs.block[members]] * per_tile + ranks] = members
    owner = torch.repeat_interleave(torch.arange(count, device=device), tile_count, output_size=total)
    partial = torch.arange(total, device=device) < (first_tile + partial_count)[owner]
    return SlabTiles(tile_count, partial_count, partial, owner, numbers)


def _rank(owner: Tensor, counts: Tensor) -> Tensor:
    """Position of each member among those of its owner; owners ascend."""
    return torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]


def in_slabs(plain: Pattern, q_len: int, config: LayoutConfig) -> Pattern:
    """The same scores in tiles of slabs, from contiguous tiles of one or several masks."""
    blocks, tiles = len(plain.tile_count), len(plain.partial)
    numbers = torch.arange(blocks, device=plain.columns.device)
    if tiles * config.block_m * config.block_n <= _AT_ONCE:
        return _in_slabs(plain, numbers, q_len, config)
    step = max(1, blocks * _AT_ONCE // (tiles * config.block_m * config.block_n))
    ends = torch.nn.functional.pad(torch.stack([plain.tile_count, plain.partial_count]).cumsum(1), (1, 0)).tolist()
    parts = []
    for first in range(0, blocks, step):
        rows = slice(first, min(first + step, blocks))
        of_tiles, of_bitmaps = (slice(end[rows.start], end[rows.stop]) for end in ends)
        part = Pattern(
            plain.tile_count[rows],
            plain.partial_count[rows],
            plain.columns[of_tiles],
            plain.partial[of_tiles],
            plain.bitmaps[of_bitmaps],
        )
        parts.append(_in_slabs(part, numbers[rows], q_len, config))
    return Pattern.join(parts)


def _in_slabs(plain: Pattern, numbers: Tensor, q_len: int, config: LayoutConfig) -> Pattern:
    """`in_slabs` of the row blocks with these numbers."""
    block_m, block_n, slab = config.block_m, config.block_n, config.slab_columns
    device, tiles = numbers.device, len(plain.partial)
    owner = torch.repeat_interleave(plain.tile_count, output_size=tiles)
    keep = bits.unpack(plain.bitmaps, block_n)  # [t, block_m, block_n]
    live, whole = (torch.ones(tiles, block_n, dtype=torch.bool, device=device) for _ in range(2))
    live[plain.partial], whole[plain.partial] = keep.any(1), keep.all(1)
    left = q_len % block_m  # rows of each mask's last row block, if it has fewer than others
    last = (numbers + 1) % -(-q_len // block_m) == 0
    if left:
        short = last[owner] & plain.partial
        whole[short] = keep[short[plain.partial], :left].all(1)

    order = (owner * (int(plain.columns.max()) + 1 if tiles else 1) + plain.columns[:, 0]).argsort()
    needed, full = (x[order].unflatten(1, (-1, slab)) for x in (live, whole))
    tile, within = needed.any(-1).nonzero(as_tuple=True)
    tile, first = order[tile], within * slab
    slabs = Slabs(owner[tile], plain.columns[tile, 0] + first, full.all(-1)[needed.any(-1)])
    chosen = slab_tiles(slabs, len(numbers), config)

    # As [tile, column, row], with two tiles more: one that keeps everything, for full tiles, and one that keeps
    # nothing, for unused slots: their number -1 is the last entry of `source`.
    ends = torch.zeros(2, block_n, block_m, dtype=torch.bool, device=device)
    ends[0] = True
    by_column = torch.cat([keep.mT, ends])
    bitmap = torch.where(plain.partial, plain.partial.cumsum(0) - 1, len(keep))
    source = torch.nn.functional.pad(bitmap[tile], (0, 1), value=len(keep) + 1)  # the last is that of unused slots
    first = torch.nn.functional.pad(first, (0, 1))
    out = [torch.empty(0, block_m, bits.words(block_n), dtype=torch.int32, device=device)]
    columns = torch.arange(slab, device=device)
    partial = chosen.owner[chosen.partial], chosen.slabs[chosen.partial]
    for block, number in zip(*(x.split(max(1, _AT_ONCE // (block_m * block_n))) for x in partial), strict=True):
        picked = by_column[source[number][:, :, None], first[number][:, :, None] + columns].flatten(1, 2)
        if left:
            picked[last[block], :, left:] = False
        out.append(bits.pack(picked.mT))
    return Pattern(chosen.tile_count, chosen.partial_count, chosen.columns(slabs), chosen.partial, torch.cat(out))
