"""Making plans: found in a bounded cache, or built."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError, DeviceError, MaskError, shown
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.base import check_lengths, check_sizes
from stof.plans.cache import PlanCache, plan_key
from stof.plans.plan import Plan
from stof.plans.unsized import UnsizedPlan
from stof.plans.used_masks import present
from stof.runtime.memory import refuse_capture
from stof.runtime.private import past_modes, tensors_have_no_values
from stof.selection import MaskGeometry

# Calls of cached plans that are part of CUDA graphs. Replays read their memory, and nothing tells when a graph has
# gone; the cache drops plans, and a plan calls of other shapes.
_IN_GRAPHS: set[Any] = set()

# Seconds beyond which planning is logged.
_SLOW = 2.0
_log = logging.getLogger(__name__)

plan_cache = PlanCache(max_entries=128, max_bytes=2**28)


@past_modes
def make_plan(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int | None,
    heads: int | None,
    device: torch.device,
    config: LayoutConfig | None,
    row_order: Tensor | None,
) -> Plan:
    """`make_sized_plan`, where sizes may be left to the mask, and, where it does not tell them either, to the calls."""
    check_lengths(q_len, kv_len)
    if config is not None and not isinstance(config, LayoutConfig):
        raise ArgumentError(f"config is a stof.LayoutConfig or None, got {shown(config)}")
    mask = present(mask, device)
    if batch is None and (mask.batch != 1 or not mask.depends_on_batch):
        batch = mask.batch
    if heads is None and (mask.heads != 1 or not mask.depends_on_heads):
        heads = mask.heads
    if batch is not None and heads is not None:
        return make_sized_plan(
            mask, q_len, kv_len, batch=batch, heads=heads, device=device, config=config, row_order=row_order
        )
    check_sizes(1 if batch is None else batch, 1 if heads is None else heads)
    _check_values()
    mask.check(q_len, kv_len)
    mask.dims(batch or 1, heads or 1)
    needed = (batch if mask.depends_on_batch else None, heads if mask.depends_on_heads else None)
    make = functools.partial(make_sized_plan, device=device, config=config, row_order=row_order)
    return UnsizedPlan(mask, (q_len, kv_len), device, needed, make)


def _check_values() -> None:
    if tensors_have_no_values():
        raise MaskError("a plan needs tensors with values; make it before FakeTensorMode")


def cached_plan(mask: Any, q: Tensor, k: Tensor) -> Plan | None:
    """Return the plan of a call under a mask that cannot change, if such a call was made before; a look-up alone."""
    try:
        if not mask.may_change:
            batch, heads, q_len, _ = q.shape
            return plan_cache.of_call((mask.key, batch, heads, q_len, k.shape[2], q.device))
    except (AttributeError, IndexError, RuntimeError, ValueError):
        pass  # no mask, no tensors, or without these sizes: the caller's checks say which
    return None


@past_modes
def make_sized_plan(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    heads: int,
    device: torch.device,
    config: LayoutConfig | None = None,
    row_order: Tensor | None = None,
) -> Plan:
    """A plan for calls of one batch and heads, from the cache where the mask is a value and rows keep their order."""
    if device.type == "meta":
        raise DeviceError("a plan needs a device that holds data, got meta; give the device the calls will run on")
    check_sizes(batch, heads)
    key: Hashable = None
    call = (mask.key, batch, heads, q_len, kv_len, device) if row_order is None and config is None else None
    mask = present(mask, device)
    if row_order is None:
        key = plan_key(mask, q_len, kv_len, batch, heads, device, config)
        plan = plan_cache.get(key, call)
        if plan is not None:
            return plan
    refuse_capture(device)
    _check_values()
    check_lengths(q_len, kv_len)
    mask.check(q_len, kv_len)
    geometry = MaskGeometry(mask, q_len, kv_len, batch=batch, heads=heads, device=device)
    started = time.perf_counter()
    plan = Plan.of_mask(geometry, config, row_order)
    seconds = time.perf_counter() - started
    if seconds > _SLOW:
        _log.warning(
            "planning %s for %d queries and %d keys took %.1f s; keep the plan for later calls (stof.plan), or save it",
            shown(mask), q_len, kv_len, seconds,
        )  # fmt: skip
    if key is not None:
        if "<" not in mask.key:
            plan.name_after(repr(key))
        plan._in_graphs = _IN_GRAPHS
        plan_cache.put(key, plan, call)
    return plan
