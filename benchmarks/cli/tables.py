"""Tables of the results that `python -m benchmarks` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.attention.mask_build import BuildRow, StepRow
    from benchmarks.attention.report import Cell
    from benchmarks.attention.run import Row

_FIGURES = ("density", "stof us", "its us", "speed-up", "TFLOP/s")


def results_table(rows: list[Row], title: str) -> Table:
    """One line per mask and shape: each implementation's time, and STOF's speed-up over it."""
    from rich.table import Table

    from benchmarks.attention.report import cells_of, time_of

    impls = list(dict.fromkeys(row.impl for row in rows))
    table = Table(title=title, caption="times: GPU time on a GPU, wall time on a CPU; (n x): stof is n times faster")
    for heading in ("mask", "shape", "density"):
        table.add_column(heading)
    for impl in impls:
        table.add_column(impl, justify="right")
    for cell in cells_of(rows):
        shown = []
        for impl in impls:
            row = cell.rows.get(impl)
            us = None if row is None else time_of(row)
            if us is None:
                shown.append("-" if row is None else "wrong")
            else:
                ratio = "" if impl == "stof" or not cell.ours else f" ({us / cell.ours:.2f}x)"
                shown.append(f"{us / 1e3:.3g}{ratio}")
        table.add_row(cell.mask, cell.shape, f"{cell.density:.3f}", *shown)
    return table


def build_table(rows: list[BuildRow]) -> Table:
    """One line per mask and builder."""
    from rich.table import Table

    table = Table(title="Building masks known ahead of time: wall time, ms")
    for heading in ("mask", "length", "how", "ms", "GPU us", "first, ms", "peak MB", ""):
        table.add_column(heading, justify="left" if heading in ("mask", "how", "") else "right")
    for row in rows:
        values = (row.ms, row.gpu_us, row.first_ms, row.peak_mb)
        figures = ["-" if value is None else f"{value:.3g}" for value in values]
        spent = [f"{name[:24]} {us:.1f}" for name, us in sorted(row.kernels.items(), key=lambda kernel: -kernel[1])]
        table.add_row(row.mask, str(row.q_len), row.how, *figures, row.note or ", ".join(spent[:5]))
    return table


def step_table(rows: list[StepRow]) -> Table:
    """One line per mask made at run time."""
    from rich.table import Table

    table = Table(title="Masks made at run time: GPU time in us (wall time on a CPU)")
    table.add_column("mask")
    for heading in (
        "update",
        "attention",
        "step",
        "best static",
        "overhead",
        "density",
        "error",
        "plan MB",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        shown = [f"{row.update_us:.0f}", f"{row.attend_us:.0f}", f"{row.step_us:.0f}"]
        shown += ["-" if row.best_us is None else f"{row.best_us:.0f}"]
        shown += ["-" if row.overhead is None else f"{row.overhead:+.1%}"]
        table.add_row(row.mask, *shown, f"{row.density:.3f}", f"{row.error:.1e}", f"{row.plan_mb:.0f}")
        if row.note:
            table.add_row("", row.note)
        for name, us in sorted(row.kernels.items(), key=lambda kernel: -kernel[1])[:8]:
            table.add_row(f"  {name[:40]}", f"{us:.0f}")
    return table


def report_table(cells: list[Cell], title: str) -> Table:
    """One line per cell, classes apart."""
    from rich.table import Table
    from rich.text import Text

    from benchmarks.attention.report import HEADINGS, line

    table = Table(title=title)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in _FIGURES else "left")
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        apart = following is not None and following.kind != cell.kind
        style = "bold red" if cell.wrong else "red" if cell.speedup is not None and cell.speedup < 1 else ""
        table.add_row(*(Text(text, style=style) for text in line(cell)), end_section=apart)
    return table
