"""Plans that learn the batch and heads of their calls from the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.kernels.implementation import BoundCall
from stof.layout import Layout
from stof.masks import Mask
from stof.plans.calls import CallSizes, check_rows
from stof.plans.plan import Plan
from stof.plans.used_masks import present


class UnsizedPlan(Plan):
    """A plan whose mask depends on the batch entry or the head, and which was given no sizes: calls tell them.

    Each pair of sizes has a plan of its own, built at the first call that has them.
    """

    def __init__(
        self,
        mask: Mask,
        lengths: tuple[int, int],
        device: torch.device,
        call_sizes: CallSizes,
        make: Callable[..., Plan],
    ) -> None:
        self._mask, self._make = mask, make
        self._plans: dict[tuple[int, int], Plan] = {}
        super().__init__(repr(mask), lengths, (0, 0), device, call_sizes=call_sizes)

    @property
    def mask(self) -> Mask:
        return self._mask

    @property
    def layout(self) -> Layout:
        raise ArgumentError(
            "the mask depends on the batch entry or the head, and this plan was not told how many there are, so it has "
            "no layout of its own to show, save, move or compare; give batch= and heads= to stof.plan"
        )

    def for_call(self, q: Tensor, k: Tensor) -> Plan:
        self.check_call(q, k)
        sizes = (q.shape[0], q.shape[1])
        plan = self._plans.get(sizes)
        if plan is None:
            self._check_unchanged()
            plan = self._plans[sizes] = self._make(self._mask, self.q_len, self.kv_len, batch=sizes[0], heads=sizes[1])
        return plan

    def find_call(self, *arguments: Any) -> BoundCall | None:
        q = arguments[0]
        if q.is_nested or q.ndim < 2:
            return None  # the checks have the message
        plan = self._plans.get((q.shape[0], q.shape[1]))
        return None if plan is None else plan.find_call(*arguments)

    def extended(self, rows: int, mask: Mask | None = None) -> Plan:
        check_rows(rows)
        if mask is None:
            self._check_unchanged()
            mask = self._mask
        else:
            mask = present(mask, self.device)
        lengths = (self.q_len + rows, self.kv_len + rows)
        return UnsizedPlan(mask, lengths, self.device, (self.batch, self.heads), self._make)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__
