"""Measure every candidate of the selector on cells of masks and shapes; `least_squares.py` fits the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stof.attention import plan as make_plan
from stof.errors import ArgumentError, KernelError
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import Options
from stof.layout import LayoutConfig
from stof.layout.survey import Survey, TileCounts
from stof.plans.plan import Plan
from stof.selection import CallSpec, KernelChoice
from stof.selection.implementations import IMPLEMENTATIONS
from stof.testing.attention_check import TOLERANCE, AttentionProblem, Expected
from stof.testing.mask_grid import GridMask, Shape, decode_masks, grid_mask
from stof.tuning.timing import time_calls

# Candidates whose estimate is this many times the best one's are not worth measuring.
_WORTH_MEASURING = 2.5


@dataclass(frozen=True)
class Measured:
    """One candidate on one cell.

    Attributes:
        mask, shape: the cell, `shape` as B,H,Hkv,D,Sq,Skv; `mask` ends with `BIAS` where scores get one.
        choice: the candidate.
        us: GPU time, cold L2.
        partial, full: tiles of each row block, what the model sees; by mask entry.
        kept: scores kept.
        compacted_keys: see `TileCounts`.
        longest_row: keys of the row that keeps most; 0 where it was not noted.
    """

    mask: str
    shape: str
    dtype: str
    choice: KernelChoice
    us: float
    partial: list[list[int]]
    full: list[list[int]]
    kept: float
    compacted_keys: int = 0
    longest_row: int = 0

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.mask, self.shape, self.dtype


# Suffix of cells whose scores get a bias `[1, H, Sq, Skv]`.
BIAS = "+bias"
# Cells the model is fitted on: the benchmark's grid, other shapes, a wide head, biases, and decoding.
GRID_MASKS = ("full", "causal", "window512", "longformer", "bigbird", "strided", "dilated")
_GRID_SHAPES = (
    "1,12,64,512", "1,12,64,2048", "1,12,64,4096", "16,12,64,1024",
    "1,32,128,1024", "1,32,128,8192", "1,32,128,16384",
)  # fmt: skip
# Shapes that the benchmark does not have: few heads, grouped ones, heads of 96, batches of short sequences.
_OTHER_SHAPES = (
    "8,12,64,384", "1,8,64,1024", "1,32,8,128,2048,2048", "1,6,128,512", "4,16,64,2048", "2,16,96,1536",
)  # fmt: skip
# Scattered keys: nothing is shared by the rows of a row block, nor by row blocks.
_RANDOM_SHAPES = ("1,12,64,4096", "16,12,64,1024", "1,32,128,8192", "2,32,8,128,4096,4096")
_RANDOM_MASKS = ("random0.1%", "random0.5%", "random1%", "random2%", "random5%", "random10%", "random30%", "random60%")
_DECODE_SHAPES = (
    "16,32,8,128,1,16384", "16,32,8,128,1,65536", "1,32,8,128,1,16384", "16,12,12,64,1,4096", "4,8,8,128,1,8192",
)  # fmt: skip
_BIAS_CELLS = (
    ("1,12,64,4096", ("full+bias", "causal+bias", "window512+bias", "longformer+bias")),
    ("8,12,64,512", ("full+bias", "causal+bias")),
    ("1,32,128,4096", ("full+bias", "causal+bias", "window512+bias", "longformer+bias")),
    ("1,16,256,4096", ("full+bias", "causal+bias", "longformer+bias")),
)
CELLS: tuple[tuple[str, str], ...] = (
    *((mask, shape) for shape in _GRID_SHAPES for mask in GRID_MASKS),
    *((mask, shape) for shape in _OTHER_SHAPES for mask in GRID_MASKS if mask != "dilated"),
    *((mask, "1,16,256,4096") for mask in ("full", "causal", "window512", "longformer", "strided")),
    *((mask, shape) for shape in _RANDOM_SHAPES for mask in _RANDOM_MASKS),
    *((mask, shape) for shape, of_shape in _BIAS_CELLS for mask in of_shape),
    *(
        (mask, shape)
        for shape in _DECODE_SHAPES
        for mask in ("decode-dense", "decode-window4096")
        if "4096" not in mask or shape != "16,12,12,64,1,4096"  # the window is the whole cache there
    ),
)


def cell_mask(name: str, shape: Shape) -> GridMask:
    """The mask of a cell by its name."""
    name = name.removesuffix(BIAS)
    if name.startswith("decode-"):
        return next(mask for mask in decode_masks(shape, 4096) if mask.name == name)
    return grid_mask(name)


def cell_bias(name: str, problem: AttentionProblem) -> Tensor | None:
    """Scores' bias `[1, H, Sq, Skv]`, normally distributed, of cells that have one."""
    if not name.endswith(BIAS):
        return None
    generator = torch.Generator(device=problem.device).manual_seed(1)
    size = (1, problem.shape.heads, problem.shape.q_len, problem.shape.kv_len)
    return torch.randn(size, generator=generator, device=problem.device, dtype=problem.q.dtype)


def call_of(shape: Shape, dtype: torch.dtype, has_bias: bool = False) -> CallSpec:
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
        has_bias=has_bias,
        compute_capability=(9, 0),
    )


def measure_cell(
    name: str,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[str], None],
    only: str = "",
) -> list[Measured]:
    """Time every candidate of a cell whose estimate is near the best and whose result is right."""
    mask = cell_mask(name, shape)
    problem = AttentionProblem.draw(mask, shape, device, dtype)
    bias = cell_bias(name, problem)
    expected = Expected.of(problem, 256, bias)
    plan = make_plan(mask.mask(shape.q_len), shape.q_len, shape.kv_len, device=device)
    call = call_of(shape, dtype, bias is not None)
    call = replace(call, compute_capability=torch.cuda.get_device_capability(device))
    weighed = [c for c in plan.candidates(call) if c.estimate_us is not None and only in ("", c.name)]
    best = (weighed[0].estimate_us or 0.0) if weighed else 0.0
    calls: dict[str, Callable[[], object]] = {}
    chosen: dict[str, KernelChoice] = {}
    for candidate in weighed:
        choice = candidate.choice
        if choice is None or (candidate.estimate_us or 0.0) > _WORTH_MEASURING * best:
            continue
        try:
            run = runner((problem.q, problem.k, problem.v), plan, choice, bias)
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
    for text, choice in chosen.items():
        layout = choice.layout or LayoutConfig()
        assert plan.geometry is not None
        survey = plan.geometry.survey((layout,), choice.row_order)
        counts, kept = survey.counts[layout], survey.kept.double()
        us = timings[text].gpu_us
        assert us is not None
        sizes = (shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.q_len, shape.kv_len)
        cell = (name, ",".join(map(str, sizes)), str(dtype).removeprefix("torch."))
        rows.append(
            Measured(
                *cell,
                choice,
                us,
                partial=counts.partial.tolist(),
                full=counts.full.tolist(),
                kept=float(kept.mean(0).sum()),
                compacted_keys=counts.compacted_keys,
                longest_row=int(kept.max()),
            )
        )
    return rows


def runner(
    inputs: tuple[Tensor, Tensor, Tensor], plan: Plan, choice: KernelChoice, bias: Tensor | None = None
) -> Callable[[], Tensor]:
    """A call of exactly this choice on q, k and v; `KernelError` where it cannot run here."""
    prepared = plan.prepared(choice)
    options = Options(inputs[0].shape[-1] ** -0.5, bias=bias)
    bound = IMPLEMENTATIONS[choice.implementation].bind(*inputs, prepared, options)

    def run() -> Tensor:
        return bound(*inputs, bias, None)[0]

    return run


def survey_of(row: Measured) -> Survey:
    """The survey a measurement was made with, its own geometry only."""
    counts = TileCounts(torch.tensor(row.partial), torch.tensor(row.full), row.compacted_keys)
    layout = row.choice.layout or LayoutConfig()
    shape = Shape.parse(row.shape)
    kept = torch.full((1, shape.q_len), row.kept / shape.q_len)
    if row.longest_row and shape.q_len > 1:
        kept[:] = (row.kept - row.longest_row) / (shape.q_len - 1)
        kept[0, 0] = row.longest_row
    return Survey({layout: counts}, kept, 1, 1)


def call_of_row(row: Measured) -> CallSpec:
    return call_of(Shape.parse(row.shape), getattr(torch, row.dtype), row.mask.endswith(BIAS))


def from_json(values: Iterable[dict[str, Any]]) -> list[Measured]:
    """Rows of a file of measurements.

    Raises:
        ArgumentError: they are something else.
    """
    rows = []
    try:
        for value in values:
            choice = value["choice"]
            layout = choice["layout"] and LayoutConfig(**choice["layout"])
            kernel = choice["kernel"] and KernelConfig(**choice["kernel"])
            picked = KernelChoice(choice["implementation"], layout, choice["row_order"], kernel)
            rows.append(Measured(**{**value, "choice": picked}))
    except (TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(f"these are no measurements of stof tune --device: {error!r}") from None
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
        measured = measure_cell(mask, shape, torch.device("cuda"), torch.float16, report, only)
        rows += measured
        keep(rows)
        if not measured:
            report(f"{mask} {sizes}: no candidate")
            continue
        best = min(measured, key=lambda row: row.us)
        report(f"{mask} {sizes}: {len(measured)} candidates, best {best.us:.1f} us by {best.choice}")
    return rows


def replaced(old: Iterable[Measured], new: Sequence[Measured]) -> list[Measured]:
    """Old measurements with new ones in the place of those of the same candidates on the same cells."""
    again = {(row.cell, row.choice) for row in new}
    return [row for row in old if (row.cell, row.choice) not in again] + list(new)


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


def _warm_cell(cell: tuple[str, str, str, str]) -> str | None:
    name, sizes, dtype, only = cell
    try:
        shape = Shape.parse(sizes)
        # One sequence and two key heads are enough: sizes are no constants of a kernel.
        shape = replace(shape, batch=1, heads=2 * (shape.heads // shape.kv_heads), kv_heads=2)
        device = torch.device("cuda")
        problem = AttentionProblem.draw(cell_mask(name, shape), shape, device, getattr(torch, dtype))
        plan = make_plan(problem.grid_mask.mask(shape.q_len), shape.q_len, shape.kv_len, device=device)
        bias = cell_bias(name, problem)
        call = call_of(Shape.parse(sizes), problem.q.dtype, bias is not None)
        call = replace(call, compute_capability=torch.cuda.get_device_capability(device))
        for candidate in plan.candidates(call):
            if candidate.choice is not None and candidate.estimate_us is not None and only in ("", candidate.name):
                try:
                    runner((problem.q, problem.k, problem.v), plan, candidate.choice, bias)()
                except KernelError:
                    continue  # reported when it is measured
    except Exception as error:  # a worker only warms caches; what fails here fails again, visibly, when measured
        return f"  warming {name} {sizes}: {type(error).__name__}: {str(error)[:200]}"
    return None
