"""`python -m benchmarks start`: a second process compiles nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stof
from benchmarks.cli.attention import app
from benchmarks.models.startup_time import Ask, Start, run_starts
from stof.errors import StofError

MODULE = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Linear(16, 32), torch.zeros(4, 16)  # for which Inductor needs no C++
"""


@pytest.mark.slow
def test_a_second_process_starts_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(stof.__file__).parents[1].resolve()))
    (tmp_path / "a_small_model.py").write_text(MODULE, encoding="utf-8")
    words = ["a_small_model:small", "--dtype", "float32", "--warm", "1"]
    done = CliRunner().invoke(app, ["start", *words, "--output", "start.json"])
    assert done.exit_code == 0, done.output
    cold, warm = json.loads((tmp_path / "start.json").read_text(encoding="utf-8"))["rows"]
    assert (cold["kind"], warm["kind"]) == ("cold", "warm")
    assert [row["compiled"] for row in (cold, warm)] == [1, 0]
    assert [row["measured"] for row in (cold, warm)] == [0, 0]
    assert all(row[part] > 0 for row in (cold, warm) for part in ("import_s", "load_s", "compile_s", "call_ms"))


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(StofError, match="start failed:\nno model 'nothing'"):  # and no traceback
        run_starts(Ask("nothing", 1, 1, "full", "float32", {}), tmp_path, 0)


def test_options_reach_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def started(ask: Ask, caches: Path, warm: int) -> list[Start]:
        asked.append(ask)
        return [Start("cold", 1.0, 2.0, 3.0, 4.0, 5, 6)]

    monkeypatch.setattr("benchmarks.models.startup_time.run_starts", started)
    done = CliRunner().invoke(app, ["start", "llama", "--fold", "--lock", str(tmp_path / "a.lock")])
    assert done.exit_code == 0, done.output
    assert asked[0].options == {
        "effort": "none", "fold": True, "references": False, "cuda_graphs": "whole",
        "lock": str((tmp_path / "a.lock").resolve()),
    }  # fmt: skip
