"""What a plan holds for backward passes: layouts of the mask and of the transposed mask, and bound calls."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import Tensor

from stof.errors import KernelError, UnfitLayoutError, UnsupportedError
from stof.kernels.implementation import BackwardCall, tensors_of
from stof.layout import Layout, LayoutConfig
from stof.masks import Mask
from stof.masks.tensors import DenseMask
from stof.plans.filled import filled_gradients, is_fillable_backward, keep_tiling, kept_decision, kept_tiling
from stof.plans.kept_choices import kept_by_structure, structure_key
from stof.plans.plan import Plan
from stof.runtime.memory import made_for_calls, tensors_on_host
from stof.selection import IMPLEMENTATIONS, CallSpec, MaskGeometry
from stof.selection.backward_tilings import BackwardTiling

# Bound calls that one plan stores.
_MOST_CALLS = 64


class PlanGradients:
    """Backward passes of one plan: everything is built when a backward pass first needs it.

    Attributes:
        calls: bound calls by what they are bound to.
    """

    def __init__(self, plan: Plan) -> None:
        # The plan holds this object: without a cycle it dies, and frees its memory on a GPU, with its last reference.
        self._plan: Plan = weakref.proxy(plan)
        self._layouts: dict[tuple[tuple[LayoutConfig, str | None], bool], Layout] = {}
        self._prepared: dict[tuple[str, BackwardTiling], Any] = {}
        self._failed: dict[tuple[str, BackwardTiling], str] = {}
        self._geometries: dict[bool, MaskGeometry] = {}
        self.calls: dict[Hashable, BackwardCall] = {}

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are held: layouts, and what was prepared from them."""
        held = [tensor for layout in list(self._layouts.values()) for tensor in layout.tensors().values()]
        return held + [tensor for prepared in list(self._prepared.values()) for tensor in tensors_of(prepared)]

    def choices(self, call: CallSpec) -> list[tuple[str, BackwardTiling]]:
        """Return how the gradients of a call can be computed, best first, by the first implementation that has a way.

        Raises:
            UnsupportedError: there is none.
        """
        reasons = {}
        for name, implementation in IMPLEMENTATIONS.items():
            if implementation.backward is None:
                continue
            refusals = implementation.backward.capabilities.refusals(call)
            if refusals:
                reasons[name] = refusals
                continue
            choices = [(name, tiling) for tiling in self._tilings(name, call)]
            usable = [choice for choice in choices if choice not in self._failed]
            if usable:
                return usable
            reasons[name] = [self._failed[choice] for choice in choices] or ["other kernels are estimated faster"]
        raise UnsupportedError("no implementation can compute the gradients of this call", reasons)

    def _tilings(self, name: str, call: CallSpec) -> tuple[BackwardTiling, ...]:
        """Return the tiling of an earlier mask of the same structure, or else all by surveying this one."""
        plan, backward = self._plan, IMPLEMENTATIONS[name].backward
        assert backward is not None
        keeps = plan.device.type == "cuda" and backward.keeps_tilings
        if not keeps or plan.mask is None or plan.fixed is not None or self._failed:
            return backward.tilings(call, self._geometry)
        plan.mask.refuse_changed()
        key = structure_key(self._geometry(False), call, name)
        kept = None if key is None else kept_by_structure.of(key)
        if kept is not None:
            find = partial(kept_tiling, kept, call, self._geometry, plan.mask_text)
            if backward.one_decision:
                find = partial(kept_decision, kept, self._geometry)
            serves = made_for_calls(plan.device, find)
            if serves is not None:
                if serves.tiling is not None and serves.prepared is not None:
                    self._prepared[name, serves.tiling] = serves.prepared
                    plan.note_growth()
                return () if serves.tiling is None else (serves.tiling,)
        tilings = backward.tilings(call, self._geometry)
        if kept is not None and backward.one_decision:
            kept.keep(self._geometry(False).statistics, tilings[0] if tilings else None, plan.mask_text)
            try:
                for tiling in tilings:
                    self.prepared(name, tiling)
            except UnfitLayoutError:  # other masks of the structure may fit
                return ()
        elif kept is not None:
            keep_tiling(kept, call, self._geometry, tilings[0], plan.mask_text)
            geometry = self._geometry(False)
            is_new = (name, tilings[0]) not in self._prepared
            if is_new and geometry.is_counted_on_device and is_fillable_backward(tilings[0]):
                # The kernels that fill are those of later masks: fewer are compiled than for layouts.
                fill = partial(filled_gradients, self._geometry, tilings[0], both_kinds=True, device=geometry.device)
                prepared = made_for_calls(plan.device, fill)
                if prepared is not None:
                    self._prepared[name, tilings[0]] = prepared
                    plan.note_growth()
        return tilings

    def prepared(self, name: str, tiling: BackwardTiling) -> Any:
        """Return the layouts of a choice in the form that its kernels read; computed once."""
        key = (name, tiling)
        if key not in self._prepared:
            self._prepared[key] = made_for_calls(self._plan.device, partial(self._prepare, name, tiling))
            self._plan.note_growth()
        return self._prepared[key]

    def reject(self, name: str, tiling: BackwardTiling, error: KernelError) -> None:
        """Exclude a choice that failed on this device, or with these layouts, from later calls."""
        self._failed[name, tiling] = str(error)
        if not isinstance(error, UnfitLayoutError):  # the layouts of other masks may fit
            kept_by_structure.drop(tiling)

    def store(self, key: Hashable, call: BackwardCall) -> None:
        """Store a bound call under a key that holds all it is bound to."""
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
        self.calls[key] = call

    def _prepare(self, name: str, tiling: BackwardTiling) -> Any:
        backward = IMPLEMENTATIONS[name].backward
        assert backward is not None
        with tensors_on_host():
            return backward.prepare(self._layout_of, tiling)

    def _layout_of(self, chosen: tuple[LayoutConfig, str | None] | None, transposed: bool = False) -> Layout:
        if chosen is None:
            return self._plan.call_layout
        key = (chosen, transposed)
        if key not in self._layouts:
            if self._plan.mask is not None:
                self._plan.mask.refuse_changed()
            self._layouts[key] = self._geometry(transposed).build(*chosen)
            self._plan.is_filled = False
            self._plan.note_growth()
        return self._layouts[key]

    def _geometry(self, swap: bool) -> MaskGeometry:
        """The plan's mask, or its transpose; of a plan without a mask, which was read from a file, its layout's."""
        plan = self._plan
        if swap not in self._geometries:
            geometry = plan.mask_geometry
            if geometry is None:
                mask: Mask = DenseMask(plan.to_dense(), copied=True)
                sizes = {"batch": plan.mask_batch, "heads": plan.mask_heads}
                geometry = MaskGeometry(mask, plan.q_len, plan.kv_len, device=plan.device, **sizes)
            self._geometries |= {False: geometry, True: geometry.transposed()}
        return self._geometries[swap]


def gradients_of(plan: Plan) -> PlanGradients:
    """Return what a plan holds for backward passes."""
    if plan.gradients is None:
        plan.gradients = PlanGradients(plan)
    gradients: PlanGradients = plan.gradients
    return gradients
