"""`benchmarks/package_configs.py`: what was measured becomes the package's, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.package_configs import package
from stof.errors import ArgumentError
from stof.fusion.records.choices import TunedConfig, choices_path, read_choices, update_choices


def store(folder: Path, device: str = "My GPU", **choices: TunedConfig) -> Path:
    path = choices_path(folder, device)
    update_choices(folder, device, {key.replace("_", " "): one for key, one in choices.items()})
    return path


def test_newer_choices_take_the_place_of_older_ones(tmp_path: Path) -> None:
    data = tmp_path / "data"
    store(data, kept=TunedConfig("", 1.0, 2.0), changed_one=TunedConfig("", 1.0, 2.0), again=TunedConfig("", 1.0, 2.0))
    first = store(tmp_path / "a", changed_one=TunedConfig("cublas", 3.0, 4.0), new_one=TunedConfig("", 5.0, 4.0))
    second = store(tmp_path / "b", new_one=TunedConfig("cublas", 3.5, 4.0), again=TunedConfig("", 1.5, 2.0))
    lines = package([first, second], folder=data)
    assert lines == [
        "changed one: cublas 3.0 us, Inductor 4.0 us, was default 1.0",
        "new one: cublas 3.5 us, Inductor 4.0 us",
    ]
    found = read_choices(data, "My GPU")
    assert {key: (one.config, one.template_us) for key, one in found.items()} == {
        "again": ("", 1.5), "changed one": ("cublas", 3.0), "kept": ("", 1.0), "new one": ("cublas", 3.5)
    }  # fmt: skip
    assert list(json.loads(choices_path(data, "My GPU").read_text())["choices"]) == sorted(found)


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    path = store(tmp_path / "a", wide_one=TunedConfig("", 1.0, 2.0), tall_one=TunedConfig("", 1.0, 2.0))
    package([path], only="wide", folder=tmp_path)
    assert list(read_choices(tmp_path, "My GPU")) == ["wide one"]


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    good, other = (
        store(tmp_path / "a", one=TunedConfig("", 1.0, 2.0)),
        store(tmp_path / "b", "Other", one=TunedConfig("", 1.0, 2.0)),
    )
    with pytest.raises(ArgumentError, match="one device at a time, got My GPU, Other"):
        package([good, other], folder=tmp_path)
    with pytest.raises(ArgumentError, match="holds no choices"):
        package([tmp_path / "none.json"], folder=tmp_path)
    data = json.loads(good.read_text())
    data["choices"]["one"]["template_us"] = -1
    good.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="its content does not match its checksum"):
        package([good], folder=tmp_path)
    assert not choices_path(tmp_path, "My GPU").exists()
