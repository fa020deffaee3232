"""A bounded cache of plans, and its keys."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.functions import forget_functions
from stof.plans.plan import Plan
from stof.runtime.locks import ForkSafeLock

# Calls by which plans are found; a plan serves calls of many batch sizes.
_MOST_CALLS = 1024


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
        self._keys: dict[Hashable, Hashable] = {}  # of plans, by call; cleared when a plan is dropped
        self._lock = ForkSafeLock()
        # Bytes of each plan when it was measured, the longest ago first. Plans that were used since may have grown.
        self._bytes: dict[Hashable, int] = {}
        self._total = 0  # of these
        self._used: set[Hashable] = set()
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
            self._used.add(key)
            if len(self._keys) >= _MOST_CALLS:
                self._keys.clear()
            self._keys[call] = key
            return plan

    def of_call(self, call: Hashable) -> Plan | None:
        """Return the plan that was stored or found for an equal call, None if it was dropped."""
        key = self._keys.get(call)
        return None if key is None else self.get(key, call)

    def put(self, key: Hashable, plan: Plan, call: Hashable = None) -> None:
        """Keep `plan`, and drop the least recently used ones beyond the bounds; the latest stays whatever its size.

        Measuring all plans takes longer than finding one. Measured are the new one, those that were found since the
        last call of this function, which may have grown, and of the others, whose users may hold them, one in turn.
        """
        with self._lock:
            if key in self._plans:
                return
            self._plans[key], self._keys[call] = plan, key
            due, self._used = {key, *self._used, *itertools.islice(self._bytes, 1)}, set()
            held_plans = [(one, self._plans[one]) for one in due if one in self._plans]
        sizes = {held_key: held.bytes() for held_key, held in held_plans}  # not under the lock
        with self._lock:
            for held_key, size in sizes.items():
                if held_key in self._plans:
                    self._total += size - self._bytes.pop(held_key, 0)
                    self._bytes[held_key] = size
            while len(self._plans) > 1 and (len(self._plans) > self._max_entries or self._total > self._max_bytes):
                self._total -= self._bytes.pop(self._plans.popitem(last=False)[0], 0)
                self._keys.clear()

    def clear(self) -> None:
        """Drop all plans, and what is known of mask functions."""
        forget_functions()
        with self._lock:
            self._plans.clear()
            self._keys.clear()
            self._bytes.clear()
            self._total = 0
            self._used.clear()
            self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        with self._lock:
            plans, hits, misses = list(self._plans.values()), self._hits, self._misses
        return CacheInfo(len(plans), sum(plan.bytes() for plan in plans), hits, misses)
