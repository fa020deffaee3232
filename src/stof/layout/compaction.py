"""Scattered columns that many row blocks see, listed once for all of them: dense tiles out of vertical lines.

A row block that sees a few keys of a tile and nothing else of it computes the whole tile for them. Where such keys are
the same for most row blocks (the summary columns of "fixed" sparse Transformers, arXiv 1904.10509, section 4.2, or
single global keys), they make one list, in their order; cut into tiles, it takes the place of all those tiles. A kernel
may put the listed keys side by side before it starts, and then reads contiguous tiles alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.errors import MaskFunctionError
from stof.layout import bitmaps as bits
from stof.layout.build.closed_form import Tiles
from stof.layout.build.gpu.count import device_columns
from stof.layout.build.strips import SPAN, strips
from stof.layout.config import LayoutConfig
from stof.layout.head_mask import HeadMask
from stof.masks.index import Index

# Scores evaluated at once: bounds the memory of int64 temporaries to some 100 MB.
_AT_ONCE = 2**22
# Pairs of a row block and a key that are looked at, a byte each in a few tensors: 65,536 keys and rows in blocks of 64.
_MOST_PAIRS = 2**26
# Columns packed without gaps have to leave less than this share of all tiles, or surveys do not look for a list.
_WORTH = 0.85


class Seen(NamedTuple):
    """What row blocks see of each key: bool `[row blocks, kv_len]`, whether some row does, and whether every row."""

    some: Tensor
    every: Tensor

    def joined(self, count: int) -> Seen:
        """What row blocks `count` times as tall see."""
        missing = (0, 0, 0, -len(self.some) % count)
        some = torch.nn.functional.pad(self.some, missing).unflatten(0, (-1, count)).any(1)
        return Seen(some, torch.nn.functional.pad(self.every, missing, value=True).unflatten(0, (-1, count)).all(1))


class Division(NamedTuple):
    """Where each row block finds its columns.

    Attributes:
        keys: int64 `[n]`, the list, ascending.
        listed: bool `[row blocks, ceil(n / block_n), block_n]`, columns of the list that each takes from there.
        in_place: bool `[row blocks, tile columns]`, aligned tiles that it takes as they lie.
    """

    keys: Tensor
    listed: Tensor
    in_place: Tensor


def looked_at(row_blocks: int, kv_len: int) -> bool:
    """Whether problems of this size are searched for columns to put aside."""
    return row_blocks * kv_len <= _MOST_PAIRS


def may_pay(contiguous: int, packed: int) -> bool:
    """Whether aligned tiles are so many more than those of columns without gaps that looking for a list is worth it.

    Asked of the smallest tiles: where these lose nothing, larger ones hold no lines either, but wide runs.
    """
    return packed <= _WORTH * contiguous


def seen_columns(own: HeadMask, block_m: int) -> Seen:
    """Columns that row blocks see."""
    if own.order is None and own.device.type == "cuda":
        told = device_columns(own, block_m)
        if told is not None:
            return Seen(*told)
    some, every = [], []
    for strip in strips(own, block_m):
        kept = strip.keep.sum(1, dtype=torch.int32)
        found = torch.stack([kept > 0, kept == strip.valid_rows[:, None]])
        if strip.spans is not None:
            within = torch.arange(SPAN, device=kept.device)
            keys = (strip.spans[:, None] * SPAN + within).flatten()[: kept.shape[1]]
            found = found.new_zeros(2, len(kept), own.kv_len).index_copy_(2, keys, found)
        some.append(found[0])
        every.append(found[1])
    return Seen(torch.cat(some), torch.cat(every))


def divided(some: Tensor, block_n: int) -> Division | None:
    """The list for columns seen `[row blocks, kv_len]`; None where it would save no tiles.

    A row block sees keys of a tile *alone* when they are half of the tile at most. Keys that most row blocks that see
    them at all see alone are listed; a row block takes a tile's keys from the list when all of them are there.
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
    return Division(keys, of_list, (count > 0) & ~from_list)


def division_counts(seen: Seen, division: Division) -> tuple[Tensor, Tensor]:
    """Partial and full tiles of each row block, int64 `[row blocks]`."""
    some, every = _tiles(seen, division)
    return (some & ~every).sum(1), every.sum(1)


def _tiles(seen: Seen, division: Division) -> tuple[Tensor, Tensor]:
    """Tiles of row blocks, and which of them are full: aligned ones, then those of the list."""
    block_n = division.listed.shape[-1]
    full = _tiled(seen.every, block_n).all(-1) & division.in_place
    of_list = division.listed & _tiled(seen.every[:, division.keys], block_n)
    some = torch.cat([division.in_place, division.listed.any(-1)], 1)
    return some, torch.cat([full, of_list.all(-1)], 1)


def _tiled(columns: Tensor, block_n: int) -> Tensor:
    """`[row blocks, columns]` as `[row blocks, tiles, block_n]`, False past the end."""
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[1] % block_n))
    return padded.unflatten(1, (-1, block_n))


def aside_tiles(own: HeadMask, config: LayoutConfig) -> Tiles | None:
    """The fields of `build.Pattern`; None where no column is put aside.

    Unused slots of a tile of the list are columns that its row block does not take from there, and the list's end.
    """
    q_len, block_m, block_n = own.q_len, config.block_m, config.block_n
    if not looked_at(own.row_blocks(block_m), own.kv_len):
        return None
    seen = seen_columns(own, block_m)
    division = divided(seen.some, block_n)
    if division is None:
        return None
    some, every = _tiles(seen, division)
    row, number = some.nonzero(as_tuple=True)
    whole = every[row, number]
    ranks = (2 * row + whole).argsort(stable=True)
    row, number, partial = row[ranks], number[ranks], ~whole[ranks]
    aligned = torch.arange(division.in_place.shape[1] * block_n, device=row.device)
    aligned = torch.where(aligned < own.kv_len, aligned, -1)
    keys = torch.nn.functional.pad(division.keys, (0, -len(division.keys) % block_n), value=-1)
    columns = torch.cat([aligned, keys]).view(-1, block_n)[number]
    place = number - division.in_place.shape[1]
    taken = division.listed[row, place.clamp(min=0)] | (place < 0)[:, None]
    columns = torch.where(taken, columns, -1)
    rows = row[partial][:, None] * block_m + torch.arange(block_m, device=row.device)
    exists = rows < q_len
    rows = rows.clamp(max=q_len - 1)
    bitmaps = _bitmaps(own, rows if own.order is None else own.order[rows], exists, columns[partial])
    return some.sum(1), (some & ~every).sum(1), columns, partial, bitmaps


def _bitmaps(own: HeadMask, rows: Tensor, exists: Tensor, columns: Tensor) -> Tensor:
    """Packed bits `[t, block_m, words]` of rows `[t, block_m]` that exist and columns `[t, block_n]` but -1."""
    step = max(1, _AT_ONCE // (rows.shape[1] * columns.shape[1]))
    words = [rows.new_empty(0, rows.shape[1], bits.words(columns.shape[1]), dtype=torch.int32)]
    for q, there, kv in zip(rows.split(step), exists.split(step), columns.split(step), strict=True):
        if len(q):
            keep = _kept(own, q, kv.clamp(min=0))
            words.append(bits.pack(keep & there[:, :, None] & (kv >= 0)[:, None, :]))
    return torch.cat(words)


def _kept(own: HeadMask, q: Tensor, kv: Tensor) -> Tensor:
    """The mask of rectangles of any rows `[t, block_m]` and columns `[t, block_n]`: bool `[t, block_m, block_n]`."""
    b, h = (torch.tensor(number, device=q.device).view(1, 1, 1, 1) for number in (own.b, own.h))
    index = Index(b, h, q[:, None, :, None], kv[:, None, None, :], own.q_len, own.kv_len)
    try:
        return own.mask.evaluate(index).expand(len(q), 1, q.shape[1], kv.shape[1])[:, 0]
    except MaskFunctionError:
        # A function may not take several rectangles at once.
        if len(q) == 1:
            raise
        return torch.cat([_kept(own, one_q, one_kv) for one_q, one_kv in zip(q.split(1), kv.split(1), strict=True)])
