"""Weights, attributes, settings and hooks of a model's modules: a comparison with those of an earlier call."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from stof.masks import Mask
from stof.plans.plan import Plan
from stof.runtime.private import FORWARD_HOOKS, entries_of, version_of

# Attributes of every module: `Weights` compares tensors, modules and the training mode, `FORWARD_HOOKS` names hooks.
_EVERY = frozenset(vars(nn.Module()))
# Types compared by value instead of identity.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Levels of objects looked into: those in modules, such as configurations, and objects in those.
_DEPTH = 2


class Attributes:
    """What the modules of a model hold besides tensors and modules: a comparison with what they held before.

    Looked into are dictionaries, lists and objects in attributes, such as a model's configuration, and those in them,
    no deeper. Functions, classes, masks and plans are compared as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Dictionaries and lists, and three parallel lists of their entries: the holder, the name and the value.
        self._holders: list[Any] = []
        self._count = -1
        self._owners: list[Any] = []
        self._names: list[Any] = []
        self._values: list[Any] = []

    def changed(self) -> bool:
        """Whether they differ from those of the call before; True for the first."""
        if self._count == sum(map(len, self._holders)) and self._same():
            return False
        self._look()
        return True

    def _same(self) -> bool:
        try:
            if all(map(operator.is_, map(operator.getitem, self._owners, self._names), self._values)):
                return True
            now = list(map(operator.getitem, self._owners, self._names))
        except (KeyError, IndexError):  # an entry was removed
            return False
        if not all(map(_equal, now, self._values)):
            return False
        self._values = now
        return True

    def _look(self) -> None:
        self._holders, self._owners, self._names, self._values = [], [], [], []
        seen: set[int] = set()
        for part in self._module.modules():
            held = vars(part)
            self._holders.append(held)
            self._add(held, [name for name in held if name not in _EVERY], seen, _DEPTH)
            for name in FORWARD_HOOKS:
                self._into(held[name], seen, 0)
        self._count = sum(map(len, self._holders))

    def _add(self, holder: Any, names: list[Any], seen: set[int], depth: int) -> None:
        for name in names:
            value = holder[name]
            self._owners.append(holder)
            self._names.append(name)
            self._values.append(value)
            if depth:
                self._into(value, seen, depth - 1)

    def _into(self, value: Any, seen: set[int], depth: int) -> None:
        holder = _holder_of(value)
        if holder is None or id(holder) in seen:
            return
        seen.add(id(holder))
        self._holders.append(holder)
        self._add(holder, list(_names_in(holder)), seen, depth)


def _names_in(holder: Any) -> Iterable[Any]:
    return range(len(holder)) if isinstance(holder, list) else holder


def _holder_of(value: Any) -> Any:
    """The dictionary or list in which a value holds others; None for what is compared as it is."""
    if type(value) in (dict, list, OrderedDict):  # reading subclasses may run their code
        return value
    if isinstance(value, Tensor | Mask | Plan | ModuleType) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _equal(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and isinstance(new, _PLAIN) and repr(new) == repr(old))


class Weights:
    """Addresses of the parameters and buffers of a module: a comparison with those of an earlier call.

    Their memory stays allocated until the next change. Tensors and modules are looked up by name in the modules that
    hold them, so a replaced one is noticed too.
    """

    def __init__(self, module: nn.Module, folded_weights: bool) -> None:
        self._module, self._folded_weights = module, folded_weights
        self._parts: list[nn.Module] = []
        self._filled: list[Mapping[str, Any]] = []
        self._owners: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        # References keep the objects alive, so that a replacement cannot have the same `id`.
        self._entries: list[Any] = []
        self._tensors: list[Tensor] = []
        self._placed: list[Tensor] = []
        self._versioned: list[Tensor] = []
        # Memory that recordings read stays allocated, since an outdated recording may still be running.
        self._memory: list[torch.UntypedStorage] = []
        self._places: tuple[int, ...] | None = None
        self._counts: tuple[int, ...] = ()

    def changed(self) -> bool:
        """Whether they differ from those of the call before; True for the first."""
        other = self._places is None or not self._in_place()
        if other:
            self._look()
        places = *map(operator.attrgetter("training"), self._parts), *map(Tensor.data_ptr, self._placed)
        if other or places != self._places:
            # Inference tensors have no version counter: writes to them go unnoticed.
            self._versioned = [x for x in self._tensors if not x.is_inference()]
            self._memory = [x.untyped_storage() for x in self._placed]
            other, self._places = True, places
        counts = self.versions() if self._folded_weights else ()
        changed, self._counts = other or counts != self._counts, counts
        return changed

    def versions(self) -> tuple[int, ...]:
        """How often each was written to, as far as PyTorch counts that."""
        return tuple(map(version_of, self._versioned))

    def _in_place(self) -> bool:
        """Whether the modules hold what they held, and nothing else."""
        try:
            now = map(operator.getitem, self._owners, self._names)
            return all(map(operator.is_, now, self._entries)) and sum(map(len, self._filled)) == len(self._entries)
        except KeyError:  # an entry was removed
            return False

    def _look(self) -> None:
        self._parts = list(self._module.modules())
        every = [owner for part in self._parts for owner in entries_of(part)]
        self._filled = [owner for owner in every if owner]
        self._owners = [owner for owner in self._filled for _ in owner]
        self._names = [name for owner in self._filled for name in owner]
        self._entries = list(map(operator.getitem, self._owners, self._names))
        self._tensors = [x for x in self._entries if isinstance(x, Tensor)]
        self._placed = [x for x in self._tensors if x.layout is torch.strided]
