"""`stof bench attention`: same mask and inputs for everyone, checked against float64 before any timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.bench.grid import GridMask, Shape
from stof.bench.peers import Call, Peer, Problem
from stof.kernels.reference import reference_attention
from stof.tuning.timing import time_calls

# Largest |out - float64| / max |float64| accepted before a time is given: some 10 units in the last place of what
# a row of attention averages over. A wrong mask is off by 0.1 or more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


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


Report = Callable[[str], None]


def run_attention(
    masks: Iterable[GridMask],
    shapes: Iterable[Shape],
    peers: Iterable[Peer],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    report: Report,
) -> list[Row]:
    """Every mask on every shape by every peer; `report` gets one line per event (progress, missing peers)."""
    rows: list[Row] = []
    masks, peers = list(masks), list(peers)
    for shape in shapes:
        for grid_mask in masks:
            report(f"{grid_mask.name} {shape}")
            rows += _run_cell(_problem(grid_mask, shape, device, dtype), peers, rounds, report)
    return rows


def _problem(grid_mask: GridMask, shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    generator = torch.Generator(device="cpu").manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    q, k, v = draw(shape.heads, shape.q_len), draw(shape.kv_heads, shape.kv_len), draw(shape.kv_heads, shape.kv_len)
    return Problem(grid_mask, shape, q, k, v)


def _run_cell(problem: Problem, peers: list[Peer], rounds: int, report: Report) -> list[Row]:
    shape = problem.shape
    keep = problem.grid_mask.mask(shape.q_len).to_dense(shape.q_len, shape.kv_len, device=problem.device)
    density = float(keep.float().mean())
    expected = float64_attention(problem.q, problem.k, problem.v, keep)
    del keep
    calls: dict[str, Call] = {}
    built: dict[str, tuple[float, float]] = {}
    for peer in peers:
        reason = peer.missing(problem)
        if reason is None:
            outcome = _prepare_and_check(peer, problem, expected)
            if isinstance(outcome, str):
                reason = outcome
            else:
                calls[peer.name], built[peer.name] = outcome[0], outcome[1:]
        if reason is not None:
            report(f"  {peer.name}: not run ({reason})")
    good = {n: c for n, c in calls.items() if built[n][1] <= TOLERANCE[problem.q.dtype]}
    for name in calls.keys() - good.keys():
        report(f"  {name}: WRONG, relative error {built[name][1]:.1e}; not timed")
    timings = time_calls(good, problem.device, rounds=rounds)
    rows = []
    for name, (build_us, error) in built.items():
        timing = timings.get(name)
        rows.append(
            Row(
                mask=problem.grid_mask.name,
                batch=shape.batch,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                q_len=shape.q_len,
                kv_len=shape.kv_len,
                dtype=str(problem.q.dtype).removeprefix("torch."),
                density=density,
                impl=name,
                gpu_us=timing.gpu_us if timing else None,
                call_us=timing.call_us if timing else None,
                build_us=build_us,
                max_rel_err=error,
            )
        )
    return rows


def _prepare_and_check(peer: Peer, problem: Problem, expected: Tensor) -> tuple[Call, float, float] | str:
    """The call to time, its build time and its error, or why this peer gave no result."""
    try:
        start = time.perf_counter()
        call = peer.prepare(problem)
        _synchronize(problem.device)
        build_us = (time.perf_counter() - start) * 1e6
        out = call()
    except (RuntimeError, ValueError) as error:  # a peer's refusal or out of memory must not end the race
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return call, build_us, relative_error(out, expected)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def float64_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Dense float64 attention, one head and 1024 rows at a time to bound memory; `[B, H, Sq, D]`."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        key = slice(head // group, head // group + 1)
        kept = keep if keep.shape[1] == 1 else keep[:, head : head + 1]
        for start in range(0, q.shape[2], 1024):
            rows = slice(start, start + 1024)
            out[:, head : head + 1, rows] = reference_attention(
                q[:, head : head + 1, rows].double(),
                k[:, key].double(),
                v[:, key].double(),
                kept[:, :, rows],
                scale=q.shape[-1] ** -0.5,
            )[0]
    return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    """`max |out - expected| / max |expected|`; infinity when anything is not finite."""
    difference = (out.double() - expected).abs().max()
    error = float(difference / expected.abs().max().clamp_min(1e-300))
    return error if error == error else float("inf")
