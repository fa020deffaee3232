"""The last word: a whole compiled model with its templates against the same model without, on its first real inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stof.fusion.report import FusionReport
from stof.tuning.timing import wall_us

Timer = Callable[[Mapping[str, Callable[[], object]], torch.device], Mapping[str, float]]


class Race:
    """A compiled model that times two versions on its first call and is the faster one from then on.

    Args:
        fused, plain: with templates and without; the same function, which changes nothing in place.
        report: gets a note with both times; when `plain` wins, its segments are marked as taken back.
        tell: called with the report once it is decided.
        keep: called with both times once they are known.
        timer: microseconds of each of some calls.
    """

    def __init__(
        self,
        fused: Callable[..., Any],
        plain: Callable[..., Any],
        report: FusionReport,
        tell: Callable[[FusionReport], object],
        keep: Callable[[float, float], object] = lambda fused_us, plain_us: None,
        timer: Timer = wall_us,
    ) -> None:
        self.fused, self.plain, self.report, self.tell = fused, plain, report, tell
        self.keep, self.timer = keep, timer
        self.winner: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.winner is None:
            self._decide(args)
        assert self.winner is not None
        return self.winner(*args)

    def _decide(self, args: tuple[Any, ...]) -> None:
        devices = sorted({value.device for value in args if isinstance(value, Tensor)}, key=lambda d: d.type != "cuda")
        device = devices[0] if devices else torch.device("cpu")
        times = self.timer({"fused": lambda: self.fused(*args), "plain": lambda: self.plain(*args)}, device)
        fused_us, plain_us = times["fused"], times["plain"]
        self.keep(fused_us, plain_us)
        self.winner = self.fused if decide(self.report, fused_us, plain_us) else self.plain
        self.fused = self.plain = self.winner  # what lost may be freed
        self.tell(self.report)


def decide(report: FusionReport, fused_us: float, plain_us: float) -> bool:
    """Whether a model keeps its templates; the report says so."""
    kept = fused_us < plain_us
    report.whole_us = fused_us, plain_us
    verdict = "templates kept" if kept else "templates taken back"
    report.notes.append(f"whole model: {fused_us:.0f} us with templates, {plain_us:.0f} us without; {verdict}")
    if not kept:
        report.take_back("the whole model is not faster with it")
    return kept
