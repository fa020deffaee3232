"""Locks that a forked process can use."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ForkSafeLock:
    """A `threading.Lock` or `RLock` that is never left locked in a forked child.

    `os.fork` copies the calling thread alone. A lock that another thread held stays locked in the child, where nobody
    releases it, so it is replaced there. The other thread may have stopped between any two statements: code under the
    lock must leave what it guards consistent after each of them.
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make = threading.RLock if reentrant else threading.Lock
        self._lock = self._make()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replace the lock unless it is free, or a reentrant one that the calling thread holds."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = self._make()


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_renew_all)
