"""The two-level layout: which tiles each row block computes, and which scores of a tile count.

Source: STOF (arXiv 2506.06095), section 4.1 (BSR + bitmap, "full" and "part" tiles), generalised to gathered
columns, permuted rows and shared patterns as `docs/explanation/layout.md` describes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stof.errors import LayoutError
from stof.layout import bitmaps as bits
from stof.layout.config import LayoutConfig


def gathered_row(base: Tensor) -> Tensor:
    """Rows of `Layout.gathered` for entries of `tile_base` below 0; of rows, the entries."""
    return ~base


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
        tile_base: int32 `[T]`, first column of a contiguous tile, or `~g` for the tile in row g of `gathered`
            (`gathered_row`).
        gathered: int32 `[G, block_n // slab]`, first column of each slab, -1 in unused slots.
        tile_bitmap: int32 `[T]`, row of `bitmaps`, or -1 for a full tile.
        bitmaps: int32 `[U, block_m, ceil(block_n / 32)]`, bit c of a row is column c of the tile; in the
            order in which tiles first use them.
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
        tensors, other_tensors = self.tensors(), other.tensors()
        sizes = [(x.q_len, x.kv_len, x.config) for x in (self, other)]
        return (
            sizes[0] == sizes[1]
            and tensors.keys() == other_tensors.keys()
            and all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())
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
            slots = self.gathered[gathered_row(base[scattered])].long()
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
        # One spare row and column take the writes of padding.
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

    def compacted_keys(self) -> tuple[Tensor, Tensor] | None:
        """The compacted keys of each pattern (`config.compact_columns`), and where in them each gathered tile begins.

        Both are found from the gathered tiles.

        Returns:
            Keys, int64 `[P, n]`, ascending, padded with -1; n is a multiple of `block_n`, 0 where no tile is gathered.
            First positions among them, int64 `[G]`, by row of `gathered`. None where the columns of some gathered tile
            do not follow each other among the keys, which no builder makes.
        """
        block_n, slots = self.config.block_n, self.gathered.long()
        of_list = self.tile_base < 0
        pattern = torch.zeros_like(slots[:, 0])
        owner = torch.div(self.tile_row_block()[of_list], self.row_blocks, rounding_mode="floor")
        pattern[gathered_row(self.tile_base[of_list]).long()] = owner
        used = slots >= 0
        numbers, place = (pattern[:, None] * self.kv_len + slots)[used].unique(return_inverse=True)
        owner = torch.div(numbers, self.kv_len, rounding_mode="floor")
        count = torch.bincount(owner, minlength=self.patterns)
        first = count.cumsum(0) - count
        longest = -(-int(count.max()) // block_n) * block_n
        keys = torch.full((self.patterns, longest), -1, dtype=torch.int64, device=slots.device)
        keys[owner, torch.arange(len(numbers), device=slots.device) - first[owner]] = torch.remainder(
            numbers, self.kv_len
        )
        # Each used column implies a place where the tile begins; in a tile cut from the list all of them agree.
        begins = torch.zeros_like(slots)
        begins[used] = place - first[pattern.repeat_interleave(used.sum(1))] - used.nonzero()[:, 1]
        begin = torch.div(begins.sum(1), used.sum(1).clamp(min=1), rounding_mode="floor")
        if bool((used & (begins != begin[:, None])).any()) or bool((begin < 0).any()):
            return None
        return keys, begin

    def validate(self) -> None:
        """Check every invariant on the tensors alone.

        Shapes and dtypes come first: contents are looked at only where those hold, so that corrupt files cannot index
        out of range.

        Raises:
            LayoutError: names all problems found.
        """
        problems = _shape_problems(self) or _range_problems(self) or _content_problems(self)
        if problems:
            raise LayoutError(problems)

    def __repr__(self) -> str:
        return (
            f"Layout({self.q_len}x{self.kv_len}, {self.config}, patterns={self.patterns}, tiles={self.tiles}, "
            f"device={str(self.device)!r})"
        )


def _shape_problems(layout: Layout) -> list[str]:
    config, problems = layout.config, []
    if not (0 < layout.q_len < 2**31 and 0 < layout.kv_len < 2**31):
        return [f"lengths are between 1 and 2**31 - 1, got q_len {layout.q_len}, kv_len {layout.kv_len}"]
    devices = {tensor.device for tensor in layout.tensors().values()}
    if len(devices) != 1:
        problems.append(f"tensors are on several devices: {sorted(map(str, devices))}")
    numbered, tiles = layout.partial_count.numel(), layout.tile_base.numel()
    if layout.pattern_of.ndim != 2 or 0 in layout.pattern_of.shape:
        problems.append(f"pattern_of is [mask_batch, mask_heads], got {list(layout.pattern_of.shape)}")
    if numbered == 0 or numbered % layout.row_blocks:
        problems.append(f"partial_count has {numbered} entries, not a multiple of {layout.row_blocks} row blocks")
    wanted: dict[str, tuple[torch.dtype, tuple[int | None, ...]]] = {
        "pattern_of": (torch.int32, (None, None)),
        "row_block_ptr": (torch.int32, (numbered + 1,)),
        "partial_count": (torch.int32, (numbered,)),
        "tile_base": (torch.int32, (tiles,)),
        "gathered": (torch.int32, (None, config.slabs_per_tile)),
        "tile_bitmap": (torch.int32, (tiles,)),
        "bitmaps": (torch.int32, (None, config.block_m, bits.words(config.block_n))),
        "row_order": (torch.int32, (numbered // layout.row_blocks, layout.q_len)),
    }
    for name, tensor in layout.tensors().items():
        dtype, shape = wanted[name]
        fits = len(shape) == tensor.ndim and all(
            size in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            problems.append(f"{name} is {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    return problems


def _range_problems(layout: Layout) -> list[str]:
    problems: list[str] = []
    pointers, partial = layout.row_block_ptr, layout.partial_count
    steps = pointers.long().diff()  # int32 differences wrap around
    gathered, bitmaps = len(layout.gathered), len(layout.bitmaps)
    slab = layout.config.slab_columns

    def require(good: Tensor | bool, problem: str) -> None:
        if not bool(good):
            problems.append(problem)

    require(pointers[0] == 0, "row_block_ptr does not start at 0")
    require(pointers[-1] == layout.tiles, f"row_block_ptr does not end at the number of tiles {layout.tiles}")
    require((steps >= 0).all(), "row_block_ptr decreases")
    require(((partial >= 0) & (partial <= steps)).all(), "partial_count is not between 0 and the tile count")
    require(_within(layout.pattern_of, 0, layout.patterns), "pattern_of names a pattern that is not there")
    require(_within(layout.tile_base, -gathered, layout.kv_len), "tile_base is out of range")
    require(_within(layout.tile_bitmap, -1, bitmaps), "tile_bitmap is out of range")
    require(_within(layout.gathered, -1, layout.kv_len), "gathered has columns out of range")
    used = layout.gathered[layout.gathered >= 0]
    require((torch.remainder(used, slab) == 0).all(), f"gathered slabs do not start at multiples of {slab}")
    if layout.row_order is not None:
        require(_is_permutation(layout.row_order), "row_order is not a permutation of the rows")
    return problems


def _within(values: Tensor, low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())


def _is_permutation(rows: Tensor) -> bool:
    return bool((rows.sort(-1).values == torch.arange(rows.shape[-1], device=rows.device)).all())


def _content_problems(layout: Layout) -> list[str]:
    problems: list[str] = []
    owner = layout.tile_row_block()
    position = torch.arange(layout.tiles, device=layout.device) - layout.row_block_ptr[:-1].long()[owner]
    partial = position < layout.partial_count.long()[owner]
    if not torch.equal(partial, layout.tile_bitmap >= 0):
        problems.append("tiles with a bitmap are not the partial ones, or do not come first")
    slots = layout.tile_base[layout.tile_base < 0]
    if len(slots.unique()) != len(slots):
        problems.append("two tiles share one row of gathered columns")
    columns = layout.tile_columns()
    exists = columns >= 0
    key = (owner[:, None] * layout.kv_len + columns)[exists]
    if len(key.unique()) != len(key):
        problems.append("a row block lists the same column twice")
    if layout.config.compact_columns and layout.compacted_keys() is None:
        problems.append("gathered tiles are not stretches of one list of compacted columns")
    if not bool(exists[~partial].all()):
        problems.append("a full tile reaches past kv_len or has unused slots")
    if problems:
        return problems
    rows = layout.rows().view(-1, layout.config.block_m) >= 0
    step = max(1, 2**24 // (layout.config.block_m * layout.config.block_n))
    for tiles in partial.nonzero()[:, 0].split(step):
        outside = ~(rows[owner[tiles]][:, :, None] & exists[tiles][:, None, :])
        if bool((layout.tile_keep(tiles) & outside).any()):
            problems.append("a bitmap keeps rows or columns that do not exist")
            break
    return problems
