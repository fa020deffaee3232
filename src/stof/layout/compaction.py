"""Column compaction: scattered columns that many row blocks see, listed once for all of them.

A row block that sees a few keys of a tile and nothing else of it computes the whole tile for them. Where most row
blocks see the same such keys (the summary columns of "fixed" sparse Transformers, arXiv 1904.10509, section 4.2, or
single global keys), these keys make one list, in order. The list is cut into tiles, which replace the nearly empty
ones. A kernel may copy the listed keys to consecutive rows before it starts, and then reads contiguous tiles only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import MaskFunctionError
from stof.layout import bitmaps as bits
from stof.layout.builders.closed_form import Tiles
from stof.layout.builders.strips import SPAN, strips
from stof.layout.config import LayoutConfig
from stof.layout.fill.slab_counts import device_columns
from stof.layout.head_mask import HeadMask

# Scores evaluated at once: bounds the memory of int64 temporaries to some 100 MB.
_AT_ONCE = 2**22
# Pairs of a row block and a key that are looked at, a byte each in a few tensors: 65,536 keys and rows in blocks of 64.
_MOST_PAIRS = 2**26
# Columns packed without gaps have to leave less than this share of all tiles, or surveys do not look for a list.
_WORTH = 0.85


class ColumnUse(NamedTuple):
    """Which keys each row block sees, bool `[row blocks, kv_len]`: by some of its rows, and by every row."""

    some: Tensor
    every: Tensor

    def joined(self, count: int) -> ColumnUse:
        """The use by row blocks `count` times as tall."""
        missing = (0, 0, 0, -len(self.some) % count)
        some = torch.nn.functional.pad(self.some, missing).unflatten(0, (-1, count)).any(1)
        return ColumnUse(
            some, torch.nn.functional.pad(self.every, missing, value=True).unflatten(0, (-1, count)).all(1)
        )


class Compaction(NamedTuple):
    """The list of compacted keys, and where each row block finds its columns.

    Attributes:
        keys: int64 `[n]`, the list, ascending.
        listed: bool `[row blocks, ceil(n / block_n), block_n]`, keys that each row block takes from the list.
        in_place: bool `[row blocks, tile columns]`, aligned tiles that it takes from the keys themselves.
    """

    keys: Tensor
    listed: Tensor
    in_place: Tensor


def is_searched(row_blocks: int, kv_len: int) -> bool:
    """Whether problems of this size are searched for columns to compact."""
    return row_blocks * kv_len <= _MOST_PAIRS


def is_worthwhile(contiguous: int, packed: int) -> bool:
    """Whether packing columns without gaps saves enough of the aligned tiles to look for a list.

    Args:
        contiguous: aligned tiles.
        packed: tiles of columns gathered singly. Both of the smallest tile size: where it saves nothing, larger tiles
            save nothing either.
    """
    return packed <= _WORTH * contiguous


def column_use(head_mask: HeadMask, block_m: int) -> ColumnUse:
    """The columns that row blocks of `block_m` rows see."""
    if head_mask.order is None and head_mask.device.type == "cuda":
        told = device_columns(head_mask, block_m)
        if told is not None:
            return ColumnUse(*told)
    some, every = [], []
    for strip in strips(head_mask, block_m):
        kept = strip.keep.sum(1, dtype=torch.int32)
        sees = torch.stack([kept > 0, kept == strip.valid_rows[:, None]])
        if strip.spans is not None:
            within = torch.arange(SPAN, device=kept.device)
            keys = (strip.spans[:, None] * SPAN + within).flatten()[: kept.shape[1]]
            sees = sees.new_zeros(2, len(kept), head_mask.kv_len).index_copy_(2, keys, sees)
        some.append(sees[0])
        every.append(sees[1])
    return ColumnUse(torch.cat(some), torch.cat(every))


def find_compaction(some: Tensor, block_n: int) -> Compaction | None:
    """The list for columns that some rows see, bool `[row blocks, kv_len]`; None where it would save no tiles.

    A row block sees keys of a tile *alone* when it sees at most half of the tile. A key is listed when most of the row
    blocks that see it see it alone. A row block takes the keys of a tile from the list when all of them are listed.
    """
    kv_len = some.shape[1]
    tiled = _tiled(some, block_n)
    count = tiled.sum(-1)
    width = (kv_len - torch.arange(0, kv_len, block_n, device=some.device)).clamp(max=block_n)
    alone = (count > 0) & (2 * count <= width)
    listed = 2 * (tiled & alone[..., None]).sum(0) > tiled.sum(0)
    from_list = alone & ~(tiled & ~listed).any(-1)
    taken = (tiled & from_list[..., None]).flatten(1)[:, :kv_len]
    keys = taken.any(0).nonzero()[:, 0]
    of_list = _tiled(taken[:, keys], block_n)
    if not len(keys) or int(of_list.any(-1).sum() - from_list.sum()) >= 0:
        return None
    return Compaction(keys, of_list, (count > 0) & ~from_list)


def compaction_counts(use: ColumnUse, compaction: Compaction) -> tuple[Tensor, Tensor]:
    """Partial and full tiles of each row block, int64 `[row blocks]`."""
    some, every = _tiles(use, compaction)
    return (some & ~every).sum(1), every.sum(1)


def _tiles(use: ColumnUse, compaction: Compaction) -> tuple[Tensor, Tensor]:
    """Which tiles each row block needs, and which of them are full: aligned tiles, then those of the list."""
    block_n = compaction.listed.shape[-1]
    full = _tiled(use.every, block_n).all(-1) & compaction.in_place
    of_list = compaction.listed & _tiled(use.every[:, compaction.keys], block_n)
    some = torch.cat([compaction.in_place, compaction.listed.any(-1)], 1)
    return some, torch.cat([full, of_list.all(-1)], 1)


def _tiled(columns: Tensor, block_n: int) -> Tensor:
    """`[row blocks, columns]` as `[row blocks, tiles, block_n]`, False past the end."""
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[1] % block_n))
    return padded.unflatten(1, (-1, block_n))


def compacted_tiles(head_mask: HeadMask, config: LayoutConfig) -> Tiles | None:
    """The fields of `build.Pattern`; None where no column is compacted.

    Slots of a listed tile stay unused for columns that its row block does not take from the list, and past its end.
    """
    block_m, block_n = config.block_m, config.block_n
    if not is_searched(head_mask.row_blocks(block_m), head_mask.kv_len):
        return None
    use = column_use(head_mask, block_m)
    compaction = find_compaction(use.some, block_n)
    if compaction is None:
        return None
    some, every = _tiles(use, compaction)
    row, number = some.nonzero(as_tuple=True)
    is_full = every[row, number]
    ranks = (2 * row + is_full).argsort(stable=True)
    row, number, partial = row[ranks], number[ranks], ~is_full[ranks]
    aligned = torch.arange(compaction.in_place.shape[1] * block_n, device=row.device)
    aligned = torch.where(aligned < head_mask.kv_len, aligned, -1)
    keys = torch.nn.functional.pad(compaction.keys, (0, -len(compaction.keys) % block_n), value=-1)
    columns = torch.cat([aligned, keys]).view(-1, block_n)[number]
    place = number - compaction.in_place.shape[1]
    taken = compaction.listed[row, place.clamp(min=0)] | (place < 0)[:, None]
    columns = torch.where(taken, columns, -1)
    rows = row[partial][:, None] * block_m + torch.arange(block_m, device=row.device)
    if head_mask.order is not None:
        rows = torch.where(rows < head_mask.q_len, head_mask.order[rows.clamp(max=head_mask.q_len - 1)], -1)
    bitmaps = _bitmaps(head_mask, rows, columns[partial])
    return some.sum(1), (some & ~every).sum(1), columns, partial, bitmaps


def _bitmaps(head_mask: HeadMask, rows: Tensor, columns: Tensor) -> Tensor:
    """Bitmaps `[t, block_m, words]` of original rows `[t, block_m]` and columns `[t, block_n]`; -1 keeps nothing."""
    step = max(1, _AT_ONCE // (rows.shape[1] * columns.shape[1]))
    packed = [rows.new_empty(0, rows.shape[1], bits.words(columns.shape[1]), dtype=torch.int32)]
    for q, kv in zip(rows.split(step), columns.split(step), strict=True):
        if len(q):
            packed.append(bits.pack(_kept(head_mask, q, kv)))
    return torch.cat(packed)


def _kept(head_mask: HeadMask, q: Tensor, kv: Tensor) -> Tensor:
    """`HeadMask.evaluate`, one rectangle after the other for functions that do not take several."""
    try:
        return head_mask.evaluate(q, kv)
    except MaskFunctionError:
        if len(q) == 1:
            raise
        return torch.cat([head_mask.evaluate(*one) for one in zip(q.split(1), kv.split(1), strict=True)])
