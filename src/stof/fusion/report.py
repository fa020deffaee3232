"""What was done to a graph, for people: a row a segment, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stof.fusion.choices import Choices

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
        start: its first operator; segments that differ in nothing else are equal.
    """

    operators: str
    template: str
    config: str
    reason: str
    inductor_us: float | None = None
    template_us: float | None = None
    start: int = field(default=0, compare=False)


@dataclass
class FusionReport:
    """What was done to one graph.

    Attributes:
        segments: in graph order.
        scheme, digest: the scheme's bits, and its stable hash.
        notes: parts of the graph, or the whole of it, that were left alone; one line each.
        measurements: how many times were taken to choose.
        graph: stable hash of the operators alone; "" where they were not looked at.
        fold: whether weights of norms might be folded into products.
        choices: the best measured configuration of each template and shape (`stof.fusion.choices`).
        whole_us: the whole model's microseconds with templates and without, None where they were not compared.
    """

    segments: list[SegmentReport] = field(default_factory=list)
    scheme: str = ""
    digest: str = ""
    notes: list[str] = field(default_factory=list)
    measurements: int = 0
    graph: str = ""
    fold: bool = False
    choices: Choices = field(default_factory=dict)
    whole_us: tuple[float, float] | None = None

    @property
    def fused(self) -> int:
        """Segments computed by a template."""
        return sum(bool(segment.template) for segment in self.segments)

    def take_back(self, reason: str) -> None:
        """Leave all segments to Inductor after all."""
        self.segments = [
            replace(row, template="", config="", reason=reason) if row.template else row for row in self.segments
        ]

    def grouped(self) -> dict[SegmentReport, int]:
        """Segments that are alike once, and how often they occur."""
        rows: dict[SegmentReport, int] = {}
        for segment in self.segments:
            rows[segment] = rows.get(segment, 0) + 1
        return rows

    def headline(self) -> str:
        """What came of it in one line."""
        text = f"{self.fused} of {len(self.segments)} segments computed by templates, scheme {self.digest or 'none'}"
        if self.whole_us is not None:
            fused_us, plain_us = self.whole_us
            text += f"; whole model {plain_us:.0f} us without, {fused_us:.0f} us with ({plain_us / fused_us:.2f}x)"
        return text

    def __rich__(self) -> Group:
        """A table; rows that repeat are counted."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.headline(), title_justify="left")
        for name in ("segment", "times", "computed by", "Inductor us", "template us", "why"):
            table.add_column(name, justify="right" if name.endswith("us") or name == "times" else "left")
        for row, count in self.grouped().items():
            by = f"{row.template} {row.config}".strip() or "Inductor"
            times = [f"{t:.1f}" if t is not None else "" for t in (row.inductor_us, row.template_us)]
            table.add_row(*(Text(cell) for cell in (row.operators, str(count), by, *times, row.reason)))
        return Group(table, *(Text(f"- {note}") for note in self.notes))
