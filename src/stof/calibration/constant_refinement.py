"""Constants of the cost model chosen by what is picked with them, where estimates alone leave it open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stof.calibration.measure import Measured, call_of_row, survey_of
from stof.selection.cost_model import estimate, kernel_key
from stof.selection.device_model import DeviceModel, KernelTimes

# What constants may be multiplied by: little more than estimates are off by.
FACTORS = (1.0, 0.94, 0.955, 0.97, 0.985, 1.015, 1.03, 1.045, 1.06)
# A change has to gain so much, in cells that are this share slower than they need be: less is noise.
LEAST_GAIN = 0.01
# A regret of 1/3 counts twice what a regret near 0 counts for its size: large ones are what users notice.
_LARGE = 3.0


@dataclass(frozen=True)
class _Variant:
    """A kernel's constants, one of those to choose from, and estimates in us of the rows that it times."""

    times: KernelTimes
    estimates: dict[int, float]


def polish(rows: Sequence[Measured], models: Sequence[DeviceModel]) -> DeviceModel:
    """The first of some models, with constants of another, or a few percent off, where better picks follow.

    Least squares bring every estimate near its time, but the selector only asks which of a cell's candidates is
    fastest, and two of them are often nearer to each other than estimates are to times. So the sum of all cells'
    regrets is made smaller kernel by kernel, always by the change that gains most, until none gains `LEAST_GAIN`.

    Args:
        rows: what was measured.
        models: of one device, the first to begin with.
    """
    keys = [None if row.choice.kernel is None else kernel_key(row.choice, call_of_row(row)) for row in rows]
    rows_of: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            rows_of.setdefault(key, []).append(i)
    rows_of = {key: indices for key, indices in rows_of.items() if key in models[0].kernels}
    variants = {key: _variants(key, rows, indices, models) for key, indices in rows_of.items()}
    estimates = {i: known for options in variants.values() for i, known in options[0].estimates.items()}
    for i, row in enumerate(rows):
        if i not in estimates:
            estimates[i] = estimated(row, models[0])
    cells: dict[tuple[str, str, str], list[int]] = {}
    for i, row in enumerate(rows):
        cells.setdefault(row.cell, []).append(i)
    touched = {key: {rows[i].cell for i in indices} for key, indices in rows_of.items()}

    def loss(cell: tuple[str, str, str], changed: dict[int, float]) -> float:
        indices = cells[cell]
        picked = min(indices, key=lambda i: changed.get(i, estimates[i]))
        regret = rows[picked].us / min(rows[i].us for i in indices) - 1
        return regret * (1 + _LARGE * regret)

    chosen = {key: options[0] for key, options in variants.items()}
    losses = {cell: loss(cell, {}) for cell in cells}
    while True:
        best, gain = None, LEAST_GAIN
        for key, options in variants.items():
            for variant in options:
                gained = sum(losses[cell] - loss(cell, variant.estimates) for cell in touched[key])
                if gained > gain:
                    best, gain = (key, variant), gained
        if best is None:
            return replace(models[0], kernels={**models[0].kernels, **{k: v.times for k, v in chosen.items()}})
        key, variant = best
        chosen[key] = variant
        estimates.update(variant.estimates)
        for cell in touched[key]:
            losses[cell] = loss(cell, {})


def _variants(
    key: str, rows: Sequence[Measured], indices: Sequence[int], models: Sequence[DeviceModel]
) -> list[_Variant]:
    """Constants of each model, as they are and multiplied; the first model's own come first."""
    variants = []
    for times in dict.fromkeys(model.kernels[key] for model in models if key in model.kernels):
        for factor in FACTORS:
            scaled = replace(times, item=times.item * factor, partial=times.partial * factor, full=times.full * factor)
            model = replace(models[0], kernels={**models[0].kernels, key: scaled})
            variants.append(_Variant(scaled, {i: estimated(rows[i], model) for i in indices}))
    return variants


def estimated(row: Measured, model: DeviceModel) -> float:
    """A model's estimate of a row's time, in us; infinite where it has none."""
    known = estimate(row.choice, call_of_row(row), survey_of(row), model)
    return math.inf if known is None else known
