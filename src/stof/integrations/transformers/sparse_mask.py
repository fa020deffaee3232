"""The sparse mask of an attention layer, with hooks that refuse calls in which it would be left out."""

from __future__ import annotations

import functools
import threading
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from stof.errors import UnsupportedError
from stof.integrations.transformers.self_attention import attends_to_another_sequence, key_argument
from stof.masks import Mask
from stof.masks.aligned import not_by_distance
from stof.runtime.recomputation import Changes

NAME = "stof"

# Whether layers run without their sparse masks: the packing check calls them with other lengths. Not in compiled code.
IGNORED: ContextVar[bool] = ContextVar("stof_sparse_masks_ignored", default=False)
_MASK = "_stof_sparse_mask"
_USE = "_stof_sparse_use"
_CHANGES = "_stof_sparse_mask_changes"


class AttentionLayer(NamedTuple):
    """An attention layer of a model.

    Attributes:
        name: of the module in its model.
        module: the layer itself.
        block: the member of a list of modules that it is a part of, such as a decoder layer; None if there is none.
            The block's forward pass includes the layer's, whatever replaced its code. Of other parents this is unknown.
    """

    name: str
    module: nn.Module
    block: nn.Module | None


def attention_layer(model: nn.Module, name: str) -> AttentionLayer:
    """The layer of this name."""
    parents = name.split(".")[:-1]
    while parents and not parents[-1].isdigit():
        parents.pop()
    block = model.get_submodule(".".join(parents)) if parents else None
    return AttentionLayer(name, model.get_submodule(name), block)


class _Use:
    """How a layer with a sparse mask is called.

    Attributes:
        name: of the layer in its model.
        owner: by whom the mask was set: an object for each `Sparsified`.
        hooks: handles of the hooks that check the calls.
        keys: how a call hands over the sequence of the keys; None if there is one sequence.
        counts_positions: whether the mask looks at more than distances of queries and keys.
        cross: whether the current call attends to another sequence, which has no sparse mask.
        called: whether the current call of the block around the layer, or of the layer, called stof's attention; one
            value for all threads, as compiled code sets it.
        threads: the threads whose current call did, so that calls at the same time do not mix; not in compiled code.
    """

    __slots__ = ("called", "counts_positions", "cross", "hooks", "keys", "name", "owner", "threads")

    def __init__(self, layer: AttentionLayer, mask: Mask, owner: object) -> None:
        self.name, self.owner = layer.name or type(layer.module).__name__, owner
        self.hooks: list[Any] = []
        self.keys, self.counts_positions = key_argument(type(layer.module)), not_by_distance(mask) is not None
        self.cross = self.called = False
        self.threads: set[int] = set()

    def set_called(self, called: bool) -> None:
        self.called = called
        if not torch.compiler.is_dynamo_compiling():
            (self.threads.add if called else self.threads.discard)(threading.get_ident())

    def was_called(self) -> bool:
        return self.called or (not torch.compiler.is_dynamo_compiling() and threading.get_ident() in self.threads)


def sparse_mask_of(layer: nn.Module) -> Mask | None:
    """The sparse mask set on an attention layer."""
    return getattr(layer, _MASK, None)


def counts_positions(layer: nn.Module) -> bool:
    """Whether the sparse mask of a layer looks at more than distances of queries and keys."""
    use: _Use = getattr(layer, _USE)
    return use.counts_positions


def owner_of(layer: nn.Module) -> object:
    """By whom the sparse mask was set; None without one."""
    use = getattr(layer, _USE, None)
    return None if use is None else use.owner


def mask_of_call(layer: nn.Module) -> Mask | None:
    """The sparse mask for the current call of a layer, whose attention function asks for it.

    A backward pass that recomputes a call (activation checkpointing) takes the mask that the layer has by then.

    Raises:
        UnsupportedError: the mask may have been changed after the call that is recomputed.
    """
    mask, compiling = sparse_mask_of(layer), torch.compiler.is_dynamo_compiling()
    if not compiling and IGNORED.get():
        return None
    if mask is not None:
        use: _Use = getattr(layer, _USE)
        use.set_called(True)
        if use.cross:
            return None
    if not compiling and not _changes_of(layer).note_call():
        raise UnsupportedError(
            f"a backward pass recomputes a call of {type(layer).__name__} (activation checkpointing), whose sparse "
            "mask was changed after the call, or is changed and used by several threads; call backward() before the "
            "mask changes: inside of the block `with sparsify(...)`, and before the next sparsify()",
            {},
        )
    return mask


def _changes_of(layer: nn.Module) -> Changes:
    attributes = vars(layer)
    changes: Changes | None = attributes.get(_CHANGES)
    if changes is None:
        changes = attributes[_CHANGES] = Changes()
    return changes


def set_mask(layer: AttentionLayer, mask: Mask | None, owner: object) -> None:
    """Set or remove the sparse mask of a layer.

    Raises:
        UnsupportedError: another mask, in a backward pass.
    """
    module = layer.module
    if mask is not sparse_mask_of(module) and not _changes_of(module).note_change():
        raise UnsupportedError(
            "sparsify() changes masks in a backward pass, which recomputes a function that calls it (activation "
            "checkpointing); call sparsify() outside of the function, and call backward() before the masks change",
            {},
        )
    use: _Use | None = getattr(module, _USE, None)
    if use is not None:
        for hook in use.hooks:
            hook.remove()
        delattr(module, _MASK)
        delattr(module, _USE)
    if mask is None:
        return
    use = _Use(layer, mask, owner)
    setattr(module, _MASK, mask)
    setattr(module, _USE, use)
    outer = module if layer.block is None else layer.block
    use.hooks = [
        outer.register_forward_pre_hook(functools.partial(_begin, use)),
        outer.register_forward_hook(functools.partial(_check, use)),
    ]
    if use.keys is not None:
        use.hooks.append(module.register_forward_pre_hook(_tell_cross_attention, with_kwargs=True))


def _begin(use: _Use, module: nn.Module, args: object) -> None:
    del module, args
    use.set_called(False)


def _tell_cross_attention(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    use: _Use = getattr(layer, _USE)
    assert use.keys is not None
    use.cross = attends_to_another_sequence(use.name, use.keys, args, kwargs)


def _check(use: _Use, module: nn.Module, args: object, output: object) -> None:
    del module, args, output
    if not use.was_called():
        raise UnsupportedError(
            f"layer {use.name} has a sparse mask, and its forward pass never called stof's attention, so the mask was "
            f"left out: it has another attn_implementation than {NAME!r} (call enable(model)), or some code replaced "
            "the layer, its forward or the forward of the module around it; let that code call the layer's own "
            "forward, or remove the mask with sparsify(model, None)",
            {},
        )
