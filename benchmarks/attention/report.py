"""What a result file says: one cell a line, STOF against the best of its peers, and means by class."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attention.run import KEY, NotRun, Row
from stof.errors import ArgumentError, MissingDependencyError
from stof.testing.mask_grid import GRID

OURS = "stof"
CLASSES = ("dense-like", "sparse", "decode", "other")
_COLOURS = {"dense-like": "#4c72b0", "sparse": "#dd8452", "decode": "#55a868", "other": "#8c8c8c"}


@dataclass
class Cell:
    """One mask on one shape: every implementation's line.

    Attributes:
        sizes: batch, query heads, key heads, head dim, query and key length.
        density: share of scores kept; None when nothing ran.
        not_run: reasons by implementation.
    """

    mask: str
    sizes: tuple[int, int, int, int, int, int]
    dtype: str
    density: float | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """One of `CLASSES`."""
        if self.mask.startswith("decode"):
            return "decode"
        if self.mask not in GRID:
            return "other"
        return "dense-like" if GRID[self.mask].dense_like else "sparse"

    @property
    def shape(self) -> str:
        """`B1 H32 D128 S8192`, with key heads and lengths only where they differ."""
        batch, heads, kv_heads, head_dim, q_len, kv_len = self.sizes
        grouped = "" if heads == kv_heads else f"/{kv_heads}"
        lengths = f"{q_len}" if q_len == kv_len else f"{q_len}x{kv_len}"
        return f"B{batch} H{heads}{grouped} D{head_dim} S{lengths}"

    @property
    def ours(self) -> float | None:
        """STOF's time in microseconds, None when it did not run or was wrong."""
        return time_of(self.rows[OURS]) if OURS in self.rows else None

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer with a right result, and its time in microseconds."""
        timed = [(time_of(row), name) for name, row in self.rows.items() if name != OURS]
        found = min(((us, name) for us, name in timed if us is not None), default=None)
        return (found[1], found[0]) if found else None

    @property
    def speedup(self) -> float | None:
        """Time of the best peer over STOF's."""
        return self.best[1] / self.ours if self.best and self.ours else None

    @property
    def tflops(self) -> float | None:
        """STOF's useful rate: `4 * B * H * D * kept scores` over its time, in 10^12 a second."""
        if self.density is None or not self.ours:
            return None
        batch, heads, _, head_dim, q_len, kv_len = self.sizes
        return 4 * batch * heads * head_dim * self.density * q_len * kv_len / self.ours * 1e-6

    @property
    def wrong(self) -> list[str]:
        """Implementations that ran and were not timed, because their result was off."""
        return [name for name, row in self.rows.items() if time_of(row) is None]


def time_of(row: Row) -> float | None:
    """GPU time on a GPU, else wall time, in microseconds."""
    return row.gpu_us if row.gpu_us is not None else row.call_us


def cells_of(rows: Iterable[Row], not_run: Iterable[NotRun] = ()) -> list[Cell]:
    """Lines grouped into cells, in the order of their classes, sizes and masks."""
    found: dict[tuple[Any, ...], Cell] = {}

    def cell(entry: Row | NotRun) -> Cell:
        mask, *sizes, dtype, _ = (getattr(entry, name) for name in KEY)
        return found.setdefault((mask, *sizes, dtype), Cell(mask, tuple(sizes), dtype))

    for row in rows:
        at = cell(row)
        at.rows[row.impl], at.density = row, row.density
    for entry in not_run:
        cell(entry).not_run[entry.impl] = entry.reason
    masks = [*GRID, *(c.mask for c in found.values())]
    return sorted(
        found.values(), key=lambda c: (CLASSES.index(c.kind), masks.index(c.mask), c.sizes[3], c.sizes[5], c.sizes)
    )


@dataclass(frozen=True)
class Summary:
    """Speed-ups of one class: how many cells, geometric mean, and the lowest with its cell."""

    kind: str
    cells: int
    geometric_mean: float
    minimum: float
    lowest: Cell


def summaries(cells: Iterable[Cell]) -> list[Summary]:
    """One summary for each class that has a cell with both STOF and a peer."""
    out = []
    rated = [(cell, cell.speedup) for cell in cells]
    for kind in CLASSES:
        mine = [(speedup, cell) for cell, speedup in rated if cell.kind == kind and speedup is not None]
        if mine:
            mean = math.exp(sum(math.log(speedup) for speedup, _ in mine) / len(mine))
            minimum, lowest = min(mine, key=lambda pair: pair[0])
            out.append(Summary(kind, len(mine), mean, minimum, lowest))
    return out


HEADINGS = ("class", "mask", "shape", "density", "stof us", "best peer", "its us", "speed-up", "TFLOP/s", "notes")


def line(cell: Cell) -> tuple[str, ...]:
    """The cell as text, one entry for each of `HEADINGS`."""
    best = cell.best
    ours = "wrong" if OURS in cell.wrong else "not run" if cell.ours is None else _number(cell.ours)
    notes = [f"WRONG: {', '.join(cell.wrong)}"] if cell.wrong else []
    # An implementation that does not serve a mask is no news; one that could not start or failed is.
    failed = [name for name, reason in cell.not_run.items() if "not usable" in reason or ": " in reason]
    if failed:
        notes.append(f"missing: {', '.join(failed)}")
    return (
        cell.kind,
        cell.mask,
        cell.shape if cell.dtype == "float16" else f"{cell.shape} {cell.dtype}",
        "-" if cell.density is None else f"{cell.density:.3f}",
        ours,
        best[0] if best else "-",
        _number(best[1]) if best else "-",
        f"{cell.speedup:.2f}x" if cell.speedup else "-",
        f"{cell.tflops:.0f}" if cell.tflops else "-",
        "; ".join(notes),
    )


def _number(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def summary_line(summary: Summary) -> str:
    """`sparse: 2.61x over the best peer (geometric mean of 24 cells), lowest 1.20x (bigbird B1 ...)`."""
    return (
        f"{summary.kind}: {summary.geometric_mean:.2f}x over the best peer (geometric mean of {summary.cells} cells), "
        f"lowest {summary.minimum:.2f}x ({summary.lowest.mask} {summary.lowest.shape})"
    )


def reasons(cells: Iterable[Cell]) -> list[str]:
    """`peer: reason (cells)` for everything that did not run, equal reasons in one line."""
    counted: dict[tuple[str, str], int] = {}
    for cell in cells:
        for name, reason in cell.not_run.items():
            counted[name, reason] = counted.get((name, reason), 0) + 1
    return [
        f"{name}: {reason} ({count} {'cell' if count == 1 else 'cells'})" for (name, reason), count in counted.items()
    ]


def markdown(cells: list[Cell]) -> str:
    """The table and the means as Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(line(cell)) + " |" for cell in cells]
    return "\n".join([*lines, "", *(f"- {summary_line(summary)}" for summary in summaries(cells))])


def draw_speedups(cells: list[Cell], path: Path, title: str) -> None:
    """Write a PNG or SVG: classes side by side, bars on a logarithmic axis, each labelled with the best peer.

    Raises:
        ArgumentError: no cell has both STOF and a peer.
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
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
    figure.suptitle(title, fontsize=10)
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
    # Equal results give equal files; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
