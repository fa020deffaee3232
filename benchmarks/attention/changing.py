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
# Steps reported apart, timed calls under a repeated mask, and calls of either that are timed however little time is left.
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
    cells = list(dict.fromkeys((KINDS[kind].shape(size), KINDS[kind]) for size in sizes for kind in kinds))
    cells = [(shape, kind) for shape, kind in cells if shape.q_len <= kind.longest]
    reasons = {(*cell, impl): WAYS[impl].missing(cell[1], cell[0], device) for cell in cells for impl in impls}
    left = len(passes) * list(reasons.values()).count(None)
    deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
    before: Any = None
    problem: _Problem | None = None
    for ((shape, kind, impl), reason), what in itertools.product(reasons.items(), passes):
        row = ChangingRow(kind.name, str(shape), str(dtype).removeprefix("torch."), impl, what)
        seconds = None if deadline is None else deadline - time.monotonic()
        if reason is not None or (seconds is not None and seconds < 0):
            yield replace(row, note=reason or "no time left")
            continue
        # Ways to give documents share what torch.compile made.
        if problem is None or (shape, kind.mod) != before:
            before = shape, kind.mod
            _forget(device)
            problem = _Problem.draw(shape, device, dtype)
        yield _measured(row, kind, problem, impl, limits.steps, None if seconds is None else 2 * seconds / left)
        left -= 1


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
    try:
        return _Stepper(kind, problem, impl, row.passes == "both").run(row, steps, seconds)
    except Exception as failure:  # a peer may refuse, or run out of memory: a row of the table
        note = str(failure) if isinstance(failure, _WrongError) else first_line(failure)
    # Dynamo would run a function that it could not compile eagerly from now on.
    _forget(problem.q.device)
    return replace(row, note=note)


def _several(call: Callable[[], tuple[float, float]], count: int, end: float) -> list[tuple[float, float]]:
    """Call `count` times, or fewer but no less than `_LEAST_STEPS` where they would last beyond `end`."""
    times: list[tuple[float, float]] = []
    while len(times) < min(count, _LEAST_STEPS) or (len(times) < count and time.monotonic() < end):
        times.append(call())
    return times


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
        end = float("inf") if seconds is None else time.monotonic() + seconds
        among = range(FIRST_STEPS, FIRST_STEPS + max(_CHECKED, min(steps, 20)))
        checked = {0, *random.Random(0).sample(among, _CHECKED)}
        first = [self.step(checked)[1] for _ in range(FIRST_STEPS)]
        self.attend()
        repeated = _several(lambda: self.timed(self.attend), REPEATS, end)
        self.check()
        new = _several(lambda: self.step(checked), steps, end)
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
