"""Values that no command takes: refused with a message that says what to do, not with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stof.cli.common import CheckedCommand
from stof.cli.main import app

HUGE = str(10**30)


def refused(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))
    assert done.exit_code == 2, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench", "attention", "--masks", ""], "--masks is empty"),
        (["bench", "attention", "--shapes", " "], "--shapes is empty"),
        (["bench", "attention", "--impls", ""], "--impls is empty"),
        (["bench", "attention", "--rounds", HUGE], "--rounds is a number from 0 to 2147483647, got 1000000"),
        (["bench", "attention", "--budget", "-1"], "--budget is a number from 0"),
        (["bench", "attention", "--budget", "nan"], "--budget is a number from 0"),
        (["bench", "attention", "--shapes", f"1,1,1,{HUGE}"], "a shape is B,H,D,S"),
        (["bench", "attention", "--shapes", "1,1,-1,1"], "a shape is B,H,D,S"),
        (["bench", "decode", "--kv", "many"], "--kv takes numbers from 1"),
        (["bench", "decode", "--kv", HUGE], "--kv takes numbers from 1"),
        (["bench", "build", "--parts", "stepts"], "unknown 'stepts'; there are steps, growth, known"),
        (["inspect", "causal()", "--q-len", HUGE], "--q-len is a number from 0"),
        (["inspect", "causal()", "--block-m", "-64"], "--block-m is a number from 0"),
        (["inspect", ""], "mask is empty"),
        (["demo", "--passages", HUGE], "--passages is a number from 0"),
        (["tune", "bert", "--budget", "-3"], "--budget is a number from 0"),
        (["tune", "--device", "--masks", "cuasal"], "--masks: unknown 'cuasal'"),
        (["tune", "--device", "--only", "hoper"], "--only: unknown 'hoper'"),
        (["tune", "--device", "--shapes", "1,1"], "--shapes: unknown '1,1'"),
        (["verify", "--seconds", "-1"], "--seconds"),
        (["verify", "--seed", HUGE], "--seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_no_option_has(words: list[str], told: str) -> None:
    assert told in refused(*words)


def test_a_function_that_takes_arguments_is_no_model() -> None:
    told = refused("tune", "os:system")
    assert "os:system has to take no arguments and return (model, example inputs)" in told
    assert "a str" in refused("tune", "os:getcwd")


def test_results_that_are_none(tmp_path: Path) -> None:
    told = refused("bench", "report", str(tmp_path / "nofile.json"))
    assert told.strip().endswith("nofile.json: No such file or directory")
    (tmp_path / "other.json").write_text("{}")
    told = refused("bench", "report", str(tmp_path / "other.json"))
    assert "is no result of `stof bench attention --output FILE`" in told
    assert "it has no entry 'rows'" in told


def _commands(command: Any, name: str = "stof") -> Iterator[tuple[str, Any]]:
    for word, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


def test_every_command_checks_its_values() -> None:
    found = dict(_commands(typer.main.get_command(app)))
    assert len(found) > 12
    assert [name for name, command in found.items() if not isinstance(command, CheckedCommand)] == []
