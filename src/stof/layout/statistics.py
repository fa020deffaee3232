"""Figures that describe a layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from stof.layout import bitmaps as bits
from stof.layout.layout import Layout


@dataclass(frozen=True)
class LayoutStatistics:
    """What a layout computes, summed over its patterns weighted by the (batch, head) pairs that use them.

    Attributes:
        density: kept scores / all scores, 0 to 1.
        computed_over_needed: scores of all tiles / kept scores; 1.0 is perfect, 0 for an empty mask.
        needed: kept scores.
        computed: scores of all tiles (rows and columns that do not exist not counted).
        full_tiles, partial_tiles: tiles by kind, of the distinct patterns.
        contiguous_tiles, gathered_tiles: tiles by how their columns lie.
        row_blocks: row blocks of the distinct patterns.
        empty_row_blocks: those with no tile at all.
        heaviest_row_block: most tiles in one row block.
        mean_row_block: tiles per row block.
        patterns: distinct (batch, head) masks.
        distinct_bitmaps: bitmaps stored after sharing equal ones.
        bytes: memory of all tensors of the layout.
    """

    density: float
    computed_over_needed: float
    needed: int
    computed: int
    full_tiles: int
    partial_tiles: int
    contiguous_tiles: int
    gathered_tiles: int
    row_blocks: int
    empty_row_blocks: int
    heaviest_row_block: int
    mean_row_block: float
    patterns: int
    distinct_bitmaps: int
    bytes: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def statistics(layout: Layout) -> LayoutStatistics:
    """Count; on a GPU this synchronises."""
    config = layout.config
    owner = layout.tile_row_block()
    exists = (layout.tile_columns() >= 0).sum(1)
    rows = (layout.rows().view(-1, config.block_m) >= 0).sum(1)
    computed = exists * rows[owner]
    ones = bits.unpack(layout.bitmaps, config.block_n).sum((1, 2)) if len(layout.bitmaps) else exists[:0]
    partial = layout.tile_bitmap >= 0
    kept = computed.clone()
    kept[partial] = ones[layout.tile_bitmap[partial].long()]

    # How many (batch, head) pairs use each pattern.
    uses = torch.bincount(layout.pattern_of.flatten().long(), minlength=layout.patterns)
    weight = uses[torch.div(owner, layout.row_blocks, rounding_mode="floor")]
    needed, total = int((kept * weight).sum()), int((computed * weight).sum())
    scores = layout.q_len * layout.kv_len * layout.pattern_of.numel()
    tiles_per_block = layout.row_block_ptr.diff()
    return LayoutStatistics(
        density=needed / scores,
        computed_over_needed=total / needed if needed else 0.0,
        needed=needed,
        computed=total,
        full_tiles=int((~partial).sum()),
        partial_tiles=int(partial.sum()),
        contiguous_tiles=int((layout.tile_base >= 0).sum()),
        gathered_tiles=int((layout.tile_base < 0).sum()),
        row_blocks=tiles_per_block.numel(),
        empty_row_blocks=int((tiles_per_block == 0).sum()),
        heaviest_row_block=int(tiles_per_block.max()),
        mean_row_block=layout.tiles / tiles_per_block.numel(),
        patterns=layout.patterns,
        distinct_bitmaps=len(layout.bitmaps),
        bytes=sum(t.numel() * t.element_size() for t in layout.tensors().values()),
    )
