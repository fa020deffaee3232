"""`python -m benchmarks changing`: wall time of attention under another mask in every step, beside a repeated mask.

The time of a step begins with the list or tensors that its mask is made from, and ends when the device is done. The
first step, some later ones and the last are checked against float64; a wrong result has no time.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.backward import GRADIENT_TOLERANCE
from benchmarks.attention.changing_check import errors_of
from benchmarks.attention.changing_masks import KINDS, Kind
from benchmarks.attention.changing_ways import WAYS, Prepared
from benchmarks.failures import first_line
from stof.testing.attention_check import TOLERANCE
from stof.testing.mask_grid import Shape

PASSES = ("forward", "both")
# Steps reported apart, timed calls under a repeated mask, and new masks that are measured whatever time is left.
FIRST_STEPS, REPEATS, _LEAST_STEPS = 3, 20, 5
# Later steps, among the first 20, that are checked beside the first and the last.
_CHECKED = 2


@dataclass(frozen=True)
class ChangingRow:
    """One implementation under masks of one kind; wall times in milliseconds, None where it failed or is wrong.

    Attributes:
        kind: of mask.
        shape, dtype: of the problem.
        impl: who computes it.
        passes: "forward" without gradients, or "both": the output, and the gradients of q, k and v.
        repeated_ms: median of calls under a mask that was seen before.
        new_ms: median of steps with a new mask, the making of the mask included.
        adds_ms: `new_ms` less `repeated_ms`.
        worst_ms: the longest of these steps.
        first_ms: the first three steps, compilations included, which are none of those.
        repeated_host_ms, new_host_ms: medians of the time until the calls return, on a GPU.
        steps: new masks after the first three.
        error: largest relative error of the steps checked, outputs and gradients.
        note: why there are no times.
    """

    kind: str
    shape: str
    dtype: str
    impl: str
    passes: str
    repeated_ms: float | None = None
    new_ms: float | None = None
    adds_ms: float | None = None
    worst_ms: float | None = None
    first_ms: list[float] = field(default_factory=list)
    repeated_host_ms: float | None = None
    new_host_ms: float | None = None
    steps: int = 0
    error: float | None = None
    note: str = ""


class _WrongError(ValueError):
    """A result that is not attention under the step's mask."""


@dataclass(frozen=True)
class Limits:
    """How much is measured.

    Attributes:
        steps: new masks after the first three.
        seconds: after which no further measurement begins; steps end early where others would be left without time.
    """

    steps: int
    seconds: float | None = None


def changing_rows(
    sizes: Sequence[Shape], kinds: Sequence[str], impls: Sequence[str], device: torch.device, dtype: torch.dtype,
    limits: Limits, passes: Sequence[str] = PASSES,
) -> Iterator[ChangingRow]:  # fmt: skip
    """Check and time every implementation under every kind of mask."""
    cells = list(dict.fromkeys((KINDS[kind].shape(size), kind) for size in sizes for kind in kinds))
    cells = [(shape, kind) for shape, kind in cells if shape.q_len <= KINDS[kind].longest]
    wanted = list(itertools.product(cells, impls, passes))
    deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
    before: Any = None
    problem: _Problem | None = None
    for number, ((shape, name), impl, what) in enumerate(wanted):
        kind = KINDS[name]
        row = ChangingRow(name, str(shape), str(dtype).removeprefix("torch."), impl, what)
        left = None if deadline is None else deadline - time.monotonic()
        reason = WAYS[impl].missing(kind, shape, device) or ("no time left" if left is not None and left < 0 else None)
        if reason is not None:
            yield replace(row, note=reason)
            continue
        # Variants of documents share what torch.compile made.
        if (shape, kind.mod) != before:
            problem, before = None, (shape, kind.mod)
            _forget(device)
        problem = problem or _Problem.draw(shape, device, dtype)
        share = None if left is None else 2 * left / (len(wanted) - number)
        yield _measured(row, kind, problem, impl, limits.steps, share)


def _forget(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


def _measured(
    row: ChangingRow, kind: Kind, problem: _Problem, impl: str, steps: int, seconds: float | None
) -> ChangingRow:
    """The row with its times, or with a note of why it has none."""
    stepper = _Stepper(kind, problem, impl, row.passes == "both")
    try:
        return stepper.run(row, steps, seconds)
    except Exception as failure:  # a peer may refuse, or run out of memory: a row of the table
        note = str(failure) if isinstance(failure, _WrongError) else first_line(failure)
    if problem.q.device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(row, note=note)


class _Stepper:
    """Steps of one implementation, each with a mask of its own."""

    def __init__(self, kind: Kind, problem: _Problem, impl: str, both: bool) -> None:
        way = WAYS[impl]
        self.kind, self.problem, self.both, self.device = kind, problem, both, problem.q.device
        self.prepared: Prepared = way.prepare(kind, problem.shape, self.device)
        self.swapped = way.sequence_major
        *inputs, self.d_out = (self._laid_out(x) for x in (problem.q, problem.k, problem.v, problem.d_out))
        self.inputs = [x.clone().requires_grad_(both) for x in inputs]
        # The same masks for all implementations, and others in each kind and pass: one's caches do not serve another.
        seed = zlib.crc32(f"{kind.name} {problem.shape} {both}".encode())
        self.generator = torch.Generator().manual_seed(seed)
        self.error, self.count, self.mask, self.source = 0.0, 0, None, None
        self.result: Sequence[Tensor] = ()

    def run(self, row: ChangingRow, steps: int, seconds: float | None) -> ChangingRow:
        start = time.monotonic()
        checked = {
            0,
            *(FIRST_STEPS + n for n in random.Random(0).sample(range(max(_CHECKED, min(steps, 20))), _CHECKED)),
        }
        first = [self.step(checked)[1] for _ in range(FIRST_STEPS)]
        repeated = [self.timed(self.attend) for _ in range(2 + REPEATS)][2:]
        self.check()
        new = []
        while len(new) < steps:
            late = seconds is not None and time.monotonic() - start > seconds
            if late and len(new) >= _LEAST_STEPS:
                break
            new.append(self.step(checked))
        self.check()
        medians = [statistics.median(times) for times in (*zip(*repeated, strict=True), *zip(*new, strict=True))]
        on_gpu = self.device.type == "cuda"
        return replace(
            row,
            repeated_ms=medians[1],
            new_ms=medians[3],
            adds_ms=medians[3] - medians[1],
            worst_ms=max(wall for _, wall in new),
            first_ms=first,
            repeated_host_ms=medians[0] if on_gpu else None,
            new_host_ms=medians[2] if on_gpu else None,
            steps=len(new),
            error=self.error,
        )

    def step(self, checked: set[int]) -> tuple[float, float]:
        """One step with a new mask: milliseconds until it returned, and until the device was done."""
        self.source = self.kind.draw(self.problem.shape, self.device, self.generator)
        times = self.timed(self.make_and_attend)
        if self.count in checked:
            self.check()
        self.count += 1
        return times

    def make_and_attend(self) -> Sequence[Tensor]:
        self.mask = self.prepared.make(self.source)
        return self.attend()

    def attend(self) -> Sequence[Tensor]:
        if not self.both:
            with torch.no_grad():
                return (self.prepared.attend(*self.inputs, self.mask),)
        out = self.prepared.attend(*self.inputs, self.mask)
        return (out, *torch.autograd.grad(out, self.inputs, self.d_out))

    def timed(self, call: Callable[[], Sequence[Tensor]]) -> tuple[float, float]:
        self.result = ()
        self._wait()
        start = time.perf_counter()
        self.result = call()
        returned = time.perf_counter()
        self._wait()
        return (returned - start) * 1e3, (time.perf_counter() - start) * 1e3

    def check(self) -> None:
        """Compare the last result with float64.

        Raises:
            _WrongError: it is off by more than its dtype explains.
        """
        problem = self.problem
        mod = self.kind.mod(self.source, problem.shape, self.device)
        with torch.no_grad():
            found = errors_of(
                mod, problem.shape, (problem.q, problem.k, problem.v), problem.d_out,
                [self._laid_out(x) for x in self.result], self.count,
            )  # fmt: skip
        for what, error, tolerance in (
            ("the output", found.out, TOLERANCE[problem.q.dtype]),
            ("a gradient", found.gradients, GRADIENT_TOLERANCE[problem.q.itemsize]),
        ):
            if not error <= tolerance:
                raise _WrongError(f"wrong: {what} of step {self.count} is off by {error:.2g} of the largest")
            self.error = max(self.error, error)

    def _laid_out(self, x: Tensor) -> Tensor:
        """Between `[B, H, S, D]` and what the implementation takes."""
        return x.transpose(1, 2).contiguous() if self.swapped else x

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
