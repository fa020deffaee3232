"""`python -m benchmarks`: attention against its peers on a grid of masks, decoding, call overhead, and reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.against import against
from benchmarks.cli.changing import changing
from benchmarks.cli.embed import embed
from benchmarks.cli.fusion import gemm, layer
from benchmarks.cli.kept import kept
from benchmarks.cli.kernels import kernels
from benchmarks.cli.models import models, search, train
from benchmarks.cli.options import GPU_SHAPES, integers
from benchmarks.cli.paper import paper
from benchmarks.cli.start import start
from benchmarks.cli.tables import build_table, report_table, results_table, step_table
from stof.cli.common import CheckedCommand, Commands, device_of, must_be_writable, names, table_console

if TYPE_CHECKING:
    import torch

    from benchmarks.attention.mask_build import BuildRow, StepRow
    from benchmarks.attention.run import NotRun, Row
    from stof.testing.mask_grid import GridMask, Shape

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)

_SHAPES = {"cpu": "1,12,64,4096", "cuda": GPU_SHAPES}
_MASKS = "full causal window512 longformer bigbird strided dilated"
_IMPLS = {
    "cpu": "stof sdpa sdpa-native flex",
    "cuda": "stof sdpa sdpa-cudnn flash-2 flex flex-64 flex-autotuned "
    "flash-3 flash-4 flash-4-64 flash-4-192 cudnn-flex flashinfer",
}
_DECODE_IMPLS = "stof sdpa-sliced flex flash-4"

_Dtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16; default by device.")]
_Device = Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")]
_Output = Annotated[Path | None, typer.Option(help="Write the JSON here, after every cell.")]
_Merge = Annotated[bool, typer.Option("--merge", help="Keep what the output file holds but is not measured again.")]


app.command(cls=CheckedCommand)(gemm)
app.command(cls=CheckedCommand)(layer)
app.command(cls=CheckedCommand)(models)
app.command(cls=CheckedCommand)(train)
app.command(cls=CheckedCommand)(kernels)
app.command(cls=CheckedCommand)(search)
app.command(cls=CheckedCommand)(start)
app.command(cls=CheckedCommand)(paper)
app.command(cls=CheckedCommand)(against)
app.command(cls=CheckedCommand)(kept)
app.command(cls=CheckedCommand)(changing)
app.command(cls=CheckedCommand)(embed)


@app.callback()
def _bench() -> None:
    """Time attention against its peers, after checking every result."""


@app.command(cls=CheckedCommand)
def attention(
    masks: Annotated[str, typer.Option(help="Names of grid masks, separated by spaces.")] = _MASKS,
    shapes: Annotated[str, typer.Option(help="B,H,D,S or B,H,Hkv,D,Sq,Skv, separated by spaces.")] = "",
    impls: Annotated[
        str, typer.Option(help="Implementations, separated by spaces; `python -m benchmarks peers` lists them.")
    ] = "",
    dtype: _Dtype = "",
    device: _Device = "",
    rounds: _Rounds = 7,
    check_rows: Annotated[int, typer.Option(min=4, help="Rows of each cell that are compared with float64.")] = 1024,
    check_only: Annotated[bool, typer.Option("--check-only", help="Stop after the check; nothing is written.")] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further cell is started.")] = None,
    output: _Output = None,
    merge: _Merge = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="As --merge, and leave out cells that the output file has.")
    ] = False,
) -> None:
    """Time masked attention: same mask and inputs for all, each checked against float64 first."""
    from stof.testing.mask_grid import Shape, grid_mask
    from stof.tuning.machine import device_name

    where, precision = _place(device, dtype)
    wanted = [Shape.parse(text) for text in (shapes or _SHAPES[where.type]).split()]
    rows = _race(
        [([grid_mask(name) for name in masks.split()], wanted)],
        impls or _IMPLS[where.type],
        where,
        precision,
        None if check_only else output,
        merge or resume,
        resume=resume,
        rounds=rounds,
        check_rows=check_rows,
        budget=budget,
        timed=not check_only,
    )
    if not check_only:
        name = str(precision).removeprefix("torch.")
        table_console().print(results_table(rows, f"Masked attention on {device_name(where)}, {name}, ms per call"))


@app.command(cls=CheckedCommand)
def decode(
    kv: Annotated[str, typer.Option(help="Cache lengths, separated by spaces.")] = "",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    window: Annotated[int, typer.Option(min=1, help="Keys that the windowed mask keeps.")] = 4096,
    impls: Annotated[str, typer.Option(help="Implementations, separated by spaces.")] = _DECODE_IMPLS,
    dtype: _Dtype = "",
    device: _Device = "",
    rounds: _Rounds = 7,
    output: _Output = None,
    merge: _Merge = False,
) -> None:
    """Time one query against a long cache, windowed and dense, as a share of the memory's copy rate."""
    from rich.table import Table

    from benchmarks.attention.decode import copy_rate, needed_bytes, rate
    from benchmarks.attention.report import time_of
    from stof.testing.mask_grid import Shape, decode_masks
    from stof.tuning.machine import device_name

    where, precision = _place(device, dtype)
    lengths = integers("--kv", kv or ("16384 65536" if where.type == "cuda" else "4096"))
    shapes = [Shape(batch, heads, kv_heads, head_dim, 1, length) for length in lengths]
    copied = copy_rate(where, rounds)
    grids = [(decode_masks(shape, window), [shape]) for shape in shapes]
    rows = _race(grids, impls, where, precision, output, merge, rounds=rounds)
    table = Table(title=f"Decoding on {device_name(where)}; a copy reaches {copied / 1e9:.0f} GB/s")
    for heading in ("mask", "cache", "implementation"):
        table.add_column(heading)
    for heading in ("us", "MB needed", "GB/s", "of copy"):
        table.add_column(heading, justify="right")
    for row in rows:
        us, speed = time_of(row), rate(row)
        figures = (f"{us:.1f}", f"{speed / 1e9:.0f}", f"{speed / copied:.0%}") if us and speed else ("wrong", "-", "-")
        needed = f"{needed_bytes(row) / 1e6:.1f}"
        table.add_row(row.mask, str(row.kv_len), row.impl, figures[0], needed, *figures[1:])
    table_console().print(table)


@app.command(cls=CheckedCommand)
def launch(
    dtype: _Dtype = "",
    device: _Device = "",
    calls: Annotated[int, typer.Option(min=50, help="Calls timed, in batches of 50.")] = 2000,
) -> None:
    """Host time of one eager call with a ready plan or a mask, next to PyTorch's own attention."""
    from rich.table import Table

    from benchmarks.attention.call_overhead import launch_times
    from stof.tuning.machine import device_name

    where, precision = _place(device, dtype)
    table = Table(title=f"Host time of an eager call on {device_name(where)}")
    table.add_column("call")
    table.add_column("us", justify="right")
    for found in launch_times(where, precision, calls):
        table.add_row(found.name, f"{found.us:.1f}")
    table_console().print(table)


@app.command(cls=CheckedCommand)
def backward(
    masks: Annotated[
        str, typer.Option(help="Names of grid masks, separated by spaces.")
    ] = f"{_MASKS} documents neighborhood",
    shapes: Annotated[str, typer.Option(help="B,H,D,S or B,H,Hkv,D,Sq,Skv, separated by spaces.")] = "",
    impls: Annotated[
        str, typer.Option(help="Implementations separated by spaces; default: all, on a CPU stof and sdpa.")
    ] = "",
    dtype: _Dtype = "",
    device: _Device = "",
    rounds: _Rounds = 5,
    output: _Output = None,
) -> None:
    """Time forward passes, backward passes and both; every gradient is checked against float64 first."""

    from rich.table import Table

    from benchmarks.attention.backward import WAYS, backward_rows
    from benchmarks.results_io import saving
    from stof.testing.mask_grid import Shape, grid_mask
    from stof.tuning.machine import device_name

    must_be_writable(output)
    where, precision = _place(device, dtype)
    chosen = names("--impls", impls or ("stof sdpa" if where.type == "cpu" else " ".join(WAYS)), WAYS)
    wanted = [Shape.parse(text) for text in (shapes or _SHAPES[where.type]).split()]
    table = Table(
        "mask", "shape", "implementation", "pass", "us", "host us", title=f"Gradients on {device_name(where)}"
    )
    rows = backward_rows([grid_mask(name) for name in masks.split()], wanted, chosen, where, precision, rounds)
    for row in saving(rows, output, where):
        figures = (row.note, "") if row.us is None else (f"{row.us:.0f}", f"{row.host_us:.0f}")
        table.add_row(row.mask, row.shape, row.impl, row.passes, *figures)
    table_console().print(table)


@app.command("block-topk", cls=CheckedCommand)
def block_topk(
    shapes: Annotated[str, typer.Option(help="B,H,D,S or B,H,Hkv,D,S,S, separated by spaces.")] = "",
    blocks: Annotated[str, typer.Option(help="Sizes of blocks, separated by spaces.")] = "64 128",
    share: Annotated[float, typer.Option(help="Share of all key blocks that a query block takes.")] = 0.1,
    impls: Annotated[str, typer.Option(help="stof and flex, separated by spaces.")] = "stof flex",
    dtype: _Dtype = "",
    device: _Device = "",
    rounds: _Rounds = 5,
    output: _Output = None,
) -> None:
    """Time both passes under causal blocks chosen at run time, and choosing them; checked against float64 first."""

    from rich.table import Table

    from benchmarks.attention.block_topk import WAYS, topk_rows
    from benchmarks.results_io import saving
    from stof.testing.mask_grid import Shape
    from stof.tuning.machine import device_name

    must_be_writable(output)
    where, precision = _place(device, dtype)
    wanted = [Shape.parse(text) for text in (shapes or _SHAPES[where.type]).split()]
    sizes, chosen = integers("--blocks", blocks), names("--impls", impls, WAYS)
    table = Table(
        "shape", "block", "implementation", "pass", "us", "TFLOP/s", title=f"Block top-k on {device_name(where)}"
    )
    rows = topk_rows(wanted, sizes, share, chosen, where, precision, rounds)
    for row in saving(rows, output, where):
        figures = (row.note, "") if row.us is None else (f"{row.us:.0f}", "" if not row.tflops else f"{row.tflops:.0f}")
        table.add_row(row.shape, str(row.block), row.impl, row.passes, *figures)
    table_console().print(table)


@app.command("distributed", cls=CheckedCommand)
def distributed(
    masks: Annotated[str, typer.Option(help="causal, documents and window, separated by spaces.")] = "",
    tokens: Annotated[str, typer.Option(help="Tokens of one GPU, separated by spaces.")] = "8192 32768",
    ways: Annotated[
        str, typer.Option(help="stof, stof-heads, stof-keys, gather, ulysses, torch, separated by spaces.")
    ] = "",
    output: _Output = None,
) -> None:
    """Time attention over a sequence split over all GPUs of this host; every way is checked first."""
    from tempfile import TemporaryDirectory

    import torch
    from rich.table import Table

    from benchmarks.attention.distributed import MASKS, WAYS, run
    from benchmarks.results_io import saving
    from stof.tuning.machine import device_name

    must_be_writable(output)
    device = torch.device("cuda", 0)
    wanted = names("--masks", masks or " ".join(MASKS), MASKS), names("--ways", ways or " ".join(WAYS), WAYS)
    table = Table("mask", "tokens a GPU", "way", "forward ms", "forward and backward ms", title=device_name(device))
    with TemporaryDirectory() as folder:
        rows = run(wanted[0], integers("--tokens", tokens), wanted[1], Path(folder))
        for row in saving(rows, output, device):
            figures = ["" if ms is None else f"{ms:.2f}" for ms in (row.forward_ms, row.both_ms)]
            table.add_row(row.mask, str(row.tokens), row.way, row.note or figures[0], figures[1])
    table_console().print(table)


@app.command("first-call", cls=CheckedCommand)
def first_call(
    device: _Device = "",
    libraries: Annotated[str, typer.Option(help="stof and flex, separated by spaces.")] = "stof flex",
    output: _Output = None,
) -> None:
    """Time the first eager calls of a process, with empty caches and with those that it left, beside FlexAttention."""
    from tempfile import TemporaryDirectory

    from rich.table import Table

    from benchmarks.attention.first_call import LIBRARIES, as_json, run_processes
    from benchmarks.results_io import provenance, write_json
    from stof.tuning.machine import device_name

    must_be_writable(output)
    where, _ = _place(device, "")
    chosen = names("--libraries", libraries, LIBRARIES)
    with TemporaryDirectory() as folder:
        rows = list(run_processes(where, tuple(chosen), Path(folder)))
    columns = list(dict.fromkeys((row.library, row.caches) for row in rows))
    table = Table(title=f"First calls on {device_name(where)}, s", caption="; ".join(r.note for r in rows if r.note))
    for heading in ("call", *(f"{library}, caches {caches}" for library, caches in columns)):
        table.add_column(heading)
    times = {(row.call, row.library, row.caches): row.seconds for row in rows}
    for call in dict.fromkeys(row.call for row in rows):
        seconds = (times.get((call, *column)) for column in columns)
        table.add_row(call, *("-" if value is None else f"{value:.2f}" for value in seconds))
    table_console().print(table)
    if output is not None:
        write_json(output, as_json(rows, provenance(where)))


@app.command(cls=CheckedCommand)
def direct(
    dtype: _Dtype = "",
    device: _Device = "",
    lengths: Annotated[str, typer.Option(help="Tokens, separated by spaces; default by device.")] = "",
    heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=16)] = 64,
    output: _Output = None,
) -> None:
    """Time eager attention under a bool tensor that is read in every call, beside plans and SDPA."""

    from rich.table import Table

    from benchmarks.attention.direct_masks import direct_rows
    from benchmarks.results_io import saving
    from stof.tuning.machine import device_name

    must_be_writable(output)
    where, precision = _place(device, dtype)
    wanted = integers("--lengths", lengths or ("1024 4096 8192" if where.type == "cuda" else "512 2048"))
    table = Table("mask", "tokens", "given as", "us", "host us", title=f"Eager calls on {device_name(where)}")
    rows = direct_rows(where, precision, wanted, heads, head_dim)
    for row in saving(rows, output, where):
        table.add_row(
            row.mask, str(row.length), row.how, f"{row.us:.0f}", "" if row.host_us is None else f"{row.host_us:.0f}"
        )
    table_console().print(table)


@app.command(cls=CheckedCommand)
def build(
    device: _Device = "",
    length: Annotated[int | None, typer.Option(min=256, help="Tokens of the masks made at run time.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of the masks made at run time.")] = None,
    head_dim: Annotated[int, typer.Option(min=16)] = 128,
    flex: Annotated[bool, typer.Option(help="Also time FlexAttention's create_block_mask.")] = True,
    budget: Annotated[float, typer.Option(help="Seconds after which no further peer is started.")] = 80.0,
    parts: Annotated[str, typer.Option(help="What to time.")] = "steps growth known",
    masks: Annotated[str, typer.Option(help="Names of masks known ahead, separated by spaces; all when empty.")] = "",
    output: _Output = None,
) -> None:
    """Time compiling masks, once and in every step, against FlexAttention's; checked against float64 first."""
    import itertools
    import time

    from benchmarks.attention.mask_build import as_json, growth_rows, known_rows, step_rows
    from benchmarks.results_io import provenance, write_json

    must_be_writable(output)
    names("--parts", parts, ("steps", "growth", "known"))
    deadline = time.monotonic() + budget
    where, _ = _place(device, "")
    on_gpu = where.type == "cuda"
    rows: list[BuildRow] = []
    steps: list[StepRow] = []
    if "steps" in parts:
        steps += step_rows(where, length or (32768 if on_gpu else 512), heads or (32 if on_gpu else 2), head_dim)
    if output is not None:
        write_json(output, as_json(rows, steps, provenance(where)))
    growth = growth_rows(where, 2**18 if on_gpu else 2**12) if "growth" in parts else ()
    known = known_rows(where, not on_gpu, flex, deadline, masks.split()) if "known" in parts else ()
    for row in itertools.chain(growth, known):
        rows.append(row)
        if output is not None:
            write_json(output, as_json(rows, steps, provenance(where)))
    console = table_console()
    if rows:
        console.print(build_table(rows))
    if steps:
        console.print(step_table(steps))
    if output is not None:
        console.print(f"wrote {output}")


@app.command(cls=CheckedCommand)
def peers() -> None:
    """List the implementations a benchmark can time."""
    from rich.table import Table

    from benchmarks.peers import PEERS

    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("what it is")
    for peer in PEERS.values():
        table.add_row(peer.name, peer.summary)
    table_console().print(table)


@app.command(cls=CheckedCommand)
def report(
    results: Annotated[Path, typer.Argument(help="JSON that `python -m benchmarks attention` wrote.", metavar="FILE")],
    png: Annotated[Path | None, typer.Option(help="Draw the speed-ups here (.png or .svg).")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Table of a result file: STOF against its best peer in every cell, and geometric means by class."""
    from benchmarks.attention.report import cells_of, draw_speedups, markdown, reasons, summaries, summary_line
    from benchmarks.attention.run import Row
    from benchmarks.results_io import read_results

    found = read_results(results, Row)
    cells = cells_of(found.rows, found.not_run)
    title = f"{found.meta.get('device')}, torch {found.meta.get('torch')}, commit {found.meta.get('commit')}"
    if as_markdown:
        typer.echo(markdown(cells))
    else:
        console = table_console()
        console.print(report_table(cells, title))
        for summary in summaries(cells):
            console.print(summary_line(summary), soft_wrap=True, highlight=False)
        for reason in reasons(cells):
            console.print(f"not run: {reason}", style="dim", soft_wrap=True, highlight=False, markup=False)
    if png is not None:
        draw_speedups(cells, png, f"Speed-up of stof over the best peer, {title.split(',')[0]}")
        typer.echo(f"wrote {png}", err=True)


def _place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype to run on, with their defaults."""
    import torch

    from stof.errors import ArgumentError
    from stof.testing.attention_check import TOLERANCE

    where = device_of(device)
    wanted = dtype or ("float32" if where.type == "cpu" else "float16")
    precision = getattr(torch, wanted, None)
    if not isinstance(precision, torch.dtype) or precision not in TOLERANCE:
        raise ArgumentError(f"dtype is float32, float16, bfloat16 or float64, got {wanted!r}")
    return where, precision


def _race(
    grids: list[tuple[list[GridMask], list[Shape]]],
    impls: str,
    where: torch.device,
    precision: torch.dtype,
    output: Path | None,
    merge: bool,
    resume: bool = False,
    **settings: Any,
) -> list[Row]:
    """Run every grid (masks and the shapes they go with), writing the output file after each cell.

    `settings` go to `run_attention`.
    """
    from rich.console import Console
    from rich.text import Text

    from benchmarks.attention.run import KEY, ContextLostError, Row, run_attention
    from benchmarks.peers import peer
    from benchmarks.results_io import RowFile

    must_be_writable(output)
    console = Console(stderr=True)
    contenders = [peer(name) for name in impls.split()]
    file = RowFile(output, where, Row, KEY, keep=merge, mixed=True)
    done = file.done() if resume else set()
    rows: list[Row] = []

    def on_cell(found: list[Row], not_run: list[NotRun]) -> None:
        rows.extend(found)
        file.add(found, not_run)

    try:
        for masks, shapes in grids:
            run_attention(
                masks,
                shapes,
                contenders,
                device=where,
                dtype=precision,
                done=done,
                **settings,
                on_cell=on_cell,
                report=lambda text: console.print(Text(text, style="dim"), soft_wrap=True),
            )
    except ContextLostError as error:
        console.print(Text(f"the CUDA context is lost, the rest is left out: {error}", style="red"), soft_wrap=True)
    if output is not None and rows:
        console.print(f"wrote {output}")
    return rows
