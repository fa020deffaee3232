"""How a layout cuts the score matrix: one frozen object, one validity rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stof.errors import ArgumentError, shown

SLABS = (1, 8, 16)
BLOCK_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
BLOCK_COLUMNS = (16, 32, 64, 128, 256)


def _is_one_of(value: object, accepted: tuple[int, ...]) -> bool:
    """64.0 and True equal ints, but are no sizes of tensors."""
    return type(value) is int and value in accepted


@dataclass(frozen=True)
class LayoutConfig:
    """Shape of row blocks and tiles.

    Attributes:
        block_m: query rows of a row block; below 16 for decoding, where query heads fill up the tensor core's rows.
        block_n: key columns of a tile.
        slab: columns gathered together (1, 8 or 16); None keeps aligned, contiguous tiles.
        compact_columns: with slab 1, columns that most row blocks see without their neighbours are listed once for all
            row blocks; tiles are contiguous, or cut from that list (`stof.layout.compaction`). A kernel may copy the
            listed keys to consecutive rows first.
    """

    block_m: int = 64
    block_n: int = 64
    slab: int | None = None
    compact_columns: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("block_m", BLOCK_ROWS), ("block_n", BLOCK_COLUMNS)):
            if not _is_one_of(getattr(self, name), accepted):
                raise ArgumentError(f"{name} is one of {accepted}, got {shown(getattr(self, name))}")
        if self.slab is not None and not _is_one_of(self.slab, SLABS):
            raise ArgumentError(f"slab is one of {SLABS} or None (contiguous tiles), got {shown(self.slab)}")
        if not isinstance(self.compact_columns, bool):
            raise ArgumentError(f"compact_columns is True or False, got {shown(self.compact_columns)}")
        if self.compact_columns and self.slab != 1:
            raise ArgumentError(f"columns are compacted one by one, so slab is 1, got {self.slab!r}")

    def __new__(cls, *args: object, **options: object) -> LayoutConfig:
        if "aside" in options:
            raise ArgumentError("LayoutConfig has no option aside; it is called compact_columns")
        return super().__new__(cls)

    @property
    def slab_columns(self) -> int:
        """Granularity of columns: the slab, or a whole tile when tiles are contiguous."""
        return self.slab or self.block_n

    @property
    def slabs_per_tile(self) -> int:
        return self.block_n // self.slab_columns

    @property
    def columns(self) -> str:
        """How columns make tiles, for people."""
        if self.compact_columns:
            return "scattered columns compacted"
        names = {None: "contiguous columns", 1: "columns gathered singly"}
        return names.get(self.slab, f"columns gathered by {self.slab}")

    def contiguous(self) -> LayoutConfig:
        """The same block sizes without gathering."""
        return replace(self, slab=None, compact_columns=False)
