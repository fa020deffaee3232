"""Whether a model is still the one that a CUDA graph recorded: its weights, modules, attributes, settings and hooks.

Objects are compared by identity, weights by address as well, and where something computed from their values is kept, by
the number of writes that PyTorch counts. `fusion/templates/folded_weights.py` asks less, whether one kept product is of
these two tensors at these writes, and `integrations/transformers/packing_check.py` asks nothing about changes: what it
finds of a model's code holds for any weights.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable
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


class _Entries:
    """Entries of dictionaries and lists, and the objects that they held.

    References keep the objects alive, so that a replacement cannot have the same `id`. In parallel lists, `map`
    compares all entries without a loop in Python.
    """

    def __init__(self) -> None:
        self._holders: list[Any] = []
        self._empty: list[Any] = []
        self._count = -1
        self._owners: list[Any] = []
        self._names: list[Any] = []
        self.values: list[Any] = []

    def add(self, holder: Any, names: Iterable[Any]) -> list[Any]:
        """Note some entries of a dictionary or list, whose length may not change; return what they hold."""
        names = list(names)
        values = [holder[name] for name in names]
        (self._holders if holder else self._empty).append(holder)
        self._count = max(self._count, 0) + len(holder)
        self._owners += [holder] * len(names)
        self._names += names
        self.values += values
        return values

    def now(self) -> list[Any] | None:
        """What they hold now, `values` itself if these are the same objects; None if there are more or fewer."""
        if self._count != sum(map(len, self._holders)) or any(self._empty):
            return None
        try:
            if all(map(operator.is_, map(operator.getitem, self._owners, self._names), self.values)):
                return self.values
            return list(map(operator.getitem, self._owners, self._names))
        except (KeyError, IndexError):  # an entry was removed
            return None


class Attributes:
    """What the modules of a model hold besides tensors and modules: a comparison with what they held before.

    Looked into are dictionaries, lists and objects in attributes, such as a model's configuration, and those in them,
    no deeper. Functions, classes, masks and plans are compared as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._entries = module, _Entries()

    def changed(self) -> bool:
        """Whether they differ from those of the call before; True for the first."""
        now = self._entries.now()
        if now is self._entries.values:
            return False
        if now is None or not all(map(_equal, now, self._entries.values)):
            self._look()
            return True
        self._entries.values = now
        return False

    def _look(self) -> None:
        self._entries = _Entries()
        seen: set[int] = set()
        for part in self._module.modules():
            held = vars(part)
            self._add(held, [name for name in held if name not in _EVERY], seen, _DEPTH)
            for name in FORWARD_HOOKS:
                self._into(held[name], seen, 0)

    def _add(self, holder: Any, names: Iterable[Any], seen: set[int], depth: int) -> None:
        values = self._entries.add(holder, names)
        for value in values if depth else ():
            self._into(value, seen, depth - 1)

    def _into(self, value: Any, seen: set[int], depth: int) -> None:
        holder = _holder_of(value)
        if holder is not None and id(holder) not in seen:
            seen.add(id(holder))
            self._add(holder, _names_in(holder), seen, depth)


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
        self._entries = _Entries()
        self._placed: list[Tensor] = []
        self._versioned: list[Tensor] = []
        # Memory that recordings read stays allocated, since an outdated recording may still be running.
        self._memory: list[torch.UntypedStorage] = []
        self._places: tuple[int, ...] | None = None
        self._counts: tuple[int, ...] = ()

    def changed(self) -> bool:
        """Whether they differ from those of the call before; True for the first."""
        other = self._entries.now() is not self._entries.values
        if other:
            self._look()
        places = *map(operator.attrgetter("training"), self._parts), *map(Tensor.data_ptr, self._placed)
        if other or places != self._places:
            # Inference tensors have no version counter: writes to them go unnoticed.
            self._versioned = [x for x in self._entries.values if isinstance(x, Tensor) and not x.is_inference()]
            self._memory = [x.untyped_storage() for x in self._placed]
            other, self._places = True, places
        counts = self.versions() if self._folded_weights else ()
        changed, self._counts = other or counts != self._counts, counts
        return changed

    def versions(self) -> tuple[int, ...]:
        """How often each was written to, as far as PyTorch counts that."""
        return tuple(map(version_of, self._versioned))

    def _look(self) -> None:
        self._parts = list(self._module.modules())
        self._entries = _Entries()
        for holder in (holder for part in self._parts for holder in entries_of(part)):
            self._entries.add(holder, holder)
        tensors = (x for x in self._entries.values if isinstance(x, Tensor))
        self._placed = [x for x in tensors if x.layout is torch.strided]
