"""Drawing with matplotlib, which is imported only when a picture is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stof.drawing.raster import KINDS, Raster, layout_of, rasterize
from stof.drawing.text import COLOURS
from stof.errors import MissingDependencyError
from stof.layout import Layout, statistics
from stof.masks.parse import readable
from stof.plans.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Light to dark: what a picture of shares needs on white paper, in print and for any colour vision.
INK = "#12283D"
GREY = "#5B6670"

# Pixels. A panel as wide as its raster needs no resampling, which would make stripes shimmer.
PANEL = 1024
MARGIN_LEFT, GAP, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 150, 210, 60, 190, 240
DPI = 200

# Edges of tiles are drawn while row blocks are at least this many pixels high.
EDGE_PIXELS = 16

# Sparse stripes would vanish in proportion to their share: shown strength is share ** GAMMA. Shares matter more in
# the mask, presence in the tiles.
MASK_GAMMA, TILE_GAMMA = 0.5, 0.25

# Width of a character of the heading in pixels: 11 points of a monospaced font.
HEADING_PIXELS = 11 * 0.602 * DPI / 72


@dataclass(frozen=True)
class _Size:
    """Pixels of a panel, and of the figure around all of them (always as wide, so that its heading fits)."""

    width: int
    height: int
    panels: int

    @property
    def figure(self) -> tuple[int, int]:
        across = MARGIN_LEFT + self.panels * PANEL + (self.panels - 1) * GAP + MARGIN_RIGHT
        return across, MARGIN_TOP + self.height + MARGIN_BOTTOM


def draw_picture(
    layout_or_plan: Layout | Plan,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    pattern: int = 0,
    before: Layout | None = None,
) -> None:
    """Write the figure of `draw_figure` to a file.

    Args:
        layout_or_plan, title, pattern, before: as for `draw_figure`.
        path: file to write, replaced if it exists; SVG if it ends with .svg, else PNG.

    Raises:
        MissingDependencyError, ArgumentError: as of `draw_figure`.
        OSError: the file cannot be written.
    """
    figure = draw_figure(layout_or_plan, title=title, pattern=pattern, before=before)
    figure.savefig(path, format="svg" if Path(path).suffix == ".svg" else "png", dpi=DPI)


def draw_figure(
    layout_or_plan: Layout | Plan, *, title: str | None = None, pattern: int = 0, before: Layout | None = None
) -> Figure:
    """A figure of two panels, the mask and its tiles coloured by kind; or of three, with the tiles before.

    The left panel shows the share of kept scores, one pixel per score up to 1024 tokens. The right panel shows which
    scores are computed, by tiles of which kind; with permuted rows, these are in the layout's order. The figure is
    2468 pixels wide (3702 with `before`) and 1454 high for equal lengths; other ratios make a panel lower or narrower.

    Args:
        layout_or_plan: what to draw.
        title: heading; default the mask's text for a plan, the lengths for a layout.
        pattern: which distinct (batch, head) mask to draw.
        before: another layout of the same mask to compare with, such as the one with the rows in their own order.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ArgumentError: no such pattern.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a picture needs matplotlib: pip install matplotlib") from error
    layout = layout_of(layout_or_plan)
    if title is None:
        text = layout_or_plan.mask_text if isinstance(layout_or_plan, Plan) else f"{layout.q_len} x {layout.kv_len}"
        title = readable(text)
    shown = [layout] if before is None else [before, layout]
    size = _panel_size(layout, 1 + len(shown))
    pixels = _pixels(layout.q_len, size.height), _pixels(layout.kv_len, size.width)
    rasters = [rasterize(each, *pixels, pattern=pattern) for each in shown]
    # A figure and canvas without pyplot, whose global state and backend belong to the caller.
    across, down = size.figure
    figure = Figure(figsize=(across / DPI, down / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    _heading(figure, title, layout, pattern)
    _mask_panel(figure, rasters[-1], layout, size)
    for number, (each, raster) in enumerate(zip(shown, rasters, strict=True), 1):
        _tile_panel(figure, raster, each, size, pattern, number)
    # IPython looks for this name; a notebook that has not imported pyplot shows no figures otherwise.
    vars(figure)["_repr_png_"] = partial(_png, figure)
    return figure


def _png(figure: Figure) -> bytes:
    """A figure as a PNG file, half as wide as in a file of its own."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI / 2)
    return file.getvalue()


def _panel_size(layout: Layout, panels: int) -> _Size:
    """Equal scale for both axes as far as the ratio of the lengths allows."""
    ratio = layout.q_len / layout.kv_len
    return _Size(round(PANEL * min(1.0, max(0.25, 1 / ratio))), round(PANEL * min(1.0, max(0.25, ratio))), panels)


def _pixels(length: int, panel: int) -> int:
    """Raster pixels for a panel: a divisor of the length if one is near, so that all pixels are equally large."""
    if length <= panel:
        return length
    return next((n for n in range(panel, panel // 2, -1) if length % n == 0), panel)


def _heading(figure: Figure, title: str, layout: Layout, pattern: int) -> None:
    figures = statistics(layout)
    config = layout.config
    order = "" if layout.row_order is None else ", rows permuted"
    facts = [
        f"{layout.q_len} queries, {layout.kv_len} keys",
        f"density {100 * figures.density:.3g} %",
        f"computed / needed {figures.computed_over_needed:.2f}",
        f"{config.block_m} x {config.block_n} tiles, {config.columns}{order}",
    ]
    if layout.patterns > 1:
        facts.append(f"pattern {pattern + 1} of {layout.patterns}")
    width, height = figure.get_size_inches() * DPI
    room = int((width - MARGIN_LEFT - MARGIN_RIGHT) / HEADING_PIXELS)
    if len(title) > room:
        title = title[: room - 3] + "..."
    left = MARGIN_LEFT / width
    # parse_math off: a mask's text may hold dollar signs
    style: dict[str, Any] = {"ha": "left", "va": "baseline", "parse_math": False}
    figure.text(left, 1 - 62 / height, title, size=11, weight="bold", color=INK, family="monospace", **style)
    figure.text(left, 1 - 108 / height, "  ·  ".join(facts), size=8.5, color=GREY, **style)


def _panel(figure: Figure, size: _Size, number: int, title: str) -> Axes:
    width, height = size.figure
    left = MARGIN_LEFT + number * (PANEL + GAP)
    axes = figure.add_axes((left / width, MARGIN_BOTTOM / height, size.width / width, size.height / height))
    axes.set_title(title, fontsize=10, color=INK, loc="left", pad=7)
    axes.tick_params(labelsize=8, colors=GREY, width=0.6, length=3)
    for spine in axes.spines.values():
        spine.set(linewidth=0.6, color=GREY)
    return axes


def _label(axes: Axes, layout: Layout, rows: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("key position", fontsize=9, color=INK)
    axes.set_ylabel(rows, fontsize=9, color=INK)
    for axis, length in ((axes.xaxis, layout.kv_len), (axes.yaxis, layout.q_len)):
        if length % 4 == 0:
            axis.set_ticks(range(0, length + 1, length // 4))
        else:
            axis.set_major_locator(MaxNLocator(4, integer=True))


def _mask_panel(figure: Figure, raster: Raster, layout: Layout, size: _Size) -> None:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    axes = _panel(figure, size, 0, "Mask: who sees whom")
    image = axes.imshow(
        raster.kept.numpy(),
        cmap=LinearSegmentedColormap.from_list("ink", ["#FFFFFF", "#7FA3C4", INK]),
        norm=PowerNorm(MASK_GAMMA, vmin=0, vmax=1),
        extent=(0, layout.kv_len, layout.q_len, 0),
        aspect="auto",
    )
    _label(axes, layout, "query position")
    width, height = size.figure
    if raster.kept.shape == (layout.q_len, layout.kv_len):
        _keys(figure, MARGIN_LEFT / width, height, [(INK, "kept"), ("#FFFFFF", "dropped")])
        return
    bar = figure.add_axes((MARGIN_LEFT / width, 84 / height, 360 / width, 22 / height))
    figure.colorbar(image, cax=bar, orientation="horizontal", ticks=[0, 0.05, 0.25, 0.5, 1])
    bar.set_xticklabels(["0", "5 %", "25 %", "50 %", "100 %"])
    bar.tick_params(labelsize=7, colors=GREY, width=0.6, length=2)
    bar.set_title("share of a pixel's scores that is kept", fontsize=8, color=INK, loc="left", pad=4)
    bar.spines["outline"].set(linewidth=0.6, color=GREY)


def _tile_panel(figure: Figure, raster: Raster, layout: Layout, size: _Size, pattern: int, number: int) -> None:
    title = "Tiles: what is computed"
    if size.panels > 2:
        order = "rows in their own order" if layout.row_order is None else "rows permuted"
        title = f"{title}, {order}: {statistics(layout).computed_over_needed:.2f} x needed"
    axes = _panel(figure, size, number, title)
    axes.imshow(_blend(raster.tiles).numpy(), extent=(0, layout.kv_len, layout.q_len, 0), aspect="auto")
    if size.height / layout.row_blocks >= EDGE_PIXELS:
        _edges(axes, layout, pattern)
    _label(axes, layout, "query position" if layout.row_order is None else "row in the layout's order")
    width, height = size.figure
    present = raster.tiles.sum((1, 2)) > 0
    names = [(colour, f"{name} tile") for colour, name, seen in zip(COLOURS, KINDS, present, strict=True) if seen]
    names = names or [("#FFFFFF", "no tile: nothing is computed")]
    _keys(figure, (MARGIN_LEFT + number * (PANEL + GAP)) / width, height, names)


def _keys(figure: Figure, left: float, height: float, names: list[tuple[str, str]]) -> None:
    """A legend under a panel."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor=GREY, linewidth=0.5, label=name) for colour, name in names]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 130 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _blend(tiles: Tensor) -> Tensor:
    """RGB `[H, W, 3]` in 0 to 1: the kinds' colours in proportion, on white where nothing is computed."""
    rgb = [[int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)] for colour in COLOURS]
    total = tiles.sum(0)
    share = tiles / total.clamp(min=torch.finfo(tiles.dtype).tiny)
    mixed = torch.einsum("khw,kc->hwc", share, torch.tensor(rgb, dtype=tiles.dtype))
    strength = (total**TILE_GAMMA)[..., None]
    return (mixed * strength + (1 - strength)).clamp(0, 1)


def _edges(axes: Axes, layout: Layout, pattern: int) -> None:
    """White lines between row blocks, and between the contiguous tiles of each."""
    from matplotlib.collections import LineCollection

    block_m = layout.config.block_m
    axes.hlines(range(block_m, layout.q_len, block_m), 0, layout.kv_len, colors="white", linewidth=0.4)
    row = layout.tile_row_block() - pattern * layout.row_blocks
    chosen = (row >= 0) & (row < layout.row_blocks) & (layout.tile_base >= 0)
    pairs = torch.stack([row[chosen], layout.tile_base[chosen].long()], 1).tolist()
    lines = [((x, r * block_m), (x, (r + 1) * block_m)) for r, x in pairs]
    axes.add_collection(LineCollection(lines, colors="white", linewidths=0.4), autolim=False)
