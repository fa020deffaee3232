"""What Dynamo's guards look at, evaluated without Dynamo: expressions of a model's arguments and global names."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from stof.integrations.code_text import IndescribableError
from stof.integrations.fingerprint import HOOKS
from stof.integrations.traced import Looks

# Not of the outermost function: what Dynamo names after addresses, which classes of PyTorch are.
_OF_THIS_PROCESS = re.compile(r"G\['_\d+_c\d+'\]")


class _Globals(dict[str, Any]):
    """Global names of the outermost function, and those that Dynamo adds to reach other modules."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__import_"):
            return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]
        if name.startswith("__builtins_dict__"):
            return vars(builtins)
        raise KeyError(name)


def _outermost(model: nn.Module) -> types.FunctionType:
    """The function that tracing a model begins with."""
    forward = model.forward
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, types.FunctionType):
        raise IndescribableError("its forward is no function")
    return function


def check_whole(model: nn.Module, code: Sequence[types.CodeType]) -> None:
    """Raise IndescribableError unless the model's forward was traced as a whole, with no hooks before and after it."""
    if not code or code[0] is not _outermost(model).__code__:
        raise IndescribableError("its graph is not of the model's whole forward")
    if any(one.co_name.startswith("torch_dynamo_resume_in_") for one in code):
        raise IndescribableError("it is not one graph")
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    if any(not (getattr(hook, "__module__", None) or "").startswith("stof.") for hook in hooks):
        raise IndescribableError("the model has hooks")


def scope_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Where guards' expressions mean what they meant to Dynamo."""
    function = _outermost(model)
    for hook in model._forward_pre_hooks.values():  # ours, see `check_whole`
        args, kwargs = hook(model, args, kwargs) or (args, kwargs)
    bound = inspect.Signature.from_callable(function, follow_wrapped=False).bind(model, *args, **kwargs)
    bound.apply_defaults()
    closed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    local = {name: cell.cell_contents for name, cell in closed} | dict(bound.arguments)
    return {"G": _Globals(function.__globals__), "L": local}


@dataclass(frozen=True)
class Guard:
    """A value that guards look at, and those that they reach from it: all of a call's together are trees.

    Attributes:
        how: it is reached: "name" in the call's scope; "attribute" or "item" of the value before; "expression", by
            itself.
        key: of which name.
        text: a hash of what it gave; "" for the model's and the call's own tensors and modules, which are described
            elsewhere; "absent" for an attribute that there was not.
        then: what is reached from it.
    """

    how: str
    key: Any
    text: str
    then: tuple[Guard, ...] = ()

    def reached(self, before: Any) -> Any:
        """The value, from the one before or, of names and expressions, the scope.

        Raises:
            Exception: of whatever kind, there is none.
        """
        if self.how == "attribute":
            return getattr(before, self.key)
        return eval(self.key, before) if self.how == "expression" else before[self.key]

    def of(self, value: Any, looks: Looks) -> str:
        """A hash of what it gives."""
        if self.key in HOOKS and isinstance(value, dict):
            value = tuple(value.values())  # keys count all hooks of a process
        return looks.text(value)

    def other(self, before: Any, looks: Looks) -> str:
        """What gives something else now than it gave, as text; "" where nothing does."""
        try:
            value = self.reached(before)
        except AttributeError:
            return "" if self.text == _ABSENT else str(self)
        except Exception:
            return str(self)
        if self.text and self.text != self.of(value, looks):
            return str(self)
        return next((f"{self}{said}" for guard in self.then if (said := guard.other(value, looks))), "")

    def __str__(self) -> str:
        return {"attribute": f".{self.key}", "item": f"[{self.key!r}]"}.get(self.how, str(self.key))


_ABSENT = "absent"


def guards_of(expressions: Sequence[str], scope: dict[str, Any], own: Collection[int], looks: Looks) -> list[Guard]:
    """What expressions look at, with what that gives now.

    Args:
        own: addresses of the tensors and modules that are described elsewhere.

    Raises:
        IndescribableError: one cannot be evaluated outside of Dynamo.
    """
    ways: dict[Any, Any] = {}
    for expression in expressions:
        if expression and not _OF_THIS_PROCESS.search(expression):
            level = ways
            for step in _way(ast.parse(expression, mode="eval").body):
                level = level.setdefault(step, {})
            level[_ASKED] = {}
    maker = _Maker(own, looks)
    return [found for step, rest in ways.items() if (found := maker.guard(step, rest, scope, "")) is not None]


_ASKED = ("asked", None)


def _way(node: ast.expr) -> tuple[tuple[str, Any], ...]:
    """The steps from the scope to what an expression names."""
    way: list[tuple[str, Any]] = []
    inner = node
    while not isinstance(inner, ast.Name):
        if isinstance(inner, ast.Attribute):
            way.append(("attribute", inner.attr))
        elif isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
            way.append(("item", inner.slice.value))
        else:
            return (("expression", ast.unparse(node)),)
        inner = inner.value
    return ("name", inner.id), *reversed(way)


@dataclass(frozen=True)
class _Maker:
    """Makes guards; see `guards_of`."""

    own: Collection[int]
    looks: Looks

    def guard(self, step: tuple[str, Any], ways: dict[Any, Any], before: Any, path: str) -> Guard | None:
        """What a step gives now; None where nobody looks at it or at what is behind it."""
        guard, asked = Guard(*step, ""), _ASKED in ways
        path += str(guard)
        try:
            value = guard.reached(before)
        except Exception as error:
            if isinstance(error, AttributeError) and guard.how == "attribute" and ways.keys() == {_ASKED}:
                return replace(guard, text=_ABSENT)
            raise IndescribableError(f"a guard on {path}, which cannot be evaluated") from error
        described = isinstance(value, Tensor | nn.Module) and id(value) in self.own
        text = guard.of(value, self.looks) if asked and not described else ""
        further = [(step, rest) for step, rest in ways.items() if step != _ASKED]
        then = tuple(one for step, rest in further if (one := self.guard(step, rest, value, path)) is not None)
        return replace(guard, text=text, then=then) if text or then else None
