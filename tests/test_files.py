"""Files that threads share, that are damaged, or lie beside planted links: none is lost or misread in silence."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import stof
from benchmarks.results_io import read_results, write_json
from stof import masks
from stof.errors import ArgumentError, LockFileError, PlanFileError
from stof.fusion.records.choices import ChoiceTable, TunedConfig, choices_path, read_choices, read_lock, update_choices
from stof.fusion.records.store import Records, Store
from stof.runtime import files
from stof.runtime.files import read_checked, read_json, write_atomically, write_checked

# Writing


def parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == ".part"]


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "text": lambda path, n: write_atomically(path, f"{n}" * 5000),
    "plan": lambda path, n: stof.plan(masks.sliding_window(n % 7 + 1), 24).save(path),
    "results": lambda path, n: write_json(path, {"meta": {}, "rows": [n] * 1000}),
    "lock": lambda path, n: ChoiceTable(f"{n}").write_lock(path),
}
READERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.read_text(),
    "plan": stof.Plan.load,
    "results": read_json,
    "lock": read_lock,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_threads_that_write_and_read_one_path(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    WRITERS[kind](path, 0)

    def work(n: int) -> None:
        WRITERS[kind](path, n)
        READERS[kind](path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(80)))
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_that_is_replaced_while_it_is_read_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced right after the first access to its content."""
    path, other = tmp_path / "plan", tmp_path / "other"
    old, new = (stof.plan(masks.sliding_window(n), 40) for n in (2, 9))
    old.save(path)
    new.save(other)
    raw = path.read_bytes()

    def read_and_replace(self: Path) -> bytes:
        other.replace(path)
        return raw

    monkeypatch.setattr(Path, "read_bytes", read_and_replace)
    assert torch.equal(stof.Plan.load(path).to_dense(), old.to_dense())
    monkeypatch.undo()
    assert torch.equal(stof.Plan.load(path).to_dense(), new.to_dense())


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask(tmp_path: Path, kind: str, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        WRITERS[kind](tmp_path / "file", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_folders_are_made(tmp_path: Path) -> None:
    write_atomically(tmp_path / "some" / "more" / "file", "text")
    assert (tmp_path / "some" / "more" / "file").read_text() == "text"


def test_planted_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that has the temporary file's name."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f"file.{os.getpid()}.part", f".file.{os.getpid()}.part", "file.part", ".stof-00.part"):
        (tmp_path / name).symlink_to(victim)
    for kind, write in WRITERS.items():
        write(tmp_path / "file", 1)
        READERS[kind](tmp_path / "file")
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "00")
    with pytest.raises(FileExistsError, match=r"'.*/file'"):
        write_atomically(tmp_path / "file", "new")
    assert victim.read_text() == "precious"


def test_leftovers_of_killed_processes_are_swept(tmp_path: Path) -> None:
    names = (".stof-0123456789abcdef.part", ".stof-fedcba9876543210.part", "notes.part", ".stof-mine.txt")
    for name in names:
        (tmp_path / name).write_text("half")
    for name in (names[0], names[2], names[3]):
        os.utime(tmp_path / name, (0, 0))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".stof-link.part").symlink_to(victim)
    os.utime(tmp_path / ".stof-link.part", (0, 0), follow_symlinks=False)
    write_atomically(tmp_path / "file", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[1:], "victim", "file"])
    assert victim.read_text() == "precious"


def test_a_failed_write_keeps_the_old_file_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "folder", "new")
    assert caught.value.filename == str(tmp_path / "folder")
    assert parts(tmp_path) == []


# Damaged JSON

ODD = {
    "empty": "",
    "deep": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "list": "[]",
    "number": "3",
    "none": "null",
    "infinity": '{"version": 3, "stof_lock": 3, "choices": Infinity}',
    "huge number": f'{{"version": {"9" * 400}, "stof_lock": {"9" * 400}}}',
    "larger than Python reads": f'{{"version": {"9" * 5000}}}',
    "parts of wrong types": '{"version": 3, "stof_lock": 3, "choices": 1, "segments": []}',
    "half a character": '{"version": "\\ud800"}',
}
TUNED = {"linear 16x16x16 float16": TunedConfig("64x64x32,4w,3s", 12.5, 25.25)}
CONTENTS = Records({"one": {None: 3.5, ("linear", ""): 2.25}}, {"race": (1.5, 2.5)}, {"right": ""}, {"one": 4})


def lock_of() -> ChoiceTable:
    return ChoiceTable("here", {"stof": "1"}, dict(TUNED))


@pytest.mark.parametrize("name", ODD)
def test_odd_json_is_ignored_with_a_warning_and_replaced(tmp_path: Path, name: str) -> None:
    store, path = Store(tmp_path, {}), choices_path(tmp_path, "a")
    for file in (store.path, path):
        file.write_text(ODD[name], encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.load() == Records()
    with pytest.warns(UserWarning, match="is ignored"):
        assert read_choices(tmp_path, "a") == {}
    with pytest.warns(UserWarning, match="is ignored"):
        store.update(CONTENTS)
    with pytest.warns(UserWarning, match="is ignored"):
        update_choices(tmp_path, "a", TUNED)
    assert store.load() == CONTENTS
    assert read_choices(tmp_path, "a") == TUNED


@pytest.mark.parametrize("name", ODD)
def test_odd_json_is_no_lock_and_no_result(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_text(ODD[name], encoding="utf-8")
    with pytest.raises(LockFileError, match="not a usable lock file"):
        read_lock(path)
    with pytest.raises(ArgumentError, match="is no result"):
        read_results(path, dict)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe{")
    with pytest.raises(LockFileError, match="UnicodeDecodeError"):
        read_lock(tmp_path / "file")


def test_every_digit_that_changes_is_noticed(tmp_path: Path) -> None:
    store, choices, lock = Store(tmp_path, {}), choices_path(tmp_path, "a"), tmp_path / "model.lock"
    store.update(CONTENTS)
    update_choices(tmp_path, "a", TUNED)
    lock_of().write_lock(lock)
    for path in (store.path, choices, lock):
        text = path.read_text(encoding="utf-8")
        for place in [match.start() for match in re.finditer(r"\d", text)]:
            path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :], encoding="utf-8")
            if path == lock:
                with pytest.raises(LockFileError, match=r"does not match its checksum|of version"):
                    read_lock(path)
            else:
                with pytest.warns(UserWarning, match=r"does not match its checksum|of version"):
                    assert (store.load() == Records()) if path == store.path else (read_choices(tmp_path, "a") == {})
        path.write_text(text, encoding="utf-8")
    assert (store.load(), read_choices(tmp_path, "a"), read_lock(lock)) == (CONTENTS, TUNED, lock_of())


def test_the_checksum_is_of_values_not_of_their_layout(tmp_path: Path) -> None:
    lock_of().write_lock(tmp_path / "lock")
    text = (tmp_path / "lock").read_text(encoding="utf-8")
    (tmp_path / "lock").write_text(json.dumps(json.loads(text), indent=7, sort_keys=True), encoding="utf-8")
    assert read_lock(tmp_path / "lock") == lock_of()
    assert text.count("\n") > 5, "a line for each entry, to be read and compared"


def test_damaged_locks_say_what_to_do(tmp_path: Path) -> None:
    lock_of().write_lock(tmp_path / "lock")
    text = (tmp_path / "lock").read_text(encoding="utf-8").replace("12.5", "13.5")
    (tmp_path / "lock").write_text(text, encoding="utf-8")
    with pytest.raises(LockFileError, match=r"edited or damaged. Restore it .* `stof tune MODEL --lock FILE`"):
        read_lock(tmp_path / "lock")


def test_choices_of_another_version_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {}
    for version in (2, 4):
        with monkeypatch.context() as patched:
            patched.setattr("stof.fusion.records.choices.VERSION", version)
            path = choices_path(tmp_path, "a")
            update_choices(tmp_path, "a", TUNED)
            theirs[path] = path.read_bytes()
    ours = choices_path(tmp_path, "a")
    assert ours not in theirs
    update_choices(tmp_path, "a", {"other": TunedConfig("", 1.0, 2.0)})
    assert read_choices(tmp_path, "a") == {"other": TunedConfig("", 1.0, 2.0)}
    assert {path: path.read_bytes() for path in theirs} == theirs


def test_stores_of_another_version_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("stof.fusion.records.store.VERSION", 99)
        path = Store(tmp_path, {}).path
    path.write_text("theirs", encoding="utf-8")
    Store(tmp_path, {}).update(CONTENTS)
    assert Store(tmp_path, {}).load() == CONTENTS
    assert path.read_text(encoding="utf-8") == "theirs"


def test_converters_that_fail_are_errors_of_the_file(tmp_path: Path) -> None:
    write_checked(tmp_path / "file", '{"version": 1, "value": "many"}')
    assert read_checked(tmp_path / "file", "version", 1, lambda data: data["value"]) == "many"
    for convert in (lambda data: data["other"], lambda data: int(data["value"]), lambda data: data["value"].x):
        with pytest.raises(ValueError, match=r"KeyError|invalid literal|AttributeError"):
            read_checked(tmp_path / "file", "version", 1, convert)


def test_plan_files_whose_header_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(PlanFileError, match="not a plan file"):
        stof.Plan.load(tmp_path / "plan")
