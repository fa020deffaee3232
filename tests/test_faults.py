"""Forks, threads, damaged files, permissions, symbolic links: nothing hangs, is lost, or is misread in silence."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stof
from stof import files, masks
from stof.bench.results import read_rows, write_json
from stof.caching import PlanCache
from stof.errors import ArgumentError, LockFileError, PlanFileError
from stof.files import read_checked, read_json, write_atomically, write_checked
from stof.fusion.choices import Tuned, choices_path, read_choices, update_choices
from stof.fusion.lock import Lock, read_lock
from stof.fusion.store import Contents, Entry, Store
from stof.locks import ForkSafeLock
from stof.plans import plan_cache
from stof.selection import CallSpec, failures
from stof.selection.choice import Choice

SOURCE = Path(stof.__file__).parent
CPU = torch.device("cpu")


# Forks


def exit_code_of_child(work: Callable[[], object], patience_s: float = 30) -> int | None:
    """The exit code of a forked child that does some work; None for one that hangs, which is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def while_held(lock: Any, work: Callable[[], object]) -> int | None:
    """`exit_code_of_child` while another thread of the parent holds a lock."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        return exit_code_of_child(work)
    finally:
        release.set()
        thread.join()


def test_a_child_can_plan_while_another_thread_held_the_plan_cache() -> None:
    def work() -> None:
        stof.plan(masks.sliding_window(5), 48)
        assert plan_cache.info().entries > 0

    assert while_held(plan_cache._lock, work) == 0


def test_a_child_can_note_failures_while_another_thread_did() -> None:
    def work() -> None:
        call = CallSpec("cpu", torch.float32, head_dim=8, value_dim=8, heads=1, kv_heads=1, q_len=1, kv_len=1)
        with pytest.warns(RuntimeWarning, match="is left out"):
            failures.add(Choice("reference"), call, CPU, "for this test")

    assert while_held(failures._lock, work) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_locks_are_free_in_a_child_and_still_held_in_the_parent(reentrant: bool) -> None:
    lock = ForkSafeLock(reentrant=reentrant)

    def work() -> None:
        with lock:
            pass

    assert while_held(lock, work) == 0
    assert exit_code_of_child(work) == 0
    before = lock._lock
    with lock:
        assert lock._lock is before


def test_a_reentrant_lock_survives_a_fork_of_the_thread_that_holds_it() -> None:
    lock = ForkSafeLock(reentrant=True)

    def work() -> None:
        with lock:
            assert lock._lock is before

    with lock:
        before = lock._lock
        assert exit_code_of_child(work) == 0


def test_all_locks_of_the_package_survive_forks() -> None:
    plain = [
        path.name
        for path in SOURCE.rglob("*.py")
        if re.search(r"threading\.(R?Lock|Semaphore|BoundedSemaphore)\b", path.read_text(encoding="utf-8"))
    ]
    assert plain == ["locks.py"]


def test_forks_beside_a_thread_that_plans() -> None:
    stop = threading.Event()

    def plan_for_ever() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            stof.plan(masks.sliding_window(n % 300 + 1), 16)

    def work() -> None:
        stof.plan(masks.sliding_window(7), 16)
        stof.plan(masks.causal(), 17)

    work()  # a fork while another thread imports a module of PyTorch for the first time can hang in Python's own lock
    thread = threading.Thread(target=plan_for_ever)
    thread.start()
    try:
        assert [exit_code_of_child(work) for _ in range(20)] == [0] * 20
    finally:
        stop.set()
        thread.join()


class Sized:
    """A plan that takes some memory; asks whether the cache's lock is held while it is measured."""

    def __init__(self, size: int, cache: PlanCache[Sized]) -> None:
        self.size, self.cache = size, cache

    def bytes(self) -> int:
        lock = self.cache._lock._lock
        assert lock.acquire(blocking=False), "measured under the lock"
        lock.release()
        return self.size


def test_plans_that_grow_count_with_their_new_size_and_are_measured_without_the_lock() -> None:
    cache: PlanCache[Sized] = PlanCache(max_entries=4, max_bytes=10)
    plans = [Sized(2, cache) for _ in range(3)]
    for n, plan in enumerate(plans):
        cache.put(n, plan)
    assert (cache.info().entries, cache.info().bytes) == (3, 6)
    plans[2].size = 7
    cache.put(3, Sized(2, cache))
    assert [key for key, _ in cache.items()] == [2, 3], "the least recently used go first"
    assert cache.info().bytes == 9
    cache.put(4, Sized(11, cache))
    assert [key for key, _ in cache.items()] == [2, 3], "larger than the bound"
    for n in range(5, 10):
        cache.put(n, Sized(0, cache))
    assert len(cache.items()) == 4


# Writing


def parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == ".part"]


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "text": lambda path, n: write_atomically(path, f"{n}" * 5000),
    "plan": lambda path, n: stof.plan(masks.sliding_window(n % 7 + 1), 24).save(path),
    "results": lambda path, n: write_json(path, {"meta": {}, "rows": [n] * 1000}),
    "lock": lambda path, n: Lock(f"{n}").write(path),
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


# Users without rights or without a home


def as_nobody(work: Callable[[], object]) -> int | None:
    """`exit_code_of_child` of a user that the system does not know."""

    def child() -> None:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
        work()

    return exit_code_of_child(child)


needs_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="becomes another user")


@needs_root
def test_a_plan_that_may_not_be_read_says_so() -> None:
    def work() -> None:
        with pytest.raises(PermissionError, match=f"Permission denied: '{path}'"):
            stof.Plan.load(path)

    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` lies in a folder of this user
        Path(folder).chmod(0o755)
        path = Path(folder) / "plan"
        stof.plan(masks.causal(), 8).save(path)
        path.chmod(0o600)
        assert as_nobody(work) == 0


def test_what_cannot_be_read_is_not_called_a_broken_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    stof.plan(masks.causal(), 8).save(tmp_path / "plan")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        stof.Plan.load(tmp_path / "plan")


def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    files._warn_homeless.cache_clear()


def test_without_a_home_folder_optimize_warns_once_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    homeless(monkeypatch)
    model, x = torch.nn.Linear(8, 8).eval(), torch.randn(2, 8)
    torch.compiler.reset()
    fast = stof.optimize(model)
    with warnings.catch_warnings(record=True) as found, torch.inference_mode():
        warnings.simplefilter("always")
        for given in (x, x[:1]):
            torch.testing.assert_close(fast(given), model(given))
    assert len([one for one in found if "this user has no home folder" in str(one.message)]) == 1
    torch.compiler.reset()


def test_a_folder_that_is_named_needs_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    homeless(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "stof"  # a warning would be an error


@needs_root
def test_users_that_the_system_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with pytest.warns(UserWarning, match="nothing is remembered: this user has no home folder; set XDG_CACHE_HOME"):
            assert files.cache_folder() is None
        assert files.cache_folder() is None  # a second warning would be an error

    files._warn_homeless.cache_clear()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert as_nobody(work) == 0


# Damaged JSON

ODD = {
    "empty": "",
    "deep": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "list": "[]",
    "number": "3",
    "none": "null",
    "infinity": '{"version": 2, "stof_lock": 2, "choices": Infinity}',
    "huge number": f'{{"version": {"9" * 400}, "stof_lock": {"9" * 400}}}',
    "larger than Python reads": f'{{"version": {"9" * 5000}}}',
    "parts of wrong types": '{"version": 3, "stof_lock": 2, "choices": 1, "segments": []}',
    "half a character": '{"version": "\\ud800"}',
}
TUNED = {"linear 16x16x16 float16": Tuned("64x64x32,4w,3s", 12.5, 25.25)}
CONTENTS = Contents({"one": Entry({None: 3.5, ("linear", ""): 2.25}, 4)}, {"race": (1.5, 2.5)}, {"right": ""})


def lock_of() -> Lock:
    return Lock("here", {"stof": "1"}, {}, dict(TUNED))


@pytest.mark.parametrize("name", ODD)
def test_odd_json_is_ignored_with_a_warning_and_replaced(tmp_path: Path, name: str) -> None:
    store, path = Store(tmp_path, {}), choices_path(tmp_path, "a")
    for file in (store.path, path):
        file.write_text(ODD[name], encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.load() == Contents()
    with pytest.warns(UserWarning, match="is ignored"):
        assert read_choices(path) == {}
    with pytest.warns(UserWarning, match="is ignored"):
        store.update(CONTENTS)
    with pytest.warns(UserWarning, match="is ignored"):
        update_choices(path, "a", TUNED)
    assert store.load() == CONTENTS
    assert read_choices(path) == TUNED


@pytest.mark.parametrize("name", ODD)
def test_odd_json_is_no_lock_and_no_result(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_text(ODD[name], encoding="utf-8")
    with pytest.raises(LockFileError, match="not a usable lock file"):
        read_lock(path)
    with pytest.raises(ArgumentError, match="is no result"):
        read_rows(path, dict)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe{")
    with pytest.raises(LockFileError, match="UnicodeDecodeError"):
        read_lock(tmp_path / "file")


def test_every_digit_that_changes_is_noticed(tmp_path: Path) -> None:
    store, choices, lock = Store(tmp_path, {}), choices_path(tmp_path, "a"), tmp_path / "model.lock"
    store.update(CONTENTS)
    update_choices(choices, "a", TUNED)
    lock_of().write(lock)
    for path in (store.path, choices, lock):
        text = path.read_text(encoding="utf-8")
        for place in [match.start() for match in re.finditer(r"\d", text)]:
            path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :], encoding="utf-8")
            if path == lock:
                with pytest.raises(LockFileError, match=r"does not match its checksum|of version 3"):
                    read_lock(path)
            else:
                with pytest.warns(UserWarning, match=r"does not match its checksum|of version"):
                    assert (store.load() == Contents()) if path == store.path else (read_choices(path) == {})
        path.write_text(text, encoding="utf-8")
    assert (store.load(), read_choices(choices), read_lock(lock)) == (CONTENTS, TUNED, lock_of())


def test_the_checksum_is_of_values_not_of_their_layout(tmp_path: Path) -> None:
    lock_of().write(tmp_path / "lock")
    text = (tmp_path / "lock").read_text(encoding="utf-8")
    (tmp_path / "lock").write_text(json.dumps(json.loads(text), indent=7, sort_keys=True), encoding="utf-8")
    assert read_lock(tmp_path / "lock") == lock_of()
    assert text.count("\n") > 5, "a line for each entry, to be read and compared"


def test_damaged_locks_say_what_to_do(tmp_path: Path) -> None:
    lock_of().write(tmp_path / "lock")
    text = (tmp_path / "lock").read_text(encoding="utf-8").replace("12.5", "13.5")
    (tmp_path / "lock").write_text(text, encoding="utf-8")
    with pytest.raises(LockFileError, match=r"edited or damaged. Restore it .* `stof tune MODEL --lock FILE`"):
        read_lock(tmp_path / "lock")


def test_choices_of_another_version_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {}
    for version in (1, 3):
        with monkeypatch.context() as patched:
            patched.setattr("stof.fusion.choices.VERSION", version)
            path = choices_path(tmp_path, "a")
            update_choices(path, "a", TUNED)
            theirs[path] = path.read_bytes()
    ours = choices_path(tmp_path, "a")
    assert ours not in theirs
    update_choices(ours, "a", {"other": Tuned("", 1.0, 2.0)})
    assert read_choices(ours) == {"other": Tuned("", 1.0, 2.0)}
    assert {path: path.read_bytes() for path in theirs} == theirs


def test_stores_of_another_version_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("stof.fusion.store.VERSION", 99)
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
