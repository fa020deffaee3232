"""`python -m benchmarks changing`: wall time of attention under another mask in every step, beside a repeated mask.

The time of a step begins with the list or tensors that its mask is made from, and ends when the device is done. The
first step, two later ones and the last are checked against float64; a wrong result has no time.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.changing_masks import KINDS, Kind
from benchmarks.attention.changing_ways import WAYS
from benchmarks.attention.float64_check import errors_of
from benchmarks.step_times import Budget, StepRow, WrongResultError, forget, measured
from stof.testing.mask_grid import Shape

PASSES = ("forward", "both")


def changing_rows(
    sizes: Sequence[Shape], kinds: Sequence[str], impls: Sequence[str], passes: Sequence[str], device: torch.device,
    steps: int = 100, seconds: float | None = None, *, dtype: torch.dtype,
) -> Iterator[StepRow]:  # fmt: skip
    """Check and time every implementation under every kind of mask.

    Args:
        steps: new masks after the first three.
        seconds: after which no further measurement begins; steps end early where others would be left without time.
    """
    cells = list(dict.fromkeys((KINDS[kind].shape(size), KINDS[kind]) for size in sizes for kind in kinds))
    shapes = [shape for shape, _ in cells]
    cells = [cell for cell in sorted(cells, key=lambda cell: shapes.index(cell[0])) if cell[0].q_len <= cell[1].longest]
    # The first implementation everywhere, then the others: they are what a budget leaves out.
    wanted = [(*cell, impl) for part in (impls[:1], impls[1:]) for cell in cells for impl in part]
    reasons = [WAYS[impl].missing(kind, shape, device) for shape, kind, impl in wanted]
    budget = Budget(seconds, len(passes) * reasons.count(None))
    problem: _Problem | None = None
    for ((shape, kind, impl), reason), what in itertools.product(zip(wanted, reasons, strict=True), passes):
        row = StepRow(kind.name, str(shape), str(dtype).removeprefix("torch."), impl, what)
        if reason is not None or budget.spent:
            yield replace(row, note=reason or "no time left")
            continue
        # Masks of one shape share what torch.compile made: few of their functions differ.
        if problem is None or problem.shape != shape:
            problem = None
            forget(device)
            problem = _Problem.draw(shape, device, dtype)
        prepare = partial(_Attention, kind, problem, impl, what == "both")
        yield measured(row, prepare, device, steps, budget.share())


@dataclass(frozen=True)
class _Problem:
    """The inputs of all implementations, `[B, H, S, D]`, and the gradient of the output."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor

    @staticmethod
    def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> _Problem:
        generator = torch.Generator(device).manual_seed(0)

        def drawn(heads: int) -> Tensor:
            size = (shape.batch, heads, shape.q_len, shape.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        return _Problem(shape, drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads), drawn(shape.heads))


class _Attention:
    """One implementation of one problem, a `benchmarks.step_times.Subject`."""

    def __init__(self, kind: Kind, problem: _Problem, impl: str, both: bool) -> None:
        way, self.device = WAYS[impl], problem.q.device
        self.kind, self.problem, self.both, self.swapped = kind, problem, both, way.sequence_major
        self.prepared = way.prepare(kind, problem.shape, self.device)
        *inputs, self.d_out = (self._laid_out(x) for x in (problem.q, problem.k, problem.v, problem.d_out))
        self.inputs = [x.clone().requires_grad_(both) for x in inputs]
        # The same masks for all implementations, and others in each kind and pass: one's caches do not serve another.
        seed = zlib.crc32(f"{kind.name} {problem.shape} {both}".encode())
        self.generator = torch.Generator().manual_seed(seed)
        self.source: Any = None
        self.mask: Any = None

    def draw(self) -> None:
        self.source = self.kind.draw(self.problem.shape, self.device, self.generator)

    def step(self) -> tuple[Tensor, ...]:
        self.mask = self.prepared.make(self.source)
        return self.again()

    def again(self) -> tuple[Tensor, ...]:
        q, k, v = self.inputs
        if not self.both:
            with torch.no_grad():
                return (self.prepared.attend(q, k, v, self.mask),)
        out = self.prepared.attend(q, k, v, self.mask)
        return (out, *torch.autograd.grad(out, self.inputs, self.d_out))

    def check(self, result: Any, step: int) -> float:
        problem = self.problem
        with torch.no_grad():
            mod = self.kind.mod(self.source, problem.shape, self.device)
            inputs = (problem.q, problem.k, problem.v)
            errors = errors_of(mod, problem.shape, inputs, problem.d_out, [self._laid_out(x) for x in result], step)
        if wrong := errors.problem(problem.q.dtype):
            raise WrongResultError(f"wrong: {wrong}, in step {step}")
        return max(errors)

    def _laid_out(self, x: Tensor) -> Tensor:
        """Between `[B, H, S, D]` and what the implementation takes."""
        return x.transpose(1, 2).contiguous() if self.swapped else x
