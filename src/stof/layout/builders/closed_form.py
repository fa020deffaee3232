"""Contiguous tiles of a mask in closed form: only tiles that keep some scores but not all are ever evaluated.

`Mask.tile_bounds` is asked first about squares of many tiles, where there are many, then about the tiles of those that
are not empty. Dense masks are reduced tile by tile instead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stof.errors import MaskFunctionError
from stof.layout import bitmaps as bits
from stof.layout.config import LayoutConfig
from stof.layout.head_mask import HeadMask
from stof.masks.bounds import Interval

# Scores, or rectangles, evaluated at once: bounds the memory of int64 temporaries to some 100 MB.
_AT_ONCE = 2**22
# Scores whose temporaries fit the caches of a CPU, which is then twice as fast.
_IN_CACHES = 2**19
# Up to this many tiles, bounds of every tile are as fast on the host, which need not wait for a GPU.
_ON_HOST = 2**14
# Tiles along one side of the squares whose bounds are computed first.
_SQUARE = 16

Tiles = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def tiles_of(head_mask: HeadMask, config: LayoutConfig) -> Tiles | None:
    """Contiguous tiles of a mask: fields of `slabs.Pattern`; None when its bounds are not known."""
    keep = head_mask.mask.as_tensor(head_mask.q_len, head_mask.kv_len)
    if keep is not None:
        number = head_mask.b if keep.shape[0] > 1 else 0, head_mask.h if keep.shape[1] > 1 else 0
        keep = keep[number].to(head_mask.device)
        return tiles_of_dense((keep if head_mask.order is None else keep[head_mask.order])[None], config)
    grid = _Grid(head_mask, config)
    classified = grid.of_rule()
    return None if classified is None else assembled(*classified, grid.rows, grid.columns, config.block_n)


def tiles_of_dense(keep: Tensor, config: LayoutConfig) -> Tiles:
    """The same from dense tensors `[n, q_len, kv_len]`, one after the other."""
    block_m, block_n = config.block_m, config.block_n
    count, q_len, kv_len = keep.shape
    rows, columns = -(-q_len // block_m), -(-kv_len // block_n)
    if keep.stride(2) > 1:  # reductions of a transposed tensor take three times as long, a copy of it a third
        keep = keep.contiguous()
    missing = (rows * block_m - q_len, columns * block_n - kv_len)
    if any(missing):
        keep = torch.nn.functional.pad(keep, (0, missing[1], 0, missing[0]))
    tiled = keep.reshape(count * rows, block_m, columns, block_n)
    valid = (q_len - torch.arange(rows, device=keep.device) * block_m).clamp(max=block_m).repeat(count)
    if keep.device.type == "cpu":
        some, is_full = _kept_by_tiles(tiled)
        if missing[0]:
            is_full[valid < block_m] = tiled[valid < block_m, : block_m - missing[0]].all(1).all(-1)
    else:
        # Summed along rows first: there memory is contiguous.
        kept = tiled.sum(3, dtype=torch.int32).sum(1)
        some, is_full = kept > 0, kept == valid[:, None] * block_n
    row, column = (some & ~is_full).nonzero(as_tuple=True)
    step = max(1, _AT_ONCE // (block_m * block_n))
    words = [bits.pack(tiled[r, :, c]) for r, c in zip(row.split(step), column.split(step), strict=True)]
    return assembled(
        is_full.flatten().nonzero()[:, 0], row * columns + column, torch.cat(words), count * rows, columns, block_n
    )


def _kept_by_tiles(tiled: Tensor) -> tuple[Tensor, Tensor]:
    """Which tiles of `[rows, block_m, columns, block_n]` keep some, and all scores; by NumPy, 8 scores at a time."""
    rows, _block_m, columns, _block_n = tiled.shape
    octets = tiled.flatten(2).numpy().view(np.uint64)
    some, every = (f.reduce(octets, 1).reshape(rows, columns, -1) for f in (np.bitwise_or, np.bitwise_and))
    return torch.from_numpy(some.any(-1)), torch.from_numpy((every == 0x0101_0101_0101_0101).all(-1))


def assembled(everything: Tensor, some: Tensor, words: Tensor, rows: int, columns: int, block_n: int) -> Tiles:
    """Tiles in order: by row block, partial ones first, then by column.

    Args:
        everything: numbers of full tiles, `row block * columns + tile column`.
        some, words: numbers and bitmaps of partial ones.
        rows, columns: row blocks, and tiles of each.
        block_n: columns of a tile.
    """
    tiles = torch.cat([some, everything])
    partial = torch.arange(len(tiles), device=tiles.device) < len(some)
    row = torch.div(tiles, columns, rounding_mode="floor")
    column = torch.remainder(tiles, columns)
    key = row * (2 * columns) + torch.where(partial, 0, columns) + column
    order = key.argsort()
    none = torch.zeros(rows, dtype=torch.int64, device=tiles.device)
    return (
        none.index_add(0, row, torch.ones_like(row)),
        none.index_add(0, row, partial.long()),
        (column * block_n)[order][:, None],
        partial[order],
        words[some.argsort()],
    )


class _Grid:
    """The tiles of one problem, numbered `row block * tile columns + tile column`."""

    def __init__(self, head_mask: HeadMask, config: LayoutConfig) -> None:
        self.head_mask, self.config, self.device = head_mask, config, head_mask.device
        self.rows, self.columns = head_mask.row_blocks(config.block_m), -(-head_mask.kv_len // config.block_n)

    def _queries(self, row: Tensor, square: int) -> Interval:
        """The queries of squares; of rows out of order, a range that holds them."""
        tall, last, order = self.config.block_m * square, self.head_mask.q_len - 1, self.head_mask.order
        if order is None:
            return Interval(row * tall, (row * tall + tall - 1).clamp(max=last))
        rows = torch.arange(-(-len(order) // tall) * tall, device=order.device).clamp(max=last)
        ordered = order[rows].view(-1, tall)
        low, high = (ends.to(row.device)[row] for ends in (ordered.amin(1), ordered.amax(1)))
        return Interval(low, high)

    def of_rule(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Numbers of full tiles, and numbers and bitmaps of partial ones; all on the device."""
        on_host = self.head_mask.is_device_independent and self.rows * self.columns <= _ON_HOST
        where = torch.device("cpu") if on_host else self.device
        everything, some = self._asked(where)
        if some.numel() > 0.9 * self.rows * self.columns and some.numel() > 1:
            return None
        full, words, partial = [everything.to(self.device)], [], []
        block_m, block_n = self.config.block_m, self.config.block_n
        at_once = min(_AT_ONCE, _IN_CACHES) if self.device.type == "cpu" else _AT_ONCE
        for tiles in some.to(self.device).split(max(1, at_once // (block_m * block_n))):
            if not tiles.numel():
                continue
            keep = self._evaluated(tiles)
            if keep is None:
                return None
            packed = bits.pack(keep)
            full_tiles = self._are_full(tiles, packed)
            chosen = (packed != 0).flatten(1).any(1) & ~full_tiles
            full.append(tiles[full_tiles])
            partial.append(tiles[chosen])
            words.append(packed[chosen])
        if not words:
            return torch.cat(full), some.to(self.device), self._no_bitmaps()
        return torch.cat(full), torch.cat(partial), torch.cat(words)

    def _no_bitmaps(self) -> Tensor:
        shape = (0, self.config.block_m, bits.words(self.config.block_n))
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _are_full(self, tiles: Tensor, packed: Tensor) -> Tensor:
        """Which tiles keep every row there is of every column; tiles that reach past the last key never do."""
        row = torch.div(tiles, self.columns, rounding_mode="floor") * self.config.block_m
        rows = (self.head_mask.q_len - row).clamp(max=self.config.block_m)
        every = -1 if self.config.block_n >= 32 else (1 << self.config.block_n) - 1
        return (packed == every).all(-1).sum(-1) == rows

    def _asked(self, where: torch.device) -> tuple[Tensor, Tensor]:
        """Numbers of tiles that certainly keep everything, and of those that may keep something."""
        rows, columns = (torch.arange(n, device=where) for n in (self.rows, self.columns))
        if self.rows * self.columns <= _ON_HOST:
            nothing, certain = self._bounds(rows.view(1, 1, -1, 1), columns, 1)
            return certain.flatten().nonzero()[:, 0], (~(nothing | certain)).flatten().nonzero()[:, 0]
        square = _SQUARE
        across = -(-self.columns // square)
        squares = []
        for first in range(0, -(-self.rows // square), max(1, _AT_ONCE // across)):
            some_rows = rows[: -(-self.rows // square)][first : first + max(1, _AT_ONCE // across)]
            nothing, _ = self._bounds(some_rows.view(1, 1, -1, 1), columns[:across], square)
            squares.append((~nothing).flatten().nonzero()[:, 0] + first * across)
        numbers = torch.cat(squares)
        everything, some = [numbers[:0]], [numbers[:0]]
        within = torch.arange(square, device=where)
        for number in numbers.split(max(1, _AT_ONCE // (square * square))):
            if not number.numel():  # every square is empty, and `tile_bounds` need not accept zero tiles
                continue
            row = torch.div(number, across, rounding_mode="floor").view(-1, 1, 1, 1) * square + within.view(1, 1, -1, 1)
            column = torch.remainder(number, across).view(-1, 1, 1, 1) * square + within
            # Indices past the end are clamped to the last row or column; their results are discarded.
            exists = (row < self.rows) & (column < self.columns)
            row, column = row.clamp(max=self.rows - 1), column.clamp(max=self.columns - 1)
            nothing, certain = self._bounds(row, column, 1)
            tile = row * self.columns + column
            everything.append(tile[certain & exists])
            some.append(tile[~(nothing | certain) & exists])
        return torch.cat(everything), torch.cat(some)

    def _bounds(self, row: Tensor, column: Tensor, square: int) -> tuple[Tensor, Tensor]:
        """Which squares, `square` tiles wide, keep nothing, and which everything, `[T, 1, rows, columns]`."""
        wide = self.config.block_n * square
        bounds = self.head_mask.tile_bounds(
            self._queries(row, square),
            Interval(column * wide, (column * wide + wide - 1).clamp(max=self.head_mask.kv_len - 1)),
        )
        shape = np.broadcast_shapes(row.shape, column.shape)  # torch.broadcast_shapes imports sympy
        # Tiles that reach past the last key are partial however much they keep.
        inside = (column + 1) * wide <= self.head_mask.kv_len
        return bounds.empty.expand(shape), (bounds.full & inside).expand(shape)

    def _evaluated(self, tiles: Tensor) -> Tensor | None:
        """bool `[t, block_m, block_n]`; None when a function does not take several rectangles at once."""
        row = torch.div(tiles, self.columns, rounding_mode="floor")[:, None] * self.config.block_m
        column = torch.remainder(tiles, self.columns)[:, None] * self.config.block_n
        q = row + torch.arange(self.config.block_m, device=self.device)
        if self.head_mask.order is not None:
            last = self.head_mask.q_len - 1
            q = torch.where(q > last, q, self.head_mask.order[q.clamp(max=last)])
        kv = column + torch.arange(self.config.block_n, device=self.device)
        try:
            return self.head_mask.evaluate(q, kv)
        except MaskFunctionError:
            if len(tiles) == 1:
                raise
            return None
