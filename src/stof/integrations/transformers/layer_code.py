"""The code that a call of a layer runs, found without running it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel


def calls_interface(layer: nn.Module | type[nn.Module]) -> bool:
    """Whether a layer uses transformers' table of attention functions.

    A class is told by its methods, and so is a module, unless its `forward` was replaced on the instance: then by what
    that function leads to.
    """
    if isinstance(layer, type):
        kind: Any = layer  # mypy does not take modules for hashable
        return _class_calls_interface(kind, kind.forward)
    replaced = vars(layer).get("forward")
    if replaced is None:
        return calls_interface(type(layer))
    return any(map(uses_interface, _reached(replaced, layer)))


# Classes may be patched, so `forward` is a part of the key.
@functools.lru_cache(maxsize=4096)
def _class_calls_interface(layer: Any, forward: object) -> bool:
    del forward
    return any(map(uses_interface, methods(layer)))


def methods(layer: type[nn.Module]) -> Iterator[FunctionType]:
    """Functions in a layer's class and its bases, those of `nn.Module` and `PreTrainedModel` left out."""
    for kind in layer.__mro__:
        if kind in (nn.Module, PreTrainedModel) or not issubclass(kind, nn.Module):
            continue
        for value in vars(kind).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, FunctionType):
                yield function


def uses_interface(function: FunctionType) -> bool:
    """Whether a function names the table of attention functions."""
    known = function.__globals__
    return any(
        name == "ALL_ATTENTION_FUNCTIONS" or isinstance(known.get(name), AttentionInterface)
        for name in names_in(function.__code__)
    )


def names_in(code: CodeType) -> Iterator[str]:
    """Global names and attributes that code uses, functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def syntax_tree(function: FunctionType) -> ast.Module | None:
    """The parsed source of a function; None where it was written at run time."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _reached(forward: object, module: nn.Module) -> set[FunctionType]:
    """Functions that a replaced `forward` may call: those it wraps, holds, or finds by name.

    It follows wrappers (`functools.partial`, bound methods, closures, `functools.wraps`) and attributes of the objects
    these hold, such as accelerate's `module._old_forward`. Reaching a method of the module's class reaches the class.
    """
    inherited = set(methods(type(module)))
    functions: set[FunctionType] = set()
    seen: dict[int, object] = {}
    # Values to look at, each with objects whose attributes its code may call.
    left: list[tuple[object, tuple[object, ...]]] = [(forward, (module,))]
    while left:
        value, holders = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        match value:
            case functools.partial():
                arguments = (*value.args, *value.keywords.values())
                left += [(one, (*holders, *arguments)) for one in (value.func, *arguments)]
            case MethodType():
                left.append((value.__func__, (*holders, value.__self__)))
            case FunctionType() if value in inherited:
                return functions | inherited
            case FunctionType() if not _is_torch(value):
                functions.add(value)
                held = _held(value)
                named = _looked_up(value, (*holders, *held))
                left += [(one, (*holders, *held)) for one in (*held, *named)]
            case dict():
                left += [(one, holders) for one in value.values()]
            case list() | tuple():
                left += [(one, holders) for one in value]
            case type() | nn.Module():
                pass  # its attributes are looked at where code names them
            case _ if callable(value):
                left.append((inspect.getattr_static(type(value), "__call__", None), (*holders, value)))
    return functions


def _is_torch(function: FunctionType) -> bool:
    """Whether a function is PyTorch's, which calls no model's code unless it wraps it (`torch.compile`)."""
    return str(function.__module__).split(".")[0] == "torch" and not hasattr(function, "__wrapped__")


def _held(function: FunctionType) -> list[Any]:
    """Values a function holds: closure cells, defaults, and what it wraps."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # still empty
            continue
    return [*held, getattr(function, "__wrapped__", None)]


def _looked_up(function: FunctionType, holders: Iterable[object]) -> Iterator[object]:
    """Values of a function's names: among its globals, and as attributes of the objects it can reach."""
    names = set(names_in(function.__code__))
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from (value for value in known if isinstance(value, FunctionType | functools.partial))
    for holder in (*holders, *(value for value in known if isinstance(value, type))):
        attributes = {} if isinstance(holder, type) else getattr(holder, "__dict__", {})
        yield from (attributes[name] for name in names if name in attributes)
        kind = holder if isinstance(holder, type) else type(holder)
        inherited = (inspect.getattr_static(kind, name, None) for name in names)
        yield from (value for value in inherited if isinstance(value, FunctionType))
