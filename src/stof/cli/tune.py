"""`stof tune`: a model's fusion scheme, or with `--device` the attention selector's cost model of this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stof.cli.tune_device import tune_backward, tune_device
from stof.cli.tune_model import Wanted, tune_model

_MODEL, _DEVICE = "A model", "The attention selector (--device)"


def tune(
    model: Annotated[
        str | None,
        typer.Argument(help="bert, gpt2, ..., module:function giving (model, inputs), or a Hugging Face folder."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, or images.", rich_help_panel=_MODEL)] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.", rich_help_panel=_MODEL)] = 512,
    mask: Annotated[
        str,
        typer.Option(
            help="full, or a mask expression; for named models also window+sinks, longformer, bigbird.",
            rich_help_panel=_MODEL,
        ),
    ] = "full",
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.", rich_help_panel=_MODEL)] = "float16",
    effort: Annotated[str, typer.Option(help="quick or full.", rich_help_panel=_MODEL)] = "quick",
    lock: Annotated[
        Path | None, typer.Option(help="Write the choices here, to commit and reuse.", rich_help_panel=_MODEL)
    ] = None,
    html: Annotated[str | None, typer.Option(hidden=True)] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a chart (.png, .svg or .pdf).", rich_help_panel=_MODEL)
    ] = None,
    fold: Annotated[
        bool,
        typer.Option("--fold", help="Fold norms' weights into those of matmuls (option fold).", rich_help_panel=_MODEL),
    ] = False,
    store: Annotated[
        Path | None, typer.Option(help="Folder for measurements; the user's cache otherwise.", rich_help_panel=_MODEL)
    ] = None,
    references: Annotated[
        bool,
        typer.Option(
            "--references", help="Run templates' PyTorch references where no kernel serves.", rich_help_panel=_MODEL
        ),
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="Seconds for measuring; with --device, after which no cell is begun.")
    ] = None,
    device: Annotated[
        bool,
        typer.Option("--device", help="Measure every attention kernel here, and fit.", rich_help_panel=_DEVICE),
    ] = False,
    measurements: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write the measurements here, into what it holds; without --device, read them (may be repeated).",
            rich_help_panel=_DEVICE,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the fitted constants.", rich_help_panel=_DEVICE)] = None,
    masks: Annotated[str, typer.Option(help="Only cells with these masks.", rich_help_panel=_DEVICE)] = "",
    only: Annotated[str, typer.Option(help="Only this implementation.", rich_help_panel=_DEVICE)] = "",
    shapes: Annotated[str, typer.Option(help="Only cells with these shapes.", rich_help_panel=_DEVICE)] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes compiling ahead.", rich_help_panel=_DEVICE)] = 8,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="The backward kernels instead of the forward ones.", rich_help_panel=_DEVICE),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Keep the constants; report error and regret.", rich_help_panel=_DEVICE)
    ] = False,
) -> None:
    """Tune a model: search for what to fuse, show why, and write a lock file. Or, with --device, tune for this GPU.

    stof tune bert --batch 8 --length 512 --mask bigbird --lock bert.lock
    """
    from stof.errors import ArgumentError

    if html is not None:
        raise ArgumentError("--html is removed: `stof tune MODEL > FILE` writes the same tables, --png FILE a chart")
    if model is None:
        for name, value in (("lock", lock), ("png", png)):
            if value is not None:
                raise ArgumentError(f"--{name} is for a model: stof tune MODEL --{name} {value}")
        if fold:
            raise ArgumentError("--fold is for a model: stof tune MODEL --fold")
        if backward:
            tune_backward(device, measurements, output, masks, shapes, budget, check)
            return
        tune_device(device, measurements, output, masks, only, shapes, budget, workers, check)
        return
    if device or measurements or check or backward:
        raise ArgumentError(
            f"--device, --backward, --measurements and --check tune for a GPU, not for the model {model!r}"
        )
    tune_model(Wanted(model, batch, length, mask, dtype, effort, budget, fold, references, lock, png, store))
