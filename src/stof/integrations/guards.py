"""What Dynamo's guards look at, evaluated without Dynamo: expressions of a model's arguments and global names."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stof.integrations.fingerprint import IndescribableError, shallow_text

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


def guards_of(expressions: Sequence[str], scope: dict[str, Any]) -> list[tuple[str, str]]:
    """Each expression with what it gives now.

    Raises:
        IndescribableError: one cannot be evaluated outside of Dynamo.
    """
    found = []
    for expression in expressions:
        if not expression or _OF_THIS_PROCESS.search(expression):
            continue
        text = guarded(expression, scope)
        if text is None:
            raise IndescribableError(f"a guard on {expression}, which cannot be evaluated")
        if text:
            found.append((expression, text))
    return found


def guarded(expression: str, scope: dict[str, Any]) -> str | None:
    """A hash of what an expression gives; "" for tensors and modules, which are described, None where it fails."""
    try:
        value = eval(expression, scope)
    except Exception:
        return None
    return "" if isinstance(value, Tensor | nn.Module) else shallow_text(value)
