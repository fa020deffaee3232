"""The store of measurements: what goes in comes out, broken files and entries are skipped, writers do not lose data."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch

from stof.fusion import store as stores
from stof.fusion.store import Contents, Entry, Store, cache_folder, default_store, segment_key

ENTRY = Entry({None: 3.5, ("linear", ""): 2.0, ("linear", "64x64x32,4w,3s,tile"): math.inf}, 4)


def test_round_trip_and_merge(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep", {"device": "a"})
    assert store.load() == Contents()
    store.update(Contents({"one": ENTRY}, {"race": (1.0, 2.0)}))
    store.update(Contents({"one": Entry({None: 4.0}, 0), "two": Entry({None: 1.0})}))
    found = Store(tmp_path / "deep", {"device": "a"}).load()
    assert found.segments["one"] == Entry(ENTRY.times | {None: 4.0}, 4)
    assert found.segments["two"] == Entry({None: 1.0})
    assert found.races == {"race": (1.0, 2.0)}
    assert Store(tmp_path / "deep", {"device": "b"}).load() == Contents()
    assert [file.suffix for file in sorted((tmp_path / "deep").iterdir())] in ([".json"], [".json", ".lock"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "segments": 3, "races": {}}'])
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path, {})
    store.path.write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.load() == Contents()
    with pytest.warns(UserWarning, match="is ignored"):
        store.update(Contents({"one": ENTRY}))
    assert store.load().segments == {"one": ENTRY}


def test_another_version_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    store.path.write_text(json.dumps({"version": 0, "segments": {}, "races": {}}), encoding="utf-8")
    assert store.load() == Contents()


def test_broken_entries_are_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    store.update(Contents({"good": ENTRY}, {"good": (1.0, 2.0)}))
    data = json.loads(store.path.read_text(encoding="utf-8"))
    data["segments"] |= {
        "negative": {"times": [[None, -1.0]], "per_segment": 0},
        "short": {"times": [[["linear"], 1.0]], "per_segment": 0},
        "empty": {},
    }
    data["races"]["bad"] = [1.0]
    store.path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.warns(UserWarning, match="4 broken entries"):
        assert store.load() == Contents({"good": ENTRY}, {"good": (1.0, 2.0)})


def _write(folder: Path, name: str) -> None:
    store = Store(folder, {})
    for i in range(10):
        store.update(Contents({f"{name}{i}": ENTRY}))


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(Store(tmp_path, {}).load().segments) == 20


def test_folders_and_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stores.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stof"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "stof"
    monkeypatch.setattr(stores.sys, "platform", "darwin")
    assert cache_folder().parts[-3:] == ("Library", "Caches", "stof")
    store = default_store(torch.device("cpu"), tmp_path)
    assert store.path.parent == tmp_path
    assert store.environment["torch"] == torch.__version__
    assert segment_key(("a", 1)) == segment_key(("a", 1)) != segment_key(("a", 2))
