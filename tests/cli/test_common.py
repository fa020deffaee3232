"""What commands ask for alike: devices and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stof.cli.common import device_of, must_be_replaceable
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
    if "demo" in command:
        pytest.importorskip("transformers")
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


CONTENTS = {
    "png": b"\x89PNG\r\n\x1a\n....",
    "svg": b'<?xml version="1.0" encoding="utf-8"?>\n<!-- made by hand -->\n<svg xmlns="http://www.w3.org/2000/svg">',
    "pdf": b"%PDF-1.7",
    "page": b"<!DOCTYPE html><html><svg></svg></html>",
    "text": b"import torch  # <svg %PDF-1.7",
    "cut": b"\x89PNG",
    "xml": b'<?xml version="1.0"?><html></html>',
}


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files_of_another_kind_are_not_replaced(kind: str, tmp_path: Path) -> None:
    must_be_replaceable(None, kind)
    must_be_replaceable(tmp_path / "new", kind)
    (tmp_path / "empty").touch()
    must_be_replaceable(tmp_path / "empty", kind)
    for other, content in CONTENTS.items():
        (tmp_path / other).write_bytes(content)
        if other == kind:
            must_be_replaceable(tmp_path / other, kind)
        else:
            with pytest.raises(ArgumentError, match=f"{other}: it exists and is no {kind.upper()} file"):
                must_be_replaceable(tmp_path / other, kind)


COMMANDS = {
    "inspect": ["inspect", "causal", "--q-len", "64", "--no-draw", "--png"],
    "demo": ["demo", "--device", "cuda:99", "--picture"],
    "tune, a chart": ["tune", "nothing_is_loaded", "--png"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_commands_write_over_no_other_files(name: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"precious{ending}"
    path.write_bytes(CONTENTS["text"])
    done = CliRunner().invoke(app, [*COMMANDS[name], str(path)])
    assert done.exit_code == 2
    assert "it exists and is no" in done.output.replace("\n", " ")
    assert path.read_bytes() == CONTENTS["text"]


def test_two_outputs_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    paths = (str(tmp_path / "x.png"), str(tmp_path / "folder" / ".." / "x.png"))
    done = CliRunner().invoke(app, ["tune", "nothing_is_loaded", "--lock", paths[0], "--png", paths[1]])
    assert done.exit_code == 2
    assert "another output goes there" in done.output.replace("\n", " ")


def test_constants_do_not_replace_measurements(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("[]")
    done = CliRunner().invoke(app, ["tune", "--measurements", str(path), "--output", str(path)])
    assert done.exit_code == 2
    assert "which it would replace" in done.output.replace("\n", " ")
    assert path.read_text() == "[]"
