"""Figures 3 and 4: what fusing a few operators gains, by PyTorch's compiler and by us, at the sizes of BERT-base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.failures import first_line
from benchmarks.paper.experiment import Cell, Report, Row
from benchmarks.paper.models import SIZES
from stof.testing.attention_check import TOLERANCE, relative_error
from stof.tuning.timing import time_calls

HIDDEN, INNER = 768, 3072
IMPLS = ("native", "inductor", "stof")


class FeedForward(nn.Module):
    """Matmul, bias, GELU, matmul."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class BiasNorm(nn.Module):
    """Bias, LayerNorm."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.bias, self.norm = nn.Parameter(torch.randn(hidden)), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.bias)
        return out


class LinearNorm(nn.Module):
    """Matmul, bias, LayerNorm."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        return out


OPERATORS: dict[str, tuple[str, Callable[[int, int], nn.Module]]] = {
    "matmul + bias + GELU + matmul": ("3", FeedForward),
    "bias + LayerNorm": ("4", BiasNorm),
    "matmul + bias + LayerNorm": ("4", LinearNorm),
}


def cells(device: torch.device, dtype: torch.dtype) -> list[Cell]:
    """Every sequence of operators at every size."""
    listed = []
    for batch, length in SIZES if device.type == "cuda" else ((1, 16),):
        for name, (figure, _) in OPERATORS.items():
            rows = tuple(Row(figure, "", name, batch, length, impl) for impl in IMPLS)
            listed.append(Cell((f"fig{figure}",), rows, partial(_measure, device=device, dtype=dtype)))
    return listed


def _measure(
    wanted: Sequence[Row], report: Report, timed: bool, *, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    torch.compiler.reset()
    first = wanted[0]
    sizes = (HIDDEN, INNER) if device.type == "cuda" else (32, 64)
    torch.manual_seed(0)
    with torch.device(device):
        module = OPERATORS[first.model][1](*sizes).eval()
        x = torch.randn(first.batch, first.length, sizes[0])
    found = {row.impl: row for row in wanted}
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        exact = module.double()(x.double())
        module, x = module.to(dtype), x.to(dtype)
        for row in wanted:
            try:
                call = partial(_prepared(module, row.impl), x)
                error = relative_error(call(), exact)
            except Exception as failure:  # whatever a compiler raises must not end the comparison
                found[row.impl] = replace(row, note=first_line(failure))
                continue
            right = error <= TOLERANCE[dtype]
            found[row.impl] = replace(row, max_rel_err=error, note="" if right else "wrong result, not timed")
            calls |= {row.impl: call} if right else {}
        timings = time_calls(calls, device, rounds=11) if timed else {}
    for impl, timing in timings.items():
        us = timing.call_us if timing.gpu_us is None else timing.gpu_us
        found[impl] = replace(found[impl], us=us)
        report(f"  {impl}: {us:.1f} us")
    return list(found.values())


def _prepared(module: nn.Module, impl: str) -> Callable[..., Any]:
    if impl == "native":
        return module
    if impl == "inductor":
        compiled: Any = torch.compile(module, dynamic=False)
        return compiled
    options: dict[str, Any] = {"effort": "quick"} if next(module.parameters()).is_cuda else {}
    fused: Any = torch.compile(module, backend="stof", dynamic=False, options=options)
    return fused
