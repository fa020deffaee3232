"""Refine fitted constants so that the selector's picks become faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stof.calibration.measure import Measured, call_of_row, survey_of
from stof.selection.cost_model import estimate, kernel_key
from stof.selection.device_model import DeviceModel, KernelTimes

# Factors that are tried on constants: within the usual error of an estimate.
FACTORS = (1.0, 0.94, 0.955, 0.97, 0.985, 1.015, 1.03, 1.045, 1.06)
# A change is kept if it lowers the sum of all cells' losses by more than this. Smaller gains are noise of measurements.
LEAST_GAIN = 0.01
# The loss of a regret r is r * (1 + _LARGE * r): users notice large regrets, so they weigh more.
_LARGE = 3.0


@dataclass(frozen=True)
class _Variant:
    """Constants of a kernel that may be chosen, and estimates with them of its rows, in us by number of the row."""

    times: KernelTimes
    estimates: dict[int, float]


def polish(rows: Sequence[Measured], models: Sequence[DeviceModel]) -> DeviceModel:
    """The first of some models, with constants replaced by another model's or scaled by `FACTORS` where regret falls.

    Least squares bring every estimate near its time, but the selector only asks which of a cell's candidates is
    fastest, and two of them are often nearer to each other than estimates are to times. So
    constants are changed one kernel at a time, each time by the change that lowers the cells' losses most, until none
    gains more than `LEAST_GAIN`.

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
