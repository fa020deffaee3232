"""`python -m benchmarks start`: how long until a compiled model answers, in a first process and in those after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stof.cli.common import must_be_writable, table_console


def start(
    model: Annotated[str, typer.Argument(help="As for `stof tune`.")] = "bert",
    batch: Annotated[int, typer.Option(min=1, help="Sequences, or images.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 512,
    mask: Annotated[str, typer.Option(help="As for `stof tune`.")] = "full",
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    effort: Annotated[str, typer.Option(help="none, quick or full.")] = "none",
    budget: Annotated[float | None, typer.Option(help="Seconds for the search of the cold start.")] = None,
    lock: Annotated[Path | None, typer.Option(help="A lock file to follow.")] = None,
    fold: Annotated[bool, typer.Option("--fold", help="Fold norms' weights into products (option fold).")] = False,
    references: Annotated[bool, typer.Option("--references", help="Claim templates where no kernel serves.")] = False,
    cuda_graphs: Annotated[str, typer.Option(help="whole, inductor or none, on GPUs.")] = "whole",
    warm: Annotated[int, typer.Option(min=0, help="Processes after the first.")] = 2,
    caches: Annotated[
        Path | None, typer.Option(help="Keep all caches here; a folder that is not empty makes all starts warm.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
) -> None:
    """Time whole processes until a compiled model answers: with empty caches, then with what that one left."""
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    import torch
    from rich.table import Table

    from benchmarks.models.startup_time import Ask, run_starts
    from benchmarks.results_io import provenance, write_json
    from stof.errors import ArgumentError
    from stof.tuning.machine import device_name

    must_be_writable(output)
    graphs: dict[str, str | bool] = {"whole": "whole", "inductor": True, "none": False}
    if cuda_graphs not in graphs:
        raise ArgumentError(f"cuda_graphs is {', '.join(graphs)}, got {cuda_graphs!r}")
    options = {
        "effort": effort,
        "budget_s": budget,
        "fold": fold,
        "references": references,
        "cuda_graphs": graphs[cuda_graphs],
    }
    options["lock"] = str(lock.resolve()) if lock else None
    ask = Ask(model, batch, length, mask, dtype, {name: value for name, value in options.items() if value is not None})
    with TemporaryDirectory() as folder:
        starts = run_starts(ask, caches.resolve() if caches is not None else Path(folder), warm)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table(title=f"{model}, {batch} x {length}, {mask}, {dtype}, effort {effort}, on {device_name(device)}")
    for name in ("start", "import s", "load s", "compile s", "call ms", "measurements", "traced", "compiled anew"):
        table.add_column(name, justify="left" if name == "start" else "right")
    for one in starts:
        seconds = (f"{value:.2f}" for value in (one.import_s, one.load_s, one.compile_s))
        table.add_row(one.kind, *seconds, f"{one.call_ms:.3f}", str(one.measured), str(one.traced), str(one.compiled))
    table_console().print(table)
    if output is not None:
        write_json(output, {"meta": provenance(device), "ask": asdict(ask), "rows": [asdict(one) for one in starts]})
