"""`python -m benchmarks paper`: the experiments of the STOF paper on the GPU at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from benchmarks.paper.experiment import Row

PARTS = ("fig9", "fig10", "order", "fig11", "fig12", "fig3", "fig4", "fig13", "table4", "selector", "unseen")
_RESULTS = Path(__file__).parents[1] / "results"


def paper(
    only: Annotated[
        str, typer.Option(help=f"Parts, separated by spaces or commas: {', '.join(PARTS)}. Default all.")
    ] = "",
    models: Annotated[str, typer.Option(help="Models of figures 11 to 13 and table 4. Default all.")] = "",
    seconds: Annotated[float, typer.Option(help="Begin nothing further after so many seconds.")] = 500.0,
    output: Annotated[Path | None, typer.Option(help="The JSON; default benchmarks/results/DEVICE-paper.json.")] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Only compile, in parallel, so that a run after it finds its caches filled.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that --warm has at a time.")] = 8,
    charts_only: Annotated[
        bool,
        typer.Option(
            "--charts-only",
            help="Draw the charts of the output file; if it lies in benchmarks/results, write docs/paper.md from the "
            "files there. Nothing is measured.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="cuda; cpu runs the code on tiny sizes, its times say nothing.")] = "",
) -> None:
    """Measure what the STOF paper shows, after checking every result; run again to go on where it stopped."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from benchmarks.paper.cells import cells_of, known_words
    from benchmarks.paper.charts import draw
    from benchmarks.paper.experiment import ABSENT, Row, StopError, open_file, pending, run
    from benchmarks.paper.page import PAGE, write_page
    from benchmarks.paper.warm import warm_cells
    from benchmarks.results_io import read_results
    from stof.cli.common import must_be_writable
    from stof.errors import DeviceError
    from stof.tuning.machine import device_name

    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(Text(line, style="dim"), soft_wrap=True)

    parts = known_words("--only", only, PARTS)
    if not charts_only and not torch.cuda.is_available() and device != "cpu":
        raise DeviceError(
            "the paper's experiments need an NVIDIA GPU (float16; 80 GB for the largest cells) with PyTorch for CUDA "
            "and Triton; none is here. --charts-only draws the charts of a result file"
        )
    where = torch.device("cpu") if device == "cpu" or charts_only else torch.device("cuda", torch.cuda.current_device())
    name = "h200" if charts_only else slug(device_name(where))
    path = output or _RESULTS / f"{name}-paper.json"
    if charts_only:
        if path.resolve().parent == _RESULTS.resolve():
            write_page(path.parent)
            typer.echo(f"wrote the tables of {PAGE}")
        for picture in draw(path):
            typer.echo(f"wrote {picture}")
        show_tables(read_results(path, Row).rows)
        return
    must_be_writable(path)
    for name, why in ABSENT.items():
        say(f"{name} is left out: {why}")
    cells = cells_of(parts, models, where, say)
    file = open_file(path, where)
    if warm:
        warm_cells(cells, pending(cells, file), parts, models, workers=workers, seconds=seconds, report=say)
        return
    try:
        left = run(cells, file, seconds=seconds, report=say)
    except KeyboardInterrupt:
        say(f"interrupted: {path} has what was measured, run the command again to go on")
        raise typer.Exit(130) from None
    except StopError as error:
        say(str(error))
        raise typer.Exit(3) from None
    if file.rows:
        show_tables(file.rows)
        for picture in draw(path):
            say(f"wrote {picture}")
    typer.echo(f"{path}: {len(file.rows)} rows, {left} cells left")


def show_tables(rows: Sequence[Row]) -> None:
    """Ours against the best of the others in every cell, and the regret of the selectors."""
    from rich.table import Table

    from benchmarks.paper.charts import regrets, table
    from stof.cli.common import table_console

    for headings, lines in (
        (("figure", "mask or model", "batch, length", "stof", "best other", "which", "speed-up"), table(rows)),
        (("choice", "cells", "mean regret", "largest", "where"), regrets(rows)),
    ):
        if lines:
            shown = Table(*headings)
            for line in lines:
                shown.add_row(*line)
            table_console().print(shown)


def slug(device: str) -> str:
    """A device's name for files: `NVIDIA H200` is `h200`, `NVIDIA H100 80GB HBM3` is `h100`."""
    found = re.search(r"\b([A-Z]{1,3}\d{2,4})\b", device.removeprefix("NVIDIA "))
    name = found[1] if found and device.startswith("NVIDIA") else device.partition(",")[0]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
