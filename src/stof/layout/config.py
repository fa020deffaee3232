"""How a layout cuts the score matrix: one frozen object, one validity rule."""

from __future__ import annotations

from dataclasses import dataclass

from stof.errors import ArgumentError

SLABS = (1, 8, 16)
BLOCK_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
BLOCK_COLUMNS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class LayoutConfig:
    """Shape of row blocks and tiles.

    Attributes:
        block_m: query rows of a row block; below 16 for decoding, where query heads fill up the tensor core's rows.
        block_n: key columns of a tile.
        slab: columns gathered together (1, 8 or 16); None keeps aligned, contiguous tiles.
    """

    block_m: int = 64
    block_n: int = 64
    slab: int | None = None

    def __post_init__(self) -> None:
        for name, accepted in (("block_m", BLOCK_ROWS), ("block_n", BLOCK_COLUMNS)):
            if getattr(self, name) not in accepted:
                raise ArgumentError(f"{name} is one of {accepted}, got {getattr(self, name)!r}")
        if self.slab is not None and self.slab not in SLABS:
            raise ArgumentError(f"slab is one of {SLABS} or None (contiguous tiles), got {self.slab!r}")

    @property
    def slab_columns(self) -> int:
        """Granularity of columns: the slab, or a whole tile when tiles are contiguous."""
        return self.slab or self.block_n

    @property
    def slabs_per_tile(self) -> int:
        return self.block_n // self.slab_columns
