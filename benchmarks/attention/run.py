"""`python -m benchmarks attention`: same mask and inputs for everyone, checked against float64 before any timing."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.failures import first_line
from benchmarks.peers.interface import Call, Peer
from stof.testing.attention_check import TOLERANCE, AttentionProblem, Expected
from stof.testing.mask_grid import GridMask, Shape
from stof.tuning.timing import time_calls


@dataclass(frozen=True)
class Row:
    """One line of the JSON; times in microseconds, None where nothing was timed."""

    mask: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    dtype: str
    density: float
    impl: str
    gpu_us: float | None
    call_us: float | None
    build_us: float | None
    max_rel_err: float | None


@dataclass(frozen=True)
class NotRun:
    """An implementation that gave no result for a cell, and why."""

    mask: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    dtype: str
    impl: str
    reason: str


KEY = ("mask", "batch", "heads", "kv_heads", "head_dim", "q_len", "kv_len", "dtype", "impl")

Report = Callable[[str], None]
OnCell = Callable[[list[Row], list[NotRun]], None]


class ContextLostError(RuntimeError):
    """The CUDA context no longer works (an illegal access in some kernel): nothing more can run in this process."""


def run_attention(
    masks: Iterable[GridMask],
    shapes: Iterable[Shape],
    peers: Iterable[Peer],
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
    rounds: int = 7,
    check_rows: int = 1024,
    budget: float | None = None,
    timed: bool = True,
    on_cell: OnCell | None = None,
    done: Container[tuple[Any, ...]] = (),
) -> list[Row]:
    """Every mask on every shape by every peer.

    Args:
        masks, shapes, peers: the grid; a cell is one mask on one shape.
        report: gets one line per event (progress, missing peers, what the budget left out).
        rounds: timed rounds; medians are reported.
        check_rows: query rows of each cell compared with float64, all batch entries and heads of them.
        budget: seconds after which no further cell is started, None for no limit.
        timed: False to stop after the check.
        on_cell: gets each cell's lines as soon as they are known.
        done: values of `KEY` of measurements there are already; cells with nothing else to measure are left out.

    Raises:
        ContextLostError: a kernel destroyed the CUDA context; the cells before have been given to `on_cell`.
    """
    masks, peers, results = list(masks), list(peers), list[Row]()
    cells = [
        (mask, shape)
        for shape in shapes
        for mask in masks
        if not all((*_where(mask, shape, dtype).values(), peer.name) in done for peer in peers)
    ]
    start, slowest = time.perf_counter(), 0.0
    for number, (grid_mask, shape) in enumerate(cells):
        begun = time.perf_counter()
        # A cell may take as long as the longest so far, and must end within the budget.
        if budget is not None and number and begun - start + slowest > budget:
            left = ", ".join(f"{mask.name} {shape}" for mask, shape in cells[number:])
            report(f"budget of {budget:.0f} s used; left out: {left}")
            break
        report(f"{grid_mask.name} {shape}")
        with torch.no_grad():
            rows, not_run = _run_cell(
                AttentionProblem.draw(grid_mask, shape, device, dtype),
                peers,
                check_rows,
                rounds if timed else 0,
                report,
            )
        results += rows
        if on_cell is not None:
            on_cell(rows, not_run)
        _forget(device)
        slowest = max(slowest, time.perf_counter() - begun)
    return results


def _run_cell(
    problem: AttentionProblem, peers: Sequence[Peer], check_rows: int, rounds: int, report: Report
) -> tuple[list[Row], list[NotRun]]:
    expected = Expected.of(problem, check_rows)
    calls: dict[str, Call] = {}
    built: dict[str, tuple[float, float]] = {}
    not_run: list[NotRun] = []
    where = _where(problem.grid_mask, problem.shape, problem.q.dtype)
    for peer in peers:
        reason = peer.missing(problem)
        if reason is None:
            outcome = _prepare_and_check(peer, problem, expected)
            if isinstance(outcome, str):
                reason = outcome
            else:
                calls[peer.name], built[peer.name] = outcome[0], outcome[1:]
                build_us, error = outcome[1:]
                verdict = "" if error <= TOLERANCE[problem.q.dtype] else "  WRONG, not timed"
                report(f"  {peer.name}: relative error {error:.1e}, built in {build_us / 1e6:.2f} s{verdict}")
        if reason is not None:
            report(f"  {peer.name}: not run ({reason})")
            not_run.append(NotRun(**where, impl=peer.name, reason=reason))
    good = {name: call for name, call in calls.items() if built[name][1] <= TOLERANCE[problem.q.dtype]}
    timings = time_calls(good, problem.device, rounds=rounds) if rounds else {}
    density = int(problem.keep.count_nonzero()) / problem.keep.numel()
    rows = []
    for name, (build_us, error) in built.items():
        timing = timings.get(name)
        if timing and timing.gpu_us is not None:
            how = "" if timing.graphed else " (no CUDA graph: from eager calls)"
            how += "" if timing.clear else " (scatters: is anything else running?)"
            report(f"  {name}: {timing.gpu_us:.1f} us on the GPU{how}, {timing.call_us:.0f} us to call")
        times = (timing.gpu_us, timing.call_us) if timing else (None, None)
        rows.append(
            Row(
                **where,
                density=density,
                impl=name,
                gpu_us=times[0],
                call_us=times[1],
                build_us=build_us,
                max_rel_err=error,
            )
        )
    return rows, not_run


def _where(grid_mask: GridMask, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """`KEY` without the implementation, in its order."""
    return {"mask": grid_mask.name, **asdict(shape), "dtype": str(dtype).removeprefix("torch.")}


def _prepare_and_check(peer: Peer, problem: AttentionProblem, expected: Expected) -> tuple[Call, float, float] | str:
    """The call to time, its build time and its error, or why this peer gave no result."""
    _ = problem.keep  # evaluated outside the build time
    try:
        start = time.perf_counter()
        call = peer.prepare(problem)
        out = call()  # compilers run on the first call
        _synchronize(problem.device)
        build_us = (time.perf_counter() - start) * 1e6
        error = expected.error(out)
    except Exception as failure:  # whatever a peer raises, out of memory included, must not end the race
        reason = first_line(failure)
        try:
            _synchronize(problem.device)
        except RuntimeError as lost:
            raise ContextLostError(f"{peer.name} on {problem.grid_mask.name} {problem.shape}: {reason}") from lost
        return reason
    return call, build_us, error


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    """Drop what a cell leaves behind: compiled functions slow the next cell's calls, cached blocks fill the GPU."""
    if "torch._dynamo" in sys.modules:  # else resetting would import it
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
