"""What a call of a model depends on beside the values of its tensors, as text that is equal in every process.

A compiler that traces a model once a process guards on what it met. Where a later process is to go without tracing, all
that it could have met is written down instead: modules with their attributes, hooks and configurations, the code of
their classes, and for what was traced also its files and the names that it looked up. What cannot be described so that
another process knows it again is refused, never passed over.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stof.integrations.code_text import NAMED, IndescribableError, cell_content, class_text, function_text, tensor_text

# Tensors that are not a module's own are told by what they hold, up to this size.
_HASHED_BYTES = 1 << 26
# Attributes of modules that hold hooks of calls; their keys count all hooks of a process.
_HOOKS_OF_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Told with the hooks, or of no call.
_TOLD_ELSEWHERE = frozenset(f"{one}{how}" for one in _HOOKS_OF_CALLS for how in ("_with_kwargs", "_always_called")) | {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
# Every attribute of modules that holds hooks.
HOOKS = _TOLD_ELSEWHERE.union(_HOOKS_OF_CALLS)


class Description:
    """Text of everything that was added, in order, and the tensors that modules hold, by name.

    Attributes:
        tensors: parameters, buffers and tensors that are attributes of modules, by their paths.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._classes: dict[type, tuple[object, ...]] = {}
        self._alive: list[object] = []  # so that no two have one address

    def add(self, value: object) -> None:
        """Add a value and all it holds.

        Raises:
            IndescribableError: something in it is known to this process alone.
        """
        self._value(value, "")

    def digest(self) -> str:
        """A hash of what was added so far."""
        return self._hash.hexdigest()

    def _put(self, *parts: object) -> None:
        self._hash.update(repr(parts).encode())

    def _value(self, value: Any, path: str) -> None:
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes, complex) or isinstance(value, NAMED):
            self._put(kind.__name__, value)
        elif kind is float:
            self._put(value.hex())
        elif isinstance(value, enum.Enum):
            self._put(kind.__module__, kind.__qualname__, value.name, repr(value.value))
        elif kind is tuple:  # may be one object or several equal ones
            self._put("tuple", len(value))
            self._each(value, path)
        elif id(value) in self._seen:
            self._put("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._held(value, path)
            self._put("end")  # of what it holds

    def _held(self, value: Any, path: str) -> None:
        """A value that may hold others."""
        kind = type(value)
        if isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, Tensor):
            self._content(value, path)
        elif isinstance(value, type):
            self._put("class", *class_text(value))
        elif isinstance(value, types.ModuleType):
            self._put("module", value.__name__)
        elif isinstance(value, types.FunctionType):
            self._put("function", *function_text(value))
            self._each((value.__defaults__, value.__kwdefaults__, _cells(value)), path)
        elif isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            if owner is not None and not isinstance(owner, types.ModuleType | type):
                raise IndescribableError(f"{path}: a method of a {type(owner).__name__}")
            self._put("builtin", value.__module__, value.__qualname__)
        elif isinstance(value, types.MethodType):
            self._each((value.__func__, value.__self__), path)
        elif isinstance(value, functools.partial):
            self._each((value.func, value.args, value.keywords), path)
        elif isinstance(value, RemovableHandle):
            self._put(kind.__name__)  # says where a hook is, not what a call does
        elif isinstance(value, weakref.ReferenceType):
            self._value(value(), path)
        elif isinstance(value, set | frozenset):
            if not all(isinstance(item, _SORTABLE) for item in value):
                raise IndescribableError(f"{path}: a set of other things than numbers and text")
            self._put(kind.__name__, sorted(map(repr, value)))
        elif isinstance(value, dict):
            self._class(kind)
            self._put(len(value))
            for key, item in dict.items(value):
                self._value(key, path)
                self._value(item, f"{path}[{key!r}]")
            self._fields(value, path)
        elif isinstance(value, list | tuple):
            self._class(kind)
            self._put(len(value))
            self._each(value, path)
            self._fields(value, path)
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self._class(kind)
            self._fields(value, path)
        else:
            raise IndescribableError(f"{path}: a {kind.__name__}")

    def _each(self, values: Iterable[object], path: str) -> None:
        for value in values:
            self._value(value, path)

    def _class(self, kind: type) -> None:
        if kind not in self._classes:
            self._classes[kind] = class_text(kind)
        self._put(*self._classes[kind])

    def _fields(self, value: object, path: str) -> None:
        """Attributes of an object of a class that Python code defines."""
        self._slots(value, path)
        for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
            self._put(name)
            self._value(item, f"{path}.{name}")

    def _slots(self, value: object, path: str) -> None:
        kind = type(value)
        if not all(base in _SHOWN or _in_python(base) for base in kind.__mro__):
            raise IndescribableError(f"{path}: a {kind.__name__}, whose state cannot be seen")
        for name in sorted({name for base in kind.__mro__ for name in _slots(base)}):
            if hasattr(value, name):
                self._put(name)
                self._value(getattr(value, name), f"{path}.{name}")

    def _module(self, module: nn.Module, path: str) -> None:
        self._class(type(module))
        self._slots(module, path)
        for name, item in vars(module).items():
            where = f"{path}.{name}" if path else name
            self._put(name)
            if name in _HOOKS_OF_CALLS:
                self._hooks(module, name, where)
            elif name in _TOLD_ELSEWHERE:
                continue
            elif name in ("_parameters", "_buffers") and isinstance(item, dict):
                self._put(len(item))
                for key, tensor in item.items():
                    self._put(key)
                    self._own(tensor, f"{path}.{key}" if path else key)
            elif name == "_modules" and isinstance(item, dict):
                self._put(len(item))
                for key, part in item.items():
                    self._put(key)
                    self._value(part, f"{path}.{key}" if path else key)
            elif isinstance(item, Tensor):
                self._own(item, where)
            else:
                self._value(item, where)

    def _hooks(self, module: nn.Module, name: str, path: str) -> None:
        self._put(len(vars(module)[name]))
        told = [vars(module).get(f"{name}{what}", {}) for what in ("_with_kwargs", "_always_called")]
        for key, hook in vars(module)[name].items():
            self._put([key in one for one in told])
            self._value(hook, path)

    def _own(self, tensor: Tensor | None, path: str) -> None:
        """A tensor that a module holds: what its values are does not matter, for calls read them anew."""
        if tensor is None:
            self._put(None)
            return
        _refuse_odd(tensor, path)
        if id(tensor) in self._seen:  # tied
            self._put("again", self._seen[id(tensor)])
            return
        self._seen[id(tensor)] = len(self._seen)
        self._alive.append(tensor)
        self.tensors[path] = tensor
        self._put(type(tensor).__name__, *tensor_text(tensor))

    def _content(self, tensor: Tensor, path: str) -> None:
        """A tensor that something else holds, such as a mask: compiled code may have read it."""
        _refuse_odd(tensor, path)
        if tensor.device.type == "meta" or tensor.nbytes > _HASHED_BYTES:
            raise IndescribableError(f"{path}: a tensor whose values are not looked at")
        held = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().flatten().view(torch.uint8)
        self._put(*tensor_text(tensor), hashlib.sha256(held.numpy().tobytes()).hexdigest())


_SORTABLE = (bool, int, float, str, bytes, type(None), torch.dtype)
# Classes that are written in C and hide nothing.
_SHOWN = (object, dict, list, tuple, OrderedDict, defaultdict)


def _refuse_odd(tensor: Tensor, path: str) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_quantized:
        raise IndescribableError(f"{path}: a {type(tensor).__name__}, {tensor.layout}")


def _cells(function: types.FunctionType) -> tuple[object, ...]:
    return tuple(map(cell_content, function.__closure__ or ()))


def _in_python(kind: type) -> bool:
    """Whether a class is Python code's; one written in C may have state that nobody sees."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    return kind.__module__ == "__main__" or file.endswith(".py")


def _slots(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    named = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))
