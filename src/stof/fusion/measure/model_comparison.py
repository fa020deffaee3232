"""The last word: a whole compiled model with its templates against the same model without, on its first real inputs.

Segments are measured one by one, each with a cold L2 on a GPU that may use all its power. In a model their sum may come
out otherwise, so what the rules would have chosen takes part, too: a search makes nothing slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stof.fusion.records.report import FusionReport
from stof.tuning.timing import wall_us

Timer = Callable[[Mapping[str, Callable[[], object]], torch.device], Mapping[str, float]]
# Versions of a model: with the templates that the search chose, with those that the rules choose, with none.
SEARCHED, RULED, PLAIN = "searched", "ruled", "plain"


class ModelComparison:
    """A compiled model that times its versions on its first call and is one of them from then on.

    Args:
        versions: by name; all the same function, which changes nothing in place.
        settle: called with the times once they are known; names the one that stays.
        timer: microseconds of each of some calls.
    """

    def __init__(
        self,
        versions: Mapping[str, Callable[..., Any]],
        settle: Callable[[Mapping[str, float]], str],
        timer: Timer = wall_us,
    ) -> None:
        self.versions, self.settle, self.timer = dict(versions), settle, timer
        self.winner: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.winner is None:
            self._decide(args)
        assert self.winner is not None
        return self.winner(*args)

    def _decide(self, args: tuple[Any, ...]) -> None:
        devices = sorted({value.device for value in args if isinstance(value, Tensor)}, key=lambda d: d.type != "cuda")
        device = devices[0] if devices else torch.device("cpu")
        calls = {name: lambda version=version: version(*args) for name, version in self.versions.items()}
        self.winner = self.versions[self.settle(self.timer(calls, device))]
        self.versions.clear()  # what lost may be freed


def pick_winner(reports: Mapping[str, FusionReport], times: Mapping[str, float]) -> tuple[str, FusionReport]:
    """Which version stays, and the report that is true of it and says so.

    Args:
        reports: of the versions with templates, `SEARCHED` among them.
        times: microseconds of those and of `PLAIN`.
    """
    best = min(reports, key=lambda name: (times[name], name != SEARCHED))
    kept = times[best] < times[PLAIN]
    searched, report = reports[SEARCHED], reports[best if kept else SEARCHED]
    if report is not searched:
        report.measurements, report.notes = searched.measurements, list(dict.fromkeys(report.notes + searched.notes))
        lost = differing(searched, report)
        report.choices = {key: choice for key, choice in searched.choices.items() if key not in lost}
    report.whole_us = times[best], times[PLAIN]
    ruled = f", {times[RULED]:.0f} us with those by rule" if RULED in times else ""
    verdict = ("templates by rule kept" if best == RULED else "templates kept") if kept else "templates taken back"
    with_us, plain_us = times[SEARCHED], times[PLAIN]
    report.notes.append(f"whole model: {with_us:.0f} us with templates, {plain_us:.0f} us without{ruled}; {verdict}")
    if not kept:
        report.revert_to_inductor("the whole model is not faster with it")
    return best if kept else PLAIN, report


def differing(one: FusionReport, other: FusionReport) -> set[str]:
    """The problems that two versions compute differently."""
    return {key for key in one.used.keys() | other.used.keys() if one.used.get(key) != other.used.get(key)}
