"""Plans: a mask compiled for its lengths, ready to run; and the bounded cache of them."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stof.errors import (
    ArgumentError,
    DeviceError,
    KernelError,
    MaskError,
    PlanFileError,
    PlanMismatchError,
    UnfitLayoutError,
    shown,
)
from stof.kernels.implementation import BoundCall, tensors_of
from stof.layout import Layout, LayoutConfig, LayoutStatistics, build_layout, statistics
from stof.layout.extend import extend_layout
from stof.layout.head_mask import HeadMask
from stof.layout.io import load_layout, save_layout
from stof.layout.limits import allocator_errors, check_tiles
from stof.layout.survey import Survey, survey_of_layout
from stof.masks import Mask
from stof.masks.base import check_lengths, check_sizes
from stof.plans.cache import PlanCache
from stof.runtime.cpu_default import tensors_on_host
from stof.runtime.memory import capturing, lasting, refuse_capture
from stof.runtime.private import is_plain
from stof.selection import (
    IMPLEMENTATIONS,
    CallSpec,
    Candidate,
    KernelChoice,
    MaskGeometry,
    candidates,
    choose,
    default_config,
    default_implementation,
    failures,
    own_layout,
)
from stof.validation import usable_device

# How calls run: for each, and for an implementation that was named, what was chosen.
Decisions = dict[tuple[CallSpec, str | None], KernelChoice]
# Batch and heads that a call must have, None for any.
CallSizes = tuple[int | None, int | None]
# Kept calls of one plan: shapes and strides rarely vary under one pair of lengths.
_MOST_BOUND = 64
# Versions of a mask that was written to before its plan was copied; no tensor has them.
_CHANGED = (-1,)


def _likeness(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    implementation: str | None,
    *scales: Tensor,
) -> Hashable:
    """What two calls share that can use the same bound call; strides stand for the memory order of the output."""
    key = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
        v.device, scale, softcap, implementation,
    )  # fmt: skip
    if bias is None and sinks is None and not scales:
        return key
    extra = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in (bias, sinks, *scales)]
    return (*key, *extra)


# Plans by number, for compiled code: a graph can hold a number, not a plan.
_BY_NUMBER: WeakValueDictionary[int, Plan] = WeakValueDictionary()
# Calls of cached plans that are part of CUDA graphs. Replays read their memory, and nothing tells when a graph has
# gone; the cache drops plans, and a plan calls of other shapes.
_IN_GRAPHS: set[BoundCall] = set()


class Plan:
    """A mask compiled for one `q_len` and `kv_len` on one device. Make it with `stof.plan`, reuse it freely.

    On a GPU, layouts are built when a call first needs them, in the block sizes that suit the call. A plan made with
    a `config` or a `row_order`, or read from a file, keeps to that one layout.

    Two plans are equal when they keep the same scores by the same tiles on the same device.

    Attributes:
        mask_text: repr of the mask it was made from.
        mask_batch, mask_heads: sizes of the mask it holds, each 1 where one mask serves all.
        batch, heads: sizes that a call must have; None where the mask serves any.
        number: finds this plan while it lives; random, so that it means nothing to another process.
    """

    def __init__(
        self,
        mask_text: str,
        lengths: tuple[int, int],
        mask_sizes: tuple[int, int],
        device: torch.device,
        *,
        call_sizes: CallSizes,
        layout: Layout | None = None,
        geometry: MaskGeometry | None = None,
    ) -> None:
        self.mask_text = mask_text
        self.q_len, self.kv_len = lengths
        self.mask_batch, self.mask_heads = mask_sizes
        self.batch, self.heads = call_sizes
        self.device = device
        self.permuted_rows = layout is not None and layout.row_order is not None
        self.fixed = layout.config if layout is not None and device.type == "cuda" else None
        self._geometry = geometry
        self._origin = geometry
        self._versions: tuple[int, ...] | None = None if geometry is None else geometry.mask.versions
        self._layout = layout
        self._layouts: dict[tuple[LayoutConfig, str | None], Layout] = {}
        self._survey: Survey | None = None
        self._prepared: dict[KernelChoice, Any] = {}
        self._choices: Decisions = {}
        self._bound: dict[Hashable, BoundCall] = {}
        self._in_graphs: set[BoundCall] = set()
        self._unfit: dict[tuple[object, ...], str] = {}
        self._content: str | None = None
        self._first: Plan | None = None
        self._name()
        if device.type != "cuda" and layout is not None:
            # Prepared now, not at the first call, which may be timed or compiled.
            self.prepared(default_implementation(device))

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: without what calls have kept, and without the name that compiled code knows it by."""
        # A copy's tensors count their versions anew.
        versions = self._versions if self.mask is None or self._changed() else "unchanged"
        state = self.__dict__ | {"number": 0, "_content": None, "_first": None, "_versions": versions}
        return state | {"_bound": {}, "_in_graphs": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.mask is not None:
            self._versions = self.mask.versions if state["_versions"] == "unchanged" else _CHANGED
        self._name()

    def _name(self) -> None:
        self.number = secrets.randbits(62)
        _BY_NUMBER[self.number] = self

    def name_after(self, content: str) -> None:
        """Take a number that plans of the same content have in every process.

        Graphs with a constant number are then found in the compilers' own caches.
        """
        self._content = content
        number = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=7).digest())
        while (first := _BY_NUMBER.setdefault(number, self)) is not self and first._content != content:
            number += 1
        del _BY_NUMBER[self.number]
        self.number = number
        self._first = None if first is self else first  # found by this number for as long as either lives

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not Plan or type(other) is not Plan:
            return self is other
        sizes = [(p.q_len, p.kv_len, p.batch, p.heads, p.device) for p in (self, other)]
        return sizes[0] == sizes[1] and self.layout.equals(other.layout)

    def __hash__(self) -> int:
        return hash((self.q_len, self.kv_len, self.batch, self.heads))

    @staticmethod
    def of_layout(
        layout: Layout, mask_text: str, origin: MaskGeometry | None = None, call_sizes: CallSizes | None = None
    ) -> Plan:
        """A plan that keeps to one layout.

        Args:
            layout: of the mask.
            mask_text: the mask's repr.
            origin: what the layout was built from, where that is known.
            call_sizes: `batch` and `heads` of the plan; default those of `origin`'s mask, else of the layout.
        """
        sizes = (layout.mask_batch, layout.mask_heads)
        if call_sizes is None:
            call_sizes = call_sizes_of(None if origin is None else origin.mask, sizes)
        lengths = (layout.q_len, layout.kv_len)
        plan = Plan(mask_text, lengths, sizes, layout.device, call_sizes=call_sizes, layout=layout)
        plan._origin = origin
        plan._versions = None if origin is None else origin.mask.versions
        return plan

    def check_call(self, q: Tensor, k: Tensor) -> None:
        """Raise unless the plan was made for a call like this.

        Raises:
            PlanMismatchError: the call has other lengths, batch or heads than the plan was made for.
            DeviceError: the call is on another device.
        """
        lengths, lengths_given = (self.q_len, self.kv_len), (q.shape[2], k.shape[2])
        if lengths != lengths_given:
            raise PlanMismatchError(
                f"the plan was made for q_len {lengths[0]} and kv_len {lengths[1]}, the inputs have "
                f"{lengths_given[0]} and {lengths_given[1]}; make one with "
                f"stof.plan(mask, {lengths_given[0]}, {lengths_given[1]}), or pass the mask itself"
            )
        if self.device != q.device:
            if q.is_meta:
                raise DeviceError(
                    f"the plan is on {self.device}, and the inputs are meta tensors, which hold no values; give inputs "
                    f"on {self.device}, or the mask itself in the plan's place: then only shapes are computed"
                )
            raise DeviceError(
                f"the plan is on {self.device}, the inputs on {q.device}; move it once with plan.to({str(q.device)!r})"
            )
        for name, own, given in (("batch", self.batch, q.shape[0]), ("heads", self.heads, q.shape[1])):
            if own is not None and own != given:
                raise PlanMismatchError(
                    f"the plan's mask depends on the {'head' if name == 'heads' else 'batch entry'}, and the plan was "
                    f"made for {name}={own}; the inputs have {given}. Make a plan with {name}={given}, or leave "
                    f"`{name}` out of stof.plan"
                )

    def refuse_first_call(self) -> None:
        """Raise if a call for which none is kept cannot run now.

        Raises:
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture(self.device)

    def for_call(self, q: Tensor, k: Tensor) -> Plan:
        """The plan that computes a call; errors as of `check_call`."""
        self.check_call(q, k)
        return self

    @property
    def mask(self) -> Mask | None:
        """The mask it was made from; None of a plan read from a file, or moved to another device."""
        return None if self._origin is None else self._origin.mask

    @staticmethod
    def by_number(number: int) -> Plan:
        """The living plan with this number.

        Raises:
            ArgumentError: it is gone; a compiled graph outlived its plan.
        """
        found = _BY_NUMBER.get(number)
        if found is None:
            raise ArgumentError(f"plan {number} is gone; keep the plan alive as long as code compiled with it runs")
        return found

    @property
    def layout(self) -> Layout:
        """The plan's own layout: what is saved, drawn and counted. Calls on a GPU may use others."""
        if self._layout is None:
            self._layout = self._build(default_config(self.device), None)
        return self._layout

    @property
    def row_orders(self) -> tuple[str, ...]:
        """Names of row orders that suit the mask and fit its length."""
        return () if self._geometry is None else self._geometry.row_orders

    def found_order(self) -> str | None:
        """Name of a row order found by looking at the mask, None where that is nothing new; searched once."""
        return None if self._geometry is None else self._geometry.found_order()

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        """Tile counts under each geometry, for the cost model; counted once."""
        if self._geometry is not None:
            return self._geometry.survey(geometries, row_order)
        if self._survey is None:
            self._survey = survey_of_layout(self.layout)
        return self._survey

    def choice(self, call: CallSpec, implementation: str | None = None) -> KernelChoice:
        """How a call runs: the fastest candidate, of one implementation when it is named; decided once."""
        key = (call, implementation)
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = choose(call, self.device, self, implementation)
        return found

    def candidates(self, call: CallSpec) -> list[Candidate]:
        """Every way to run a call, see `stof.explain`."""
        return candidates(call, self.device, self if self.device.type == "cuda" else None)

    def unfit(self, choice: KernelChoice) -> str | None:
        """Why this plan cannot run a choice, as far as was found out."""
        return self._unfit.get(_fitting(choice))

    def reject(self, choice: KernelChoice, call: CallSpec, error: KernelError) -> None:
        """Leave a choice out from now on: it failed on this device, or with this plan's layout."""
        if isinstance(error, UnfitLayoutError):
            self._unfit[_fitting(choice)] = str(error)
        else:
            failures.add(choice, call, self.device, str(error))
        self._choices.clear()
        self._bound.clear()

    def bound(self, *given: Any) -> BoundCall | None:
        """`kept`, for arguments as the user gave them: autocast would make others of them."""
        return None if torch.is_autocast_enabled(self.device.type) else self.kept(*given)

    def kept(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scale: float | None,
        softcap: float | None,
        implementation: str | None,
        *scales: Tensor,
    ) -> BoundCall | None:
        """The call kept for arguments like these, already checked and chosen for; None when there is none."""
        if not self._bound or not is_plain(q, k, v, bias, sinks, *scales):
            return None
        try:
            found = self._bound.get(_likeness(q, k, v, bias, sinks, scale, softcap, implementation, *scales))
        except (AttributeError, TypeError, RuntimeError):
            # No tensor, a nested one, or a scale that is no number: the checks have the message.
            return None
        if found is not None and capturing(self.device):
            self._in_graphs.add(found)
        return found

    def bind(self, given: tuple[Any, ...], call: BoundCall) -> None:
        """Keep a call for arguments like those given to `attention`."""
        if len(self._bound) >= _MOST_BOUND:
            self._bound.clear()
        self._bound[_likeness(*given)] = call
        if capturing(self.device):
            self._in_graphs.add(call)

    def prepared(self, choice: KernelChoice | str) -> Any:
        """The layout of a choice in the form its implementation reads; computed once."""
        choice = KernelChoice(choice) if isinstance(choice, str) else replace(choice, widened=False)
        found = self._prepared.get(choice)
        if found is None:
            # Complete when it is there: calls on other streams read it too.
            found = self._prepared[choice] = lasting(self.device, partial(self._prepare, choice))
        return found

    def _prepare(self, choice: KernelChoice) -> Any:
        implemented, layout = IMPLEMENTATIONS[choice.implementation], self._layout_of(choice)
        with tensors_on_host():
            return implemented.prepare(layout, choice.kernel)

    def _layout_of(self, choice: KernelChoice) -> Layout:
        if choice.layout is None or self.fixed is not None:
            return self.layout
        key = (choice.layout, choice.row_order)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = self._build(*key)
        return found

    def _build(self, config: LayoutConfig, row_order: str | None) -> Layout:
        assert self._geometry is not None
        self._check_unchanged()
        return self._geometry.build(config, row_order)

    def _changed(self) -> bool:
        return self.mask is not None and self.mask.versions != self._versions

    def _check_unchanged(self) -> None:
        """Raise if the mask's tensors were written to since: layouts built before and after would disagree."""
        if self._changed():
            raise MaskError(
                "the tensors of this plan's mask were changed in place after the plan was made; make another plan, or "
                "use stof.dynamic_plan for masks that change"
            )

    def extended(self, rows: int, mask: Mask | None = None) -> Plan:
        """A plan for `rows` more queries and as many more keys (a growing KV cache); it equals a new plan.

        Under the plan's own mask, only new rows are evaluated where old ones do not see new keys (see
        `stof.layout.extend`), and choices that calls have made carry over. Another mask is planned anew: nothing tells
        whether it keeps the same scores of old rows. For a chunk alone, plan the mask `.with_query_offset(cached)`.

        Args:
            rows: tokens to add, 0 or more.
            mask: the mask of all tokens; default the plan's own, which serves any length unless it lists its tokens.

        Raises:
            ArgumentError: fewer than 0 rows, or a plan read from a file without a mask given.
            MaskError: the tensors of the plan's own mask were changed since.
            ShapeError: the mask does not fit the new lengths.
        """
        _check_rows(rows)
        origin = self._origin
        if mask is None:
            if origin is None:
                raise ArgumentError("this plan was made of a layout alone; give its mask to extended()")
            self._check_unchanged()
            mask = origin.mask
        sizes = (self.mask_batch, self.mask_heads) if origin is None else (origin.batch, origin.heads)
        lengths = (self.q_len + rows, self.kv_len + rows)
        geometry = MaskGeometry(mask, *lengths, batch=sizes[0], heads=sizes[1], device=self.device)

        def grown(layout: Layout) -> Layout:
            return extend_layout(layout, mask, *lengths, batch=sizes[0], heads=sizes[1])

        own = self.mask_text if origin is None and "<" not in self.mask_text else origin and origin.mask.key
        if mask.key != own or self.permuted_rows:  # another number of rows wants another order
            return make_plan(
                mask, *lengths, batch=sizes[0], heads=sizes[1], device=self.device, config=self.fixed, row_order=None
            )
        if self.device.type != "cuda" or self.fixed is not None:
            return Plan.of_layout(grown(self.layout), repr(mask), geometry)
        mask.check(*lengths)
        dims = mask.dims(*sizes, self.device)
        call_sizes = call_sizes_of(mask, dims)
        plan = Plan(repr(mask), lengths, dims, self.device, call_sizes=call_sizes, geometry=geometry)
        plan._layouts = {key: grown(layout) for key, layout in self._layouts.items() if key[1] is None}
        for (call, name), choice in self._choices.items():
            if choice.row_order is None and not call.bias_to_copy:  # that of another length may be read as it lies
                plan._choices[replace(call, q_len=lengths[0], kv_len=lengths[1]), name] = choice
        return plan

    def statistics(self) -> LayoutStatistics:
        """Density, computed/needed, tiles by kind, heaviest row block, bytes."""
        return statistics(self.layout)

    def bytes(self) -> int:
        """Memory of all layouts and everything prepared from them."""
        # list(): another thread may add one
        layouts = list(self._layouts.values()) + ([] if self._layout is None else [self._layout])
        tensors = [tensor for layout in layouts for tensor in layout.tensors().values()]
        for prepared in list(self._prepared.values()):
            tensors += tensors_of(prepared)
        return sum(t.numel() * t.element_size() for t in tensors)

    def to_dense(self) -> Tensor:
        """Bool `[mask_batch, mask_heads, q_len, kv_len]`."""
        return self.layout.to_dense()

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device, with the same layout.

        Raises:
            DeviceError: no device of this machine.
        """
        return Plan.of_layout(
            self.layout.to(usable_device(device)), self.mask_text, call_sizes=(self.batch, self.heads)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to one safetensors file, atomically."""
        sizes = {"batch": str(self.batch), "heads": str(self.heads)}
        save_layout(self.layout, path, {"mask": self.mask_text} | sizes)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Plan:
        """Read a saved plan; a file that does not validate raises `PlanFileError`, no device of here `DeviceError`."""
        layout, extra = load_layout(path, usable_device(device))
        expected = {"batch": layout.mask_batch, "heads": layout.mask_heads}
        for name, size in expected.items():
            if extra.get(name) not in (("None", str(size)) if size == 1 else (str(size),)):
                raise PlanFileError(
                    f"{os.fspath(path)} does not say for which {name} its mask serves (it has {extra.get(name)!r}); "
                    "it was written by an earlier version: make it again with plan.save(path)"
                )
        batch, heads = (None if extra[name] == "None" else int(extra[name]) for name in expected)
        return Plan.of_layout(layout, extra.get("mask", ""), call_sizes=(batch, heads))

    def __repr__(self) -> str:
        text = self.mask_text if len(self.mask_text) <= 80 else self.mask_text[:77] + "..."
        tiles = "not built" if self._layout is None else str(self._layout.tiles)
        return f"Plan({text}, q_len={self.q_len}, kv_len={self.kv_len}, tiles={tiles}, device={str(self.device)!r})"


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
        self._versions = mask.versions

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
        found = self._plans.get(sizes)
        if found is None:
            self._check_unchanged()
            found = self._plans[sizes] = self._make(self._mask, self.q_len, self.kv_len, batch=sizes[0], heads=sizes[1])
        return found

    def kept(self, *given: Any) -> BoundCall | None:
        q = given[0]
        if not isinstance(q, Tensor) or q.is_nested or q.ndim < 2:
            return None  # the checks have the message
        found = self._plans.get((q.shape[0], q.shape[1]))
        return None if found is None else found.kept(*given)

    def extended(self, rows: int, mask: Mask | None = None) -> Plan:
        _check_rows(rows)
        mask = self._mask if mask is None else mask
        lengths = (self.q_len + rows, self.kv_len + rows)
        return UnsizedPlan(mask, lengths, self.device, (self.batch, self.heads), self._make)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def _check_rows(rows: int) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ArgumentError(f"rows is an int of 0 or more, got {rows!r}")


def call_sizes_of(mask: Mask | None, mask_sizes: tuple[int, int]) -> CallSizes:
    """The batch and heads that calls must have under a mask of these sizes, None for any."""
    batch, heads = mask_sizes
    by_batch = batch != 1 or (mask is not None and mask.depends_on_batch)
    by_heads = heads != 1 or (mask is not None and mask.depends_on_heads)
    return batch if by_batch else None, heads if by_heads else None


def _fitting(choice: KernelChoice) -> tuple[object, ...]:
    """What decides whether a layout fits a choice."""
    paired = choice.kernel is not None and choice.kernel.paired
    return choice.implementation, choice.layout, choice.row_order, paired


# A mask, and the versions of its tensors.
UsedMask = tuple[Mask, tuple[int, ...]]
_USED = threading.local()


@contextmanager
def noting_masks() -> Iterator[list[UsedMask]]:
    """Note the masks with tensors in them under which this thread calls attention."""
    before, _USED.masks = getattr(_USED, "masks", None), []
    try:
        yield _USED.masks
    finally:
        _USED.masks = before


plan_cache: PlanCache[Plan] = PlanCache(max_entries=128, max_bytes=2**28)


def unsized_plan(
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
    """`make_plan`, where sizes may be left to the mask, and, where it does not tell them either, to the calls."""
    check_lengths(q_len, kv_len)
    if config is not None and not isinstance(config, LayoutConfig):
        raise ArgumentError(f"config is a stof.LayoutConfig or None, got {shown(config)}")
    if batch is None and (mask.batch != 1 or not mask.depends_on_batch):
        batch = mask.batch
    if heads is None and (mask.heads != 1 or not mask.depends_on_heads):
        heads = mask.heads
    if batch is not None and heads is not None:
        return make_plan(
            mask, q_len, kv_len, batch=batch, heads=heads, device=device, config=config, row_order=row_order
        )
    check_sizes(1 if batch is None else batch, 1 if heads is None else heads)
    _check_values()
    mask.check(q_len, kv_len)
    mask.dims(batch or 1, heads or 1)
    needed = (batch if mask.depends_on_batch else None, heads if mask.depends_on_heads else None)
    make = functools.partial(make_plan, device=device, config=config, row_order=row_order)
    return UnsizedPlan(mask, (q_len, kv_len), device, needed, make)


def _check_values() -> None:
    if type(torch.empty(0)) is not Tensor:
        raise MaskError("a plan needs tensors with values; make it before FakeTensorMode, or another mode of its kind")


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
    key: Hashable = None
    versions = mask.versions
    if versions and (used := getattr(_USED, "masks", None)) is not None:
        used.append((mask, versions))
    if versions is not None and row_order is None:
        # The sizes matter only to masks that must be asked whether they depend on them.
        sizes = (batch, heads) if mask.binds_late else mask.dims(batch, heads)
        key = (mask.key, versions, q_len, kv_len, sizes, str(device), config)
        found = plan_cache.get(key)
        if found is not None:
            return found
    refuse_capture(device)
    _check_values()
    check_lengths(q_len, kv_len)
    mask.check(q_len, kv_len)
    with allocator_errors():
        plan = _made(mask, q_len, kv_len, batch, heads, device, config, row_order)
    if key is not None:
        if "<" not in mask.key:
            plan.name_after(repr(key))
        plan._in_graphs = _IN_GRAPHS
        plan_cache.put(key, plan)
    return plan


def _made(
    mask: Mask,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    device: torch.device,
    config: LayoutConfig | None,
    row_order: Tensor | None,
) -> Plan:
    """A new plan; arguments as of `make_plan`, checked."""
    geometry = MaskGeometry(mask, q_len, kv_len, batch=batch, heads=heads, device=device)
    if device.type == "cuda" and config is None and row_order is None:
        sizes = mask.dims(batch, heads, device)
        # Whichever layout a call chooses has at least as many tiles.
        check_tiles(HeadMask(mask, q_len, kv_len, 0, 0, None, device), LayoutConfig(256, 256))
        call_sizes = call_sizes_of(mask, sizes)
        return Plan(repr(mask), (q_len, kv_len), sizes, device, call_sizes=call_sizes, geometry=geometry)
    choose_layout = own_layout if config is None else functools.partial(build_layout, config=config)
    layout = choose_layout(mask, q_len, kv_len, batch=batch, heads=heads, device=device, row_order=row_order)
    return Plan.of_layout(layout, repr(mask), geometry)
