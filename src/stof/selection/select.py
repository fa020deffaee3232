"""The choice for a call: the candidate with the least estimated time that can run, or an error with all reasons."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from stof.errors import UnsupportedError
from stof.layout.orders.search import GOOD_ENOUGH, WORTH
from stof.layout.survey import Survey
from stof.runtime.locks import ForkSafeLock
from stof.selection.capabilities import CallSpec
from stof.selection.cost_model import estimate, widening_us
from stof.selection.device_model import DeviceModel, load_model
from stof.selection.gpu_choices import (
    fits,
    geometries,
    gpu_choices,
    is_distinct,
    is_l2_bound,
    shared_memory_limit,
)
from stof.selection.implementations import IMPLEMENTATIONS
from stof.selection.kernel_choice import KernelChoice
from stof.selection.mask_geometry import Geometry
from stof.selection.resources import block_shared_bytes

if TYPE_CHECKING:
    from stof.selection.token_order import TokenOrder

# Why the layouts of a plan do not fit some choices, by `KernelChoice.layout_key`, as far as they were tried.
LayoutErrors = Mapping[Hashable, str]
NO_LAYOUT_ERRORS: LayoutErrors = {}


@dataclass(frozen=True)
class Candidate:
    """One way to run a call, weighed.

    Attributes:
        name: the implementation.
        refusals: why it cannot run; empty when it can.
        choice: how it would run; None when it cannot.
        estimate_us: GPU time by the cost model, None where there is none.
        constants_of: the device whose constants the estimate uses, where the call's own was never tuned; else "".
    """

    name: str
    refusals: tuple[str, ...]
    choice: KernelChoice | None = None
    estimate_us: float | None = None
    constants_of: str = ""

    def __str__(self) -> str:
        if self.refusals:
            return f"{self.name}: refuses ({'; '.join(self.refusals)})"
        cost = "no estimate" if self.estimate_us is None else f"{self.estimate_us:.1f} us estimated"
        if self.constants_of and self.estimate_us is not None:
            cost += f" with the constants of {self.constants_of} (stof tune --device measures this GPU; see stof info)"
        return f"{self.choice or self.name}: {cost}"


class Explanation(list[Candidate]):
    """Candidates of a call, best first; printed as a table.

    Attributes:
        token_order: an order of the tokens that computes less, None if none is known.
        serving: which choice runs the call, where it was made for an earlier mask of the same structure; else "".
    """

    def __init__(
        self, candidates: Iterable[Candidate] = (), token_order: TokenOrder | None = None, serving: str = ""
    ) -> None:
        super().__init__(candidates)
        self.token_order, self.serving = token_order, serving

    def __str__(self) -> str:
        rows = [("implementation", "estimate", "refuses")]
        for one in self:
            estimate = "-" if one.estimate_us is None else f"{one.estimate_us:.1f} us"
            rows.append((str(one.choice or one.name), estimate, "; ".join(one.refusals)))
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{name:<{first}}  {estimate:>{second}}  {why}".rstrip() for name, estimate, why in rows]
        for device in {one.constants_of for one in self if one.constants_of and one.estimate_us is not None}:
            lines.append(f"estimated with the constants of {device}; stof tune --device measures this GPU (stof info)")
        if self.serving:
            lines.append(self.serving)
        if self.token_order is not None:
            lines.append(str(self.token_order))
        return "\n".join(lines)

    __repr__ = __str__


class Failures:
    """Choices that did not compile or did not fit on a device; asked before a choice is tried again."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[object, ...], str] = {}
        self._lock = ForkSafeLock()

    def add(self, choice: KernelChoice, call: CallSpec, device: torch.device, reason: str) -> None:
        """Remember a failure, and warn of it the first time."""
        key = self._key(choice, call, device)
        with self._lock:
            if key in self._reasons:
                return
            self._reasons[key] = reason
        warnings.warn(f"stof: {choice} failed and is left out from now on: {reason}", RuntimeWarning, stacklevel=4)

    def reason(self, choice: KernelChoice, call: CallSpec, device: torch.device) -> str | None:
        return self._reasons.get(self._key(choice, call, device))

    def clear(self) -> None:
        with self._lock:
            self._reasons.clear()

    @staticmethod
    def _key(choice: KernelChoice, call: CallSpec, device: torch.device) -> tuple[object, ...]:
        kernel = choice.kernel and replace(choice.kernel, split_tiles=min(1, choice.kernel.split_tiles), side=0)
        options = (call.has_bias, call.bias_itemsize, call.has_softcap, call.has_sinks, call.has_dropout)
        return (str(device), choice.implementation, choice.layout, kernel, call.dtype, call.head_dim, options)


failures = Failures()


def candidates(
    call: CallSpec,
    device: torch.device | None = None,
    geometry: Geometry | None = None,
    model: DeviceModel | None = None,
    layout_errors: LayoutErrors = NO_LAYOUT_ERRORS,
) -> list[Candidate]:
    """Every way to run a call, fastest first, then those without an estimate in order of preference, then refusals.

    8-bit tensors may be widened for implementations that do not take them.

    Args:
        call: what is computed.
        device: where; without one, or without a geometry, each implementation is one candidate without an estimate.
        geometry: the mask at these lengths.
        model: of a GPU that need not be here; default that of the device.
        layout_errors: choices whose layouts are known not to fit.
    """
    wide = call.widened()
    if wide is None:
        return _candidates(call, device, geometry, model, layout_errors)
    on_gpu = device is not None and device.type == "cuda"
    before_us = widening_us(call, _model_and_limit(device, model)[0]) if device is not None and on_gpu else 0.0
    weighed = [c for c in _candidates(call, device, geometry, model, layout_errors) if takes(c.name, call)]
    for candidate in _candidates(wide, device, geometry, model, layout_errors):
        if not takes(candidate.name, call):
            choice = candidate.choice and replace(candidate.choice, widened=True)
            us = None if candidate.estimate_us is None else candidate.estimate_us + before_us
            weighed.append(replace(candidate, choice=choice, estimate_us=us))
    return _ranked([c for c in weighed if not c.refusals]) + [c for c in weighed if c.refusals]


def takes(name: str, call: CallSpec) -> bool:
    """Whether an implementation takes tensors of a call's dtype as they are."""
    return call.dtype in IMPLEMENTATIONS[name].capabilities.dtypes


def refusals(name: str, call: CallSpec) -> list[str]:
    """Every reason an implementation cannot run a call, whose 8-bit tensors are widened for it if need be."""
    wide = None if takes(name, call) else call.widened()
    return IMPLEMENTATIONS[name].capabilities.refusals(wide or call)


def _ranked(runs: list[Candidate]) -> list[Candidate]:
    """Fastest first, then those without an estimate in order of preference."""
    ranks = {name: rank for rank, name in enumerate(IMPLEMENTATIONS)}
    return sorted(runs, key=lambda c: (c.estimate_us is None, c.estimate_us or 0.0, ranks[c.name]))


def _candidates(
    call: CallSpec,
    device: torch.device | None,
    geometry: Geometry | None,
    model: DeviceModel | None,
    layout_errors: LayoutErrors,
) -> list[Candidate]:
    """`candidates` with tensors as they are."""
    runs: list[Candidate] = []
    refused: list[Candidate] = []
    modelled: dict[str, list[KernelChoice]] = {}
    for name, impl in IMPLEMENTATIONS.items():
        refusals = tuple(impl.capabilities.refusals(call))
        if refusals:
            refused.append(Candidate(name, refusals))
        elif device is None or geometry is None or impl.gpu is None:
            failed = None if device is None else failures.reason(KernelChoice(name), call, device)
            if failed is None:
                runs.append(Candidate(name, (), KernelChoice(name)))
            else:
                refused.append(Candidate(name, (failed,), KernelChoice(name)))
        else:
            modelled[name] = gpu_choices(call, geometry, name)
            if not modelled[name]:
                refused.append(Candidate(name, ("the plan's layout has tiles it does not take",)))
    if modelled and device is not None and geometry is not None:
        on_gpu = _OnGpu(call, device, geometry, layout_errors, *_model_and_limit(device, model))
        good, bad, waste = on_gpu.weigh([choice for choices in modelled.values() for choice in choices])
        order = geometry.found_order() if _search_pays(waste) else None
        if order is not None:
            more, worse, _ = on_gpu.weigh([c for name in modelled for c in gpu_choices(call, geometry, name, order)])
            good, bad = good + more, bad + worse
        runs, refused = runs + good, refused + bad
    return _ranked(runs) + refused


def weighed(
    choices: list[KernelChoice],
    call: CallSpec,
    device: torch.device,
    geometry: Geometry,
    layout_errors: LayoutErrors,
) -> list[Candidate]:
    """Candidates for some choices and no others, fastest first, then those that cannot run."""
    on_gpu = _OnGpu(call, device, geometry, layout_errors, *_model_and_limit(device, None))
    counted = geometry.survey(geometries(choices), None)
    good: list[Candidate] = []
    bad: list[Candidate] = []
    for choice in choices:
        error = on_gpu.error(choice)
        if error is not None:
            bad.append(Candidate(choice.implementation, (error,), choice))
        elif is_distinct(choice, counted, simpler=False):
            good.append(on_gpu.candidate(choice, counted))
    return sorted(good, key=lambda c: (c.estimate_us is None, c.estimate_us or 0.0)) + bad


def _model_and_limit(device: torch.device, model: DeviceModel | None) -> tuple[DeviceModel, int]:
    """The cost model, and the bytes of shared memory that a thread block may have."""
    if model is None:
        return device_model(device), shared_memory_limit(device)
    return model, block_shared_bytes(model.shared_bytes)


@dataclass(frozen=True)
class _OnGpu:
    """One call under one mask on one GPU, for which choices are weighed; `limit` is the shared memory of a block."""

    call: CallSpec
    device: torch.device
    geometry: Geometry
    layout_errors: LayoutErrors
    model: DeviceModel
    limit: int

    def error(self, choice: KernelChoice) -> str | None:
        """Why a choice cannot run although its implementation's capabilities allow it; None if it can."""
        reason = failures.reason(choice, self.call, self.device) or self.layout_errors.get(choice.layout_key)
        if reason is None and not fits(choice, self.call, self.limit):
            reason = f"needs more shared memory than the {self.limit} bytes of this device"
        return reason

    def _fits_as_it_is(self, choice: KernelChoice) -> bool:
        """Whether the choice fits without a copy of the keys, as far as it was tried."""
        assert choice.kernel is not None
        return replace(choice, kernel=replace(choice.kernel, zero_unseen=False)).layout_key not in self.layout_errors

    def candidate(self, choice: KernelChoice, counted: Survey) -> Candidate:
        """A choice that can run, with its estimate."""
        constants_of = self.model.device if self.model.stands_in_for else ""
        us = estimate(choice, self.call, counted, self.model)
        return Candidate(choice.implementation, (), choice, us, constants_of)

    def weigh(self, choices: list[KernelChoice]) -> tuple[list[Candidate], list[Candidate], dict[str | None, float]]:
        """Candidates the cost model knows, those that cannot run here, and the waste of each row order."""
        good: list[Candidate] = []
        bad: list[Candidate] = []
        starved: list[tuple[KernelChoice, Survey]] = []
        waste: dict[str | None, float] = {}
        for order in dict.fromkeys(choice.row_order for choice in choices):
            ordered = [choice for choice in choices if choice.row_order == order]
            counted = self.geometry.survey(geometries(ordered), order)
            waste[order] = counted.waste
            for choice in ordered:
                if choice.kernel is not None and choice.kernel.zero_unseen and self._fits_as_it_is(choice):
                    continue
                error = self.error(choice)
                simpler = choice if choice.layout is None else replace(choice, layout=choice.layout.contiguous())
                if error is not None:
                    bad.append(Candidate(choice.implementation, (error,), choice))
                elif is_distinct(choice, counted, simpler.layout_key not in self.layout_errors):
                    if is_l2_bound(choice, self.call, counted):
                        starved.append((choice, counted))
                    else:
                        good.append(self.candidate(choice, counted))
        # Wider tiles serve instead, where there are any: a plan with a layout of its own may have none.
        served = {candidate.name for candidate in good}
        good += [self.candidate(*starving) for starving in starved if starving[0].implementation not in served]
        return good, bad, waste


def _search_pays(waste: dict[str | None, float]) -> bool:
    """Whether the rows' own order wastes much, and no order that the mask names helps."""
    usual = waste.get(None, 0.0)
    return usual > GOOD_ENOUGH and min(waste.values()) > WORTH * usual


def device_model(device: torch.device) -> DeviceModel:
    """The cost model of a device, with its own number of multiprocessors where it was never tuned, which is logged."""
    properties = torch.cuda.get_device_properties(device)
    model = load_model(properties.name)
    if model.stands_in_for:
        _log_once(model.notice())
    return replace(
        model,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_multiprocessor,
    )


@functools.cache
def _log_once(notice: str) -> None:
    logging.getLogger("stof").warning("%s", notice)


def choose(
    call: CallSpec,
    device: torch.device | None = None,
    geometry: Geometry | None = None,
    implementation: str | None = None,
    layout_errors: LayoutErrors = NO_LAYOUT_ERRORS,
) -> KernelChoice:
    """The choice to run, of one implementation when it is named; arguments as of `candidates`.

    Raises:
        UnsupportedError: none can; lists every reason of every implementation.
    """
    if device is None or device.type != "cuda":
        # One choice each: no need to weigh.
        for name in IMPLEMENTATIONS:
            wide = call if takes(name, call) else call.widened() or call
            failed = device is not None and failures.reason(KernelChoice(name), wide, device) is not None
            if implementation in (None, name) and not failed and not refusals(name, call):
                return KernelChoice(name, widened=wide is not call)
    return first_of(candidates(call, device, geometry, layout_errors=layout_errors), call, implementation)


def first_of(ranked: list[Candidate], call: CallSpec, implementation: str | None = None) -> KernelChoice:
    """The choice of the first candidate that can run, of one implementation when it is named.

    Raises:
        UnsupportedError: none can; lists every reason of every implementation.
    """
    for candidate in ranked:
        if not candidate.refusals and implementation in (None, candidate.name):
            return candidate.choice or KernelChoice(candidate.name)
    reasons: dict[str, tuple[str, ...]] = {}
    for candidate in ranked:
        if implementation in (None, candidate.name):
            reasons[candidate.name] = reasons.get(candidate.name, ()) + candidate.refusals
    raise UnsupportedError(f"no implementation can run this call ({call})", reasons)


def default_implementation(device: torch.device) -> str:
    """The implementation most calls on this device get, which plans prepare for ahead of time."""
    call = CallSpec(device.type, torch.float32, head_dim=64, value_dim=64, heads=1, kv_heads=1, q_len=128, kv_len=128)
    return choose(call).implementation
