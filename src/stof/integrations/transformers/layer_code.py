"""The code that a call of a layer runs, found without running it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel


def calls_interface(layer: nn.Module | type[nn.Module]) -> bool:
    """Whether a layer uses transformers' table of attention functions, as the methods of its class say."""
    kind: Any = layer if isinstance(layer, type) else type(layer)  # mypy does not take modules for hashable
    return _class_calls_interface(kind, kind.forward)


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
