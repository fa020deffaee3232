"""`stof tune MODEL`: searches for a model's fusion scheme with progress shown, and writes what it found."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stof.cli.common import must_be_replaceable, must_be_writable, table_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stof.fusion.planner.search_space import Progress
    from stof.fusion.records.report import FusionReport


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    model: str
    batch: int
    length: int
    mask: str
    dtype: str
    effort: str
    budget: float | None
    fold: bool
    references: bool
    lock: Path | None
    png: Path | None
    store: Path | None


class View:
    """The search as it goes on, one row a segment with the best so far: a table in a terminal, lines elsewhere.

    A file or a pipe gets a line where a segment is first measured and where its best changes.
    """

    def __init__(self, name: str, console: Console) -> None:
        from rich.live import Live

        self.name, self.console, self.start = name, console, time.perf_counter()
        self.steps: dict[str, Progress] = {}
        self.live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> View:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, step: Progress) -> None:
        """A measurement was taken."""
        before = self.steps.get(step.segment)
        self.steps[step.segment] = step
        if self.live is not None:
            self.say(f"measuring, {max(0.0, step.seconds_left):.0f} s of the budget left")
        elif before is None or (before.best, before.best_us) != (step.best, step.best_us):
            self.console.print(str(step), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def say(self, doing: str) -> None:
        """What is being done."""
        title = f"{self.name}: {doing}, {time.perf_counter() - self.start:.0f} s"
        if self.live is not None:
            self.live.update(self.table(title))
        else:
            self.console.print(title, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def table(self, title: str) -> Table:
        """What is known now, for 80 columns and more."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.pad_edge, table.collapse_padding = False, True
        for name in ("segment", "tried", "best so far", "best\nus", "Inductor\nus"):
            left = name in ("segment", "best so far")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for step in self.steps.values():
            figures = (f"{us:.1f}" if us < math.inf else "" for us in (step.best_us, step.inductor_us))
            table.add_row(*(Text(cell) for cell in (step.segment, str(step.tried), step.by, *figures)))
        return table


def tune_model(wanted: Wanted) -> None:
    """Search, show, write."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from stof.cli.model_loading import load
    from stof.errors import ArgumentError
    from stof.fusion.records.choices import current_versions, read_lock
    from stof.tuning.machine import device_name

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if wanted.dtype not in ("float16", "bfloat16", "float32"):
        raise ArgumentError(f"dtype is float16, bfloat16 or float32, got {wanted.dtype!r}")
    if wanted.effort not in ("quick", "full"):
        raise ArgumentError(f"effort is quick or full, got {wanted.effort!r}")
    if wanted.png is not None and wanted.png.suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"a chart is a .png, .svg or .pdf file, got {wanted.png.name}")
    must_be_writable(wanted.lock, wanted.png)
    if wanted.png is not None:
        must_be_replaceable(wanted.png, wanted.png.suffix.removeprefix("."))
    if wanted.lock is not None and wanted.lock.exists():
        read_lock(wanted.lock)  # raises before the search if the file cannot be read and extended
    console = Console(stderr=True)
    with console.status(f"loading {wanted.model}"):
        precision = getattr(torch, wanted.dtype)
        loaded = load(wanted.model, wanted.batch, wanted.length, wanted.mask, device, precision)
    reports = _search(wanted, loaded, device)
    if not reports:
        raise ArgumentError(f"{wanted.model} has no graph that could be tuned: torch.compile captured none")
    facts = {"model": loaded.name, "device": device_name(device), **current_versions(), "dtype": wanted.dtype}
    facts |= {"mask": wanted.mask}
    tables = table_console()
    tables.print(Text(", ".join(f"{name} {value}" for name, value in facts.items())), soft_wrap=True)
    for report in reports:
        tables.print(report)
    _write(wanted, loaded.name, device, reports, console)


def _search(wanted: Wanted, loaded: Any, device: Any) -> list[FusionReport]:
    """The reports of all graphs of one call of the model."""
    import torch
    from rich.console import Console

    import stof

    reports: list[FusionReport] = []
    with View(loaded.name, Console(stderr=True)) as view:
        view.say("capturing the model")
        fast: Any = stof.optimize(
            loaded.model, mask=loaded.mask, dynamic=False, cuda_graphs=device.type == "cuda", effort=wanted.effort,
            budget_s=wanted.budget, fold=wanted.fold, references=wanted.references, report=reports.append,
            progress=view.update, store=wanted.store or True,
        )  # fmt: skip
        with torch.inference_mode():
            fast(*loaded.args, **loaded.kwargs)
        view.say("done")
    return reports


def _write(wanted: Wanted, name: str, device: Any, reports: list[FusionReport], console: Any) -> None:
    from stof.drawing.tuning import draw_tuning, is_drawable
    from stof.fusion.records.choices import ChoiceTable, current_versions, read_lock
    from stof.tuning.machine import device_name

    device_text = device_name(device)
    if wanted.lock is not None:
        lock = ChoiceTable(device_text, current_versions())
        if wanted.lock.exists():
            old = read_lock(wanted.lock)
            # Other shapes stay in the lock if they were tuned on this device with these versions.
            if (old.device, old.versions) == (lock.device, lock.versions):
                lock = old
        for report in reports:
            report.add_to(lock)
        lock.write_lock(wanted.lock)
        console.print(f"wrote {wanted.lock}: {len(lock.graphs)} graphs", markup=False)
    if wanted.png is not None:
        if is_drawable(reports):
            draw_tuning(wanted.png, f"{name} on {device_text}, {wanted.dtype}", reports)
            console.print(f"wrote {wanted.png}", markup=False)
        else:
            console.print(f"no {wanted.png}: no segment has a time with a template and one without", markup=False)
