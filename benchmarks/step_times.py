"""Wall times of steps that each have another mask, beside calls under the same mask again, after checks."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

from benchmarks.failures import first_line

_T = TypeVar("_T")
# Steps reported apart; steps whose mask is repeated; steps that are taken however little time is left.
FIRST_STEPS, REPEATS, LEAST_STEPS = 3, 20, 3
# Later steps, among those whose mask is repeated, that are checked beside the first and the last.
_CHECKED = 2


@dataclass(frozen=True)
class StepRow:
    """One implementation under masks of one kind; wall times in milliseconds, None where it failed or is wrong.

    Attributes:
        kind: of mask, or the model.
        shape, dtype: of the problem.
        impl: who computes it.
        passes: "forward" without gradients, "both" for the output and all gradients, "training" with an optimizer.
        repeated_ms: median of 20 calls, the third under the mask of each of the first steps.
        new_ms: median of steps with a new mask, the making of the mask included.
        adds_ms: median of what those 20 steps took beyond the third call under their masks.
        worst_ms: the longest step.
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
    later = range(FIRST_STEPS, FIRST_STEPS + max(_CHECKED, min(steps, REPEATS)))
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

    def step_and_repeat() -> tuple[float, float, float, float]:
        new = step()
        timed(subject.again)
        return (*new, *timed(subject.again))

    first = [step()[1] for _ in range(FIRST_STEPS)]
    pairs = _several(step_and_repeat, min(steps, REPEATS), LEAST_STEPS, end)
    errors.append(subject.check(result, count))
    new = [pair[:2] for pair in pairs] + _several(step, steps - len(pairs), 0, end)
    if len(new) > len(pairs):
        errors.append(subject.check(result, count))
    on_gpu = device.type == "cuda"
    return replace(
        row,
        repeated_ms=statistics.median(repeated for *_, repeated in pairs),
        new_ms=statistics.median(wall for _, wall in new),
        adds_ms=statistics.median(pair[1] - pair[3] for pair in pairs),
        worst_ms=max(wall for _, wall in new),
        first_ms=first,
        repeated_host_ms=statistics.median(pair[2] for pair in pairs) if on_gpu else None,
        new_host_ms=statistics.median(host for host, _ in new) if on_gpu else None,
        steps=len(new),
        error=max(errors),
    )


def _several(call: Callable[[], _T], count: int, least: int, end: float) -> list[_T]:
    """Call `count` times, or fewer but no less than `least` where they would last beyond `end`."""
    results: list[_T] = []
    while len(results) < min(count, least) or (len(results) < count and time.monotonic() < end):
        results.append(call())
    return results


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
