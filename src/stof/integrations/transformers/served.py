"""Which models of transformers run their attention through its interface, told from the code of their layers."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from stof.errors import ArgumentError, UnsupportedError

# What layers hand to the attention function that `attention_forward` reads, or that its mask says already.
_READ = {
    "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux",
    "output_attentions", "sliding_window", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "deterministic",
}  # fmt: skip
_REFUSED = {
    "cu_seq_lens_q": "give position_ids that begin anew at every sequence, or stof's pack(), and leave cu_seq_lens out",
    "cu_seq_lens_k": "give position_ids that begin anew at every sequence, or stof's pack(), and leave cu_seq_lens out",
    "cache": 'generate without continuous batching, or call model.set_attn_implementation("sdpa")',
}
_UNREAD = "_stof_unread"


def check_module(model: object) -> None:
    """Raise `ArgumentError` unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the model is a torch.nn.Module, got {type(model).__name__}")


def check_served(model: nn.Module) -> None:
    """Refuse a model with a part whose attention layers never call the attention interface.

    Raises:
        UnsupportedError: naming these parts and layers.
    """
    refused: dict[str, list[str]] = {}
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        kinds = {type(module) for module in part.modules()}
        layers = sorted(kind.__name__ for kind in kinds if "Attention" in kind.__name__)
        if layers and not any(map(calls_interface, kinds)):
            refused[type(part).__name__] = layers
    if refused:
        raise UnsupportedError(not_served(", ".join(refused)), refused)
    unread = {kind: _unread(kind) for kind in {type(module) for module in model.modules()} if calls_interface(kind)}
    for module in model.modules():
        if unread.get(type(module)):
            setattr(module, _UNREAD, unread[type(module)])


def check_can_serve(model: object) -> None:
    """What `enable` refuses without changing anything.

    Raises:
        ArgumentError: not a module.
        UnsupportedError: a part has attention code of its own, or no layer calls the attention interface.
    """
    check_module(model)
    assert isinstance(model, nn.Module)
    check_served(model)
    if not any(map(calls_interface, {type(module) for module in model.modules()})):
        raise UnsupportedError(not_served(type(model).__name__), {})


def not_served(names: str) -> str:
    return (
        f"{names} does not run its attention through transformers' attention interface, so stof cannot serve it; use "
        "its own attention (attn_implementation=None), or a model whose attention layers call the interface, such as "
        "BERT or LLaMA; stof.integrations.transformers.sparsify gives those any sparse mask"
    )


def refuse_unread(module: nn.Module, given: dict[str, Any]) -> None:
    """Refuse what a layer or a caller hands to the attention function and stof does not read."""
    for name, advice in _REFUSED.items():
        if given.get(name) is not None:
            raise UnsupportedError(f"stof attention does not read {name}, which changes the result; {advice}", {})
    found = [name for name in getattr(module, _UNREAD, ()) if given.get(name) is not None]
    if found:
        raise UnsupportedError(
            f"{type(module).__name__} hands {', '.join(found)} to its attention function, which stof does not read and "
            'cannot leave out; call model.set_attn_implementation("sdpa") or "eager"',
            {},
        )


def calls_interface(layer: type[nn.Module]) -> bool:
    """Whether a method of a layer's class uses transformers' table of attention functions."""
    return any(_uses_interface(function) for function in _methods(layer))


def _methods(layer: type[nn.Module]) -> Iterator[FunctionType]:
    for kind in layer.__mro__:
        if kind in (nn.Module, PreTrainedModel) or not issubclass(kind, nn.Module):
            continue
        for value in vars(kind).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, FunctionType):
                yield function


def _uses_interface(function: FunctionType) -> bool:
    known = function.__globals__
    return any(
        name == "ALL_ATTENTION_FUNCTIONS" or isinstance(known.get(name), AttentionInterface)
        for name in _names(function.__code__)
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _unread(layer: type[nn.Module]) -> tuple[str, ...]:
    """Names a layer hands to its attention function, in so many words, that stof does not read."""
    found: set[str] = set()
    for function in filter(_uses_interface, _methods(layer)):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            continue  # written at run time: nothing is known
        interfaces = _interfaces(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in interfaces:
                found.update(word.arg for word in node.keywords if word.arg is not None)
    return tuple(sorted(found - _READ))


def _interfaces(tree: ast.AST) -> set[str]:
    """Variables that hold the attention function: what an expression with `_attn_implementation` is assigned to."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            inside = ast.walk(node.value)
            if any(isinstance(one, ast.Attribute) and one.attr == "_attn_implementation" for one in inside):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def check_when_loaded(name: str, watch: Callable[[PreTrainedModel], None]) -> None:
    """Have models checked, and then watched, when they are built with, or set to, the implementation `name`."""

    def check_before(method: str, wanted: Callable[..., Any]) -> None:
        own = getattr(PreTrainedModel, method)
        if hasattr(own, "_stof_checks"):
            return

        @functools.wraps(own)
        def checked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            if wanted(self, *args, **kwargs) == name:
                check_served(self)
                watch(self)
            return own(self, *args, **kwargs)

        checked._stof_checks = True  # type: ignore[attr-defined]
        setattr(PreTrainedModel, method, checked)

    check_before("post_init", lambda self, *args, **kwargs: self.config._attn_implementation)
    check_before("set_attn_implementation", lambda self, attn_implementation, *args, **kwargs: attn_implementation)
