"""The comparison of `make test-transformers`, on a checkout of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
from tests.transformers_client import stof_for_sdpa  # noqa: E402

SUITE = """
import unittest
from transformers import AttentionInterface, AttentionMaskInterface
import stof.integrations.transformers as hf

class ModelTesterMixin:
    def test_registered(self):
        self.assertIs(AttentionInterface()["sdpa"], hf.attention_forward)
        self.assertIs(AttentionMaskInterface()["sdpa"], hf.make_mask)

    def test_part(self):
        for part in range(2):
            with self.subTest(part=part):
                self.assertEqual(part, 0)

    def test_whole(self):
        self.fail()

class TinyModelTest(ModelTesterMixin, unittest.TestCase):
    def test_its_own(self):
        self.fail()
"""


@pytest.mark.slow
def test_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "src/transformers").mkdir(parents=True)
    version = tmp_path / "src/transformers/__init__.py"
    version.write_text(f'__version__ = "{transformers.__version__}"\n')
    (tmp_path / "test_tiny.py").write_text(SUITE)
    (tmp_path / "test_missing.py").write_text("import a_module_that_is_not_there")
    code, out = run(tmp_path, "--continue-on-collection-errors")
    assert code == pytest.ExitCode.TESTS_FAILED, out
    name = "test_tiny.py::TinyModelTest::test_"
    listed = [line for line in out.splitlines() if line.startswith("test_") and " " not in line]
    assert listed == ["test_missing.py", f"{name}part", f"{name}whole"]
    version.write_text('__version__ = "5.0.0"\n')
    wrong: Any = SimpleNamespace(rootpath=tmp_path)
    with pytest.raises(pytest.UsageError, match=f"git checkout v{transformers.__version__}"):
        stof_for_sdpa.pytest_configure(wrong)


def run(checkout: Path, *options: str) -> tuple[int, str]:
    paths = [str(Path(stof_for_sdpa.__file__).parent), *sys.path]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "stof_for_sdpa", "--rootdir", ".", "-q", *options],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout + found.stderr


def test_expected_failures_must_fail() -> None:
    expected = stof_for_sdpa.expected_failures(
        "# it has no backward pass\na.py::one\na.py::two\n\na.py::gone\nb.py::one\n"
    )
    assert expected == {"a.py::one", "a.py::two", "a.py::gone", "b.py::one"}
    comparison = stof_for_sdpa.Comparison(expected)
    session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.TESTS_FAILED)
    report("a.py::one", failed=True, to=comparison)
    report("a.py::two", failed=True, to=comparison)
    report("a.py::two", failed=False, to=comparison)  # a subtest failed
    comparison.expected.discard("a.py::gone")
    comparison.pytest_sessionfinish(session, session.exitstatus)
    assert (session.exitstatus, comparison.surprises) == (pytest.ExitCode.OK, {})
    comparison.expected |= {"a.py::gone", "a.py::three"}
    report("a.py::three", failed=False, to=comparison)
    comparison.pytest_sessionfinish(session, session.exitstatus)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert list(comparison.surprises.values()) == [["a.py::three"], ["a.py::gone"]]


def report(name: str, *, failed: bool, to: Any) -> None:
    to.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when="call", failed=failed, passed=not failed))
