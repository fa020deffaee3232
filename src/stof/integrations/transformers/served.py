"""Which models of transformers run their attention through its interface, told from the code of their layers."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stof.errors import ArgumentError, UnsupportedError
from stof.integrations.transformers.layer_code import calls_interface, methods, syntax_tree, uses_interface

# Arguments of the attention function that `attention_forward` reads, or that are part of its mask.
_READ = {
    "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux",
    "output_attentions", "sliding_window", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "deterministic",
}  # fmt: skip
_NO_BOUNDARIES = (
    "where it is given to a layer, alone or in compiled code; give position_ids that begin anew at every sequence, or "
    "stof's pack(), and leave cu_seq_lens out"
)
_REFUSED = {
    "cu_seq_lens_q": _NO_BOUNDARIES,
    "cu_seq_lens_k": _NO_BOUNDARIES,
    "cache": 'generate without continuous batching, or call model.set_attn_implementation("sdpa")',
}
_NAME = "stof"


def check_module(model: object) -> None:
    """Raise `ArgumentError` unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the model is a torch.nn.Module, got {type(model).__name__}")


def check_served(model: nn.Module, implementation: str | None = None) -> None:
    """Refuse a model with a part whose attention layers stof cannot serve.

    Args:
        implementation: check only the parts that are set to this attention implementation; None checks all.

    Raises:
        UnsupportedError: naming these parts and layers.
    """
    parts = [part for part in _parts(model) if implementation in (None, part.config._attn_implementation)]
    if not parts and implementation is not None:
        return
    refused = {type(part).__name__: layers for part in parts if (layers := _unserved_layers(part))}
    if refused:
        raise UnsupportedError(not_served(", ".join(refused)), refused)


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _unserved_layers(part: PreTrainedModel) -> list[str]:
    """Attention classes of a part none of whose layers calls the interface."""
    kinds = {type(module) for module in part.modules()}
    return [] if any(map(calls_interface, kinds)) else sorted(k.__name__ for k in kinds if "Attention" in k.__name__)


def _without_inner_models(part: nn.Module) -> Iterator[nn.Module]:
    """Modules of a part, those of other models within it left out."""
    for child in part.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _without_inner_models(child)


def check_can_serve(model: object) -> None:
    """What `enable` refuses without changing anything.

    Raises:
        ArgumentError: not a module.
        UnsupportedError: a part has attention code of its own, or no layer calls the attention interface.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> stof_hf.check_can_serve(model)  # nothing is raised: enable(model) will serve it
    """
    check_module(model)
    assert isinstance(model, nn.Module)
    check_served(model)
    if not any(map(calls_interface, {type(module) for module in model.modules()})):
        raise UnsupportedError(not_served(type(model).__name__), {})


def not_served(names: str) -> str:
    return (
        f"{names} has attention that stof cannot serve: layers that do not call transformers' attention interface; use "
        "its own attention (attn_implementation=None), or a model whose attention layers call the interface, such as "
        "BERT or LLaMA; stof.integrations.transformers.sparsify gives those any sparse mask"
    )


def refuse_unread(module: nn.Module, given: dict[str, Any]) -> None:
    """Refuse what a layer or a caller hands to the attention function and stof does not read."""
    for name, advice in _REFUSED.items():
        if given.get(name) is not None:
            raise UnsupportedError(f"stof attention does not read {name}, which changes the result; {advice}", {})
    unread = [name for name in _unread(type(module)) if given.get(name) is not None]
    if unread:
        raise UnsupportedError(
            f"{type(module).__name__} hands {', '.join(unread)} to its attention function, which stof does not read "
            'and cannot leave out; call model.set_attn_implementation("sdpa") or "eager"',
            {},
        )


# Its result is a constant for Dynamo, which cannot trace how sources are read.
@torch.compiler.assume_constant_result
def _unread(layer: type[nn.Module]) -> tuple[str, ...]:
    """Names a layer hands to its attention function, in so many words, that stof does not read."""
    kind: Any = layer  # mypy does not take modules for hashable
    key = (kind, kind.forward)  # classes may be patched
    if key not in _UNREAD:
        _UNREAD[key] = _read_unread(kind)
    return _UNREAD[key]


# No `functools.lru_cache`: Dynamo warns of those where it compiles `_unread` by itself.
_UNREAD: dict[tuple[Any, object], tuple[str, ...]] = {}


def _read_unread(layer: Any) -> tuple[str, ...]:
    trees = map(syntax_tree, filter(uses_interface, methods(layer)))
    calls = [node for tree in trees if tree is not None for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # The attention function is a variable, called with the layer itself first.
    interface = [call for call in calls if isinstance(call.func, ast.Name) and call.args]
    words = [word.arg for call in interface if ast.unparse(call.args[0]) == "self" for word in call.keywords]
    return tuple(sorted({word for word in words if word is not None} - _READ))


def refuse_attention_weights(asked: object) -> None:
    """Refuse `output_attentions=True`."""
    if asked:
        raise UnsupportedError(
            "stof attention never holds the attention weights, so output_attentions=True has nothing to return; "
            'call model.set_attn_implementation("eager") to inspect them',
            {},
        )


def check_when_set(watch: Callable[[PreTrainedModel], None]) -> None:
    """Have models checked, and then watched, when they are built with stof's attention implementation, or set to it."""
    build, choose = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation
    if hasattr(build, "_stof_checks"):
        return

    @functools.wraps(build)
    def checked_build(self: PreTrainedModel, *args: Any, **kw: Any) -> Any:
        check_served(self, _NAME)
        out = build(self, *args, **kw)
        watch(self)
        return out

    @functools.wraps(choose)
    def checked_choice(self: PreTrainedModel, attn_implementation: str | dict[str, str], *args: Any, **kw: Any) -> Any:
        if attn_implementation == _NAME:
            check_served(self)
        before = [(part.config, part.config._attn_implementation) for part in _parts(self)]
        out = choose(self, attn_implementation, *args, **kw)
        try:
            check_served(self, _NAME)
        except UnsupportedError:
            for config, implementation in before:
                config._attn_implementation = {"": implementation}  # those of inner configurations stay
            raise
        for part in _parts(self):
            _set_stale_configurations(part)
        watch(self)
        return out

    checked_build._stof_checks = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = checked_build
    PreTrainedModel.set_attn_implementation = checked_choice


def _set_stale_configurations(part: PreTrainedModel) -> None:
    """Give a part's layers its attention where they hold an older configuration (parts of `EncoderDecoderModel`)."""
    for layer in _without_inner_models(part):
        config = getattr(layer, "config", None)
        if config is not part.config and type(config) is type(part.config):
            config._attn_implementation = {"": part.config._attn_implementation}  # type: ignore[union-attr]
