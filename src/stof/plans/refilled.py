"""Plans of bool tensors on a GPU that are given to calls directly: every call reads the tensor, as SDPA does.

Calls under tensors of one shape share a dynamic plan, which each of them refills on the device. Nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from stof.masks.tensors import dense_view
from stof.plans.cache import PlanCache
from stof.plans.dynamic import DynamicPlan
from stof.plans.make import plan_cache
from stof.runtime.locks import ForkSafeLock
from stof.runtime.memory import outside_graph_pool

refilled_plans = PlanCache(max_entries=16, max_bytes=2**28, parent=plan_cache)
_LOCK = ForkSafeLock(reentrant=True)


@contextmanager
def refilled_plan(keep: Tensor, q: Tensor, k: Tensor, *, fill: bool = True) -> Iterator[DynamicPlan]:
    """The plan of a call under a bool tensor on the call's GPU, which no other thread refills meanwhile.

    Args:
        keep: bool `[Sq | 1, Skv]` up to `[B | 1, H | 1, Sq | 1, Skv]`.
        q, k: of the call.
        fill: whether to read the tensor.

    Not for captures of CUDA graphs: replays would share the plan with calls outside of them.

    Raises:
        The errors of `masks.from_dense` and `stof.dynamic_plan`.
    """
    mask = dense_view(keep)
    key = (keep.shape, q.shape[:3], k.shape[2], q.device)
    with _LOCK:
        plan = refilled_plans.get(key)
        if plan is None:
            mask.check(q.shape[2], k.shape[2])
            sizes = (q.shape[2], k.shape[2]), (q.shape[0], q.shape[1])
            plan = outside_graph_pool(q.device, lambda: DynamicPlan(mask, *sizes, q.device, None))
            refilled_plans.put(key, plan)
        assert isinstance(plan, DynamicPlan)
        if fill:
            plan.update(keep)
        plan.forget_mask()
        yield plan
