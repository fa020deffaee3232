"""Values that no benchmark takes: refused with a message that says what to do, not with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.cli.attention import app
from stof.cli.common import CheckedCommand

HUGE = str(10**30)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-attention.json"


def refused(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))
    assert done.exit_code == 2, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["attention", "--masks", ""], "--masks is empty"),
        (["attention", "--shapes", " "], "--shapes is empty"),
        (["attention", "--impls", ""], "--impls is empty"),
        (["attention", "--rounds", HUGE], "--rounds is a number from 0 to 2147483647, got 1000000"),
        (["attention", "--budget", "-1"], "--budget is a number from 0"),
        (["attention", "--budget", "nan"], "--budget is a number from 0"),
        (["attention", "--shapes", f"1,1,1,{HUGE}"], "a shape is B,H,D,S"),
        (["attention", "--shapes", "1,1,-1,1"], "a shape is B,H,D,S"),
        (["decode", "--kv", "many"], "--kv takes numbers from 1"),
        (["decode", "--kv", HUGE], "--kv takes numbers from 1"),
        (["build", "--parts", "stepts"], "unknown 'stepts'; there are steps, growth, known"),
        (["attention", "--device", "nosuch"], "device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_no_option_has(words: list[str], told: str) -> None:
    assert told in refused(*words)


def test_results_that_are_none(tmp_path: Path) -> None:
    told = refused("report", str(tmp_path / "nofile.json"))
    assert told.strip().endswith("nofile.json: No such file or directory")
    (tmp_path / "other.json").write_text("{}")
    told = refused("report", str(tmp_path / "other.json"))
    assert "is no result of this benchmark's --output FILE" in told
    assert "it has no entry 'meta'" in told


def test_every_command_checks_its_values() -> None:
    commands = typer.main.get_command(app).commands
    assert len(commands) > 10
    assert [name for name, command in commands.items() if not isinstance(command, CheckedCommand)] == []


def test_tables_in_a_pipe_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = CliRunner().invoke(app, ["report", str(RESULTS)])
    assert done.exit_code == 0
    assert "\u2026" not in done.output
    assert "dense-like" in done.output
