"""Dataflow patterns: small expressions matched against a graph, and those that models spell out call by call.

A pattern is a number, a variable, or an operator's name with patterns as arguments; `add` and `mul` match in either
order. A match lists the nodes it explains; it holds only if nothing else uses their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from stof.fusion.graph.nodes import argument, fake_value, is_cast, op_name, scalar_value, source_of


@dataclass(frozen=True)
class Var:
    """Any node, the same one wherever the name appears; `vector` wants one dimension."""

    name: str
    vector: bool = False


@dataclass(frozen=True)
class Constant:
    """A number, bound to a name."""

    name: str


@dataclass(frozen=True)
class Cast:
    """The inner pattern, with or without a change of floating dtype around it."""

    inner: Pattern


@dataclass(frozen=True)
class Mean:
    """The mean over the last dimension, which is kept."""

    inner: Pattern


@dataclass(frozen=True)
class Call:
    """An operator by name, with its positional arguments."""

    name: str
    args: tuple[Pattern, ...]


@dataclass(frozen=True)
class Either:
    """The first of two patterns that matches."""

    first: Pattern
    second: Pattern


Pattern = float | int | Var | Constant | Cast | Mean | Call | Either


@dataclass(frozen=True)
class Match:
    """Bound names, the nodes explained, and casts at the leaves, which others may share."""

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: frozenset[fx.Node] = frozenset()
    leaves: frozenset[fx.Node] = frozenset()

    def bind(self, name: str, value: Any) -> Match | None:
        if name in self.bound:
            return self if self.bound[name] is value or self.bound[name] == value else None
        return Match(self.bound | {name: value}, self.nodes, self.leaves)

    def add(self, node: fx.Node, leaf: bool = False) -> Match:
        if leaf:
            return Match(self.bound, self.nodes, self.leaves | {node})
        return Match(self.bound, self.nodes | {node}, self.leaves)


_COMMUTATIVE = {"add", "mul"}


def _matches(pattern: Pattern, at: Any, match: Match) -> Iterator[Match]:
    match pattern:
        case bool() | int() | float():
            given = scalar_value(at)
            if given is not None and math.isclose(given, pattern, rel_tol=1e-6):
                yield match
        case Constant(name):
            given = scalar_value(at)
            if given is not None and (bound := match.bind(name, given)):
                yield bound
        case Var(name, vector):
            if isinstance(at, fx.Node) and (not vector or ((v := fake_value(at)) is not None and v.dim() == 1)):
                bound = match.bind(name, at)
                if bound:
                    yield bound
        case Cast(inner):
            leaf = isinstance(inner, Var)
            while is_cast(at):
                match, at = match.add(at, leaf), source_of(at)
            yield from _matches(inner, at, match)
        case Either(first, second):
            yield from _matches(first, at, match)
            yield from _matches(second, at, match)
        case Mean(inner):
            if op_name(at) == "mean" and _over_last(at):
                yield from _matches(inner, source_of(at), match.add(at))
        case Call(name, patterns):
            if op_name(at) == name and len(at.args) >= len(patterns) and not at.kwargs:
                orders = (at.args, at.args[::-1]) if name in _COMMUTATIVE and len(at.args) == 2 else (at.args,)
                for args in orders:
                    yield from _sequence(patterns, args, match.add(at))


def _sequence(patterns: tuple[Pattern, ...], args: tuple[Any, ...], match: Match) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for matched in _matches(patterns[0], args[0], match):
        yield from _sequence(patterns[1:], args[1:], matched)


def _over_last(node: fx.Node) -> bool:
    value, dim = fake_value(source_of(node)), argument(node, 1, "dim")
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    return value is not None and dims in ((-1,), (value.dim() - 1,)) and bool(argument(node, 2, "keepdim", False))


def find(pattern: Pattern, root: fx.Node) -> Match | None:
    """The first way a pattern matches at `root` such that only `root`'s value is used outside the match."""
    for candidate in _matches(pattern, root, Match()):
        nodes = set(candidate.nodes)
        # A cast of the input that others read as well is no part of the match and stays in the graph.
        nodes |= {
            leaf for leaf in candidate.leaves if all(user in nodes or user in candidate.leaves for user in leaf.users)
        }
        if all(user in nodes for node in nodes if node is not root for user in node.users):
            return Match(candidate.bound, frozenset(nodes))
    return None


def _call(name: str, *args: Pattern) -> Call:
    return Call(name, args)


_X = Var("x")
_SQUARE = Either(Either(_call("pow", Cast(_X), 2), _call("square", Cast(_X))), _call("mul", Cast(_X), Cast(_X)))
_SCALED = _call("mul", Cast(_X), _call("rsqrt", _call("add", Mean(_SQUARE), Constant("eps"))))

# `weight * (x * rsqrt(mean(x^2) + eps))`, in float32 inside or not (Zhang & Sennrich 2019, equation 4).
RMS_NORM = _call("mul", Var("weight", vector=True), Cast(_SCALED))
# The same without a weight.
RMS_NORM_PLAIN = Cast(_SCALED)

_HALF = _call("mul", 0.5, _X)
# Both forms of Hendrycks & Gimpel 2016 as models spell them out.
_U = _call("mul", math.sqrt(2 / math.pi), _call("add", _X, _call("mul", 0.044715, _call("pow", _X, 3))))
GELU_TANH = _call("mul", _HALF, _call("add", 1.0, _call("tanh", _U)))
_ERF = _call("erf", Either(_call("truediv", _X, math.sqrt(2)), _call("mul", _X, math.sqrt(0.5))))
GELU_ERF = _call("mul", _HALF, _call("add", 1.0, _ERF))

# `x * cos + cat(-x[half:], x[:half]) * sin` (Su et al. 2021, equation 34); the halves are checked by the caller.
ROTARY = _call("add", _call("mul", _X, Var("cos")), _call("mul", Var("rotated"), Var("sin")))
