"""Code, classes and tensors as text that is equal in every process."""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Values whose text says everything.
NAMED = torch.dtype | torch.device | torch.Size | torch.layout | torch.memory_format
# Packages whose classes and functions are told by their version, which whoever uses these texts adds.
_VERSIONED = frozenset(("torch", "builtins", "typing", "collections", "enum", "abc", "functools"))


class IndescribableError(Exception):
    """Another process would not know this again."""


def tensor_text(tensor: Tensor) -> tuple[object, ...]:
    """What compiled code may depend on of a tensor whose values it reads anew."""
    aligned = tensor.data_ptr() % 16 == 0 if tensor.device.type != "meta" else True
    shape, strides = tuple(tensor.shape), tensor.stride()
    return shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference(), aligned


def function_text(function: types.FunctionType, depth: int = 4) -> tuple[object, ...]:
    """Where a function is from, and hashes of its code and of the functions that it closes over (decorators do)."""
    closed = []
    for cell in function.__closure__ or ():
        held = cell_content(cell)
        inner = isinstance(held, types.FunctionType) and depth
        closed.append(function_text(held, depth - 1) if inner else _short_text(held))  # type: ignore[arg-type]
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    told = [*map(_short_text, given), tuple(function.__kwdefaults__ or ()), *closed]
    return function.__module__ or "", function.__qualname__, code_digest(function.__code__), *told


def _short_text(value: object) -> tuple[object, ...]:
    """A plain value, the name of a function of C, or else a value's class."""
    if _is_plain(value):
        return type(value).__name__, repr(value)
    return builtin_text(value) or (type(value).__module__, type(value).__qualname__)


def cell_content(cell: types.CellType) -> object:
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
    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, NAMED | enum.Enum)


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
