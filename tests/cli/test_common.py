"""What commands ask for alike: devices and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stof.cli.common import device_of
from stof.cli.main import app
from stof.errors import ArgumentError


def test_devices() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for wrong in ("foo", "meta", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ArgumentError, match="device"):
            device_of(wrong)


@pytest.mark.parametrize("command", [["demo", "--device", "cuda:99"], ["verify", "--device", "nosuch"]])
def test_a_device_that_is_not_there(command: list[str]) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "device" in done.output


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "--measurements", str(tmp_path / "none.json"), "--check"])
    assert done.exit_code == 2
    assert "none.json" in done.output.replace("\n", "")
    for content in ('{"a": 1}', "garbage"):
        (tmp_path / "other.json").write_text(content)
        done = CliRunner().invoke(app, ["tune", "--measurements", str(tmp_path / "other.json"), "--check"])
        assert done.exit_code == 2
        assert "no measurements" in done.output.replace("\n", " ")
