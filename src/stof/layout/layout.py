"""The two-level layout: which tiles each row block computes, and which scores of a tile count.

Source: STOF (arXiv 2506.06095), section 4.1 (BSR + bitmap, "full" and "part" tiles), generalised to gathered
columns, permuted rows and shared patterns as `docs/explanation/layout.md` describes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stof.layout import bitmaps as bits
from stof.layout.config import LayoutConfig


@dataclass(frozen=True, eq=False)
class Layout:
    """A mask compiled for one pair of lengths.

    `P` patterns are the distinct (batch, head) masks, `R = ceil(q_len / block_m)` the row blocks of a pattern,
    `T` all tiles, `G` the gathered ones, `U` the distinct bitmaps. Row block `r` of pattern `p` is number
    `p * R + r`. Tiles of a row block are contiguous in the tile arrays: partial tiles first, then full ones.

    Attributes:
        q_len, kv_len: lengths the layout was built for.
        config: block sizes and slab.
        pattern_of: int32 `[mask_batch, mask_heads]`, the pattern of each batch entry and head.
        row_block_ptr: int32 `[P * R + 1]`, tiles of row block n are `row_block_ptr[n] : row_block_ptr[n + 1]`.
        partial_count: int32 `[P * R]`, how many of them are partial.
        tile_base: int32 `[T]`, first column of a contiguous tile, or `~g` for the tile in row `g` of `gathered`.
        gathered: int32 `[G, block_n // slab]`, first column of each slab, -1 in unused slots.
        tile_bitmap: int32 `[T]`, row of `bitmaps`, or -1 for a full tile.
        bitmaps: int32 `[U, block_m, ceil(block_n / 32)]`, bit c of a row is column c of the tile; in the
            order in which tiles first use them.
        cost: float32 `[P * R]`, work in units of one full tile.
        order: int32 `[P * R]`, row blocks longest first.
        row_order: int32 `[P, q_len]`, original row at each permuted position; None when rows keep their order.
    """

    q_len: int
    kv_len: int
    config: LayoutConfig
    pattern_of: Tensor
    row_block_ptr: Tensor
    partial_count: Tensor
    tile_base: Tensor
    gathered: Tensor
    tile_bitmap: Tensor
    bitmaps: Tensor
    cost: Tensor
    order: Tensor
    row_order: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.pattern_of.device

    @property
    def mask_batch(self) -> int:
        return int(self.pattern_of.shape[0])

    @property
    def mask_heads(self) -> int:
        return int(self.pattern_of.shape[1])

    @property
    def row_blocks(self) -> int:
        """Row blocks of one pattern."""
        return -(-self.q_len // self.config.block_m)

    @property
    def patterns(self) -> int:
        return int(self.partial_count.shape[0]) // self.row_blocks

    @property
    def tiles(self) -> int:
        return int(self.tile_base.shape[0])

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name, without `row_order` when rows keep their order."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in named if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its tensors on `device`."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def equals(self, other: Layout) -> bool:
        """Whether both keep the same scores by the same tiles."""
        own, theirs = self.tensors(), other.tensors()
        sizes = [(x.q_len, x.kv_len, x.config) for x in (self, other)]
        return (
            sizes[0] == sizes[1]
            and own.keys() == theirs.keys()
            and all(torch.equal(tensor, theirs[name]) for name, tensor in own.items())
        )

    def tile_row_block(self) -> Tensor:
        """int64 `[T]`: the row block (pattern included) each tile belongs to."""
        counts = self.row_block_ptr.diff()
        numbers = torch.arange(counts.numel(), device=self.device)
        return torch.repeat_interleave(numbers, counts.long(), output_size=self.tiles)

    def tile_columns(self, tiles: Tensor | None = None) -> Tensor:
        """int64 `[t, block_n]`: key column of each tile column, -1 where there is none.

        `tiles` selects tiles (default: all). Columns at or past `kv_len` are -1 as well.
        """
        base = (self.tile_base if tiles is None else self.tile_base[tiles]).long()
        slab = self.config.slab_columns
        within = torch.arange(self.config.block_n, device=self.device)
        columns = base[:, None] + within
        scattered = base < 0
        if bool(scattered.any()):
            slots = self.gathered[~base[scattered]].long()
            spread = slots[:, :, None] + torch.arange(slab, device=self.device)
            columns[scattered] = torch.where(slots[:, :, None] < 0, -1, spread).flatten(1)
        return torch.where(columns < self.kv_len, columns, -1)

    def tile_live(self) -> Tensor:
        """bool `[T, block_n]`: columns of each tile that some row keeps.

        Keys and values in the others may be anything: they must not be read, as 0 * NaN is NaN.
        """
        number = self.tile_bitmap.long()
        live = torch.ones(len(number), self.config.block_n, dtype=torch.bool, device=self.device)
        partial = number >= 0
        live[partial] = bits.live_columns(self.bitmaps, self.config.block_n)[number[partial]]
        return live

    def rows(self) -> Tensor:
        """int64 `[P, R * block_m]`: original row at each position, -1 past the end."""
        padded = self.row_blocks * self.config.block_m
        out = torch.full((self.patterns, padded), -1, dtype=torch.int64, device=self.device)
        if self.row_order is None:
            out[:, : self.q_len] = torch.arange(self.q_len, device=self.device)
        else:
            out[:, : self.q_len] = self.row_order
        return out

    def to_dense(self) -> Tensor:
        """The mask back as bool `[mask_batch, mask_heads, q_len, kv_len]`; exact inverse of building."""
        block_m, block_n = self.config.block_m, self.config.block_n
        # One spare row and column swallow the writes of padding.
        dense = torch.zeros(self.patterns, self.q_len + 1, self.kv_len + 1, dtype=torch.bool, device=self.device)
        owner = self.tile_row_block()
        rows = self.rows().view(-1, block_m)
        chunk = max(1, 2**24 // (block_m * block_n))
        for start in range(0, self.tiles, chunk):
            tiles = torch.arange(start, min(start + chunk, self.tiles), device=self.device)
            keep = self.tile_keep(tiles)
            columns = self.tile_columns(tiles)
            pattern = torch.div(owner[tiles], self.row_blocks, rounding_mode="floor")
            row = torch.where(rows < 0, self.q_len, rows)[owner[tiles]]
            column = torch.where(columns < 0, self.kv_len, columns)
            at = torch.broadcast_tensors(pattern[:, None, None], row[:, :, None], column[:, None, :])
            chosen = keep.nonzero(as_tuple=True)
            dense[at[0][chosen], at[1][chosen], at[2][chosen]] = True
        return dense[self.pattern_of.long(), : self.q_len, : self.kv_len]

    def tile_keep(self, tiles: Tensor) -> Tensor:
        """bool `[t, block_m, block_n]`: the scores of these tiles that count (full tiles: all)."""
        number = self.tile_bitmap[tiles].long()
        keep = torch.ones(len(tiles), self.config.block_m, self.config.block_n, dtype=torch.bool, device=self.device)
        partial = number >= 0
        keep[partial] = bits.unpack(self.bitmaps[number[partial]], self.config.block_n)
        return keep

    def validate(self) -> None:
        """Raise `LayoutError` naming every inconsistency; see `stof.layout.check`."""
        from stof.layout.check import validate

        validate(self)

    def __repr__(self) -> str:
        return (
            f"Layout({self.q_len}x{self.kv_len}, {self.config}, patterns={self.patterns}, tiles={self.tiles}, "
            f"device={str(self.device)!r})"
        )
