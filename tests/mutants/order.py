"""A pytest plugin: tests that are quick and near the mutated module run first, and none runs for ever."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Seconds of test functions with the slowest parameters, as `python -m tests.mutants --record` writes them.
SECONDS = Path(__file__).with_name("seconds.json")
# How many modules each test file is from the mutated one, as JSON.
DISTANCES = "STOF_MUTANT_DISTANCES"
# A file that gets a line for each test, `name seconds`.
RECORD = "STOF_MUTANT_RECORD"

# The same examples in every run, and a failure ends a test at once: making it smaller takes minutes.
PROFILE = "mutants"
settings.register_profile(
    PROFILE,
    deadline=None,
    max_examples=40,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def recorded() -> dict[str, float]:
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Four times the time, or four times the parameters, count as much as one more module between."""
    distances: dict[str, float] = json.loads(os.environ.get(DISTANCES, "{}"))
    if not distances:
        return
    seconds, seen = recorded(), Counter[str]()

    def place(item: pytest.Item) -> tuple[float, float]:
        function = function_of(item.nodeid)
        distance = distances[item.nodeid.partition("::")[0]]
        seen[function] += 1
        levels = [math.log(max(1, value), 4) for value in (seconds.get(function, 0), seen[function])]
        return distance + sum(map(math.ceil, levels)), distance

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
    if RECORD in os.environ and report.when == "call":
        with open(os.environ[RECORD], "a") as file:
            file.write(f"{function_of(report.nodeid)} {report.duration:.1f}\n")
