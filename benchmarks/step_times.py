"""Wall times of steps that each have another mask, beside steps under a repeated one, after checks."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from benchmarks.failures import first_line

# Steps reported apart; calls under a repeated mask; calls of either kind that are timed however little time is left.
FIRST_STEPS, REPEATS, LEAST_CALLS = 3, 20, 5
# Later steps that are checked beside the first and the last, among those that are always there.
_CHECKED = 2


@dataclass(frozen=True)
class StepRow:
    """One implementation under masks of one kind; wall times in milliseconds, None where it failed or is wrong.

    Attributes:
        kind: of mask, or the model.
        shape, dtype: of the problem.
        impl: who computes it.
        passes: "forward" without gradients, "both" for the output and all gradients, "training" with an optimizer.
        repeated_ms: median of calls under a mask that was seen before.
        new_ms: median of steps with a new mask, the making of the mask included.
        adds_ms: `new_ms` less `repeated_ms`.
        worst_ms: the longest of these steps.
        first_ms: the first three steps, compilations included, which are none of those.
        repeated_host_ms, new_host_ms: medians of the time until the calls return, on a GPU.
        steps: new masks after the first three.
        error: of the steps checked, the largest: relative to the largest value, or 1 less the cosine for models.
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


class WrongResultError(ValueError):
    """A result under another mask than the step's."""


class Subject(Protocol):
    """An implementation whose steps are timed."""

    def draw(self) -> None:
        """Draw what the next step's mask is made from; not timed."""

    def step(self) -> object:
        """One step with that mask; returns its result."""

    def again(self) -> object:
        """The last step again, under the same mask."""

    def check(self, result: object, step: int) -> float:
        """The error of a result of the last step.

        Raises:
            WrongResultError: it is no result of rounding.
        """


class Budget:
    """Seconds for several measurements, shared among those that are left."""

    def __init__(self, seconds: float | None, measurements: int) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds
        self.left = measurements

    @property
    def spent(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    def share(self) -> float | None:
        """Seconds for the next measurement: twice the mean, since many need less."""
        seconds = None if self.end is None else 2 * (self.end - time.monotonic()) / max(1, self.left)
        self.left -= 1
        return seconds


def measured(
    row: StepRow, prepare: Callable[[], Subject], device: torch.device, steps: int, seconds: float | None
) -> StepRow:
    """The row with its times, or with a note of why it has none."""
    try:
        return _times(row, prepare(), device, steps, seconds)
    except WrongResultError as failure:
        note = str(failure)
    except Exception as failure:  # a peer may refuse, or run out of memory: a row of the table
        note = f"failed: {first_line(failure)}"
    # Dynamo would run a function that it could not compile eagerly from now on.
    forget(device)
    return replace(row, note=note)


def forget(device: torch.device) -> None:
    """Drop compiled functions, which slow each other's calls down, and unused memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _times(row: StepRow, subject: Subject, device: torch.device, steps: int, seconds: float | None) -> StepRow:
    end = float("inf") if seconds is None else time.monotonic() + seconds
    later = range(FIRST_STEPS, FIRST_STEPS + max(_CHECKED, min(steps, LEAST_CALLS)))
    checked = {0, *random.Random(row.kind).sample(later, _CHECKED)}
    result: object = None
    errors: list[float] = []
    count = 0

    def timed(call: Callable[[], object]) -> tuple[float, float]:
        nonlocal result
        result = None
        _wait(device)
        start = time.perf_counter()
        result = call()
        returned = time.perf_counter()
        _wait(device)
        return (returned - start) * 1e3, (time.perf_counter() - start) * 1e3

    def step() -> tuple[float, float]:
        nonlocal count
        subject.draw()
        times = timed(subject.step)
        if count in checked:
            errors.append(subject.check(result, count))
        count += 1
        return times

    first = [step()[1] for _ in range(FIRST_STEPS)]
    timed(subject.again)
    repeated = _several(lambda: timed(subject.again), REPEATS, end)
    errors.append(subject.check(result, count))
    new = _several(step, steps, end)
    errors.append(subject.check(result, count))
    medians = [statistics.median(times) for times in (*zip(*repeated, strict=True), *zip(*new, strict=True))]
    on_gpu = device.type == "cuda"
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
        error=max(errors),
    )


def _several(call: Callable[[], tuple[float, float]], count: int, end: float) -> list[tuple[float, float]]:
    """Call `count` times, or fewer but no less than `LEAST_CALLS` where they would last beyond `end`."""
    times: list[tuple[float, float]] = []
    while len(times) < min(count, LEAST_CALLS) or (len(times) < count and time.monotonic() < end):
        times.append(call())
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
