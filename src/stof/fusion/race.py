"""The last word: a whole compiled model with its templates against the same model without, on its first real inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from stof.fusion.report import FusionReport

Timer = Callable[[Callable[[], object], Callable[[], object]], tuple[float, float]]


class Race:
    """A compiled model that times two versions on its first call and is the faster one from then on.

    Args:
        fused, plain: with templates and without; the same function, which changes nothing in place.
        report: gets a note with both times; when `plain` wins, its segments are marked as taken back.
        tell: called with the report once it is decided.
        timer: microseconds of one call of each.
    """

    def __init__(
        self,
        fused: Callable[..., Any],
        plain: Callable[..., Any],
        report: FusionReport,
        tell: Callable[[FusionReport], object],
        timer: Timer | None = None,
    ) -> None:
        self.fused, self.plain, self.report, self.tell = fused, plain, report, tell
        self.timer = timer
        self.winner: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.winner is None:
            self._decide(args)
        assert self.winner is not None
        return self.winner(*args)

    def _decide(self, args: tuple[Any, ...]) -> None:
        timer = self.timer or wall_us
        fused_us, plain_us = timer(lambda: self.fused(*args), lambda: self.plain(*args))
        self.winner = self.fused if fused_us < plain_us else self.plain
        verdict = "templates kept" if self.winner is self.fused else "templates taken back"
        self.report.notes.append(f"whole model: {fused_us:.0f} us with templates, {plain_us:.0f} us without; {verdict}")
        if self.winner is self.plain:
            self.report.take_back("the whole model is not faster with it")
        self.fused = self.plain = self.winner  # what lost may be freed
        self.tell(self.report)


def wall_us(one: Callable[[], object], other: Callable[[], object], *, rounds: int = 10) -> tuple[float, float]:
    """Medians of the wall time of two calls in turn, results awaited, after three untimed rounds."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(3 + rounds):
        for call, times in zip((one, other), taken, strict=True):
            _wait()
            start = time.perf_counter()
            call()
            _wait()
            if turn >= 3:
                times.append(time.perf_counter() - start)
    return statistics.median(taken[0]) * 1e6, statistics.median(taken[1]) * 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
