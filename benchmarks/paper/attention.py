"""Figures 9 and 10: attention under the paper's masks, 12 heads of 64; and neighbourhoods with tokens in two orders."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import run as race
from benchmarks.paper.experiment import NO_MEMORY, Cell, Report, Row
from benchmarks.paper.masks import neighborhoods, paper_masks
from benchmarks.peers import Call, Peer, peer
from benchmarks.peers.interface import always
from stof.testing.attention_check import AttentionProblem
from stof.testing.mask_grid import GridMask, Shape

HEADS, HEAD_DIM = 12, 64
# The sizes that say most come first: a run that is stopped has some of each kind.
_FIRST = ((1, 1024), (8, 512), (16, 1024), (1, 4096), (1, 128), (16, 4096))
SIZES = tuple(
    dict.fromkeys((*_FIRST, *((b, s) for s in (256, 2048, 128, 512, 1024, 4096) for b in (1, 8, 16))))
)  # fmt: skip
# Grid, batch, heads and width of a head.
GRIDS = ((64, 64, 1, 12, 64), (32, 32, 16, 12, 64), (32, 64, 1, 12, 64), (64, 128, 1, 32, 128))
_CHECKED_ROWS = 256


def native(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention as four operators: matmul, mask, softmax, matmul. `hidden`: true where a score is not kept."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def _native(problem: AttentionProblem) -> Call:
    hidden = ~problem.keep
    return lambda: native(problem.q, problem.k, problem.v, hidden)


def _native_compiled(problem: AttentionProblem) -> Call:
    hidden, compiled = ~problem.keep, torch.compile(native, dynamic=False)
    return lambda: compiled(problem.q, problem.k, problem.v, hidden)


def _window_missing(problem: AttentionProblem) -> str | None:
    if problem.device.type != "cuda" or not problem.half:
        return "flash-2: takes float16 and bfloat16 on CUDA devices only"
    return None if problem.grid_mask.window is not None else "flash-2: serves only causal masks and windows"


def _flash_function() -> Any:
    """`flash_attn_func` of the flash_attn package, None where it is not installed."""
    try:
        return getattr(importlib.import_module("flash_attn"), "flash_attn_func", None)
    except ImportError:
        return None


def _flash(problem: AttentionProblem) -> Call:
    """By the flash_attn package where it is installed, else by PyTorch's copy of its kernels."""
    assert problem.grid_mask.window is not None
    left, right = (-1 if side is None else side for side in problem.grid_mask.window)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (problem.q, problem.k, problem.v))
    packaged, causal = _flash_function(), left == -1 and right == 0
    if packaged is not None:
        return lambda: packaged(q, k, v, causal=causal, window_size=(left, right)).transpose(1, 2)
    sides = {} if causal else {"window_size_left": left, "window_size_right": right}

    def call() -> Tensor:
        lengths = q.shape[1], k.shape[1]
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, causal, False, **sides
        )[0]
        return out.transpose(1, 2)

    return call


# By the names that rows have. The figures show the fastest of SDPA's.
PEERS: dict[str, Peer] = {
    "native": Peer("native", "matmul, mask, softmax, matmul", always, _native),
    "native-compiled": Peer("native-compiled", "the same by torch.compile(dynamic=False)", always, _native_compiled),
    "flash-2": Peer("flash-2", "FlashAttention-2, causal and windows", _window_missing, _flash),
    **{name: peer(name) for name in ("sdpa", "sdpa-native", "sdpa-cudnn", "flex", "stof")},
}


def cells(device: torch.device, dtype: torch.dtype, report: Report) -> list[Cell]:
    """Every mask and size of the figures, then the neighbourhoods. Says once why an implementation serves no mask."""
    masks = paper_masks(device).values()
    sizes, grids = (SIZES, GRIDS) if device.type == "cuda" else (((1, 96),), ((8, 8, 1, 2, 16),))
    listed = [
        race_cell(("fig9", "fig10"), mask, Shape(batch, HEADS, HEADS, HEAD_DIM, length, length), device, dtype)
        for batch, length in sizes
        for mask in masks
    ]
    for height, width, batch, heads, head_dim in grids:
        shape = Shape(batch, heads, heads, head_dim, height * width, height * width)
        for mask in neighborhoods(height, width, device):
            listed.append(race_cell(("fig9", "fig10", "order"), mask, shape, device, dtype))
    served = {row.impl for cell in listed for row in cell.rows}
    probe = _probe(next(iter(masks)), Shape(1, HEADS, HEADS, HEAD_DIM, 128, 128), device, dtype)
    for name in PEERS.keys() - served:
        report(f"{name} is left out: {PEERS[name].missing(probe)}")
    return listed


def _probe(mask: GridMask, shape: Shape, device: torch.device, dtype: torch.dtype) -> AttentionProblem:
    """A problem without values, to ask implementations whether they serve it."""
    nothing = torch.empty(0, device=device, dtype=dtype)
    return AttentionProblem(mask, shape, nothing, nothing, nothing)


def race_cell(
    parts: tuple[str, ...],
    mask: GridMask,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    figure: str = "9",
    label: str = "",
    names: Sequence[str] = (),
) -> Cell:
    """A cell of the implementations of `PEERS` that serve a mask and shape.

    Args:
        parts, figure: of the cell and its rows.
        label: the mask in rows, its name by default.
        names: of the implementations, all by default.
    """
    probe = _probe(mask, shape, device, dtype)
    rows = tuple(
        Row(figure, label or mask.name, "", shape.batch, shape.q_len, name)
        for name in names or PEERS
        if PEERS[name].missing(probe) is None
    )

    def measure(wanted: Sequence[Row], report: Report, timed: bool) -> list[Row]:
        found = _measured(mask, shape, device, dtype, wanted, report, timed)
        without = [row for row in found if row.note == NO_MEMORY]
        if not without or len(wanted) == 1 or not timed:
            return found
        report("  too little memory for all at once, those without are measured one by one:")
        alone = {row.impl: _measured(mask, shape, device, dtype, [row], report, timed)[0] for row in without}
        return [alone.get(row.impl, row) for row in found]

    return Cell(parts, rows, measure)


def _measured(
    mask: GridMask,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    wanted: Sequence[Row],
    report: Report,
    timed: bool,
) -> list[Row]:
    """Check and time implementations on one cell, as `benchmarks attention` does."""
    by_name: dict[str, Row] = {row.impl: replace(row, note="") for row in wanted}
    found: dict[str, Row] = {}

    def take(rows: list[race.Row], not_run: list[race.NotRun]) -> None:
        for row in rows:
            us = row.gpu_us if row.gpu_us is not None else row.call_us
            note = "" if us is not None or not timed else "wrong result, not timed"
            found[row.impl] = replace(by_name[row.impl], us=us, max_rel_err=row.max_rel_err, note=note)
        for missed in not_run:
            note = NO_MEMORY if missed.reason.startswith("OutOfMemoryError") else missed.reason
            found[missed.impl] = replace(by_name[missed.impl], note=note)

    try:
        race.run_attention(
            [mask],
            [shape],
            [PEERS[name] for name in by_name],
            device=device,
            dtype=dtype,
            report=lambda line: report(line) if line.startswith("  ") else None,
            rounds=5,
            check_rows=_CHECKED_ROWS,
            timed=timed,
            on_cell=take,
        )
    except torch.OutOfMemoryError:  # when several are timed in turn
        found = {name: replace(row, note=NO_MEMORY) for name, row in by_name.items()}
    except race.ContextLostError as lost:  # nothing more runs in this process; the next one leaves out who did that
        return [replace(row, note=str(lost)) for name, row in by_name.items() if str(lost).startswith(f"{name} on ")]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [found[name] for name in by_name]
