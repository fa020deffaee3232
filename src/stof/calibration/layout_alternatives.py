"""The ways a mask can be laid out, with the time of each: estimated for a GPU, measured where the calls can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stof.attention import plan as make_plan
from stof.calibration.measure import call_of, runner
from stof.errors import KernelError
from stof.layout import statistics
from stof.layout.orders.search import RowOrders, column_order, find_order
from stof.masks import Mask, reordered
from stof.plans.plan import Plan
from stof.selection import (
    CallSpec,
    KernelChoice,
    MaskGeometry,
    TokenOrder,
    better_token_order,
    candidates,
    default_config,
    default_implementation,
)
from stof.selection.device_model import DEFAULT_DEVICE, load_model
from stof.selection.select import NO_LAYOUT_ERRORS, LayoutErrors
from stof.testing.attention_check import TOLERANCE, AttentionProblem, Expected
from stof.testing.mask_grid import GridMask, Shape
from stof.tuning.timing import time_calls

# The GPU that estimates are for where none is present.
DEFAULT_GPU = DEFAULT_DEVICE
# Alternatives timed on a GPU, best estimates first; query rows compared with float64.
_MOST_TIMED, _CHECKED_ROWS = 12, 256


@dataclass(frozen=True)
class Alternative:
    """One layout and the best way to run it.

    Attributes:
        choice: how it runs.
        computed_over_needed: scores of its tiles over scores kept, 0 for an empty mask; on a GPU with unused slots.
        estimate_us: GPU time by the cost model, None where there is none (CPU).
        measured_us: median time of one call, None where it was not measured.
        note: why it was not measured, though it was asked for.
        reordered: q, k and v are put in another order first, and the output back, which the times contain.
    """

    choice: KernelChoice
    computed_over_needed: float
    estimate_us: float | None = None
    measured_us: float | None = None
    note: str = ""
    reordered: bool = False


def estimated(
    mask: Mask,
    shape: Shape,
    dtype: torch.dtype,
    gpu: str = DEFAULT_GPU,
    device: torch.device | str = "cpu",
    layout_errors: LayoutErrors = NO_LAYOUT_ERRORS,
) -> list[Alternative]:
    """Every layout a GPU could use for this call, fastest first by the cost model; nothing runs, no GPU is needed.

    Args:
        mask: what to keep.
        shape, dtype: the call.
        gpu: its name as `stof tune --device` knows it.
        device: where the mask is evaluated.
        layout_errors: layouts that are known not to fit.
    """
    call, geometry = _asked(mask, shape, dtype, device)
    best: dict[tuple[object, ...], tuple[KernelChoice, float | None]] = {}
    for candidate in candidates(call, torch.device("cuda", 0), geometry, load_model(gpu), layout_errors):
        choice = candidate.choice
        if choice is not None and choice.layout is not None and not candidate.refusals:
            best.setdefault((choice.implementation, choice.layout, choice.row_order), (choice, candidate.estimate_us))
    alternatives = []
    for order in dict.fromkeys(choice.row_order for choice, _ in best.values()):
        alike = [(choice, us) for choice, us in best.values() if choice.row_order == order]
        layouts = tuple(dict.fromkeys(choice.layout for choice, _ in alike if choice.layout is not None))
        counted = geometry.survey(layouts, order)
        alternatives += [
            Alternative(choice, counted.waste_of(choice.layout), us) for choice, us in alike if choice.layout
        ]
    return sorted(alternatives, key=lambda a: (a.estimate_us is None, a.estimate_us or 0.0))


def _asked(mask: Mask, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> tuple[CallSpec, MaskGeometry]:
    """What the selector is asked; `device` evaluates the mask."""
    call = replace(call_of(shape, dtype), mask_heads=mask.dims(shape.batch, shape.heads)[1])
    return call, MaskGeometry(mask, shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads, device=device)


def estimated_reordered(mask: Mask, shape: Shape, dtype: torch.dtype, gpu: str = DEFAULT_GPU) -> list[Alternative]:
    """`estimated` for queries and keys in the orders that make contiguous tiles dense, the passes over q, k, v and the
    output counted. Empty where the rows' own order is good enough."""
    sizes: dict[str, Any] = {"batch": shape.batch, "heads": shape.heads}
    row_order = find_order(mask, shape.q_len, shape.kv_len, **sizes)
    if row_order is None:
        return []
    moved = reordered(mask, row_order[1], column_order(mask, shape.q_len, shape.kv_len, **sizes))
    model = load_model(gpu)
    # Each is read and written once.
    width = shape.batch * shape.head_dim * dtype.itemsize
    bytes_ = 2 * 2 * width * (shape.heads * shape.q_len + shape.kv_heads * shape.kv_len)
    passes_us = bytes_ / model.bytes_per_us + 4 * model.launch
    return [
        replace(one, estimate_us=one.estimate_us + passes_us, reordered=True)
        for one in estimated(moved, shape, dtype, gpu)
        if one.choice.row_order is None and one.estimate_us is not None
    ]


def better_order(
    mask: Mask, shape: Shape, dtype: torch.dtype, gpu: str = DEFAULT_GPU, device: torch.device | str = "cpu"
) -> TokenOrder | None:
    """The order of the tokens in which this call would compute less; arguments as for `estimated`."""
    call, geometry = _asked(mask, shape, dtype, device)
    return better_token_order(geometry, call, torch.device("cuda", 0), model=load_model(gpu))


def measured(
    mask: Mask,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    only: Sequence[Alternative] | None = None,
    rounds: int = 5,
) -> list[Alternative]:
    """The alternatives on this machine, timed against each other, fastest first; each is checked against float64 first.

    Args:
        mask, shape, dtype: the call.
        device: a CUDA device, or the CPU, whose alternatives are row orders.
        only: on a CUDA device, those of `estimated` to time; default the 12 best.
        rounds: timed rounds; medians are reported.
    """
    problem = AttentionProblem.draw(GridMask("given", lambda q_len: mask, dense_like=False), shape, device, dtype)
    expected = Expected.of(problem, _CHECKED_ROWS)
    if device.type == "cuda":
        chosen = (
            estimated(mask, shape, dtype, torch.cuda.get_device_name(device))[:_MOST_TIMED] if only is None else only
        )
        listed = _on_gpu(mask, shape, device, chosen)
    else:
        listed = _on_cpu(mask, shape)
    calls: dict[int, Callable[[], Tensor]] = {}
    notes = dict.fromkeys(range(len(listed)), "")
    for number, (_, plan, choice) in enumerate(listed):
        try:
            call = runner((problem.q, problem.k, problem.v), plan, choice)
            error = expected.error(call())
        except KernelError as failure:
            notes[number] = str(failure)
            continue
        if error <= TOLERANCE[dtype]:
            calls[number] = call
        else:
            notes[number] = f"wrong, relative error {error:.1e}"
    timings = time_calls({str(number): call for number, call in calls.items()}, device, rounds=rounds)
    out = []
    for number, (alternative, _, _) in enumerate(listed):
        timing = timings.get(str(number))
        us = None if timing is None else timing.call_us if timing.gpu_us is None else timing.gpu_us
        out.append(replace(alternative, measured_us=us, note=notes[number]))
    return sorted(out, key=lambda a: (a.measured_us is None, a.measured_us or 0.0))


def _on_gpu(
    mask: Mask, shape: Shape, device: torch.device, chosen: Sequence[Alternative]
) -> list[tuple[Alternative, Plan, KernelChoice]]:
    plan = make_plan(mask, shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads, device=device)
    if plan.geometry is not None:
        plan.geometry.found_order()  # the estimates searched for it on the CPU
    return [(alternative, plan, alternative.choice) for alternative in chosen]


def _on_cpu(mask: Mask, shape: Shape) -> list[tuple[Alternative, Plan, KernelChoice]]:
    """The row orders there are under the default block sizes."""
    config, implementation = default_config(torch.device("cpu")), default_implementation(torch.device("cpu"))
    orders = RowOrders(mask, shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads, device="cpu")
    clustered = orders.searched_name()
    listed = []
    for name in (None, *orders.names, *(() if clustered is None else (clustered,))):
        plan = make_plan(
            mask,
            shape.q_len,
            shape.kv_len,
            batch=shape.batch,
            heads=shape.heads,
            device="cpu",
            config=config,
            row_order=orders.rows(name),
        )
        ratio = statistics(plan.layout).computed_over_needed
        alternative = Alternative(KernelChoice(implementation, config, name), ratio)
        listed.append((alternative, plan, KernelChoice(implementation)))
    return listed
