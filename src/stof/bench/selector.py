"""Measuring every candidate of the selector, fitting the cost model to the times, and how far its picks are off."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import stof
from stof.bench.check import TOLERANCE, Expected
from stof.bench.decode import decode_masks
from stof.bench.grid import GridMask, Shape, grid_mask
from stof.bench.problem import Problem
from stof.errors import KernelError
from stof.kernels.triton.work import BlockWiseConfig
from stof.layout import LayoutConfig
from stof.layout.survey import Survey, TileCounts
from stof.selection import CallSpec, Choice
from stof.selection.implementations import IMPLEMENTATIONS, Options
from stof.selection.model import (
    DeviceModel,
    KernelTimes,
    critical_load,
    estimate,
    estimate_tiles,
    kernel_key,
    occupancy,
)
from stof.tuning.timing import time_calls

if TYPE_CHECKING:
    from rich.table import Table

# Candidates whose estimate is this many times the best one's are not worth measuring.
_WORTH_MEASURING = 2.5
# Rounds of placing work by the constants of the round before; they settle after three.
_ROUNDS = 4
_SOLO = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_STARTS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
# A start looks much like a longer first item: one is taken only where the error is smaller by this factor.
_CLEARLY = 0.85


@dataclass(frozen=True)
class Measured:
    """One candidate on one cell.

    Attributes:
        mask, shape: the cell, `shape` as B,H,Hkv,D,Sq,Skv.
        choice: the candidate.
        us: GPU time, cold L2.
        load: per row block `[partial, full]` tiles counts, what the model sees; by mask entry.
    """

    mask: str
    shape: str
    dtype: str
    choice: Choice
    us: float
    partial: list[list[int]]
    full: list[list[int]]
    kept: float

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.mask, self.shape, self.dtype


# Cells the model is fitted on: the benchmark's grid, grouped heads, a wide head, and decoding.
GRID_MASKS = ("full", "causal", "window512", "longformer", "bigbird", "strided", "dilated")
_GRID_SHAPES = (
    "1,12,64,512", "1,12,64,2048", "1,12,64,4096", "16,12,64,1024",
    "1,32,128,1024", "1,32,128,8192", "1,32,128,16384",
)  # fmt: skip
_DECODE_SHAPES = (
    "16,32,8,128,1,16384", "16,32,8,128,1,65536", "1,32,8,128,1,16384", "16,12,12,64,1,4096", "4,8,8,128,1,8192",
)  # fmt: skip
CELLS: tuple[tuple[str, str], ...] = (
    *((mask, shape) for shape in _GRID_SHAPES for mask in GRID_MASKS),
    *((mask, "1,16,256,4096") for mask in ("causal", "longformer", "strided")),
    *(
        (mask, shape)
        for shape in _DECODE_SHAPES
        for mask in ("decode-dense", "decode-window4096")
        if "4096" not in mask or shape != "16,12,12,64,1,4096"  # the window is the whole cache there
    ),
)


def cell_mask(name: str, shape: Shape) -> GridMask:
    """The mask of a cell by its name."""
    if name.startswith("decode-"):
        return next(mask for mask in decode_masks(shape, 4096) if mask.name == name)
    return grid_mask(name)


def call_of(shape: Shape, dtype: torch.dtype) -> CallSpec:
    """The call spec of a benchmark cell on a GPU that refuses nothing."""
    return CallSpec(
        device="cuda",
        dtype=dtype,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        batch=shape.batch,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        compute_capability=(9, 0),
    )


def measure_cell(
    mask: GridMask,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[str], None],
    only: str = "",
) -> list[Measured]:
    """Time every candidate of a cell that is right and not hopeless."""
    problem = Problem.draw(mask, shape, device, dtype)
    expected = Expected.of(problem, 256)
    plan = stof.plan(mask.mask(shape.q_len), shape.q_len, shape.kv_len, device=device)
    call = replace(call_of(shape, dtype), compute_capability=torch.cuda.get_device_capability(device))
    weighed = [c for c in plan.candidates(call) if c.estimate_us is not None and only in ("", c.name)]
    best = (weighed[0].estimate_us or 0.0) if weighed else 0.0
    calls: dict[str, Callable[[], object]] = {}
    chosen: dict[str, Choice] = {}
    for candidate in weighed:
        choice = candidate.choice
        if choice is None or (candidate.estimate_us or 0.0) > _WORTH_MEASURING * best:
            continue
        try:
            run = runner((problem.q, problem.k, problem.v), plan, choice)
            error = expected.error(run())
        except KernelError as failure:
            report(f"  {choice}: {failure}")
            continue
        if error > TOLERANCE[dtype]:
            report(f"  {choice}: WRONG, relative error {error:.1e}")
            continue
        calls[str(choice)] = run
        chosen[str(choice)] = choice
    timings = time_calls(calls, device, rounds=3) if calls else {}
    rows = []
    for name, choice in chosen.items():
        counts, kept = _counts(plan, call, choice)
        us = timings[name].gpu_us
        assert us is not None
        sizes = (shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.q_len, shape.kv_len)
        rows.append(
            Measured(mask.name, ",".join(map(str, sizes)), str(dtype).removeprefix("torch."), choice, us, *counts, kept)
        )
    return rows


def runner(inputs: tuple[Tensor, Tensor, Tensor], plan: stof.Plan, choice: Choice) -> Callable[[], Tensor]:
    """A call of exactly this choice on q, k and v; `KernelError` where it cannot run here."""
    prepared = plan.prepared(choice)
    options = Options(inputs[0].shape[-1] ** -0.5, 0.0, None, None)
    bound = IMPLEMENTATIONS[choice.implementation].bound(*inputs, prepared.tensors, prepared.sizes, options)

    def run() -> Tensor:
        return bound(*inputs, None, None)[0]

    return run


def _counts(plan: stof.Plan, call: CallSpec, choice: Choice) -> tuple[tuple[list[list[int]], list[list[int]]], float]:
    layout = choice.layout or LayoutConfig()
    found = plan.survey((layout,), choice.row_order)
    counts = found.counts[layout]
    return (counts.partial.tolist(), counts.full.tolist()), float(found.kept.double().mean(0).sum())


def survey_of(row: Measured) -> Survey:
    """The survey a measurement was made with, its own geometry only."""
    counts = TileCounts(torch.tensor(row.partial), torch.tensor(row.full))
    layout = row.choice.layout or LayoutConfig()
    shape = Shape.parse(row.shape)
    kept = torch.full((1, shape.q_len), row.kept / shape.q_len)
    return Survey({layout: counts}, kept, 1, 1)


def call_of_row(row: Measured) -> CallSpec:
    return call_of(Shape.parse(row.shape), getattr(torch, row.dtype))


def fit(rows: Sequence[Measured], base: DeviceModel) -> DeviceModel:
    """The model whose estimates come closest to the measured times, in relative error, kernel by kernel."""
    by_key: dict[str, list[Measured]] = {}
    for row in rows:
        if row.choice.kernel is not None:
            by_key.setdefault(kernel_key(row.choice, call_of_row(row)), []).append(row)
    kernels = dict(base.kernels)
    for key, own in by_key.items():
        kernels[key] = _fit_kernel(own, base, base.kernels.get(key, KernelTimes(4.0, 1.0, 1.0, 1.0, 0.2, 0.6)))
    row_wise = _fit_row_wise([row for row in rows if row.choice.implementation == "row_wise"], base)
    return replace(base, kernels=kernels, row_wise=row_wise)


def _fit_kernel(rows: Sequence[Measured], model: DeviceModel, start: KernelTimes) -> KernelTimes:
    best, least = start, math.inf
    cases = [(row.choice, call_of_row(row), survey_of(row), row.us - model.launch) for row in rows]
    persistent = rows[0].choice.implementation == "hopper"
    # Thread blocks that stay need time to set up. Alone on a multiprocessor they are as fast whatever others do.
    settings = [(1.0, us) for us in _STARTS] if persistent else []
    if not persistent or occupancy(rows[0].choice, cases[0][1], model) > 1:
        settings += [(solo, 0.0) for solo in _SOLO]
    for solo, start_us in settings:
        times = replace(start, solo=solo, start=start_us)
        for _ in range(_ROUNDS):
            features, measured = [], []
            for choice, call, counts, us in cases:
                load, filled, bytes_us = critical_load(choice, call, counts, model, times)
                busy = solo + (1 - solo) * filled
                own_us = us - start_us
                if bytes_us < 0.9 * own_us:  # what memory bounds says nothing about the kernel
                    compute_us = (own_us**8 - bytes_us**8) ** 0.125
                    features.append(load * busy / compute_us)
                    measured.append(1.0)
            if not features:
                return start
            # A weak pull to where it started decides what the measurements leave open.
            pull = 0.02 * torch.diag(1 / start.weights())
            matrix = torch.cat([torch.stack(features), pull])
            target = torch.cat([torch.ones(len(measured), dtype=torch.float64), torch.full((5,), 0.02).double()])
            item, partial, full, merge, collect = _nonnegative(matrix, target).clamp(min=1e-3).tolist()
            # A partial tile does all that a full one does; few measurements may say otherwise.
            times = KernelTimes(item, max(partial, full / 2), full, merge, collect, solo, start_us)
        error = sum(
            (math.log(estimate_tiles(choice, call, counts, model, times)) - math.log(us + model.launch)) ** 2
            for choice, call, counts, us in cases
        )
        if error < least * (_CLEARLY if persistent else 1.0):
            best, least = times, error
    return best


def _nonnegative(matrix: Tensor, target: Tensor) -> Tensor:
    """Least squares with no negative coefficient, by trying every set of coefficients that stay (there are five)."""
    best, least = torch.zeros(matrix.shape[1], dtype=matrix.dtype), math.inf
    for count in range(matrix.shape[1], 0, -1):
        for some in combinations(range(matrix.shape[1]), count):
            columns = list(some)
            found = torch.linalg.lstsq(matrix[:, columns], target[:, None]).solution[:, 0]
            if bool((found >= 0).all()):
                error = float((matrix[:, columns] @ found - target).square().sum())
                if error < least:
                    least = error
                    best = torch.zeros_like(best)
                    best[columns] = found
        if math.isfinite(least):
            break
    return best


def _fit_row_wise(rows: Sequence[Measured], model: DeviceModel) -> tuple[float, float]:
    if not rows:
        return model.row_wise
    features = []
    for row in rows:
        shape = Shape.parse(row.shape)
        us = max(row.us - model.launch, 0.1)
        heads = shape.batch * shape.heads
        features.append([heads * shape.q_len / us, row.kept * heads * shape.head_dim / 64 / us])
    matrix = torch.tensor(features, dtype=torch.float64)
    row_us, key_us = _nonnegative(matrix, torch.ones(len(rows), dtype=torch.float64)).tolist()
    return row_us, key_us


@dataclass(frozen=True)
class Regret:
    """How much slower the model's pick is than the best measured candidate of a cell."""

    mask: str
    shape: str
    picked: Choice
    best: Choice
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
    found = []
    for (mask, shape, _), own in cells.items():
        picked = min(own, key=lambda r: estimate(r.choice, call_of_row(r), survey_of(r), model) or math.inf)
        best = min(own, key=lambda r: r.us)
        found.append(Regret(mask, shape, picked.choice, best.choice, picked.us, best.us))
    return found


def leave_one_out(rows: Sequence[Measured], base: DeviceModel) -> tuple[list[float], list[Regret]]:
    """Relative errors of estimates, and regrets, of models fitted without the mask they are asked about."""
    errors: list[float] = []
    found: list[Regret] = []
    for mask in dict.fromkeys(row.mask for row in rows):
        model = fit([row for row in rows if row.mask != mask], base)
        own = [row for row in rows if row.mask == mask]
        off, picked = self_check(own, model)
        errors += off
        found += picked
    return errors, found


def to_json(rows: Iterable[Measured]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def from_json(values: Iterable[dict[str, Any]]) -> list[Measured]:
    rows = []
    for value in values:
        choice = value["choice"]
        layout = choice["layout"] and LayoutConfig(**choice["layout"])
        kernel = choice["kernel"] and BlockWiseConfig(**choice["kernel"])
        picked = Choice(choice["implementation"], layout, choice["row_order"], kernel)
        rows.append(Measured(**{**value, "choice": picked}))
    return rows


def measure(
    cells: Sequence[tuple[str, str]],
    workers: int,
    budget: float | None,
    report: Callable[[str], None],
    only: str = "",
    keep: Callable[[Sequence[Measured]], object] = lambda rows: None,
) -> list[Measured]:
    """Measure the cells in float16 on the current GPU; those the budget (seconds) leaves out are reported.

    Args:
        only: names the one implementation to measure.
        keep: called with all rows so far after every cell.
    """
    start = time.monotonic()
    if workers > 1:
        warm(cells, "float16", workers, report, only)
        report(f"compiled ahead in {time.monotonic() - start:.0f} s")
    rows: list[Measured] = []
    for mask, sizes in cells:
        if budget is not None and time.monotonic() - start > budget:
            report(f"{mask} {sizes}: left out, the budget is spent")
            continue
        shape = Shape.parse(sizes)
        found = measure_cell(cell_mask(mask, shape), shape, torch.device("cuda"), torch.float16, report, only)
        rows += found
        keep(rows)
        if not found:
            report(f"{mask} {sizes}: no candidate")
            continue
        best = min(found, key=lambda row: row.us)
        report(f"{mask} {sizes}: {len(found)} candidates, best {best.us:.1f} us by {best.choice}")
    return rows


def replaced(old: Iterable[Measured], new: Sequence[Measured]) -> list[Measured]:
    """Old measurements with new ones in the place of those of the same candidates on the same cells."""
    again = {(row.cell, row.choice) for row in new}
    return [row for row in old if (row.cell, row.choice) not in again] + list(new)


def self_check(rows: Sequence[Measured], model: DeviceModel) -> tuple[list[float], list[Regret]]:
    """Relative errors of a model's estimates on these rows, and its regrets."""
    errors = []
    for row in rows:
        guess = estimate(row.choice, call_of_row(row), survey_of(row), model)
        if guess is not None:
            errors.append(abs(guess / row.us - 1))
    return errors, regrets(rows, model)


def regret_table(rows: Sequence[Measured], model: DeviceModel) -> Table:
    """One line per cell: the model's pick, the best measured, and what the pick costs more."""
    from rich.table import Table

    errors, found = self_check(rows, model)
    table = Table(title=f"Selector on {model.device}", caption=summary(errors, found))
    for heading in ("mask", "shape", "picked", "us", "best", "us", "regret"):
        table.add_column(heading)
    for regret in found:
        cells = (
            short_name(regret.picked),
            f"{regret.picked_us:.1f}",
            short_name(regret.best),
            f"{regret.best_us:.1f}",
            f"{regret.share:.1%}",
        )
        table.add_row(regret.mask, regret.shape, *map(str, cells))
    return table


def short_name(choice: Choice) -> str:
    """`64x32 gathered 4w3s168r split 32`: a choice in a table's cell."""
    layout, kernel = choice.layout, choice.kernel
    if layout is None or kernel is None:
        return choice.implementation
    columns = "contiguous" if layout.slab is None else "gathered"
    split = f" split {kernel.split_tiles}" if kernel.split_tiles else ""
    order = f" by {choice.row_order}" if choice.row_order else ""
    compiled = f"{kernel.num_warps}w{kernel.num_stages}s{kernel.max_registers}r"
    return f"{layout.block_m}x{layout.block_n} {columns}{order} {compiled}{split}"


def warm(
    cells: Sequence[tuple[str, str]], dtype: str, workers: int, report: Callable[[str], None], only: str = ""
) -> None:
    """Compile what the cells need in several processes, into Triton's cache on disk."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failure in pool.map(_warm_cell, [(*cell, dtype, only) for cell in cells]):
            if failure:
                report(failure)


def _warm_cell(job: tuple[str, str, str, str]) -> str | None:
    name, sizes, dtype, only = job
    try:
        shape = Shape.parse(sizes)
        # One sequence and two key heads are enough: sizes are no constants of a kernel.
        shape = replace(shape, batch=1, heads=2 * (shape.heads // shape.kv_heads), kv_heads=2)
        device = torch.device("cuda")
        problem = Problem.draw(cell_mask(name, shape), shape, device, getattr(torch, dtype))
        plan = stof.plan(problem.grid_mask.mask(shape.q_len), shape.q_len, shape.kv_len, device=device)
        call = replace(
            call_of(Shape.parse(sizes), problem.q.dtype), compute_capability=torch.cuda.get_device_capability(device)
        )
        for candidate in plan.candidates(call):
            if candidate.choice is not None and candidate.estimate_us is not None and only in ("", candidate.name):
                try:
                    runner((problem.q, problem.k, problem.v), plan, candidate.choice)()
                except KernelError:
                    continue  # reported when it is measured
    except Exception as error:  # a worker only warms caches; what fails here fails again, visibly, when measured
        return f"  warming {name} {sizes}: {type(error).__name__}: {str(error)[:200]}"
    return None


def summary(errors: Sequence[float], found: Sequence[Regret]) -> str:
    """One line: median and worst."""
    shares = [regret.share for regret in found]
    return (
        f"estimates off by {statistics.median(errors):.1%} (median), {max(errors, default=0):.0%} (worst); "
        f"regret {statistics.median(shares):.1%} (median), {max(shares):.1%} (worst)"
        if errors and shares
        else "nothing measured"
    )
