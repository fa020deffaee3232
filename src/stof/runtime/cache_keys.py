"""Calls of Triton's JIT: compile options of every kernel, and cache keys that are equal in every process.

Triton names a kernel's cached binary after its source and the constants that it and the functions it calls refer to.
The constants of a called function only count if that function was hashed before its caller, by another kernel that
calls it (Triton 3.6 and 3.7). So the key depends on which kernels the process launched earlier, and a second process
may compile a kernel again. Hashing called functions first makes the key independent of that order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

K = TypeVar("K")

# Kernels count on products and sums becoming one instruction, which Triton 3.10 no longer does by default.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return Triton's launch of a kernel on a grid, which takes the kernel's arguments and other compile options."""
    return functools.partial(with_stable_key(kernel)[grid], **COMPILE_OPTIONS)


def with_stable_key(kernel: K) -> K:
    """Return the same kernel, hashed after the functions that it calls. Use it before each launch or compilation."""
    if getattr(kernel, "hash", "") is None:  # Triton's interpreter has no hashes
        _settle(kernel, set())
    return kernel


def _settle(function: Any, begun: set[int]) -> None:
    begun.add(id(function))
    for called in _called(function):
        if called.hash is None and id(called) not in begun:
            _settle(called, begun)
    _ = function.cache_key


def _called(function: Any) -> Iterator[Any]:
    """Yield the Triton functions that a function refers to, by name or as an attribute of a module."""
    python = function.fn
    scope = {**python.__globals__, **inspect.getclosurevars(python).nonlocals}
    names = python.__code__.co_names
    known = [scope[name] for name in (*names, *python.__code__.co_freevars) if name in scope]
    for value in known:
        within = [getattr(value, name, None) for name in names] if isinstance(value, ModuleType) else [value]
        # Asks the class for the attribute: asking the function would hash it.
        yield from (one for one in within if hasattr(type(one), "cache_key") and hasattr(one, "fn"))
