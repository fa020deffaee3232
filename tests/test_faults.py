"""Forks beside threads, users without rights or a home: nothing hangs, and errors say what is wrong."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stof
from stof import masks
from stof.plans.cache import PlanCache
from stof.plans.make import plan_cache
from stof.runtime import files
from stof.runtime.locks import ForkSafeLock
from stof.selection import CallSpec, failures
from stof.selection.kernel_choice import KernelChoice

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
            failures.add(KernelChoice("reference"), call, CPU, "for this test")

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

    when_grown: Any
    is_filled = False

    def __init__(self, size: int, cache: PlanCache) -> None:
        self.size, self.cache = size, cache

    def bytes(self) -> int:
        lock = self.cache._lock._lock
        assert lock.acquire(blocking=False), "measured under the lock"
        lock.release()
        return self.size


def test_plans_that_grow_count_with_their_new_size_and_are_measured_without_the_lock() -> None:
    cache: PlanCache = PlanCache(max_entries=4, max_bytes=10)
    plans = [Sized(2, cache) for _ in range(3)]
    for n, plan in enumerate(plans):
        cache.put(n, plan)
    assert (cache.info().entries, cache.info().bytes) == (3, 6)
    plans[2].size = 7
    plans[2].when_grown()
    cache.put(3, Sized(2, cache))
    assert [*cache._plans] == [2, 3], "the least recently used go first"
    assert cache.info().bytes == 9
    cache.put(4, Sized(11, cache))
    assert [*cache._plans] == [4], "the latest stays"
    for n in range(5, 10):
        cache.put(n, Sized(0, cache))
    assert len(cache._plans) == 4


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


@pytest.mark.slow
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
