"""The store of measurements: what goes in comes out, broken files and entries are skipped, writers do not lose data."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stof.fusion.records import store as store_module
from stof.fusion.records.choices import TunedConfig, choices_path, read_choices, update_choices
from stof.fusion.records.store import Records, Store, default_store, segment_key
from stof.runtime import files
from stof.runtime.files import cache_folder, write_checked

ENTRY = {None: 3.5, ("linear", ""): 2.0, ("linear", "64x64x32,4w,3s,tile"): math.inf}


def test_round_trip_and_merge(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep", {"device": "a"})
    assert store.load() == Records()
    store.update(Records({"one": ENTRY}, {"race": (1.0, 2.0)}, {"right": "", "wrong": "off by 3"}, {"one": 4, "g": 3}))
    store.update(Records({"one": {None: 4.0}, "two": {None: 1.0}}, searched={"one": 3, "g": 8}))
    found = Store(tmp_path / "deep", {"device": "a"}).load()
    assert found.segments["one"] == ENTRY | {None: 4.0}
    assert found.segments["two"] == {None: 1.0}
    assert found.races == {"race": (1.0, 2.0)}
    assert found.searched == {"one": 4, "g": 8}
    assert found.checks == {"right": "", "wrong": "off by 3"}
    assert Store(tmp_path / "deep", {"device": "b"}).load() == Records()
    assert [file.suffix for file in sorted((tmp_path / "deep").iterdir())] in ([".json"], [".json", ".lock"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 2, "segments": 3, "races": {}}'])
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path, {})
    store.path.write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.load() == Records()
    with pytest.warns(UserWarning, match="is ignored"):
        store.update(Records({"one": ENTRY}))
    assert store.load().segments == {"one": ENTRY}


def test_another_version_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    store.path.write_text(json.dumps({"version": 0, "segments": {}, "races": {}}), encoding="utf-8")
    with pytest.warns(UserWarning, match=f"of version 0, this stof reads version {store_module.VERSION}"):
        assert store.load() == Records()


BROKEN = {
    "segments": [[[None, -1.0]], [[["linear"], 1.0]], [[None]], 3],
    "races": [[1.0], [0.0, 1.0], [int("9" * 400), 1.0]],
    "checks": [1],
    "searched": ["3", None],
}


@pytest.mark.parametrize(("part", "value"), [(part, value) for part, values in BROKEN.items() for value in values])
def test_a_file_of_wrong_values_is_ignored_with_a_warning(tmp_path: Path, part: str, value: Any) -> None:
    store = Store(tmp_path, {})
    store.update(Records({"good": ENTRY}))
    data = json.loads(store.path.read_text(encoding="utf-8"))
    del data["checksum"]
    data[part]["bad"] = value
    write_checked(store.path, json.dumps(data))
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.load() == Records()


def _write(folder: Path, name: str) -> None:
    store = Store(folder, {})
    for i in range(10):
        store.update(Records({f"{name}{i}": ENTRY}))


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(Store(tmp_path, {}).load().segments) == 20


def _write_for_ever(folder: Path) -> None:
    for i in itertools.count():
        Store(folder, {}).update(Records({f"{i % 50}": ENTRY}))
        update_choices(folder, "a", {f"{i % 50}": TunedConfig("", 1.0 + i, 2.0)})


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.01, 0.03, 0.07, 0.11, 0.2])
def test_a_writer_killed_at_any_moment_leaves_a_readable_store(tmp_path: Path, seconds: float) -> None:
    writer = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(tmp_path,))
    store = Store(tmp_path, {})
    writer.start()
    deadline = time.monotonic() + 20
    while not choices_path(tmp_path, "a").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(seconds)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert store.load().segments["0"] == ENTRY  # a warning would be an error
    assert read_choices(tmp_path, "a")["0"].inductor_us == 2.0
    store.update(Records({"after": ENTRY}))  # the lock is free, whatever the writer held
    update_choices(tmp_path, "a", {"after": TunedConfig("", 1.0, 2.0)})
    assert store.load().segments["after"] == ENTRY


def test_what_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="nothing is remembered in"):
        Store(tmp_path / "file" / "below", {}).update(Records({"one": ENTRY}))


def test_folders_and_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stof"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "stof"
    monkeypatch.setattr(files.sys, "platform", "darwin")
    assert cache_folder().parts[-3:] == ("Library", "Caches", "stof")
    store = default_store(torch.device("cpu"), tmp_path)
    assert store is not None
    assert store.path.parent == tmp_path
    assert store.environment["torch"] == torch.__version__
    monkeypatch.setattr(store_module, "package_version", lambda name: None if name == "tilelang" else "1")
    without = default_store(torch.device("cpu"), tmp_path)
    assert without is not None
    monkeypatch.setattr(store_module, "package_version", lambda name: "1")
    other = default_store(torch.device("cpu"), tmp_path)
    assert other is not None
    assert other.path != without.path, "whose times are of no use without it"
    assert segment_key(("a", 1)) == segment_key(("a", 1)) != segment_key(("a", 2))
