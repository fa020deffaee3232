"""The picture of a result file: one bar a cell, STOF's speed-up over its best peer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.attention.report import Cell, summaries
from stof.errors import ArgumentError, MissingDependencyError

_COLOURS = {"dense-like": "#4c72b0", "sparse": "#dd8452", "decode": "#55a868", "other": "#8c8c8c"}


def draw_speedups(cells: list[Cell], path: Path, title: str) -> None:
    """Write a PNG: classes side by side, bars on a logarithmic axis, each labelled with the best peer.

    Raises:
        ArgumentError: no cell has both STOF and a peer.
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a picture needs matplotlib: pip install matplotlib") from error
    groups = [(s, [cell for cell in cells if cell.kind == s.kind and cell.speedup]) for s in summaries(cells)]
    if not groups:
        raise ArgumentError("nothing to draw: no cell has both a time of stof and one of a peer")
    tallest = max(len(members) for _, members in groups)
    figure = Figure(figsize=(1 + 6.2 * len(groups), 1.6 + 0.27 * tallest), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    plots = figure.subplots(1, len(groups), squeeze=False)[0]
    values = [cell.speedup or 1.0 for _, members in groups for cell in members]
    low, high = min(0.9, *values) / 1.1, max(1.1, *values) * 2.2  # room for the labels at the bars' ends
    for axes, (summary, members) in zip(plots, groups, strict=True):
        places = range(len(members))
        speedups = [cell.speedup or 1.0 for cell in members]
        # Bars grow from 1: to the right where STOF is faster.
        axes.barh(places, [s - 1 for s in speedups], left=1, height=0.75, color=_COLOURS[summary.kind])
        for place, cell, speedup in zip(places, members, speedups, strict=True):
            peer = cell.best[0] if cell.best else ""
            axes.annotate(
                f"{speedup:.2f}x  {peer}", (max(speedup, 1.0), place), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=7, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        axes.axvline(1, color="black", linewidth=0.8)
        axes.axvline(summary.geometric_mean, color=_COLOURS[summary.kind], linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(list(places), [f"{cell.mask}  {cell.shape}" for cell in members], fontsize=7)
        axes.set_ylim(tallest - 0.4, -0.6)  # bars of one height in all classes
        axes.set_xlabel("speed-up over the best peer")
        axes.set_title(f"{summary.kind}: {summary.geometric_mean:.2f}x (geometric mean, dashed)", fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
