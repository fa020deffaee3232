"""`stof tune --device`: measures this GPU and fits the selector's cost model to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    from stof.calibration import least_squares, measure, measurement_file
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
    base, values = _start(device, measurements)
    rows = measure.from_json(values)
    if device:
        cells = [
            (mask, shape)
            for mask, shape in measure.CELLS
            if (not masks or mask in wanted_masks) and (not shapes or shape in wanted_shapes)
        ]
        old = rows

        def keep(new: Sequence[Measured]) -> None:
            for file in measurements or ():
                measurement_file.write(file, base, measure.replaced(old, new))

        new = measure.measure(
            cells, workers, budget, lambda line: console.print(line, style="dim", markup=False), only, keep
        )
        rows = measure.replaced(old, new)
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

    from stof.calibration import measure_backward, measurement_file
    from stof.runtime.files import write_atomically
    from stof.selection.device_model import model_to_dict

    must_be_writable(output)
    console = Console(stderr=True)
    base, values = _start(device, measurements)
    rows = measure_backward.from_json(values)
    if device:
        wanted = [
            cell
            for cell in measure_backward.CELLS
            if (not masks or cell[0] in masks.split()) and (not shapes or cell[1] in shapes.split())
        ]
        old = [row for row in rows if (row.mask, row.shape, row.dtype) not in wanted]

        def keep(new: Sequence[MeasuredTile]) -> None:
            for file in measurements or ():
                measurement_file.write(file, base, [*old, *new])

        rows = old + measure_backward.measure(
            wanted, torch.device("cuda"), budget, lambda line: console.print(line, style="dim", markup=False), keep
        )
    torch.set_num_threads(1)  # many tiny tensors
    fitted = base if check else measure_backward.fit(rows, base)
    console.print(measure_backward.summary(rows, fitted))
    if output is not None:
        write_atomically(output, json.dumps(model_to_dict(fitted), indent=1) + "\n")
        console.print(f"wrote {output}")


def _start(device: bool, measurements: list[Path] | None) -> tuple[DeviceModel, list[dict[str, Any]]]:
    """The constants to begin with, and the rows that the files of measurements hold."""
    import torch

    from stof.calibration import measurement_file
    from stof.errors import ArgumentError

    if not device:
        if measurements:
            return measurement_file.read(measurements)
        raise ArgumentError(
            "give a MODEL to tune, --device to measure this GPU, or --measurements FILE to fit its times"
        )
    if not torch.cuda.is_available():
        raise ArgumentError("stof tune --device needs an NVIDIA GPU, and torch sees none")
    if measurements is not None and len(measurements) > 1:
        raise ArgumentError("--device writes one file of measurements")
    old = [file for file in measurements or () if file.exists()]
    return measurement_file.read(old, measurement_file.measured_device())
