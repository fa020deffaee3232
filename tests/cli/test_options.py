"""Values that no command takes: refused with a message that says what to do, not with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
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


def _commands(command: Any, name: str = "stof") -> Iterator[tuple[str, Any]]:
    for word, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


def test_every_command_checks_its_values() -> None:
    found = dict(_commands(typer.main.get_command(app)))
    assert len(found) > 4
    assert [name for name, command in found.items() if not isinstance(command, CheckedCommand)] == []
