"""`stof tune --device`: measures this GPU and fits the selector's cost model to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stof.cli.common import must_be_writable, names, table_console

if TYPE_CHECKING:
    from stof.calibration.measure import Measured
    from stof.calibration.measure_backward import MeasuredTile
    from stof.selection.device_model import DeviceModel


def tune_device(
    device: bool,
    measurements: list[Path] | None,
    output: Path | None,
    masks: str,
    only: str,
    shapes: str,
    budget: float | None,
    workers: int,
    check: bool,
) -> None:
    """Measure this machine's GPU (`device`), or read measurements; fit the cost model and report how far it is off."""
    import json

    import torch
    from rich.console import Console

    from stof.calibration import least_squares, measure
    from stof.calibration.constant_refinement import polish
    from stof.errors import ArgumentError
    from stof.runtime.files import write_atomically
    from stof.selection import IMPLEMENTATIONS
    from stof.selection.device_model import model_to_dict

    must_be_writable(output)
    if output is not None and output.resolve() in [file.resolve() for file in measurements or ()]:
        raise ArgumentError(f"--output {output} is a file of --measurements as well, which it would replace")
    console = Console(stderr=True)
    wanted_masks = names("--masks", masks, list(dict.fromkeys(mask for mask, _ in measure.CELLS)))
    wanted_shapes = names("--shapes", shapes, list(dict.fromkeys(shape for _, shape in measure.CELLS)))
    names("--only", only, IMPLEMENTATIONS)
    if device:
        if not torch.cuda.is_available():
            raise ArgumentError("stof tune --device needs an NVIDIA GPU, and torch sees none")
        cells = [
            (mask, shape)
            for mask, shape in measure.CELLS
            if (not masks or mask in wanted_masks) and (not shapes or shape in wanted_shapes)
        ]
        if measurements is not None and len(measurements) > 1:
            raise ArgumentError("--device writes one file of measurements")
        file = measurements[0] if measurements else None
        old = [] if file is None or not file.exists() else _read(file)

        def keep(new: Sequence[Measured]) -> None:
            if file is not None:
                write_atomically(file, json.dumps(measure.to_json(measure.replaced(old, new))))

        new = measure.measure(
            cells, workers, budget, lambda line: console.print(line, style="dim", markup=False), only, keep
        )
        rows = measure.replaced(old, new)
    elif measurements:
        rows = [row for file in measurements for row in _read(file)]
    else:
        raise ArgumentError(
            "give a MODEL to tune, --device to measure this GPU, or --measurements FILE to fit its times"
        )
    base = _present_model()
    torch.set_num_threads(1)  # many tiny tensors
    if check:
        table_console().print(least_squares.regret_table(rows, base))
        return
    if not device or not measurements or output is not None:  # else only measured, to be fitted elsewhere
        solved = least_squares.fit(rows, base)
        # The refinement is greedy: its result depends on the initial constants, so the better of two runs is taken.
        refined = (polish(rows, [solved, base]), polish(rows, [base, solved]))
        fitted = min(refined, key=lambda model: sum(regret.share for regret in least_squares.regrets(rows, model)))
        errors, left_out = least_squares.cross_validate(rows, base)
        quality = {"fit": least_squares.summary(*least_squares.self_check(rows, fitted))}
        quality["cross_validation"] = least_squares.summary(errors, left_out)
        table_console().print(least_squares.regret_table(rows, fitted))
        for kind, line in quality.items():
            console.print(f"{kind}: {line}")
        if output is not None:
            content = json.dumps({**model_to_dict(fitted), "quality": quality}, indent=1)
            write_atomically(output, content + "\n")
            console.print(f"wrote {output}")


def tune_backward(
    device: bool,
    measurements: list[Path] | None,
    output: Path | None,
    masks: str,
    shapes: str,
    budget: float | None,
    check: bool,
) -> None:
    """`tune_device` of the backward kernels."""
    import json

    import torch
    from rich.console import Console

    from stof.calibration import measure_backward
    from stof.errors import ArgumentError
    from stof.runtime.files import write_atomically
    from stof.selection.device_model import model_to_dict

    must_be_writable(output)
    console = Console(stderr=True)
    if not device and not measurements:
        raise ArgumentError("give --device to measure this GPU, or --measurements FILE to fit its times")
    rows = [row for file in measurements or () if not device or file.exists() for row in measure_backward.read(file)]
    if device:
        if not torch.cuda.is_available():
            raise ArgumentError("stof tune --device needs an NVIDIA GPU, and torch sees none")
        if measurements is not None and len(measurements) > 1:
            raise ArgumentError("--device writes one file of measurements")
        wanted = [
            cell
            for cell in measure_backward.CELLS
            if (not masks or cell[0] in masks.split()) and (not shapes or cell[1] in shapes.split())
        ]
        old = [row for row in rows if (row.mask, row.shape, row.dtype) not in wanted]

        def keep(new: Sequence[MeasuredTile]) -> None:
            if measurements:
                measure_backward.write(measurements[0], [*old, *new])

        rows = old + measure_backward.measure(
            wanted, torch.device("cuda"), budget, lambda line: console.print(line, style="dim", markup=False), keep
        )
    torch.set_num_threads(1)  # many tiny tensors
    base = _present_model()
    fitted = base if check else measure_backward.fit(rows, base)
    console.print(measure_backward.summary(rows, fitted))
    if output is not None:
        write_atomically(output, json.dumps(model_to_dict(fitted), indent=1) + "\n")
        console.print(f"wrote {output}")


def _present_model() -> DeviceModel:
    """Constants of this GPU, or of the default device in its place."""
    from dataclasses import replace

    import torch

    from stof.selection.device_model import DEFAULT_DEVICE, load_model

    base = load_model(torch.cuda.get_device_name() if torch.cuda.is_available() else DEFAULT_DEVICE)
    if not base.stands_in_for:
        return base
    here = torch.cuda.get_device_properties()
    return replace(
        base, device=here.name, multiprocessors=here.multi_processor_count,
        shared_bytes=here.shared_memory_per_multiprocessor, stands_in_for="",
    )  # fmt: skip


def _read(file: Path) -> list[Measured]:
    """Measurements of a file.

    Raises:
        ArgumentError: it holds something else.
        OSError: it cannot be read.
    """
    from stof.calibration.measure import from_json
    from stof.errors import ArgumentError
    from stof.runtime.files import read_json

    try:
        data = read_json(file)
    except ValueError as error:
        raise ArgumentError(f"{file} holds no measurements of stof tune --device: {error}") from None
    return from_json(data)
