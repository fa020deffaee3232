"""What tuning a model came to, for sharing: a page of HTML that needs nothing else, or a chart as PNG or SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from stof.errors import ArgumentError, MissingDependencyError
from stof.fusion.records.report import FusionReport, SegmentReport
from stof.fusion.templates.row_buckets import table

_BEFORE, _AFTER = "#8c8c8c", "#4c72b0"
_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.4em; }} h2 {{ font-size: 1.1em; margin-top: 2em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .35em .8em .35em 0; border-bottom: 1px solid #ddd; }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
td.bars {{ min-width: 10em; }}
.bar {{ height: .7em; margin: .15em 0; border-radius: 2px; }}
.key {{ display: inline-block; width: .7em; height: .7em; border-radius: 2px; }}
.before {{ background: {_BEFORE}; }} .after {{ background: {_AFTER}; }}
code {{ font-size: .92em; overflow-wrap: anywhere; }} .why, p.facts, p.how {{ color: #555; }}
@media (prefers-color-scheme: dark) {{
 body {{ background: #181a1b; color: #ddd; }} th, td {{ border-color: #444; }}
 .why, p.facts, p.how {{ color: #aaa; }} }}
"""
_HOW = (
    "A segment is a run of the model's operators, as often as the count says. A template is a kernel of stof that "
    "computes one whole; what no template computes stays with Inductor, PyTorch's compiler. Times are microseconds of "
    "one segment alone; saved is what all of a row's segments together take less."
)


def tuning_html(title: str, facts: Mapping[str, str], reports: Sequence[FusionReport]) -> str:
    """A whole page: each graph's segments, what computes them and why, their times as numbers and bars."""
    told = " · ".join(f"{escape(name)} {escape(value)}" for name, value in facts.items())
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p class="facts">{told}</p><p class="how">{_HOW}</p>',
    ]
    for number, report in enumerate(reports, 1):
        parts.append(_graph(report, f"Graph {number} of {len(reports)}: " if len(reports) > 1 else ""))
    return "\n".join([*parts, "</body></html>\n"])


def _graph(report: FusionReport, place: str) -> str:
    longest = max((time for row in report.segments for _, time in _drawn(row)), default=1.0)
    rows = []
    for row, count in report.grouped().items():
        cells = [f"{time:.1f}" if time is not None else "" for time in (row.inductor_us, row.template_us)]
        cells[1] += " (rejected)" * _is_rejected(row)
        saved = _saved(row, count)
        cells += ["" if saved is None else f"{saved:.0f}"]
        figures = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(
            f'<tr><td>{escape(row.operators)}</td><td class="n">{count}</td><td>{_computed_by(row)}</td>{figures}'
            f'<td class="bars">{_bars(row, longest)}</td><td class="why">{escape(row.reason)}</td></tr>'
        )
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    notes = f"<ul>{notes}</ul>" if notes else ""
    scheme = f'<p class="facts">scheme {escape(report.digest)}</p>' if report.digest else ""
    keys = [f'<span class="key {kind}"></span>' for kind in ("before", "after")]
    return (
        f"<h2>{escape(place)}{escape(report.headline())}</h2>"
        '<div class="wide"><table><tr><th>segment</th><th class="n">count</th><th>computed by</th>'
        f'<th class="n">{keys[0]} Inductor</th><th class="n">{keys[1]} template</th><th class="n">saved</th><th></th>'
        "<th>why</th></tr>" + "".join(rows) + f"</table></div>{notes}{scheme}"
    )


def _computed_by(row: SegmentReport) -> str:
    """The template and its configuration; a table of them opens when it is clicked."""
    by = escape(row.by)
    if not row.template:
        return by
    if "=" not in row.config:
        return f"<code>{by}</code>"
    entries = (f"{rows} rows: {config or '(default)'}" for rows, config in sorted(table(row.config).items()))
    listed = "<br>".join(f"<code>{escape(entry)}</code>" for entry in entries)
    return f"<details><summary><code>{by}</code></summary>{listed}</details>"


def _times(row: SegmentReport) -> list[float]:
    return [time for time in (row.inductor_us, row.template_us) if time is not None]


def _saved(row: SegmentReport, count: int) -> float | None:
    """Microseconds that a template saves in all segments of a row."""
    if not row.template or row.inductor_us is None or row.template_us is None:
        return None
    return count * (row.inductor_us - row.template_us)


def _is_rejected(row: SegmentReport) -> bool:
    """Whether a template was measured that does not compute the segment."""
    return not row.template and row.template_us is not None


def _drawn(row: SegmentReport) -> list[tuple[str, float]]:
    """Kind and time of a row's bars; what was rejected, however slow, has none."""
    bars = (("before", row.inductor_us), ("after", None if _is_rejected(row) else row.template_us))
    return [(kind, time) for kind, time in bars if time is not None]


def _bars(row: SegmentReport, longest: float) -> str:
    return "".join(
        f'<div class="bar {kind}" style="width:{100 * time / longest:.1f}%"></div>' for kind, time in _drawn(row)
    )


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
