"""The paper's charts and tables, drawn from the rows of the JSON alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.experiment import Row
from benchmarks.results_io import read_results
from stof.errors import ArgumentError, MissingDependencyError

NATIVE = "native"
_COLOURS = ("#8c8c8c", "#c4c4c4", "#4c72b0", "#55a868", "#937860", "#dd8452", "#8172b3", "#c44e52")
# Bars of the figures: the fastest row of the listed implementations counts.
ATTENTION: dict[str, tuple[str, ...]] = {
    "PyTorch native": (NATIVE,),
    "torch.compile": ("native-compiled",),
    "SDPA": ("sdpa", "sdpa-native", "sdpa-cudnn"),
    "FlashAttention-2": ("flash-2",),
    "FlexAttention": ("flex",),
    "STOF": ("stof",),
}
SIX = tuple(f"{mode}-{kind}" for mode in ("default", "reduce-overhead", "max-autotune") for kind in ("sdpa", "flex"))
_MODELS: dict[str, tuple[str, ...]] = {
    "PyTorch native": (NATIVE,),
    "torch.compile": ("native-compiled",),
    "best of SDPA and FlexAttention, compiled": SIX,
    "STOF": ("stof",),
    "STOF tuned": ("stof-tuned",),
}
_ABLATION: dict[str, tuple[str, ...]] = {
    "PyTorch native": (NATIVE,),
    "torch.compile": ("native-compiled",),
    "attention only": ("stof-attention",),
    "fusion only": ("stof-fusion",),
    "both": ("stof",),
}
_FUSED: dict[str, tuple[str, ...]] = {"operators alone": (NATIVE,), "Inductor": ("inductor",), "STOF": ("stof",)}


def draw(path: Path) -> list[Path]:
    """Draw every figure that the file has rows of, as PNG and SVG beside it; the files.

    Raises:
        ArgumentError: there is no such file, or it is none of `python -m benchmarks paper`.
        MissingDependencyError: matplotlib is not installed.
    """
    results = read_results(path, Row)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing charts needs matplotlib: pip install matplotlib") from error
    if not results.rows:
        raise ArgumentError(f"{path} has no rows to draw")
    written = []
    with matplotlib.rc_context({"svg.hashsalt": "paper"}):
        for name, title, panels in charts(results.rows):
            figure = Figure(
                figsize=(max(8.5, 4.6 * min(3, len(panels))), 0.8 + 3.2 * -(-len(panels) // 3)), layout="constrained"
            )
            FigureCanvasAgg(figure)
            figure.suptitle(f"{title}\n{results.meta.get('device')}", fontsize=10)
            axes = list(figure.subplots(-(-len(panels) // 3), min(3, len(panels)), squeeze=False).flat)
            for place, (heading, groups, bars) in zip(axes, panels, strict=False):
                _panel(place, heading, groups, bars)
            for place in axes[len(panels) :]:
                place.set_visible(False)
            figure.legend(
                *next(iter(figure.axes)).get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8
            )
            for kind, options in (("png", {"dpi": 130}), ("svg", {"metadata": {"Date": None}})):
                target = path.with_name(f"{path.stem}-{name}.{kind}")
                figure.savefig(target, **options)
                written.append(target)
    return written


# A heading, names of the groups of bars, and the bars by label, None where one is missing.
Panel = tuple[str, list[str], dict[str, list[float | None]]]


def charts(rows: Iterable[Row]) -> list[tuple[str, str, list[Panel]]]:
    """A name for files, a title and the panels of every figure that has rows."""
    rows = list(rows)
    speed = "times as fast as PyTorch native"
    orders = [row for row in rows if row.mask.startswith("neighborhood")]
    grid = [row for row in rows if row.figure == "9" and row not in orders]
    made = [
        ("figure-9-10", f"Figures 9 and 10: attention, {speed}", _grouped(grid, _by_mask, _by_size, ATTENTION)),
        ("orders", f"Neighbourhoods by the order of tokens, {speed}", _grouped(orders, _all, _by_mask, ATTENTION)),
    ]
    for figure, title, bars in (
        ("11", "Figure 11: models", _MODELS),
        ("12", "Figure 12: ablation", _ABLATION),
        ("3", "Figure 3: a feed-forward layer", _FUSED),
        ("4", "Figure 4: norms", _FUSED),
    ):
        of_figure = [row for row in rows if row.figure == figure]
        panels = _grouped(of_figure, lambda row: row.model, _by_size, bars)
        made.append((f"figure-{figure}", f"{title}, {speed}", panels))
    phases = [row for row in rows if row.figure == "13"]
    names: dict[str, tuple[str, ...]] = {row.impl.removeprefix("stof "): (row.impl,) for row in phases}
    made.append(
        (
            "figure-13",
            "Figure 13: seconds of a search",
            _grouped(phases, _all, _by_model, names, speedup=False),
        )
    )
    totals = [row for row in rows if row.figure == "table4"]
    made.append(
        ("table-4", "Table 4: seconds of tuning", _grouped(totals, _all, _by_model, {"STOF": ("stof",)}, False))
    )
    return [chart for chart in made if chart[2]]


def _by_mask(row: Row) -> str:
    return row.mask


def _by_size(row: Row) -> str:
    return f"{row.batch}, {row.length}"


def _by_model(row: Row) -> str:
    return f"{row.model} {row.batch}, {row.length}"


def _all(row: Row) -> str:
    del row
    return ""


def _grouped(
    rows: Sequence[Row],
    panel: Callable[[Row], str],
    group: Callable[[Row], str],
    bars: dict[str, tuple[str, ...]],
    speedup: bool = True,
) -> list[Panel]:
    """Rows by panel and group, in the order of their sizes; each bar the time of native over its own, or its time."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in sorted(rows, key=lambda row: (row.length, row.batch)):
        if row.time is not None:
            panels.setdefault(panel(row), {}).setdefault(group(row), {})[row.impl] = row.time
    found: list[Panel] = []
    for heading, groups in panels.items():
        shown = {name: times for name, times in groups.items() if not speedup or NATIVE in times}
        heights = {
            label: [bar_height(times, impls, speedup) for times in shown.values()] for label, impls in bars.items()
        }
        if shown:
            found.append((heading, list(shown), heights))
    return found


def bar_height(times: dict[str, float], impls: Sequence[str], speedup: bool = True) -> float | None:
    """Native's time over the fastest of some implementations', or that time; None where none has one."""
    own = min((times[impl] for impl in impls if impl in times), default=None)
    if own is None or own <= 0:
        return None if own is None or speedup else own
    return times[NATIVE] / own if speedup else own


def _panel(axes: Any, heading: str, groups: list[str], bars: dict[str, list[float | None]]) -> None:
    from matplotlib.ticker import LogFormatter

    width = 0.84 / max(1, len(bars))
    for number, (label, heights) in enumerate(bars.items()):
        places = [i - 0.42 + (number + 0.5) * width for i in range(len(groups))]
        colour = _COLOURS[-1] if label in ("STOF", "both") else _COLOURS[number % (len(_COLOURS) - 1)]
        axes.bar(places, [height or math.nan for height in heights], width, label=label, color=colour)
    axes.set_title(heading, fontsize=9)
    axes.set_xticks(range(len(groups)), groups, rotation=60, fontsize=6)
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())  # plain numbers, between powers of ten as well
    axes.yaxis.set_minor_formatter(LogFormatter())
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def table(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """A line for each cell with a time of ours: figure, mask or model, size, our time, the best other, their ratio."""
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row.figure not in ("12", "13", "table4", "selector"):
            cells.setdefault((row.figure, row.model or row.mask, _by_size(row)), {})[row.impl] = row
    lines = []
    for at, found in cells.items():
        ours = found.get("stof")
        others = [(row.time, name) for name, row in found.items() if not name.startswith("stof") and row.time]
        if ours is None or not ours.time or not others:
            continue
        best, name = min(others)
        unit = "us" if ours.us else "ms"
        lines.append((*at, f"{ours.time:.3g} {unit}", f"{best:.3g} {unit}", name, f"{best / ours.time:.2f}"))
    return lines


def regrets(rows: Iterable[Row]) -> list[tuple[str, str, str, str, str]]:
    """Of every selector: cells, mean and largest regret against the best measured, and where the largest is."""
    rows = [row for row in rows if row.figure == "selector" and row.us]
    best = {(row.mask, row.batch, row.length): row.us for row in rows if row.impl == "best measured" and row.us}
    found = []
    for impl in dict.fromkeys(row.impl for row in rows if row.impl != "best measured"):
        own = [(row.us / best[row.mask, row.batch, row.length] - 1, row) for row in rows if row.impl == impl and row.us]
        worst, at = max(own, key=lambda pair: pair[0])
        mean = sum(regret for regret, _ in own) / len(own)
        found.append((impl, str(len(own)), f"{mean:.1%}", f"{worst:.0%}", f"{at.mask}, {at.length}"))
    return found
