"""Symbolic sizes: their values in the call that is being compiled, and in calls with more or fewer rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

# Symbols and the values they are taken at, both SymPy's.
Values = Mapping[Any, Any]
Size = int | torch.SymInt


def size_hint(size: Size, at: Values | None = None) -> int:
    """A size, or for a symbolic one its value in the call that is being compiled, or at given values of its symbols.

    Adds no guard. 1 for what depends on data.
    """
    if isinstance(size, int):
        return size
    if at:
        value = size.node.expr.xreplace(at)
        if value.is_number:
            return int(value)
    return int(size.node.hint) if size.node.has_hint() else 1


def is_symbolic(sizes: Iterable[Size]) -> bool:
    """Whether a graph leaves any of these sizes open."""
    return any(not isinstance(size, int) and size.node.maybe_as_int() is None for size in sizes)


def values_for(lead: Sequence[Size], least: int, most: int) -> Values | None:
    """Values of the symbols in `lead` at which its GEMM is at most `most` and more than `least`.

    The longest dimension changes first, so that a batch stays a batch. None where the symbols' ranges do not reach.
    """
    import sympy  # type: ignore[import-untyped]  # torch loads it when it first sees a symbolic size

    values: dict[Any, Any] = {}
    ranges: dict[Any, Any] = {}
    for size in lead:
        if isinstance(size, int):
            continue
        env = size.node.shape_env
        known = env.backed_var_to_val
        for symbol in size.node.expr.free_symbols:
            if symbol not in known:
                return None
            values[symbol], ranges[symbol] = sympy.Integer(known[symbol]), env.var_to_range[symbol]
    for symbol in sorted(values, key=lambda one: (-values[one], str(one))):
        scaled = values[symbol] * most // prod(size_hint(size, values) for size in lead)
        # An open range ends at an infinity.
        values[symbol] = min(max(scaled, ranges[symbol].lower), ranges[symbol].upper)
    return values if values and least < prod(size_hint(size, values) for size in lead) <= most else None
