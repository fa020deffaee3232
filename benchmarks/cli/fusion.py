"""`python -m benchmarks gemm` and `python -m benchmarks layer`: kernel templates against PyTorch's compiler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.options import integers

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from benchmarks.fusion.gemm import Summary

_Models = Annotated[str, typer.Option(help="Models, separated by spaces.")]
_Tokens = Annotated[str, typer.Option(help="Numbers of tokens (batch times length), separated by spaces.")]
_Dtype = Annotated[str, typer.Option(help="float16 or bfloat16.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")]
_Budget = Annotated[float | None, typer.Option(help="Seconds after which nothing further is started.")]
_Output = Annotated[Path | None, typer.Option(help="Write the JSON here, into what it holds of this commit.")]


def gemm(
    models: _Models = "bert gpt2 llama t5 vit",
    tokens: _Tokens = "128 512 2048 4096 16384",
    configs: Annotated[
        str,
        typer.Option(help="quick: one or two of every kind; all: every one that fits; or some, separated by spaces."),
    ] = "quick",
    gemms: Annotated[str, typer.Option(help="Only products whose name contains this.")] = "",
    autotuned: Annotated[bool, typer.Option("--autotuned", help="Inductor's max-autotune as a second peer.")] = False,
    chain: Annotated[
        int, typer.Option(min=0, help="So many calls one after the other, instead of single ones with a cold L2.")
    ] = 0,
    sustained: Annotated[
        float, typer.Option(min=0, help="Repeat each call for so many seconds, in which the clock falls to what lasts.")
    ] = 0.0,
    dtype: _Dtype = "float16",
    rounds: _Rounds = 7,
    budget: _Budget = None,
    output: _Output = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out products that the output file has.")] = False,
) -> None:
    """Time the products of Transformers with their epilogues, after checking each against float64."""
    from rich.console import Console
    from rich.text import Text

    from benchmarks.fusion.gemm import GEMMS, KEY, MODELS, QUICK, Row, run_gemm, summaries
    from benchmarks.results_io import RowFile
    from stof.errors import ArgumentError
    from stof.fusion.templates.gemm_config import GemmConfig

    device, precision = gpu(dtype)
    if chain and sustained:
        raise ArgumentError("--chain and --sustained are two ways to time; give one of them")
    only = {"quick": QUICK, "all": None}.get(configs, ())
    named = [] if configs in ("quick", "all") else [str(GemmConfig.parse(text)) for text in configs.split()]
    if only == () and not named:
        raise ArgumentError("configs is 'quick', 'all', or configurations separated by spaces")
    unknown = set(models.split()) - set(MODELS)
    if unknown:
        raise ArgumentError(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    console, record, start = Console(stderr=True), RowFile(output, device, Row, KEY), time.perf_counter()
    held = [row for row in record.rows if resume and (row.chain, row.sustained) == (chain, sustained)]
    done = {(row.model, row.gemm, row.tokens, row.dtype) for row in held}
    wanted = [
        (one, count)
        for count in integers("--tokens", tokens)
        for one in GEMMS
        if one.model in models.split() and gemms in one.name and (one.model, one.name, count, dtype) not in done
    ]
    measured: list[Summary] = []
    for place, (one, count) in enumerate(wanted):
        if budget is not None and time.perf_counter() - start > budget:
            console.print(f"{len(wanted) - place} products left out for the budget; go on with --resume")
            break
        console.print(Text(f"{one.model} {one.name}, {count} tokens", style="dim"))
        rows = run_gemm(
            one, count, device, precision, only=only, named=named, autotuned=autotuned, chain=chain,
            sustained=sustained, rounds=rounds,
            report=lambda text: console.print(Text(text, style="red"), soft_wrap=True),
        )  # fmt: skip
        record.add(rows)
        measured += summaries(rows)
    Console(width=160).print(gemm_table(measured, device, dtype))


def gemm_table(lines: list[Summary], device: torch.device, dtype: str) -> Table:
    """One line a product: the best of every kind, and the share of cuBLAS's speed needed and reached."""
    from rich.table import Table

    from stof.fusion.templates.gemm_config import KINDS
    from stof.tuning.machine import device_name

    table = Table(title=f"Products with their surroundings on {device_name(device)}, {dtype}, us of GPU time, cold L2")
    for heading in ("model", "product", "tokens"):
        table.add_column(heading)
    for heading in ("gemm alone", "inductor", *KINDS, "speed-up", "needed", "reached"):
        table.add_column(heading, justify="right")
    table.add_column("best")
    for line in lines:
        kinds = (f"{line.by_kind[kind]:.1f}" if kind in line.by_kind else "-" for kind in KINDS)
        table.add_row(
            line.model, line.gemm, str(line.tokens), f"{line.bare_us:.1f}", f"{line.inductor_us:.1f}", *kinds,
            f"{line.speedup:.2f}", f"{line.needed:.0%}", f"{line.reached:.0%}", line.best,
            style="" if line.speedup >= 1 else "red",
        )  # fmt: skip
    return table


def layer(
    model: Annotated[str, typer.Option(help="bert (base) or llama (1B).")] = "bert",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1)] = 512,
    gemms: Annotated[
        Path | None, typer.Option(help="Results of `python -m benchmarks gemm`: each product's best is used.")
    ] = None,
    autotuned: Annotated[bool, typer.Option("--autotuned", help="Inductor's max-autotune as a second peer.")] = False,
    dtype: _Dtype = "float16",
    rounds: _Rounds = 11,
    output: _Output = None,
) -> None:
    """Time one layer fused by hand with the templates against torch.compile, both under CUDA graphs."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from benchmarks.fusion.gemm import Row
    from benchmarks.fusion.layer import FUSED, PEERS, configs_from, layer_shape, run_layer
    from benchmarks.results_io import provenance, read_results, write_json
    from stof.errors import ArgumentError
    from stof.tuning.machine import device_name

    if model not in ("bert", "llama"):
        raise ArgumentError(f"model is bert or llama, got {model!r}")
    device, precision = gpu(dtype)
    shape = layer_shape(model, batch, length)
    configs = configs_from([] if gemms is None else read_results(gemms, Row).rows, model, batch * length)
    peers = list(PEERS)[: 2 if autotuned else 1]
    rows = run_layer(shape, configs, device, precision, rounds, peers)
    if output is not None:
        content = {"meta": provenance(device), "configs": configs, "rows": [asdict(row) for row in rows]}
        write_json(output, content)
    console = Console(width=120)
    for name, text in configs.items():
        console.print(f"{name}: {'left to Inductor' if text is None else text or 'default'}")
    table = Table(title=f"{model} layer {batch} x {length} on {device_name(device)}, {dtype}, CUDA graphs")
    for heading in ("way", "us", "cosine", "speed-up of fusing"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    ours = next(row.us for row in rows if row.impl == FUSED)
    for row in rows:
        ratio = f"{row.us / ours:.3f}" if row.us and ours and row.impl != FUSED else ""
        figures = (f"{row.us:.1f}" if row.us else row.problem, "" if row.cosine is None else f"{row.cosine:.6f}")
        table.add_row(row.impl, *figures, ratio)
    console.print(table)


def gpu(dtype: str) -> tuple[torch.device, torch.dtype]:
    """The GPU, and a 16-bit dtype.

    Raises:
        ArgumentError: another dtype.
        DeviceError: no GPU.
    """
    import torch

    from stof.errors import ArgumentError, DeviceError

    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError(f"dtype is float16 or bfloat16, got {dtype!r}")
    if not torch.cuda.is_available():
        raise DeviceError("this benchmark compares GPU kernels; there is no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
