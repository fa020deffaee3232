"""`python -m benchmarks changing`: attention, and models, with another mask in every step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stof.cli.common import device_of, must_be_writable, names, table_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from benchmarks.step_times import StepRow

# The names of `--kinds` and `--impls`.
_KINDS = "documents documents-host documents-device padding window bool function patterns block_topk"
_IMPLS = "stof flex flex-eager-mask varlen sdpa"
_SIZES = {
    "cuda": "1,32,8,128,8192,8192 1,12,64,16384 1,32,8,128,32768,32768 1,32,8,128,131072,131072",
    "cpu": "1,12,64,4096",
}
_CASES = {
    "cuda": "llama,1,16384 gemma3,1,16384 modernbert,16,1024 roberta,16,256",
    "cpu": "llama,1,128 gemma3,1,128 modernbert,4,128",
}


def changing(
    sizes: Annotated[str, typer.Option(help="B,H,D,S or B,H,Hkv,D,Sq,Skv, separated by spaces.")] = "",
    kinds: Annotated[str, typer.Option(help="Kinds of masks, separated by spaces.")] = _KINDS,
    impls: Annotated[str, typer.Option(help="Implementations, separated by spaces.")] = _IMPLS,
    passes: Annotated[str, typer.Option(help="forward and both, separated by spaces.")] = "forward both",
    steps: Annotated[int, typer.Option(min=1, help="New masks after the first three.")] = 100,
    models: Annotated[bool, typer.Option("--models", help="Time whole models instead.")] = False,
    cases: Annotated[str, typer.Option(help="With --models: model,batch,tokens, separated by spaces.")] = "",
    ways: Annotated[str, typer.Option(help="With --models: ways to run them, separated by spaces; default all.")] = "",
    time_budget: Annotated[
        float | None, typer.Option(help="Seconds; measurements have fewer steps, and the last none, to end in time.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16; default by device.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write the JSON here, after each measurement.")] = None,
) -> None:
    """Time attention under another mask in every step, beside a repeated one; checked against float64 first."""

    import torch
    from rich.console import Console

    from benchmarks.attention.changing import PASSES, changing_rows
    from benchmarks.attention.changing_masks import KINDS
    from benchmarks.attention.changing_ways import WAYS
    from benchmarks.models.changing import MODEL_WAYS, ModelCase, model_rows
    from benchmarks.results_io import saving
    from stof.errors import ArgumentError
    from stof.testing.attention_check import TOLERANCE
    from stof.testing.mask_grid import Shape
    from stof.tuning.machine import device_name

    must_be_writable(output)
    where = device_of(device)
    precision = getattr(torch, dtype or ("bfloat16" if where.type == "cuda" else "float32"), None)
    if precision not in TOLERANCE:
        raise ArgumentError(f"dtype is float32, float16, bfloat16 or float64, got {dtype!r}")
    wanted = [Shape.parse(text) for text in (sizes or _SIZES[where.type]).split()]
    for shape in wanted:
        if shape.q_len != shape.kv_len:
            raise ArgumentError(f"--sizes takes as many queries as keys, got {shape}")
    chosen = names("--kinds", kinds, KINDS), names("--impls", impls, WAYS), names("--passes", passes, PASSES)
    options = where, steps, time_budget
    progress = Console(stderr=True)
    rows: list[StepRow] = []
    if models:
        parsed = [ModelCase.parse(text) for text in (cases or _CASES[where.type]).split()]
        results = model_rows(parsed, *options, ways=names("--ways", ways or " ".join(MODEL_WAYS), MODEL_WAYS))
    else:
        results = changing_rows(wanted, *chosen, *options, dtype=precision)
    for row in saving(results, output, where):
        rows.append(row)
        figures = row.note or f"repeated {row.repeated_ms:.2f} ms, a new mask adds {row.adds_ms:.2f} ms"
        progress.print(f"{row.kind} {row.shape} {row.impl} {row.passes}: {figures}", soft_wrap=True, highlight=False)
    table_console().print(changing_table(rows, f"Another mask in every step, {device_name(where)}, wall ms"))


def changing_table(rows: Sequence[StepRow], title: str) -> Table:
    """A line for each kind, shape and pass: times under a repeated mask, and what a new one adds."""
    from rich.table import Table

    impls = list(dict.fromkeys(row.impl for row in rows))
    table = Table("mask", "shape", "passes", title=title, caption="ms under a mask again + what a new mask adds")
    for impl in impls:
        for heading in (impl, "worst", "first")[: 3 if impl == impls[0] else 1]:
            table.add_column(heading, justify="right", no_wrap=True)
    by_key = {(row.kind, row.shape, row.passes, row.impl): row for row in rows}
    for key in dict.fromkeys((row.kind, row.shape, row.passes) for row in rows):
        cells: list[str] = []
        for impl in impls:
            row = by_key.get((*key, impl))
            if row is None or row.repeated_ms is None or row.worst_ms is None:
                word = "" if row is None else row.note.split(":")[0]
                cells += [word if word in ("wrong", "failed") else "-", "", ""][: 3 if impl == impls[0] else 1]
                continue
            cells.append(f"{row.repeated_ms:.2f} + {row.adds_ms:.2f}")
            if impl == impls[0]:
                cells += [f"{row.worst_ms:.2f}", " ".join(f"{ms:.0f}" for ms in row.first_ms)]
        table.add_row(*key, *cells)
    return table
