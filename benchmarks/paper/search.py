"""Figure 13 and table 4: seconds that tuning a model takes, and what they go to; the model's speed then, for figure 11.

Each search runs in a process of its own, with empty caches of kernels and measurements: kernels stay in the memory of a
process that has loaded them, so a second search there would be shorter. Choices that ship with the package are used.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import stof
from benchmarks.paper.experiment import Cell, Report, Row
from benchmarks.paper.models import MASK, SIZES, TINY, WHOLE, cosine_to, subject_of, wall_ms
from stof.fusion import pipeline
from stof.fusion.graph.scheme import Scheme
from stof.fusion.measure import segment_timer
from stof.fusion.measure.model_comparison import ModelComparison
from stof.fusion.measure.segment_timer import SegmentTimer
from stof.fusion.planner import two_stage_search
from stof.fusion.planner.graph_space import GraphSpace
from stof.fusion.planner.search_space import MeasurementCache
from stof.fusion.records.report import FusionReport
from stof.integrations.torch import compile as torch_compile

# Seconds that a search may take: a cell has to fit a run of 9 minutes.
BUDGET_S = 240.0
TOTAL, TUNED = "stof", "stof-tuned"
# Phases of a search by the paper's names, and their functions. The time of a nested call counts for the inner one only.
PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    "analytical model": ((GraphSpace, "floor"), (pipeline, "heuristic_choices")),
    "scheme encoding": ((two_stage_search, "best_known_scheme"), (Scheme, "digest"), (pipeline, "merged_scheme")),
    "scheme decoding": ((GraphSpace, "matches"), (GraphSpace, "candidates"), (MeasurementCache, "best")),
    "reward": ((MeasurementCache, "known_gain"),),
    "compiling": (
        (GraphSpace, "prepare"),
        (segment_timer, "compiled_segment"),
        (torch_compile, "_inductor"),
    ),
    "measuring": ((SegmentTimer, "__call__"), (ModelComparison, "_decide")),
}


@dataclass
class Stopwatch:
    """Seconds by phase; the time of a nested phase counts for the inner one only."""

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    def _switch(self) -> None:
        now = self.clock()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self.within(name):
                return function(*args, **named)

        return call

    @contextlib.contextmanager
    def on_phases(self) -> Iterator[None]:
        """Time the functions of `PHASES` while the context lasts."""
        with contextlib.ExitStack() as stack:
            for name, functions in PHASES.items():
                for owner, attribute in functions:
                    function = getattr(owner, attribute)
                    stack.enter_context(patch.object(owner, attribute, self.timed(name, function)))
            yield


def cells(names: Sequence[str], device: torch.device, dtype: torch.dtype) -> list[Cell]:
    """A search for every model and size of table 4, which has no ViT."""
    cases = [(name, *size) for size in SIZES for name in names if name != "vit-base"]
    if device.type != "cuda":
        cases = [(name, 1, 64) for name in names if name in TINY]
    phases = [f"stof {phase}" for phase in (*PHASES, "rest")]
    listed = []
    for name, batch, length in cases:
        rows = (
            Row("table4", MASK, name, batch, length, TOTAL),
            *(Row("13", MASK, name, batch, length, phase) for phase in phases),
            Row("11", MASK, name, batch, length, TUNED),
        )
        listed.append(Cell(("fig13", "table4"), rows, partial(_measure, rows, device=device, dtype=dtype)))
    return listed


def _measure(
    rows: Sequence[Row], wanted: Sequence[Row], report: Report, timed: bool, *, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    """Search in a process of its own. It fills all rows of a cell, whichever are wanted: they describe one search."""
    subject_of.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the other process
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found, lines = pool.submit(_search, rows, timed, device, dtype).result()
    for line in lines:
        report(line)
    return found


def _search(rows: Sequence[Row], timed: bool, device: torch.device, dtype: torch.dtype) -> tuple[list[Row], list[str]]:
    """Search, time the tuned model if its result is right, and return the rows with results, and lines about them."""
    from torch._inductor.utils import fresh_inductor_cache

    first = rows[0]
    subject = subject_of(first.model, first.batch, first.length, device, dtype)
    watch, reports = Stopwatch(), list[FusionReport]()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder, fresh_inductor_cache():
        options: dict[str, Any] = {"effort": "full", "budget_s": BUDGET_S, "references": device.type != "cuda"}
        compiled = stof.optimize(
            copy.deepcopy(subject.model), mask=subject.mask.mask(subject.length),
            store=folder, report=reports.append, **options, **WHOLE,
        )  # fmt: skip
        start = time.perf_counter()
        with watch.on_phases():
            out = compiled(**subject.inputs)[0]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        total = time.perf_counter() - start
        right = cosine_to(out, subject.exact) >= subject.least
        ms = wall_ms(partial(compiled, **subject.inputs), device) if right and timed else None
    error = float((out.double() - subject.exact).abs().max() / subject.exact.abs().max())
    note = f"{sum(one.measurements for one in reports)} measurements" if right else "wrong result, not timed"
    note += "".join(f"; {line}" for one in reports for line in one.notes if "budget" in line)
    seconds = watch.seconds | {"rest": total - sum(watch.seconds.values())}
    lines = [
        "  " + ", ".join(f"{name} {s:.2f} s" for name, s in (seconds | {"total": total}).items()),
        f"  {TUNED}: {f'{ms:.3f} ms' if ms else 'not timed'}, {note}",
    ]
    took: dict[str, float] = {TOTAL: total} | {f"stof {name}": s for name, s in seconds.items()}
    found = []
    for row in rows:
        if right:
            row = replace(row, ms=ms) if row.impl == TUNED else replace(row, s=took.get(row.impl, 0.0))
        found.append(replace(row, max_rel_err=error, note=note))
    return found, lines
