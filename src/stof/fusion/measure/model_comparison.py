"""Comparison of whole compiled models, with templates and without, on their first real inputs.

Segments are timed alone, with a cold L2, on a GPU below its power limit. Their savings need not add up in a model, so
the choice of the heuristics is compared as well: a search never ends with a slower model than they give.
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
    """A compiled model that times its versions on its first call and keeps the fastest.

    Args:
        versions: versions of one function by name; the function writes to none of its inputs.
        settle: called with the times; returns the name of the version to keep.
        timer: measures the microseconds of some calls.
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
        self.versions.clear()  # frees the slower versions


def pick_winner(reports: Mapping[str, FusionReport], times: Mapping[str, float]) -> tuple[str, FusionReport]:
    """Return the name of the version to keep and its report, with the verdict as a note.

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
    """Return the problems that two versions compute with different templates or configurations."""
    return {key for key in one.used.keys() | other.used.keys() if one.used.get(key) != other.used.get(key)}
