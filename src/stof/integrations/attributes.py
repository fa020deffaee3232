"""Attributes, settings and hooks of a model's modules, to see whether they are what they were."""

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
from stof.runtime.private import FORWARD_HOOKS

# What every module has: tensors, modules and the training mode, which others look at, and hooks.
_EVERY = frozenset(vars(nn.Module()))
# Equal values of these are the same, whichever object they are.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Objects in modules, such as configurations, and objects in those.
_DEPTH = 2


class Attributes:
    """What the modules of a model hold besides tensors and modules: a comparison with what they held before.

    Looked into are dictionaries, lists and objects in attributes, such as a model's configuration, and those in them,
    no deeper. Functions, classes, masks and plans are compared as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Dictionaries and lists; entries of them, one by one: where each is, under which name, and what it was.
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
        except (KeyError, IndexError):  # one is gone
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
    if type(value) in (dict, list, OrderedDict):  # looking into those of other classes may change them
        return value
    if isinstance(value, Tensor | Mask | Plan | ModuleType) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _equal(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and isinstance(new, _PLAIN) and repr(new) == repr(old))
