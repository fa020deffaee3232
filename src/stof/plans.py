"""Plans: a mask compiled for its lengths, ready to run; and the bounded cache of them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import DeviceError
from stof.layout import Layout, LayoutConfig, LayoutStatistics, build_layout, statistics
from stof.layout.io import load_layout, save_layout
from stof.masks import Mask
from stof.masks.base import check_sizes
from stof.selection import IMPLEMENTATIONS, PreparedLayout, default_config, default_implementation, refined_config


class Plan:
    """A mask compiled for one `q_len` and `kv_len` on one device. Make it with `stof.plan`, reuse it freely.

    Attributes:
        layout: the two-level layout.
        mask_text: repr of the mask it was made from.
    """

    def __init__(self, layout: Layout, mask_text: str) -> None:
        self.layout = layout
        self.mask_text = mask_text
        self.q_len = layout.q_len
        self.kv_len = layout.kv_len
        self.mask_batch = layout.mask_batch
        self.mask_heads = layout.mask_heads
        self.device = layout.device
        self.permuted_rows = layout.row_order is not None
        self._prepared: dict[str, PreparedLayout] = {}
        # Prepared now, not at the first call: compiled code must find it ready.
        self.prepared(default_implementation(self.device))

    def prepared(self, implementation: str) -> PreparedLayout:
        """The layout in the form `implementation` reads; computed once."""
        found = self._prepared.get(implementation)
        if found is None:
            found = PreparedLayout(implementation, *IMPLEMENTATIONS[implementation].prepare(self.layout))
            self._prepared[implementation] = found
        return found

    def statistics(self) -> LayoutStatistics:
        """Density, computed/needed, tiles by kind, heaviest row block, bytes."""
        return statistics(self.layout)

    def bytes(self) -> int:
        """Memory of the layout and everything prepared from it."""
        tensors = [*self.layout.tensors().values()]
        for prepared in list(self._prepared.values()):  # another thread may add one
            tensors += prepared.tensors
        return sum(t.numel() * t.element_size() for t in tensors)

    def to_dense(self) -> Tensor:
        """Bool `[mask_batch, mask_heads, q_len, kv_len]`."""
        return self.layout.to_dense()

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        return Plan(self.layout.to(device), self.mask_text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to one safetensors file, atomically."""
        save_layout(self.layout, path, {"mask": self.mask_text})

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Plan:
        """Read a saved plan; a file that does not validate raises `PlanFileError`."""
        layout, extra = load_layout(path, device)
        return Plan(layout, extra.get("mask", ""))

    def __repr__(self) -> str:
        text = self.mask_text if len(self.mask_text) <= 80 else self.mask_text[:77] + "..."
        return (
            f"Plan({text}, q_len={self.q_len}, kv_len={self.kv_len}, tiles={self.layout.tiles}, "
            f"device={str(self.device)!r})"
        )


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
        self._lock = threading.Lock()
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
        """Keep `plan` unless it alone exceeds the bound."""
        if plan.bytes() > self._max_bytes:
            return
        with self._lock:
            if key in self._plans:
                return
            self._plans[key] = plan
            # Measured anew: plans grow when another implementation prepares them.
            sizes = {key: held.bytes() for key, held in self._plans.items()}
            total = sum(sizes.values())
            while len(self._plans) > self._max_entries or total > self._max_bytes:
                dropped, _ = self._plans.popitem(last=False)
                total -= sizes[dropped]

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        with self._lock:
            size = sum(plan.bytes() for plan in self._plans.values())
            return CacheInfo(len(self._plans), size, self._hits, self._misses)


plan_cache = PlanCache(max_entries=128, max_bytes=2**28)


def make_plan(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    heads: int,
    device: torch.device,
    config: LayoutConfig | None,
    row_order: Tensor | None,
) -> Plan:
    """Build, or find in the cache when the mask is a value and rows keep their order."""
    if device.type == "meta":
        raise DeviceError("a plan needs a device that holds data, got meta; give the device the calls will run on")
    check_sizes(batch, heads)

    def built(wanted: LayoutConfig) -> Layout:
        return build_layout(mask, q_len, kv_len, wanted, batch=batch, heads=heads, device=device, row_order=row_order)

    key: Hashable = None
    versions = mask.versions
    if versions is not None and row_order is None:
        # The sizes matter only to masks that must be asked whether they depend on them.
        sizes = (batch, heads) if mask.binds_late else mask.dims(batch, heads)
        key = (mask.key, versions, q_len, kv_len, sizes, str(device), config)
        found = plan_cache.get(key)
        if found is not None:
            return found
    layout = built(default_config(device) if config is None else config)
    if config is None:
        better = refined_config(layout)
        layout = layout if better == layout.config else built(better)
    plan = Plan(layout, repr(mask))
    if key is not None:
        plan_cache.put(key, plan)
    return plan
