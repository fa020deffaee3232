"""A pytest plugin: tests of transformers' own, with stof in place of "sdpa". `make test-transformers` runs it.

The tests are those that all models share (`ModelTesterMixin`, `GenerationTesterMixin`). The run fails if a test fails
that `expected_failures.txt` does not name, or one that it names passes or does not run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

import stof.integrations.transformers as hf

EXPECTED = Path(__file__).parent / "expected_failures.txt"
SHARED = ("ModelTesterMixin", "GenerationTesterMixin")


def pytest_configure(config: pytest.Config) -> None:
    source = config.rootpath / "src/transformers/__init__.py"
    version = f'__version__ = "{transformers.__version__}"'
    if not source.is_file() or version not in source.read_text(encoding="utf-8"):
        raise pytest.UsageError(
            f"{config.rootpath} is no checkout of transformers {transformers.__version__}, which is installed; "
            f"run git checkout v{transformers.__version__} there"
        )
    AttentionInterface.register("sdpa", hf.attention_forward)
    AttentionMaskInterface.register("sdpa", hf.make_mask)
    config.pluginmanager.register(Comparison(expected_failures(EXPECTED.read_text(encoding="utf-8"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not is_shared(item)])
    items[:] = filter(is_shared, items)


class Comparison:
    """What failed and passed, and what should have."""

    def __init__(self, expected: set[str]) -> None:
        self.expected = expected
        self.seen: set[str] = set()
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.surprises: dict[str, list[str]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seen.add(report.nodeid)
        # A test has a report for each of its subtests as well, and passes itself where one of those fails.
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        files = {name.partition("::")[0] for name in self.seen}
        gone = {name for name in self.expected - self.seen if name.partition("::")[0] in files}
        found = {
            "fail": self.failed - self.expected,
            "pass and are expected to fail": self.passed & self.expected - self.failed,
            "are expected to fail and did not run": gone,
        }
        self.surprises = {what: sorted(names) for what, names in found.items() if names}
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.surprises else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for what, names in self.surprises.items():
            terminalreporter.section(f"{len(names)} tests {what}")
            for name in names:
                terminalreporter.line(name)


def expected_failures(text: str) -> set[str]:
    """Tests; a comment above them says why they fail."""
    return {line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")}


def is_shared(item: pytest.Item) -> bool:
    classes = item.cls.__mro__ if isinstance(item, pytest.Function) and item.cls is not None else ()
    return any(cls.__name__ in SHARED and item.name in vars(cls) for cls in classes)
