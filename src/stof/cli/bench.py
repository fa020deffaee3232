"""`stof bench attention`: times implementations on a grid of masks and shapes, after checking each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from stof.bench.attention import Row

app = typer.Typer(no_args_is_help=True, help="Time attention against its peers, after checking every result.")

_SHAPES = {"cpu": "1,12,64,4096", "cuda": "1,12,64,4096 1,32,128,8192"}
_MASKS = "causal window512 longformer bigbird strided dilated"


@app.callback()
def _bench() -> None:
    """Time attention against its peers, after checking every result."""


@app.command()
def attention(
    masks: Annotated[str, typer.Option(help="Names of grid masks, separated by spaces.")] = _MASKS,
    shapes: Annotated[str, typer.Option(help="B,H,D,S or B,H,Hkv,D,Sq,Skv, separated by spaces.")] = "",
    impls: Annotated[str, typer.Option(help="stof, sdpa, sdpa-native, flex.")] = "stof sdpa sdpa-native flex",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16; default by device.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")] = 7,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
) -> None:
    """Time masked attention: same mask and inputs for all, each checked against float64 first."""
    import torch
    from rich.console import Console

    from stof.bench.attention import TOLERANCE, run_attention
    from stof.bench.grid import Shape, grid_mask
    from stof.bench.peers import peer
    from stof.bench.results import write_results
    from stof.errors import ArgumentError
    from stof.tuning.machine import device_name

    console = Console(stderr=True)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind)
    wanted = dtype or ("float32" if where.type == "cpu" else "float16")
    precision = getattr(torch, wanted, None)
    if precision not in TOLERANCE:
        raise ArgumentError(f"dtype is float32, float16, bfloat16 or float64, got {wanted!r}")
    rows = run_attention(
        [grid_mask(name) for name in masks.split()],
        [Shape.parse(text) for text in (shapes or _SHAPES[where.type]).split()],
        [peer(name) for name in impls.split()],
        device=where,
        dtype=precision,
        rounds=rounds,
        report=lambda line: console.print(line, style="dim"),
    )
    table = results_table(rows, f"Masked attention on {device_name(where)}, {wanted}, ms per call")
    Console().print(table)
    if output is not None:
        write_results(output, rows, where)
        console.print(f"wrote {output}")


def results_table(rows: list[Row], title: str) -> Table:
    """One line per mask and shape: each implementation's time, and STOF's speed-up over it."""
    from rich.table import Table

    impls = list(dict.fromkeys(row.impl for row in rows))
    table = Table(title=title, caption="times: GPU time on a GPU, wall time on a CPU; (n x): stof is n times faster")
    for heading in ("mask", "shape", "density"):
        table.add_column(heading)
    for impl in impls:
        table.add_column(impl, justify="right")
    cells: dict[tuple[str, str, float], dict[str, Row]] = {}
    for row in rows:
        shape = f"{row.batch},{row.heads},{row.kv_heads},{row.head_dim},{row.q_len},{row.kv_len}"
        cells.setdefault((row.mask, shape, row.density), {})[row.impl] = row
    for (name, sizes, density), found in cells.items():
        ours = _time(found.get("stof"))
        table.add_row(name, sizes, f"{density:.3f}", *(_cell(found.get(impl), ours) for impl in impls))
    return table


def _time(row: Row | None) -> float | None:
    return None if row is None else (row.gpu_us if row.gpu_us is not None else row.call_us)


def _cell(row: Row | None, ours: float | None) -> str:
    time_us = _time(row)
    if row is None:
        return "-"
    if time_us is None:
        return "wrong"
    text = f"{time_us / 1e3:.2f}"
    return text if row.impl == "stof" or not ours else f"{text} ({time_us / ours:.2f}x)"
