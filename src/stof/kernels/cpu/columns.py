"""Which columns each row block of a layout keeps, as NumPy arrays: schedules are made of them.

A schedule takes thousands of small operations, which PyTorch is slow to start.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from stof.layout.layout import Layout

Array: TypeAlias = np.ndarray


class Tiles:
    """The tiles of a layout.

    Attributes:
        layout: on the CPU.
        row_block_ptr, tile_bitmap: of the layout.
        bitmaps: its bitmaps as bytes, uint8 `[U, block_m, 4 * words]`.
        any_row, all_rows: bool `[U, block_n]`, columns of a bitmap of which some, and all rows are kept.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.row_block_ptr, self.tile_bitmap = layout.row_block_ptr.numpy(), layout.tile_bitmap.numpy()
        self.bitmaps = layout.bitmaps.numpy().astype("<i4", copy=False).view(np.uint8)
        self.any_row = self._unpacked(np.bitwise_or.reduce(self.bitmaps, 1))
        self.all_rows = self._unpacked(np.bitwise_and.reduce(self.bitmaps, 1))

    def _unpacked(self, packed: Array) -> Array:
        """Bits of the columns of tiles, bool `[..., block_n]`."""
        return np.unpackbits(packed, axis=-1, count=self.layout.config.block_n, bitorder="little").view(bool)

    def kept_columns(self, blocks: range) -> KeptColumns:
        """Columns that row blocks with these numbers keep: that of row block r of pattern p is `p * row_blocks + r`."""
        layout, block_n = self.layout, self.layout.config.block_n
        pointers = self.row_block_ptr[blocks.start : blocks.stop + 1]
        start, stop = int(pointers[0]), int(pointers[-1])
        columns = layout.tile_columns(torch.arange(start, stop, device="cpu")).numpy()
        number = self.tile_bitmap[start:stop]
        partial = (number >= 0).nonzero()[0]
        here = columns >= 0
        here[partial] &= self.any_row[number[partial]]
        all_rows = np.ones_like(here)
        all_rows[partial] = self.all_rows[number[partial]]
        owner = np.repeat(np.arange(blocks.start, blocks.stop), np.diff(pointers))
        left = layout.q_len % layout.config.block_m
        if left:  # of each pattern's last row block
            last = partial[(owner[partial] + 1) % layout.row_blocks == 0]
            all_rows[last] = self._unpacked(np.bitwise_and.reduce(self.bitmaps[number[last], :left], 1))
        places = here.reshape(-1).nonzero()[0]
        key = (owner[:, None] * layout.kv_len + columns).reshape(-1)[places]
        order = key.argsort(kind="stable")
        bounds = key[order].searchsorted(np.arange(blocks.start, blocks.stop + 1) * layout.kv_len)
        places = places[order]
        columns, all_rows = columns.reshape(-1)[places], all_rows.reshape(-1)[places]
        return KeptColumns(self, blocks, bounds, columns, all_rows, places // block_n + start, places % block_n)

    def keep(self, tiles: Array, slots: Array) -> Array:
        """Which rows keep each of some columns, at least one, named by tile and slot: bool `[n, block_m]`."""
        keep = np.ones((len(tiles), self.layout.config.block_m), dtype=bool)
        first = int(tiles.min())
        number = self.tile_bitmap[first : int(tiles.max()) + 1]
        partial = number >= 0
        across = np.ascontiguousarray(self._unpacked(self.bitmaps[number[partial]]).transpose(0, 2, 1))
        place = partial.cumsum() - 1
        of_partial = partial[tiles - first].nonzero()[0]
        keep[of_partial] = across[place[tiles[of_partial] - first], slots[of_partial]]
        return keep


class KeptColumns(NamedTuple):
    """Columns that row blocks keep, by row block and in ascending order.

    Attributes:
        tiles: of the layout.
        blocks: numbers of the row blocks.
        bounds: where the columns of each row block begin, and the end.
        columns, all_rows: each column, and whether all rows of the block keep it.
        tile, slot: where it stands: tile of the layout, and column of the tile.
    """

    tiles: Tiles
    blocks: range
    bounds: Array
    columns: Array
    all_rows: Array
    tile: Array
    slot: Array

    def part(self, blocks: range) -> KeptColumns:
        """Those of some of the row blocks."""
        if blocks == self.blocks:
            return self
        first = blocks.start - self.blocks.start
        bounds = self.bounds[first : first + len(blocks) + 1]
        here = slice(int(bounds[0]), int(bounds[-1]))
        return self._replace(
            blocks=blocks, bounds=bounds - bounds[0], columns=self.columns[here], all_rows=self.all_rows[here],
            tile=self.tile[here], slot=self.slot[here],
        )  # fmt: skip

    def without(self, taken: Array) -> KeptColumns:
        """Those of columns where `taken`, bool `[kv_len]`, is False."""
        rest = (~taken[self.columns]).nonzero()[0]
        return self._replace(
            bounds=rest.searchsorted(self.bounds), columns=self.columns[rest], all_rows=self.all_rows[rest],
            tile=self.tile[rest], slot=self.slot[rest],
        )  # fmt: skip

    @property
    def pattern(self) -> int:
        """The pattern of the row blocks, all of which belong to one."""
        return self.blocks.start // self.tiles.layout.row_blocks

    @property
    def rows(self) -> tuple[int, int]:
        """First and last + 1 row position."""
        layout = self.tiles.layout
        first = self.blocks.start % layout.row_blocks
        return first * layout.config.block_m, min((first + len(self.blocks)) * layout.config.block_m, layout.q_len)

    def keep(self) -> Array:
        """Which scores are kept, of as many rows as a row block has: bool `[n, block_m]`."""
        return self.tiles.keep(self.tile, self.slot)
