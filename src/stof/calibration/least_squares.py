"""Fitting the cost model to measurements, and how far its estimates and picks are off.

`constant_refinement.py` follows it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.calibration.constant_refinement import estimated, polish
from stof.calibration.measure import Measured, call_of_row, survey_of
from stof.selection import KernelChoice
from stof.selection.cost_model import (
    compaction_us,
    critical_load,
    estimate_tiles,
    kernel_key,
    longest_row_us,
    row_wise_features,
)
from stof.selection.device_model import DeviceModel, KernelTimes
from stof.selection.implementations import gpu_of
from stof.testing.mask_grid import Shape

if TYPE_CHECKING:
    from rich.table import Table

# Rounds of fitting. Each assigns thread blocks to slots by the constants of the round before; three suffice.
_ROUNDS = 4
_SOLO = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_STARTS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
# The time before a thread block's first item (`start`) is hard to tell from a longer item: it is fitted only where it
# reduces the error by this factor.
_CLEARLY = 0.85
_FOLDS = 5


def fit(rows: Sequence[Measured], base: DeviceModel) -> DeviceModel:
    """The model whose estimates come closest to the measured times, in relative error, kernel by kernel."""
    by_key: dict[str, list[Measured]] = {}
    for row in rows:
        if row.choice.kernel is not None:
            by_key.setdefault(kernel_key(row.choice, call_of_row(row)), []).append(row)
    kernels = dict(base.kernels)
    for key, group in by_key.items():
        kernels[key] = _fit_kernel(group, base, base.kernels.get(key, KernelTimes(4.0, 1.0, 1.0, 1.0, 0.2, 0.6)))
    row_wise = _fit_row_wise([row for row in rows if gpu_of(row.choice).by_rows], base)
    return replace(base, kernels=kernels, row_wise=row_wise)


def _fit_kernel(rows: Sequence[Measured], model: DeviceModel, start: KernelTimes) -> KernelTimes:
    best, least = start, math.inf
    known = [((row.choice, call_of_row(row), survey_of(row)), row.us) for row in rows]
    # The time of launches before the kernel does not depend on its constants.
    cases = [(*case, us, model.launch + compaction_us(*case, model)) for case, us in known]
    gpu = gpu_of(rows[0].choice)
    # Persistent thread blocks take time to set up. One alone on a multiprocessor is as fast on a GPU that is not full.
    settings = [(1.0, us) for us in _STARTS] if gpu.persistent else []
    if not gpu.persistent or gpu.occupancy(rows[0].choice, cases[0][1], model.shared_bytes) > 1:
        settings += [(solo, 0.0) for solo in _SOLO]
    for solo, start_us in settings:
        times = replace(start, solo=solo, start=start_us)
        for _ in range(_ROUNDS):
            features, measured = [], []
            for choice, call, counts, us, before_us in cases:
                load, filled, bytes_us = critical_load(choice, call, counts, model, times)
                busy = solo + (1 - solo) * filled
                own_us = us - before_us - start_us
                if bytes_us < 0.9 * own_us:  # memory-bound calls say nothing about the kernel's constants
                    compute_us = (own_us**8 - bytes_us**8) ** 0.125
                    features.append(load * busy / compute_us)
                    measured.append(1.0)
            if not features:
                return start
            # A weak regularisation towards the initial constants decides what the measurements leave open.
            pull = 0.02 * torch.diag(1 / start.weights())
            matrix = torch.cat([torch.stack(features), pull])
            target = torch.cat([torch.ones(len(measured), dtype=torch.float64), torch.full((5,), 0.02).double()])
            item, partial, full, merge, collect = nonnegative(matrix, target).clamp(min=1e-3).tolist()
            # Partial and full tiles do nearly the same work. Few measurements may say otherwise, so each costs at least
            # half of the other.
            partial, full = max(partial, full / 2), max(full, partial / 2)
            times = KernelTimes(item, partial, full, merge, collect, solo, start_us)
        error = sum(
            (math.log(estimate_tiles(choice, call, counts, model, times)) - math.log(us)) ** 2
            for choice, call, counts, us, _ in cases
        )
        if error < least * (_CLEARLY if gpu.persistent else 1.0):
            best, least = times, error
    return best


def nonnegative(matrix: Tensor, target: Tensor) -> Tensor:
    """Least squares with no negative coefficient, by trying every set of coefficients that stay (at most five)."""
    best, least = torch.zeros(matrix.shape[1], dtype=matrix.dtype), math.inf
    for count in range(matrix.shape[1], 0, -1):
        for some in combinations(range(matrix.shape[1]), count):
            columns = list(some)
            solution = torch.linalg.lstsq(matrix[:, columns], target[:, None]).solution[:, 0]
            if bool((solution >= 0).all()):
                error = float((matrix[:, columns] @ solution - target).square().sum())
                if error < least:
                    least = error
                    best = torch.zeros_like(best)
                    best[columns] = solution
        if math.isfinite(least):
            break
    return best


def _fit_row_wise(rows: Sequence[Measured], model: DeviceModel) -> tuple[float, float]:
    features = []
    for row in rows:
        shape, call = Shape.parse(row.shape), call_of_row(row)
        us = row.us - model.launch
        heads = shape.batch * shape.heads
        # Where the longest row takes most of the time, the call says nothing about the cost of rows and keys.
        if us > 2 * longest_row_us(call, math.ceil(row.longest_row or row.kept / shape.q_len)):
            counts = row_wise_features(heads * shape.q_len, row.kept * heads, shape.head_dim)
            features.append([one / us for one in counts])
    if not features:
        return model.row_wise
    matrix = torch.tensor(features, dtype=torch.float64)
    row_us, key_us = nonnegative(matrix, torch.ones(len(features), dtype=torch.float64)).tolist()
    return row_us, key_us


@dataclass(frozen=True)
class Regret:
    """How much slower the model's pick is than the best measured candidate of a cell."""

    mask: str
    shape: str
    picked: KernelChoice
    best: KernelChoice
    picked_us: float
    best_us: float

    @property
    def share(self) -> float:
        return self.picked_us / self.best_us - 1


def regrets(rows: Sequence[Measured], model: DeviceModel) -> list[Regret]:
    """The regret of a model on every measured cell."""
    cells: dict[tuple[str, str, str], list[Measured]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    regrets = []
    for (mask, shape, _), group in cells.items():
        picked = min(group, key=lambda r: estimated(r, model))
        best = min(group, key=lambda r: r.us)
        regrets.append(Regret(mask, shape, picked.choice, best.choice, picked.us, best.us))
    return regrets


def cross_validate(rows: Sequence[Measured], base: DeviceModel) -> tuple[list[float], list[Regret]]:
    """Relative errors of estimates, and regrets, of models fitted without the shapes they are asked about.

    Shapes are left out a fifth at a time.
    """
    errors: list[float] = []
    regrets: list[Regret] = []
    names = list(dict.fromkeys(row.shape for row in rows))
    for first in range(min(_FOLDS, len(names))):
        asked = set(names[first::_FOLDS])
        others = [row for row in rows if row.shape not in asked]
        # Not from the base's constants: they may have been fitted to these shapes.
        model = polish(others, [fit(others, base)])
        off, picked = self_check([row for row in rows if row.shape in asked], model)
        errors += off
        regrets += picked
    return errors, regrets


def self_check(rows: Sequence[Measured], model: DeviceModel) -> tuple[list[float], list[Regret]]:
    """Relative errors of a model's estimates on these rows, and its regrets."""
    errors = []
    for row in rows:
        guess = estimated(row, model)
        if math.isfinite(guess):
            errors.append(abs(guess / row.us - 1))
    return errors, regrets(rows, model)


def regret_table(rows: Sequence[Measured], model: DeviceModel) -> Table:
    """One line per cell: the model's pick, the best measured, and what the pick costs more."""
    from rich.table import Table

    errors, regrets = self_check(rows, model)
    table = Table(title=f"Selector on {model.device}", caption=summary(errors, regrets))
    for heading in ("mask", "shape", "picked", "us", "best", "us", "regret"):
        table.add_column(heading)
    for regret in regrets:
        cells = (
            short_name(regret.picked),
            f"{regret.picked_us:.1f}",
            short_name(regret.best),
            f"{regret.best_us:.1f}",
            f"{regret.share:.1%}",
        )
        table.add_row(regret.mask, regret.shape, *map(str, cells))
    return table


def short_name(choice: KernelChoice) -> str:
    """`64x32 gathered 4w3s168r split 32`: a choice in a table's cell."""
    layout, kernel = choice.layout, choice.kernel
    if layout is None or kernel is None:
        return choice.implementation
    columns = "compacted" if layout.compact_columns else "contiguous" if layout.slab is None else "gathered"
    split = f" split {kernel.split_tiles}" if kernel.split_tiles else ""
    order = f" by {choice.row_order}" if choice.row_order else ""
    compiled = f"{kernel.num_warps}w{kernel.num_stages}s{kernel.max_registers}r"
    return f"{layout.block_m}x{layout.block_n} {columns}{order} {compiled}{split}"


def summary(errors: Sequence[float], regrets: Sequence[Regret]) -> str:
    """One line: errors by median and worst, regrets by mean (most are 0) and worst."""
    shares = [regret.share for regret in regrets]
    return (
        f"estimates off by {statistics.median(errors):.1%} (median), {max(errors, default=0):.0%} (worst); "
        f"regret {statistics.mean(shares):.2%} (mean), {max(shares):.1%} (worst)"
        if errors and shares
        else "nothing measured"
    )
