"""Reports of what fusion did to a graph: one row for each segment, with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stof.fusion.graph.scheme import Scheme
from stof.fusion.records.choices import Choices, ChoiceTable, GraphChoice
from stof.fusion.templates.row_buckets import table

if TYPE_CHECKING:
    from rich.console import Group

# Longest reason, in characters, that is printed inside the table.
_SHORT = 32


@dataclass(frozen=True)
class SegmentReport:
    """One segment.

    Attributes:
        operators: its operators in words.
        template, config: the template and configuration that compute it; template "" for none, config "" for the
            template's default.
        reason: why this template, or none, computes it.
        inductor_us, template_us: measured microseconds, None without measurements.
        rest: what computes it without a template.
    """

    operators: str
    template: str
    config: str
    reason: str
    inductor_us: float | None = None
    template_us: float | None = None
    rest: str = "Inductor"

    @property
    def by(self) -> str:
        """Return what computes the segment, in a few words."""
        if not self.template:
            return self.rest
        configs = set(table(self.config).values()) if "=" in self.config else {self.config}
        if len(configs) > 1:
            return f"{self.template}, {len(configs)} configurations by rows"
        return f"{self.template} {configs.pop() or '(default)'}"


@dataclass
class FusionReport:
    """What fusion did to one graph.

    Attributes:
        segments: in graph order.
        scheme, digest: the scheme's bits, and its stable hash.
        notes: why parts of the graph, or all of it, were not changed; one line each.
        measurements: the number of times measured for the choice.
        graph: stable hash of the operators alone; "" where they were not looked at.
        fold: whether weights of norms might be folded into GEMMs.
        choices: the best measured configuration of each template and shape (`stof.fusion.records.choices`).
        used: the configuration of each problem that a template computes, by the same texts.
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
    used: dict[str, str] = field(default_factory=dict)
    whole_us: tuple[float, float] | None = None

    @property
    def fused(self) -> int:
        """Segments computed by a template."""
        return sum(bool(segment.template) for segment in self.segments)

    def revert_to_inductor(self, reason: str) -> None:
        """Record that all segments are left to Inductor after all."""
        self.segments = [
            replace(row, template="", config="", reason=reason) if row.template else row for row in self.segments
        ]

    def add_to(self, table: ChoiceTable) -> None:
        """Add what was decided for the graph to a table of choices."""
        rows = zip(Scheme.from_bits(self.scheme).segments, self.segments, strict=True)
        chosen = tuple((at.start, at.stop, row.template, row.config) for at, row in rows if row.template)
        if self.graph:
            table.graphs[self.graph] = GraphChoice(self.fold, chosen)
        table.choices |= self.choices

    def grouped(self) -> dict[SegmentReport, int]:
        """Return equal segments once, with their number."""
        return Counter(self.segments)

    def headline(self) -> str:
        """Return a summary in one line."""
        text = f"{self.fused} of {len(self.segments)} segments computed by templates"
        if self.whole_us is not None:
            fused_us, plain_us = self.whole_us
            text += f"; whole model {plain_us:.0f} us without, {fused_us:.0f} us with ({plain_us / fused_us:.2f}x)"
        return text

    def __rich__(self) -> Group:
        """A table for 80 columns and more; rows that repeat are counted, and long reasons follow it."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        rows = Table(title=self.headline(), title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
        rows.pad_edge, rows.collapse_padding = False, True
        rows.caption = f"scheme {self.digest}" if self.digest else None
        for name in ("segment", "count", "computed by", "Inductor\nus", "template\nus", "why"):
            figures = name.endswith("us") or name == "count"
            rows.add_column(name, justify="right" if figures else "left", overflow="fold")
        notes: list[str] = []
        for row, count in self.grouped().items():
            times = [f"{t:.1f}" if t is not None else "" for t in (row.inductor_us, row.template_us)]
            if "=" in row.config:
                entries = (f"{rows}: {config or '(default)'}" for rows, config in sorted(table(row.config).items()))
                notes.append(f"{row.operators} by {row.template}, by rows: {'; '.join(entries)}")
            why = row.reason
            if len(why) > _SHORT:
                notes.append(f"{row.operators}: {why}")
                why = "see below"
            rows.add_row(*(Text(cell) for cell in (row.operators, str(count), row.by, *times, why)))
        return Group(rows, *(Text(f"- {note}") for note in (*notes, *self.notes)))
