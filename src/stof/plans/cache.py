"""A bounded cache of plans, and its keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch

from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.functions import forget_functions
from stof.plans.plan import Plan
from stof.runtime.locks import ForkSafeLock

# Calls by which plans are found; a plan serves calls of many batch sizes.
_MOST_CALLS = 1024
# Plans that are small and cheap to make again, because a GPU fills their lists: they are measured by `info` alone.
_MOST_FILLED = 32


def plan_key(
    mask: Mask, q_len: int, kv_len: int, batch: int, heads: int, device: torch.device, config: LayoutConfig | None
) -> Hashable:
    """The cache key of a plan whose rows keep their order: its mask's key, lengths, sizes and device."""
    # The sizes matter only to masks that must be asked whether they depend on them.
    sizes = (batch, heads) if mask.depends_on_sizes else mask.dims(batch, heads)
    return (mask.key, q_len, kv_len, sizes, str(device), config)


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
        self._keys: dict[Hashable, Hashable] = {}  # of plans, by call
        self._calls: dict[Hashable, set[Hashable]] = {}  # calls in `_keys`, by plan
        self._sizes: dict[Hashable, int] = {}  # bytes of plans, as last measured
        self._grown: set[Hashable] = set()  # keys of plans that grew since
        self._lock = ForkSafeLock()
        self._hits = self._misses = 0

    def get(self, key: Hashable, call: Hashable = None) -> Plan | None:
        """Return the plan with this key, which `of_call` then finds by `call` too."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                self._misses += 1
                return None
            self._hits += 1
            self._plans.move_to_end(key)
            self._find_by(call, key)
            return plan

    def _find_by(self, call: Hashable, key: Hashable) -> None:
        """Let `of_call` find a plan by a call."""
        if self._keys.get(call) == key:
            return
        if len(self._keys) >= _MOST_CALLS:
            self._keys.clear()
            self._calls.clear()
        self._keys[call] = key
        self._calls.setdefault(key, set()).add(call)

    def of_call(self, call: Hashable) -> Plan | None:
        """Return the plan that was stored or found for an equal call, None if it was dropped."""
        key = self._keys.get(call)
        return None if key is None else self.get(key, call)

    def put(self, key: Hashable, plan: Plan, call: Hashable = None) -> None:
        """Keep `plan`, and drop the least recently used ones beyond the bounds; the latest stays whatever its size."""
        with self._lock:
            if key in self._plans:
                return
            self._plans[key] = plan
            self._find_by(call, key)
            plan.when_grown = partial(self._grown.add, key)
            plan.when_grown()
            while len(self._plans) > self._max_entries:
                self._drop(next(iter(self._plans)))
            filled = [key for key, one in self._plans.items() if one.is_filled]
            for key in filled[: max(0, len(filled) - _MOST_FILLED)]:
                self._drop(key)
        self._measure(also_filled=False)
        with self._lock:
            while sum(self._sizes.values()) > self._max_bytes and len(self._plans) > 1:
                self._drop(next(iter(self._plans)))

    def _drop(self, key: Hashable) -> None:
        del self._plans[key]
        self._sizes.pop(key, None)
        self._grown.discard(key)
        for call in self._calls.pop(key, ()):
            if self._keys.get(call) == key:
                del self._keys[call]

    def _measure(self, also_filled: bool = True) -> None:
        """Measure the plans that grew, when another implementation prepared them, say; not under the lock."""
        with self._lock:
            # Another thread may add a key at any time.
            keys = [
                key
                for key in tuple(self._grown)
                if also_filled or key not in self._plans or not self._plans[key].is_filled
            ]
            self._grown.difference_update(keys)
            grown = [(key, self._plans[key]) for key in keys if key in self._plans]
        for key, plan in grown:
            size = plan.bytes()
            with self._lock:
                if self._plans.get(key) is plan:
                    self._sizes[key] = size

    def clear(self) -> None:
        """Drop all plans, and what is known of mask functions."""
        forget_functions()
        with self._lock:
            self._sizes.clear()
            self._plans.clear()
            self._keys.clear()
            self._calls.clear()
            self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        self._measure()
        with self._lock:
            return CacheInfo(len(self._plans), sum(self._sizes.values()), self._hits, self._misses)
