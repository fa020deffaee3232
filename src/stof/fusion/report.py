"""What was done to a graph, for people: a row a segment, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class SegmentReport:
    """One segment.

    Attributes:
        operators: what it holds.
        template, config: what computes it; both "" for Inductor, and config "" for the template's default.
        reason: why.
        inductor_us, template_us: measured microseconds, None where nothing was measured.
    """

    operators: str
    template: str
    config: str
    reason: str
    inductor_us: float | None = None
    template_us: float | None = None


@dataclass
class FusionReport:
    """What was done to one graph.

    Attributes:
        segments: in graph order.
        scheme, digest: the scheme's bits, and its stable hash.
        notes: parts of the graph, or the whole of it, that were left alone; one line each.
        measurements: how many times were taken to choose.
    """

    segments: list[SegmentReport] = field(default_factory=list)
    scheme: str = ""
    digest: str = ""
    notes: list[str] = field(default_factory=list)
    measurements: int = 0

    @property
    def fused(self) -> int:
        """Segments computed by a template."""
        return sum(bool(segment.template) for segment in self.segments)

    def take_back(self, reason: str) -> None:
        """Leave all segments to Inductor after all."""
        self.segments = [
            replace(row, template="", config="", reason=reason) if row.template else row for row in self.segments
        ]

    def __rich__(self) -> Group:
        """A table; rows that repeat are counted."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"{self.fused} of {len(self.segments)} segments computed by templates, scheme {self.digest or 'none'}"
        table = Table(title=title, title_justify="left")
        for name in ("segment", "times", "computed by", "Inductor us", "template us", "why"):
            table.add_column(name, justify="right" if name.endswith("us") or name == "times" else "left")
        rows: dict[SegmentReport, int] = {}
        for segment in self.segments:
            rows[segment] = rows.get(segment, 0) + 1
        for row, count in rows.items():
            by = f"{row.template} {row.config}".strip() or "Inductor"
            times = [f"{t:.1f}" if t is not None else "" for t in (row.inductor_us, row.template_us)]
            table.add_row(*(Text(cell) for cell in (row.operators, str(count), by, *times, row.reason)))
        return Group(table, *(Text(f"- {note}") for note in self.notes))
