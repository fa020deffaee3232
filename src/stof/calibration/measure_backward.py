"""Measure every variant of the backward kernels on cells of masks and shapes, and fit their constants."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stof.attention import attention
from stof.attention import plan as make_plan
from stof.calibration.least_squares import nonnegative
from stof.calibration.measure import call_of
from stof.errors import ArgumentError, KernelError
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import NeedsGrad, Options
from stof.kernels.torch.reference import reference_backward
from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts, survey
from stof.masks import transposed
from stof.plans.backward import gradients_of
from stof.selection import IMPLEMENTATIONS, CallSpec
from stof.selection.backward_tilings import (
    SPLITS,
    BackwardTile,
    BackwardTiling,
    critical_load,
    head_groups,
    one_pass_load,
    one_pass_tile,
    one_pass_tilings,
    tiles_of,
    triton_tilings,
)
from stof.selection.device_model import BackwardTimes, DeviceModel
from stof.selection.implementations import Backward
from stof.testing.attention_check import AttentionProblem
from stof.testing.mask_grid import Shape, grid_mask
from stof.tuning.timing import time_calls

KERNELS = ("dq", "dkv", "dqkv")
_MASKS = ("full", "causal", "window512", "longformer", "bigbird", "strided", "dilated", "random1%", "random5%")
CELLS = (
    *((mask, shape, "bfloat16") for shape in ("1,32,128,8192", "16,12,64,1024", "1,12,64,4096") for mask in _MASKS),
    *(
        (mask, *cell)
        for cell in (("1,16,256,4096", "bfloat16"), ("1,12,64,4096", "float32"), ("1,12,128,2048", "float32"))
        for mask in ("causal", "window512", "longformer", "random5%")
    ),
)
# The tile of the kernel that is not measured.
_OTHER = (LayoutConfig(32, 32), None), KernelConfig(num_warps=4, num_stages=2)
# The largest error of a gradient, relative to the largest value.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-3}
# Rounds of fitting. Each assigns thread blocks to slots by the constants of the round before.
_ROUNDS = 8


@dataclass(frozen=True)
class MeasuredTile:
    """One variant of one kernel on one cell.

    Attributes:
        mask, shape, dtype: the cell, `shape` as B,H,Hkv,D,Sq,Skv.
        kernel: "dq" or "dkv", or "dqkv" for Hopper's kernel for all gradients.
        tile: its sizes.
        slab, split_tiles: see `LayoutConfig` and `KernelConfig`.
        us: GPU time, that of the kernel of row statistics included; on a CPU the time of the call.
    """

    mask: str
    shape: str
    dtype: str
    kernel: str
    tile: BackwardTile
    slab: int | None
    split_tiles: int
    us: float

    @property
    def key(self) -> str:
        """Of the constants in `DeviceModel.backward`."""
        return self.tile.key(self.kernel, call_of(Shape.parse(self.shape), getattr(torch, self.dtype)))


def measure(
    cells: Iterable[tuple[str, str, str]],
    device: torch.device,
    budget: float | None,
    report: Callable[[str], None],
    keep: Callable[[Sequence[MeasuredTile]], object],
) -> list[MeasuredTile]:
    """Time every variant of the kernels on cells (mask, shape, dtype), each after a check against float64.

    Args:
        device: where.
        budget: seconds after which no cell is begun.
        report: takes lines for people.
        keep: called with all rows so far after every cell.
    """
    start = time.monotonic()
    rows: list[MeasuredTile] = []
    for mask, shape, dtype in cells:
        if budget is not None and time.monotonic() - start > budget:
            report(f"{mask} {shape} {dtype}: left out, the budget is spent")
            continue
        for kernel in KERNELS:
            rows += _measure_cell(mask, Shape.parse(shape), getattr(torch, dtype), kernel, device, report)
        keep(rows)
    return rows


def _measure_cell(
    name: str, shape: Shape, dtype: torch.dtype, kernel: str, device: torch.device, report: Callable[[str], None]
) -> list[MeasuredTile]:
    problem = AttentionProblem.draw(grid_mask(name), shape, device, dtype)
    q, k, v = problem.q, problem.k, problem.v
    d_out = torch.randn(q.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    plan = make_plan(
        problem.grid_mask.mask(shape.q_len), shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads,
        device=device,
    )  # fmt: skip
    out, lse = attention(q, k, v, plan, return_lse=True)
    needs = NeedsGrad(q=kernel != "dkv", kv=kernel != "dq", bias=False, sinks=False)
    expected = _expected(problem, d_out)
    calls: dict[str, Callable[[], object]] = {}
    variants: dict[str, _Variant] = {}
    for variant in _variants(kernel, call_of(shape, dtype)):
        backward = IMPLEMENTATIONS[variant.implementation].backward
        assert backward is not None
        text = f"{name} {shape} {kernel} {variant.tile} slab {variant.slab} split {variant.split_tiles}"
        try:
            prepared = gradients_of(plan).prepared(variant.implementation, variant.tiling)
            if variant.split_tiles and not getattr(prepared, kernel).slots:
                continue  # no row block is long enough
            options = Options(shape.head_dim**-0.5)
            bound = backward.bind(q, k, v, out, d_out, None, prepared, options, needs)
            run = functools.partial(bound, q, k, v, out, lse, d_out, None, None, None)
            error = _error(run(), expected)
        except KernelError as failure:
            report(f"  {text}: {failure}")
            continue
        if not error <= _TOLERANCE[dtype]:
            report(f"  {text}: WRONG, off by {error:.1e} of the largest")
            continue
        calls[text], variants[text] = run, variant
    sizes = ",".join(map(str, (shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.q_len, shape.kv_len)))
    timings = time_calls(calls, device, rounds=3) if calls else {}
    rows = []
    for text, variant in variants.items():
        us = timings[text].gpu_us or timings[text].call_us
        kind = variant.tile, variant.slab, variant.split_tiles
        rows.append(MeasuredTile(name, sizes, str(dtype).removeprefix("torch."), kernel, *kind, us))
    if rows:
        report(f"{name} {shape} {kernel}: {len(rows)} variants, best {min(row.us for row in rows):.1f} us")
    return rows


class _Variant(NamedTuple):
    """A variant of a kernel: an implementation's tiling, and of the measured kernel the tile, slab and split."""

    implementation: str
    tiling: BackwardTiling
    tile: BackwardTile
    slab: int | None = None
    split_tiles: int = 0


def _variants(kernel: str, call: CallSpec) -> Iterator[_Variant]:
    name, backward = _implementation_of(one_pass_tilings if kernel == "dqkv" else triton_tilings)
    if backward is None or backward.capabilities.refusals(call):
        return
    if kernel == "dqkv":
        tile = one_pass_tile(call)
        yield _Variant(name, BackwardTiling(dkv_layout=(LayoutConfig(tile.rows, tile.columns), None)), tile)
        return
    for tile, slab, split in itertools.product(tiles_of(kernel, call), (None, 1), SPLITS):
        chosen = (
            (LayoutConfig(tile.rows, tile.columns, slab), None),
            KernelConfig(num_warps=tile.num_warps, num_stages=tile.num_stages, split_tiles=split),
        )
        dq, dkv = (chosen, _OTHER) if kernel == "dq" else (_OTHER, chosen)
        yield _Variant(name, BackwardTiling(dq[0], dkv[0], dq[1], dkv[1]), tile, slab, split)


def _implementation_of(tilings: Callable[..., Any]) -> tuple[str, Backward | None]:
    """The implementation whose backward pass has these tilings, None if there is none."""
    listed = ((name, one.backward) for name, one in IMPLEMENTATIONS.items())
    return next(((name, one) for name, one in listed if one is not None and one.tilings is tilings), ("", None))


def _expected(problem: AttentionProblem, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the first key head of the first sequence in float64, whose memory is bounded."""
    group = problem.shape.heads // problem.shape.kv_heads
    q, d_out = (x[:1, :group].double() for x in (problem.q, d_out))
    k, v = (x[:1, :1].double() for x in (problem.k, problem.v))
    return reference_backward(q, k, v, d_out, problem.keep[:1, :group], scale=problem.shape.head_dim**-0.5)[:3]


def _error(gradients: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    errors = [
        float((got[:1, : want.shape[1]].double() - want).abs().max() / want.abs().max())
        for got, want in zip(gradients, expected, strict=False)
        if got is not None and want is not None
    ]
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def fit(rows: Sequence[MeasuredTile], base: DeviceModel) -> DeviceModel:
    """The model with constants by which estimates come closest to the measured times, in relative error."""
    fitted = dict(base.backward)
    for key in dict.fromkeys(row.key for row in rows):
        group = [row for row in rows if row.key == key]
        times = fitted.get(key, BackwardTimes(5.0, 1.0, 1.0, 5.0))
        for _ in range(_ROUNDS):
            features = torch.stack([_load(row, base, times) / (row.us - _statistics_us(row, base)) for row in group])
            solved = nonnegative(features, torch.ones(len(group), dtype=torch.float64))
            # The mean with the constants before: which slot ends last depends on them.
            item, partial, full, chunk = ((solved + times.weights()) / 2).tolist()
            # Partial and full tiles do nearly the same work. Few measurements may say otherwise, so each costs at least
            # half of the other.
            times = BackwardTimes(item, max(partial, full / 2), max(full, partial / 2), chunk)
        fitted[key] = times
    return replace(base, backward=fitted)


def _load(row: MeasuredTile, model: DeviceModel, times: BackwardTimes) -> Tensor:
    shape = Shape.parse(row.shape)
    layout = LayoutConfig(row.tile.rows, row.tile.columns, row.slab)
    counts = _counts(row.mask, shape.q_len, shape.kv_len, row.kernel != "dq", layout)
    call = call_of(shape, getattr(torch, row.dtype))
    if row.kernel == "dqkv":
        return one_pass_load(row.tile, counts, call, model, times)
    return critical_load(row.tile, counts, row.split_tiles, *head_groups(row.kernel, call), model, times)


@functools.cache
def _counts(mask: str, q_len: int, kv_len: int, swap: bool, layout: LayoutConfig) -> TileCounts:
    value = grid_mask(mask).mask(q_len)
    counted = survey(transposed(value), kv_len, q_len, (layout,)) if swap else survey(value, q_len, kv_len, (layout,))
    return counted.counts[layout]


def _statistics_us(row: MeasuredTile, model: DeviceModel) -> float:
    """Estimated time of the launches and of the kernel of row statistics, at most 90 % of what was measured."""
    shape = Shape.parse(row.shape)
    values = 2 * shape.batch * shape.heads * shape.q_len * shape.head_dim
    us = 2 * model.launch + values * getattr(torch, row.dtype).itemsize / model.bytes_per_us
    return min(us, 0.9 * row.us)


def summary(rows: Sequence[MeasuredTile], model: DeviceModel) -> str:
    """One line: how much slower the model's picks are than the best measured variants of each kernel and cell."""
    cells: dict[tuple[str, ...], list[MeasuredTile]] = {}
    for row in rows:
        cells.setdefault((row.mask, row.shape, row.dtype, row.kernel), []).append(row)

    def estimate(row: MeasuredTile) -> float:
        times = model.backward[row.key]
        return float(_load(row, model, times) @ times.weights())

    regrets = [min(group, key=estimate).us / min(row.us for row in group) - 1 for group in cells.values()]
    if not regrets:
        return "nothing measured"
    return f"{len(regrets)} cells: regret {statistics.mean(regrets):.2%} (mean), {max(regrets):.1%} (worst)"


def from_json(values: Iterable[dict[str, Any]]) -> list[MeasuredTile]:
    """Rows of a file of measurements.

    Raises:
        ArgumentError: they are something else.
    """
    try:
        return [MeasuredTile(**{**value, "tile": BackwardTile(**value["tile"])}) for value in values]
    except (TypeError, KeyError) as error:
        raise ArgumentError(f"these are no measurements of stof tune --device --backward: {error!r}") from None
