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
        aside: tiles are aligned, contiguous ones and, with slab 1, stretches of one list for all row blocks, of the
            columns that most row blocks see alone: a kernel may copy those to consecutive
            rows first (`stof.layout.compaction`).
    """

    block_m: int = 64
    block_n: int = 64
    slab: int | None = None
    aside: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (("block_m", BLOCK_ROWS), ("block_n", BLOCK_COLUMNS)):
            if not _is_one_of(getattr(self, name), accepted):
                raise ArgumentError(f"{name} is one of {accepted}, got {shown(getattr(self, name))}")
        if self.slab is not None and not _is_one_of(self.slab, SLABS):
            raise ArgumentError(f"slab is one of {SLABS} or None (contiguous tiles), got {shown(self.slab)}")
        if not isinstance(self.aside, bool):
            raise ArgumentError(f"aside is True or False, got {shown(self.aside)}")
        if self.aside and self.slab != 1:
            raise ArgumentError(f"columns are put aside one by one, so slab is 1, got {self.slab!r}")

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
        if self.aside:
            return "scattered columns put aside"
        names = {None: "contiguous columns", 1: "columns gathered singly"}
        return names.get(self.slab, f"columns gathered by {self.slab}")

    def contiguous(self) -> LayoutConfig:
        """The same block sizes without gathering."""
        return replace(self, slab=None, aside=False)
