"""A chart of what tuning a model came to: PNG, SVG or PDF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stof.errors import ArgumentError, MissingDependencyError
from stof.fusion.records.report import FusionReport, SegmentReport

_BEFORE, _AFTER = "#8c8c8c", "#4c72b0"


def _times(row: SegmentReport) -> list[float]:
    return [time for time in (row.inductor_us, row.template_us) if time is not None]


def _is_rejected(row: SegmentReport) -> bool:
    """Whether a template was measured that does not compute the segment."""
    return not row.template and row.template_us is not None


def _rows(reports: Sequence[FusionReport]) -> list[tuple[SegmentReport, int, list[float]]]:
    """Segments with a time before and one after, how often each occurs, and these times."""
    rows = [(row, count, _times(row)) for report in reports for row, count in report.grouped().items()]
    return [(row, count, times) for row, count, times in rows if len(times) == 2]


def is_drawable(reports: Sequence[FusionReport]) -> bool:
    """Whether `draw_tuning` finds something to draw: a segment with a time with a template and one without."""
    return bool(_rows(reports))


def draw_tuning(path: Path, title: str, reports: Sequence[FusionReport]) -> None:
    """Write a chart (PNG, SVG or PDF, by the ending): two bars a segment, before and after.

    Raises:
        ArgumentError: no segment has been measured with a template, or the ending is another one.
        MissingDependencyError: matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"a chart is a .png, .svg or .pdf file, got {path.name}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a chart needs matplotlib: pip install matplotlib") from error
    rows = _rows(reports)
    if not rows:
        raise ArgumentError("nothing to draw: no segment has a time with a template and one without")
    figure = Figure(figsize=(9.5, 1.4 + 0.62 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    accepted = [i for i, (row, _, _) in enumerate(rows) if not _is_rejected(row)]
    for which, colour, name, shown in ((0, _BEFORE, "Inductor", range(len(rows))), (1, _AFTER, "template", accepted)):
        places = [i + 0.4 * which - 0.2 for i in shown]
        axes.barh(places, [rows[i][2][which] for i in shown], height=0.38, color=colour, label=name)
    for i, (row, _, (before, after)) in enumerate(rows):
        end, text = (0.0, "template rejected") if _is_rejected(row) else (after, f"{before / after:.2f}x")
        axes.annotate(text, (end, i + 0.2), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row.operators}  ({count})" for row, count, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first on top, and room for what has no bar
    axes.set_xlabel("microseconds a segment; in brackets how often it occurs")
    axes.set_title(title)
    axes.legend(loc="best", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
