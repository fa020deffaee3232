"""Drawing in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from rich.text import Text
from torch import Tensor

from stof.drawing.raster import KINDS, layout_of, rasterize
from stof.errors import ArgumentError
from stof.layout import Layout
from stof.plans.plan import Plan

DrawStyle = Literal["colour", "shades", "ascii"]

# Okabe and Ito's colours, apart for colour-blind readers too; in the order of KINDS.
COLOURS = ("#0072B2", "#E69F00", "#56B4E9", "#D55E00")

# Index: bit 0 upper left, bit 1 upper right, bit 2 lower left, bit 3 lower right.
_QUADRANTS = " ▘▝▀▖▌▞▛▗▚▐▜▄▙▟█"

_SHADES: dict[str, tuple[str, ...]] = {"shades": ("█", "▓", "▒", "░"), "ascii": ("#", "+", "o", ".")}

# A pixel is lit when it keeps at least this share of what the fullest pixel of its cell keeps: thin stripes stay
# whole, where a fixed threshold or dithering breaks them up.
_LIT = 0.5

# Cells whose fullest pixel keeps less than this are dimmed.
_SPARSE = 0.25

# A character cell is about twice as high as wide.
_CELL_ASPECT = 2


@dataclass(frozen=True)
class _Frame:
    """Characters of the box around a drawing."""

    corners: tuple[str, str, str, str]
    across: str
    down: str


_BOX = _Frame(("┌", "┐", "└", "┘"), "─", "│")
_ASCII_BOX = _Frame(("+", "+", "+", "+"), "-", "|")


def draw_text(
    layout_or_plan: Layout | Plan,
    width: int = 72,
    *,
    style: DrawStyle = "colour",
    pattern: int = 0,
    legend: bool = True,
) -> Text:
    """A mask and the kinds of its tiles as characters, queries downwards, keys to the right.

    With permuted rows, they are in the layout's order. A cell that keeps any score shows something; cells computed
    in vain stay blank.

    Args:
        layout_or_plan: what to draw.
        width: characters across, frame and row numbers included. The height follows from the lengths' ratio.
        style: "colour" shows what is kept in four pixels a cell, coloured by the kind of tile that computes most of
            it, dimmed where little is kept; "shades" and "ascii" show the kind alone, for terminals without colour
            or Unicode.
        pattern: which distinct (batch, head) mask to draw.
        legend: whether a line naming the kinds follows.

    Raises:
        ArgumentError: too narrow, or no such pattern.
    """
    layout = layout_of(layout_or_plan)
    margin = len(str(layout.q_len)) + 1
    columns = width - margin - 2
    if columns < 8:
        raise ArgumentError(f"a drawing of this mask needs a width of at least {margin + 10}, got {width}")
    rows = max(1, min(columns, round(columns * layout.q_len / layout.kv_len / _CELL_ASPECT)))
    kept, kind = _cells(layout, rows, columns, pattern)
    lines = _quadrant_lines(kept, kind) if style == "colour" else _shade_lines(kept, kind, _SHADES[style])
    framed = _framed(lines, layout, columns, _ASCII_BOX if style == "ascii" else _BOX)
    if legend:
        framed.append("\n" + " " * margin)
        framed.append_text(_legend(style))
    return framed


def _cells(layout: Layout, rows: int, columns: int, pattern: int) -> tuple[Tensor, Tensor]:
    """Share kept `[rows, 2, columns, 2]` (two by two pixels a cell), and main kind of tile `[rows, columns]`."""
    height, width = 2 * rows, 2 * columns
    raster = rasterize(layout, height, width, pattern=pattern, permuted=True)
    # Short masks have fewer scores than the drawing has pixels: repeat them.
    y = torch.arange(height) * raster.kept.shape[0] // height
    x = torch.arange(width) * raster.kept.shape[1] // width
    kept = raster.kept[y][:, x].view(rows, 2, columns, 2)
    tiles = raster.tiles[:, y][:, :, x].view(len(KINDS), rows, 2, columns, 2)
    return kept, tiles.sum((2, 4)).argmax(0)


def _quadrant_lines(kept: Tensor, kind: Tensor) -> list[Text]:
    shares = kept.transpose(1, 2).flatten(2)  # [rows, columns, 4]
    most = shares.amax(2)
    lit = (shares >= _LIT * most[..., None]) & (shares > 0)
    glyph = (lit * torch.tensor([1, 2, 4, 8])).sum(2)
    style = 2 * kind + (most < _SPARSE)
    return [_coloured(*pair) for pair in zip(glyph.tolist(), style.tolist(), strict=True)]


def _coloured(glyphs: list[int], styles: list[int]) -> Text:
    """One line of cells; neighbours of one style (twice the kind, plus one when sparse) share a span."""
    line = Text()
    for style, run in groupby(zip(glyphs, styles, strict=True), key=lambda cell: cell[1]):
        colour = COLOURS[style // 2]
        line.append("".join(_QUADRANTS[glyph] for glyph, _ in run), f"dim {colour}" if style % 2 else colour)
    return line


def _shade_lines(kept: Tensor, kind: Tensor, shades: tuple[str, ...]) -> list[str]:
    number = torch.where(kept.amax((1, 3)) > 0, kind, -1)
    return ["".join(shades[n] if n >= 0 else " " for n in line) for line in number.tolist()]


def _framed(lines: Sequence[Text | str], layout: Layout, columns: int, frame: _Frame) -> Text:
    margin = len(str(layout.q_len)) + 1
    upper_left, upper_right, lower_left, lower_right = frame.corners
    title = " key position " if columns >= 32 else ""
    last = str(layout.kv_len)
    out = Text(" " * (margin + 1) + "0" + title.center(columns - 1 - len(last), " ") + last + "\n")
    out.append(f"{'0':>{margin - 1}} {upper_left}{frame.across * columns}{upper_right}\n", "dim")
    for line in lines:
        out.append(" " * margin + frame.down, "dim")
        out.append(line)
        out.append(frame.down + "\n", "dim")
    out.append(f"{layout.q_len:>{margin - 1}} {lower_left}{frame.across * columns}{lower_right}", "dim")
    return out


def _legend(style: DrawStyle) -> Text:
    glyphs = ("█",) * len(KINDS) if style == "colour" else _SHADES[style]
    parts: list[Text] = []
    for glyph, name, colour in zip(glyphs, KINDS, COLOURS, strict=True):
        parts.append(Text.assemble((glyph, colour) if style == "colour" else glyph, f" {name}"))
    return Text("  ").join(parts)
