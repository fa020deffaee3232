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
import os
import sys
import time
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
# Packages whose classes and functions are told by their version, which whoever uses a description adds.
_VERSIONED = frozenset(("torch", "builtins", "typing", "collections", "enum", "abc", "functools"))


class IndescribableError(Exception):
    """Another process would not know this again."""


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
        if value is None or kind in (bool, int, str, bytes, complex) or isinstance(value, _NAMED):
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


_NAMED = torch.dtype | torch.device | torch.Size | torch.layout | torch.memory_format
_SORTABLE = (bool, int, float, str, bytes, type(None), torch.dtype)
# Classes that are written in C and hide nothing.
_SHOWN = (object, dict, list, tuple, OrderedDict, defaultdict)


def _refuse_odd(tensor: Tensor, path: str) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_quantized:
        raise IndescribableError(f"{path}: a {type(tensor).__name__}, {tensor.layout}")


def tensor_text(tensor: Tensor) -> tuple[object, ...]:
    """What compiled code may depend on of a tensor whose values it reads anew."""
    aligned = tensor.data_ptr() % 16 == 0 if tensor.device.type != "meta" else True
    shape, strides = tuple(tensor.shape), tensor.stride()
    return shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference(), aligned


def function_text(function: types.FunctionType, depth: int = 4) -> tuple[object, ...]:
    """Where a function is from, and hashes of its code and of the functions that it closes over (decorators do)."""
    closed = []
    for cell in function.__closure__ or ():
        held = _cell(cell)
        if isinstance(held, types.FunctionType) and depth:
            closed.append(function_text(held, depth - 1))
        elif _is_plain(held):
            closed.append((type(held).__name__, repr(held)))
        else:
            closed.append((type(held).__module__, type(held).__qualname__))
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
    defaults = [repr(value) if _is_plain(value) else type(value).__qualname__ for value in given]
    return function.__module__ or "", function.__qualname__, code_digest(function.__code__), *defaults, *closed


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def code_digest(code: types.CodeType) -> str:
    """A hash of what a function does, without where it stands."""
    return hashlib.sha256(repr(_code_parts(code)).encode()).hexdigest()


def _code_parts(code: types.CodeType) -> tuple[object, ...]:
    constants = tuple(_constant(one) for one in code.co_consts)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, *names, code.co_flags, code.co_argcount, code.co_kwonlyargcount


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return _code_parts(value)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return tuple(map(_constant, value)) if isinstance(value, tuple) else (type(value).__name__, repr(value))


def class_text(kind: type) -> tuple[object, ...]:
    """Where a class is from, and a hash of the functions and plain values that it and its bases define."""
    found = [(name, *function_text(value)) for name, value in _defined(kind) if isinstance(value, types.FunctionType)]
    plain = [(name, type(value).__name__, repr(value)) for name, value in _defined(kind) if _is_plain(value)]
    of_c = [(name, told) for name, value in _defined(kind) if (told := builtin_text(value)) is not None]
    return kind.__module__, kind.__qualname__, hashlib.sha256(repr((found, plain, of_c)).encode()).hexdigest()


def _defined(kind: type) -> Iterator[tuple[str, object]]:
    """What a class and its bases define; of those of PyTorch and Python, functions that others put there."""
    for base in kind.__mro__:
        versioned = _is_versioned(base.__module__)
        for name, value in list(vars(base).items()):
            if isinstance(value, property):
                parts: tuple[object, ...] = (value.fget, value.fset)
            else:
                parts = (value.__func__ if isinstance(value, staticmethod | classmethod) else value,)
            for part in parts:
                if not versioned or (isinstance(part, types.FunctionType) and not _is_versioned(part.__module__)):
                    yield name, part


def _is_versioned(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _VERSIONED


def _is_plain(value: object) -> bool:
    """Whether its text says all of a value."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, _NAMED | enum.Enum)


def _cells(function: types.FunctionType) -> tuple[object, ...]:
    return tuple(map(_cell, function.__closure__ or ()))


def _in_python(kind: type) -> bool:
    """Whether a class is Python code's; one written in C may have state that nobody sees."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    return kind.__module__ == "__main__" or file.endswith(".py")


def _slots(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    named = (named,) if isinstance(named, str) else tuple(named)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def files_of(codes: Iterable[types.CodeType]) -> dict[str, str]:
    """The source files that code is from, and their hashes; code that was generated (dataclasses) has none.

    Raises:
        IndescribableError: code from elsewhere than a file.
    """
    found = {}
    for name in sorted({code.co_filename for code in codes if not _is_generated(code)}):
        digest = file_digest(name)
        if digest is None:
            raise IndescribableError(f"code from {name}, which is no file, or was changed since it was read")
        found[name] = digest
    return found


def _is_generated(code: types.CodeType) -> bool:
    """Whether `dataclasses` wrote it, or it came with Python itself."""
    return code.co_filename.startswith("<frozen") or code.co_qualname.startswith("__create_fn__")


def file_digest(name: str) -> str | None:
    """The hash of a file; None where there is none, or it may have been changed since this process read it."""
    try:
        return content_digest(name) if Path(name).stat().st_mtime <= _began() else None
    except OSError:
        return None


@functools.cache
def _began() -> float:
    """When this process began, as the clock of files has it, and a second, in which no process has read its code yet.

    Where the system does not say so (Linux does), when this was first asked.
    """
    try:
        # Behind the name in brackets: the 20th field counts ticks since the system was started.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        started = int(next(line.split()[1] for line in lines if line.startswith("btime ")))
        return started + ticks / os.sysconf("SC_CLK_TCK") + 1.0
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()


def content_digest(name: str | Path) -> str | None:
    """The hash of a file as it is now; None where there is none."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return None


# A module, a global name in it, and what it stood for.
Name = tuple[str, str, str]


def names_of(codes: Iterable[types.CodeType], looks: Looks) -> list[Name]:
    """The global names that code may look up, each with a hash of what it stands for.

    Raises:
        IndescribableError: code from a file that is no module's.
    """
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items()) if module}
    asked: set[tuple[str, str]] = set()
    for code in codes:
        if _is_generated(code):
            continue
        if not {"environ", "getenv"}.isdisjoint(code.co_names):
            raise IndescribableError(f"code of {code.co_qualname}, which asks for environment variables")
        module = modules.get(code.co_filename)
        if module is None:
            raise IndescribableError(f"code from {code.co_filename}, which is no module")
        asked.update((module, name) for name in _looked_up(code))
    told = ((module, name, name_text(module, name, looks)) for module, name in sorted(asked))
    return [(module, name, text) for module, name, text in told if text is not None]


def _looked_up(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _looked_up(one)


class Looks:
    """Texts of values that are looked at one by one, such as what global names stand for, and what guards asked for.

    Each says what the value is and, one level deep, what it holds, not what that holds: whoever looked for more has
    asked for it by itself. What may be changed is told with a number, equal where it is the same object again.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no two have one address
        self._classes: dict[type, tuple[object, ...]] = {}

    def text(self, value: object) -> str:
        """A hash of what a value is."""
        return hashlib.sha256(repr(self._said(value)).encode()).hexdigest()

    def _said(self, value: Any, deep: bool = True) -> object:
        if value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, _NAMED):
            return type(value).__name__, value
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.FunctionType):
            return function_text(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, Tensor):
            return self._again(value), type(value).__name__, tensor_text(value)
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name, repr(value.value)
        if (named := builtin_text(value)) is not None:
            return named
        if isinstance(value, functools.partial) and deep:
            return [self._said(part, False) for part in (value.func, *value.args, *value.keywords.items())]
        if isinstance(value, tuple) and deep:
            return type(value).__name__, [self._said(item, False) for item in value]
        return self._again(value), self._class(type(value)), self._items(value) if deep else None

    def _items(self, value: Any) -> object:
        if isinstance(value, list):
            return [self._said(item, False) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(repr(self._said(item, False)) for item in value)
        if isinstance(value, Mapping):
            items = dict.items(value) if isinstance(value, dict) else value.items()
            return [(self._said(key, False), self._said(item, False)) for key, item in items]
        return None

    def _class(self, kind: type) -> tuple[object, ...]:
        if kind not in self._classes:
            self._classes[kind] = class_text(kind)
        return self._classes[kind]

    def _again(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
        return self._numbers[id(value)]


def name_text(module: str, name: str, looks: Looks) -> str | None:
    """What a global name stands for, hashed; None where there is no such name."""
    held = getattr(sys.modules.get(module), "__dict__", {})
    return looks.text(held[name]) if name in held else None


def builtin_text(value: Any) -> tuple[object, ...] | None:
    """The name of a function that is not Python code: one of C, a method of a class, or an operator of PyTorch."""
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return "operator", str(value)
    if isinstance(value, _OF_C):
        owner = getattr(value, "__objclass__", getattr(value, "__self__", None))
        where = getattr(owner, "__name__", type(owner).__qualname__)
        return type(value).__name__, where, getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return None


_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
