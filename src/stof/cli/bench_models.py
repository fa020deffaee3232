"""`stof bench models`, `stof bench search`: whole models against torch.compile, and the searches for their schemes."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stof.cli.bench_fusion import gpu

if TYPE_CHECKING:
    from rich.table import Table

    from stof.bench.search import Row as Searched


def models(
    cases: Annotated[
        str, typer.Option(help="model,batch,length,mask separated by spaces; ViT's length is ignored.")
    ] = "bert,8,512,bigbird gpt2,8,1024,window+sinks llama,1,4096,window+sinks",
    impls: Annotated[str, typer.Option(help="Ways to run them, separated by spaces.")] = (
        "reduce-overhead-sdpa reduce-overhead-flex stof-attention stof stof-whole stof-quick"
    ),
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls; medians are reported.")] = 20,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further case is started.")] = None,
    search_budget: Annotated[float | None, typer.Option(help="Seconds that each search may take.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here, into what it holds.")] = None,
) -> None:
    """Time models from transformers with random weights, after checking their outputs against float32."""
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from stof.bench.models import Case, Row, run_case
    from stof.bench.results import provenance
    from stof.errors import ArgumentError
    from stof.tuning.machine import device_name

    device, precision = gpu(dtype)
    asked = []
    for text in cases.split():
        parts = text.split(",")
        if len(parts) != 4 or not (parts[1].isdigit() and parts[2].isdigit()):
            raise ArgumentError(f"a case is model,batch,length,mask, such as bert,8,512,bigbird; got {text!r}")
        asked.append(Case(parts[0], int(parts[1]), int(parts[2]), parts[3]))
    console, start = Console(stderr=True), time.perf_counter()
    rows: list[Row] = []
    for case in asked:
        if budget is not None and time.perf_counter() - start > budget:
            console.print(Text(f"left out for the budget: {case}"))
            continue
        console.print(Text(f"{case}", style="dim"))
        rows += run_case(case, impls.split(), device, precision, rounds, search_budget)
        if output is not None:
            old = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else []
            names = ("model", "batch", "seq", "mask", "dtype", "impl")
            again = {tuple(asdict(row)[name] for name in names) for row in rows}
            kept = [row for row in old if tuple(row[name] for name in names) not in again]
            output.parent.mkdir(parents=True, exist_ok=True)
            content = {"meta": provenance(device), "rows": kept + [asdict(row) for row in rows]}
            output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    table = Table(title=f"Whole models on {device_name(device)}, {dtype}, ms a call")
    for heading in ("model", "batch", "length", "mask", "way", "ms", "first call s", "cosine"):
        table.add_column(heading, justify="right" if heading in ("batch", "length", "ms", "first call s") else "left")
    for row in rows:
        figure = row.problem if row.ms is None else f"{row.ms:.3f}"
        cosine = "" if row.cosine is None else f"{row.cosine:.6f}"
        table.add_row(
            row.model, str(row.batch), str(row.seq), row.mask, row.impl, figure, f"{row.first_call_s:.1f}", cosine
        )
    Console(width=150).print(table)


def search(
    model: Annotated[str, typer.Option(help="bert (base) or llama (1B): one layer of it.")] = "bert",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1)] = 512,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    budget: Annotated[float, typer.Option(help="Seconds for measuring; run again to go on.")] = 80.0,
    store: Annotated[Path | None, typer.Option(help="Folder for measurements; the user's cache otherwise.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Search times that this command wrote again; nothing is measured."),
    ] = None,
) -> None:
    """Compare the searches for a fusion scheme on one layer, after measuring all there is to measure."""
    from rich.console import Console

    from stof.bench.layer import layer_shape
    from stof.bench.results import provenance, write_json
    from stof.bench.search import compare, layer_graph, measured, read_table
    from stof.errors import ArgumentError
    from stof.fusion.ahead import CompileAhead
    from stof.fusion.measure import SegmentTimer
    from stof.fusion.store import default_store
    from stof.tuning.machine import device_name

    console = Console(width=100)
    if replay is not None:
        content, table = read_table(replay)
    else:
        if model not in ("bert", "llama"):
            raise ArgumentError(f"model is bert or llama, got {model!r}")
        device, precision = gpu(dtype)
        gm, timer = layer_graph(layer_shape(model, batch, length), device, precision), SegmentTimer()
        start = time.monotonic()
        found, taken = measured(gm, timer, default_store(device, store), budget, CompileAhead.on(device))
        console.print(f"{taken} times taken in {time.monotonic() - start:.0f} s")
        for (name, config), why in timer.failures.items():
            console.print(f"{name} {config}: {why}", soft_wrap=True)
        if found is None:
            console.print("not everything is measured yet; run the command again to go on")
            return
        case, table = f"{model} layer {batch} x {length} on {device_name(device)}, {dtype}", found
        content = {"meta": provenance(device), "case": case, "table": table.to_json()}
    rows = compare(table)
    if output is not None:
        write_json(output, content | {"rows": [asdict(row) for row in rows]})
    console.print(_searches(rows, content["case"]))


def _searches(rows: list[Searched], case: str) -> Table:
    from rich.table import Table

    table = Table(title=case)
    for heading in ("search", "us saved", "of the best", "worst draw", "measurements", "of all"):
        table.add_column(heading, justify="left" if heading == "search" else "right")
    for row in rows:
        best, worst = ((f"{us / row.best_us:.1%}" if row.best_us else "") for us in (row.saved_us, row.worst_us))
        share = f"{row.measurements / row.all_measurements:.1%}" if row.all_measurements else ""
        table.add_row(row.search, f"{row.saved_us:.1f}", best, worst, str(row.measurements), share)
    return table
