"""A pytest plugin: tests that are quick and near the mutated module run first, and none runs for ever."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Seconds of test functions, all parameters together, as `python -m tests.mutants --record` writes them.
SECONDS = Path(__file__).with_name("seconds.json")
# Test functions that take less are not recorded.
QUICK = 0.5
# How many modules each test file is from the mutated one, as JSON.
DISTANCES = "STOF_MUTANT_DISTANCES"
# The file that `--record` writes.
RECORD = "STOF_MUTANT_RECORD"

_took: dict[str, float] = defaultdict(float)


def recorded() -> dict[str, float]:
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Four times the time of a test counts as much as one more module between."""
    distances: dict[str, int] = json.loads(os.environ.get(DISTANCES, "{}"))
    if not distances:
        return
    seconds = recorded()

    def place(item: pytest.Item) -> tuple[int, int, str]:
        distance = distances[item.nodeid.partition("::")[0]]
        slowness = math.ceil(math.log(max(1, seconds.get(function_of(item.nodeid), 0)), 4))
        return distance + slowness, distance, item.nodeid.partition("::")[0]

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test fails when it takes far longer than ever: a loop may have no end."""
    limit = 120 + 10 * recorded().get(function_of(item.nodeid), 0)

    def stop(*_: Any) -> None:
        pytest.fail(f"no end after {limit:.0f} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: hypothesis runs a failed example once more.
    signal.setitimer(signal.ITIMER_REAL, limit, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[function_of(report.nodeid)] += report.duration


def pytest_sessionfinish() -> None:
    if RECORD in os.environ:
        slow = {name: round(seconds, 1) for name, seconds in sorted(_took.items()) if seconds >= QUICK}
        Path(os.environ[RECORD]).write_text(json.dumps(slow, indent=0) + "\n")
