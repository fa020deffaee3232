"""A bounded cache of plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from stof.masks.functions import forget_functions
from stof.plans.plan import Plan
from stof.runtime.locks import ForkSafeLock


@dataclass(frozen=True)
class CacheInfo:
    """State of the plan cache: entries, their bytes, and hits and misses so far."""

    entries: int
    bytes: int
    hits: int
    misses: int


class PlanCache:
    """Least recently used plans, bounded in number and in bytes; safe to use from several threads."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._lock = ForkSafeLock()
        self._hits = self._misses = 0

    def get(self, key: Hashable) -> Plan | None:
        with self._lock:
            found = self._plans.get(key)
            if found is None:
                self._misses += 1
                return None
            self._hits += 1
            self._plans.move_to_end(key)
            return found

    def put(self, key: Hashable, plan: Plan) -> None:
        """Keep `plan`, and drop the least recently used ones beyond the bounds; the latest stays whatever its size."""
        with self._lock:
            if key in self._plans:
                return
            self._plans[key] = plan
            while len(self._plans) > self._max_entries:
                self._plans.popitem(last=False)
        # Plans grow when another implementation prepares them, so all are measured again, but not under the lock.
        total = 0
        with self._lock:
            held_plans = list(self._plans.items())
        for held_key, held in reversed(held_plans):
            total += held.bytes()
            if total > self._max_bytes and held is not plan:
                with self._lock:
                    self._plans.pop(held_key, None)

    def clear(self) -> None:
        """Drop all plans, and what is known of mask functions."""
        forget_functions()
        with self._lock:
            self._plans.clear()
            self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        with self._lock:
            plans, hits, misses = list(self._plans.values()), self._hits, self._misses
        return CacheInfo(len(plans), sum(plan.bytes() for plan in plans), hits, misses)
