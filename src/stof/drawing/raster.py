"""A layout reduced to pixels. Works on tiles, so no `q_len x kv_len` tensor is made at any length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.layout import Layout
from stof.plans.plan import Plan

# Kinds of tiles, in the order of `Raster.tiles`.
KINDS = ("full", "partial", "gathered full", "gathered partial")

# Scores unpacked from bitmaps at once: bounds the memory of a picture.
CHUNK_SCORES = 2**22


@dataclass(frozen=True, eq=False)
class Raster:
    """A mask and its tiles in `H x W` pixels. Query row i lies in pixel row `i * H // q_len`, keys likewise.

    Attributes:
        kept: float64 `[H, W]`, share of a pixel's scores that the mask keeps, 0 to 1.
        tiles: float64 `[4, H, W]`, share of a pixel's scores computed by tiles of each of `KINDS`. Pixel rows are
            in the layout's row order, which is the order of `kept` too unless rows are permuted.
    """

    kept: Tensor
    tiles: Tensor


def layout_of(layout_or_plan: Layout | Plan) -> Layout:
    """The layout itself, or the one a plan holds."""
    return layout_or_plan.layout if isinstance(layout_or_plan, Plan) else layout_or_plan


def rasterize(layout: Layout, height: int, width: int, *, pattern: int = 0, permuted: bool = False) -> Raster:
    """Reduce one pattern of a layout to at most `height x width` pixels, exactly.

    Args:
        layout: on any device; the picture is made on the CPU.
        height, width: wanted pixels; cut to `q_len` and `kv_len`, so short masks give one pixel per score.
        pattern: which distinct (batch, head) mask to draw, see `Layout.pattern_of`.
        permuted: whether `kept` shows rows in the layout's order instead of the queries' own.

    Raises:
        ArgumentError: no such pattern, or no pixels.
    """
    if not 0 <= pattern < layout.patterns:
        raise ArgumentError(f"pattern is between 0 and {layout.patterns - 1} for this layout, got {pattern}")
    if height < 1 or width < 1:
        raise ArgumentError(f"a picture has at least one pixel, got {height} x {width}")
    layout = layout.to("cpu")
    height, width = min(height, layout.q_len), min(width, layout.kv_len)
    blocks, block_m = layout.row_blocks, layout.config.block_m
    y, x = _pixels(layout.q_len, height), _pixels(layout.kv_len, width)
    columns = _columns_by_kind(layout, pattern, x, width)

    position = torch.full((blocks * block_m,), -1)
    position[: layout.q_len] = y
    in_order = _rows_of_blocks(position.view(blocks, block_m), height)
    if permuted or layout.row_order is None:
        mask_rows = in_order
    else:
        position[: layout.q_len] = y[layout.row_order[pattern].long()]
        mask_rows = _rows_of_blocks(position.view(blocks, block_m), height)
    # float64 holds these counts exactly
    kept = mask_rows @ (columns[0] + columns[2])
    kept += _kept_in_partial(layout, pattern, position.view(blocks, block_m), x, (height, width))
    scores = torch.bincount(y, minlength=height)[:, None] * torch.bincount(x, minlength=width)
    return Raster(kept / scores, (in_order @ columns) / scores)


def _pixels(length: int, pixels: int) -> Tensor:
    """int64 `[length]`: the pixel of each position; every pixel gets at least one."""
    return torch.div(torch.arange(length) * pixels, length, rounding_mode="floor")


def _rows_of_blocks(position: Tensor, height: int) -> Tensor:
    """float64 `[height, R]`: how many rows of each row block lie in each pixel row (`position [R, block_m]`)."""
    blocks = torch.arange(len(position))[:, None].expand_as(position)
    exists = position >= 0
    flat = position[exists] * len(position) + blocks[exists]
    return torch.bincount(flat, minlength=height * len(position)).view(height, -1).double()


def _tile_range(layout: Layout, pattern: int) -> tuple[int, int]:
    ends = layout.row_block_ptr[[pattern * layout.row_blocks, (pattern + 1) * layout.row_blocks]].tolist()
    return ends[0], ends[1]


def _columns_by_kind(layout: Layout, pattern: int, x: Tensor, width: int) -> Tensor:
    """float64 `[4, R, width]`: how many columns each row block computes, by kind of tile and pixel column."""
    blocks = layout.row_blocks
    first, last = _tile_range(layout, pattern)
    owner = layout.tile_row_block() - pattern * blocks
    kind = 2 * (layout.tile_base < 0).long() + (layout.tile_bitmap >= 0)
    counts = torch.zeros(4 * blocks * width, dtype=torch.int64)
    step = max(1, CHUNK_SCORES // layout.config.block_n)
    for start in range(first, last, step):
        tiles = torch.arange(start, min(start + step, last))
        columns = layout.tile_columns(tiles)
        cell = ((kind[tiles] * blocks + owner[tiles]) * width)[:, None] + x[columns.clamp(min=0)]
        counts += torch.bincount(cell[columns >= 0], minlength=counts.numel())
    return counts.view(4, blocks, width).double()


def _kept_in_partial(layout: Layout, pattern: int, position: Tensor, x: Tensor, size: tuple[int, int]) -> Tensor:
    """float64 `[H, W]`: kept scores of the partial tiles; `position [R, block_m]` is each row's pixel row."""
    height, width = size
    first, last = _tile_range(layout, pattern)
    owner = layout.tile_row_block() - pattern * layout.row_blocks
    counts = torch.zeros(height * width, dtype=torch.int64)
    partial = first + (layout.tile_bitmap[first:last] >= 0).nonzero()[:, 0]
    for tiles in partial.split(max(1, CHUNK_SCORES // (layout.config.block_m * layout.config.block_n))):
        tile, row, column = layout.tile_keep(tiles).nonzero(as_tuple=True)
        key = layout.tile_columns(tiles)[tile, column]
        cell = position[owner[tiles]][tile, row] * width + x[key]
        counts += torch.bincount(cell, minlength=counts.numel())
    return counts.view(height, width).double()
