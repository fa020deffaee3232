"""The sparse mask of an attention layer, with hooks that refuse calls in which it would be left out."""

from __future__ import annotations

import functools
import threading
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from stof.errors import ArgumentError, UnsupportedError
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.self_attention import attends_to_another_sequence, key_argument
from stof.masks import Mask
from stof.runtime.private import backward_node

NAME = "stof"

# Whether layers run without their sparse masks: the packing check calls them with other lengths. Not in compiled code.
IGNORED: ContextVar[bool] = ContextVar("stof_sparse_masks_ignored", default=False)
_MASK = "_stof_sparse_mask"
_USE = "_stof_sparse_use"
_HAD_MASK = "_stof_had_sparse_mask"
# The name of the node that recomputes in reentrant checkpointing.
_REENTRANT = "CheckpointFunctionBackward"


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
    """What the calls of a layer do with its sparse mask.

    Attributes:
        name: of the layer in its model.
        owner: by whom the mask was set: an object for each `Sparsified`.
        hooks: handles of the hooks that check the calls.
        cross: whether the current call attends to another sequence, which has no sparse mask.
        called: whether the latest call did call stof's attention; one value for all threads, as compiled code sets it.
        threads: the threads whose current call did, so that calls at the same time do not mix; not in compiled code.
    """

    __slots__ = ("called", "cross", "hooks", "keys", "name", "owner", "threads")

    def __init__(self, layer: AttentionLayer, owner: object) -> None:
        self.name = layer.name or type(layer.module).__name__
        self.owner = owner
        self.hooks: list[Any] = []
        self.keys = key_argument(type(layer.module))
        self.cross = False
        self.called = False
        self.threads: set[int] = set()

    def begin(self) -> None:
        self.called = False
        if not torch.compiler.is_dynamo_compiling():
            self.threads.discard(threading.get_ident())

    def mark(self) -> None:
        self.called = True
        if not torch.compiler.is_dynamo_compiling():
            self.threads.add(threading.get_ident())

    def was_called(self) -> bool:
        return self.called or (not torch.compiler.is_dynamo_compiling() and threading.get_ident() in self.threads)


def sparse_mask_of(layer: nn.Module) -> Mask | None:
    """The sparse mask set on an attention layer."""
    return getattr(layer, _MASK, None)


def owner_of(layer: nn.Module) -> object:
    """By whom the sparse mask was set; None without one."""
    use = getattr(layer, _USE, None)
    return None if use is None else use.owner


class _Call:
    """A call of a layer outside of backward passes. Its graph and the `ModelMask` it was given keep it alive.

    Attributes:
        mask: the sparse mask of the call.
    """

    __slots__ = ("__weakref__", "mask")

    def __init__(self, mask: Mask | None) -> None:
        self.mask = mask


# Calls that a backward pass may recompute. Not on the layers, which are copied and pickled.
_calls: WeakKeyDictionary[nn.Module, WeakSet[_Call]] = WeakKeyDictionary()


def mask_of_call(layer: nn.Module, model_mask: object) -> Mask | None:
    """The sparse mask for the current call of a layer, whose attention function asks for it.

    In a backward pass, which recomputes a call (activation checkpointing), it is the mask of that call.

    Args:
        layer: the attention layer.
        model_mask: the attention mask that it was called with.

    Raises:
        UnsupportedError: the mask of the call that is recomputed is not known.
    """
    mask, compiling = sparse_mask_of(layer), torch.compiler.is_dynamo_compiling()
    if not compiling and IGNORED.get():
        return None
    if mask is not None:
        use: _Use = getattr(layer, _USE)
        use.mark()
        if use.cross:
            return None
    node = None if compiling else backward_node()
    if node is None:
        return mask
    alive = set(_calls.get(layer, ()))
    # A recomputed layer is given the same `ModelMask`; a recomputed model makes a new one.
    candidates = alive & model_mask.calls if isinstance(model_mask, ModelMask) else set()
    # The first pass of reentrant checkpointing has no graph: those that are alive are of other calls.
    if not candidates and node.name() != _REENTRANT:
        candidates = alive
    sparse_masks = {call.mask for call in candidates}
    if len(sparse_masks) == 1:
        return sparse_masks.pop()
    if sparse_masks or hasattr(layer, _HAD_MASK):
        raise UnsupportedError(
            f"a backward pass recomputes a call of {type(layer).__name__} (activation checkpointing), and it is not "
            "known which sparse mask the call had: use checkpointing with use_reentrant=False, and call backward() "
            "once for each mask",
            {},
        )
    return None


def remember_call(layer: nn.Module, mask: Mask | None, model_mask: object, out: Tensor) -> None:
    """Remember the sparse mask of a call, for `mask_of_call`; `out` is what attention returned."""
    if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled() or backward_node() is not None:
        return
    call = _Call(mask)
    _calls.setdefault(layer, WeakSet()).add(call)
    if isinstance(model_mask, ModelMask):
        model_mask.calls.add(call)
    if out.grad_fn is not None:
        metadata: Any = out.grad_fn.metadata
        metadata["stof"] = call


def set_mask(layer: AttentionLayer, mask: Mask | None, owner: object) -> None:
    """Set or remove the sparse mask of a layer."""
    use = getattr(layer.module, _USE, None)
    if use is not None:
        for hook in use.hooks:
            hook.remove()
        delattr(layer.module, _MASK)
        delattr(layer.module, _USE)
    if mask is None:
        return
    use = _Use(layer, owner)
    setattr(layer.module, _HAD_MASK, True)
    setattr(layer.module, _MASK, mask)
    setattr(layer.module, _USE, use)
    use.hooks = [
        layer.module.register_forward_pre_hook(_begin, with_kwargs=True),
        layer.module.register_forward_hook(_check),
    ]
    if layer.block is not None:
        use.hooks.append(layer.block.register_forward_hook(functools.partial(_check_block, use)))


def check_implementation(layer: nn.Module, name: str) -> None:
    """Refuse a layer with a mask that runs another attention.

    Raises:
        ArgumentError: naming the layer and its implementation.
    """
    config: Any = layer.config
    if config._attn_implementation != NAME:
        raise ArgumentError(
            f"layer {name} has a stof mask and runs attn_implementation={config._attn_implementation!r}, which would "
            f"ignore it; call stof.integrations.transformers.enable(model), "
            "or remove the mask with sparsify(model, None)"
        )


def _begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    use: _Use = getattr(layer, _USE)
    check_implementation(layer, use.name)
    use.cross = use.keys is not None and attends_to_another_sequence(use.name, use.keys, args, kwargs)
    use.begin()


def _check(layer: nn.Module, args: object, output: object) -> None:
    del args, output
    _refuse_if_left_out(getattr(layer, _USE))


def _check_block(use: _Use, block: nn.Module, args: object, output: object) -> None:
    del block, args, output
    _refuse_if_left_out(use)
    use.begin()


def _refuse_if_left_out(use: _Use) -> None:
    if not use.was_called():
        raise UnsupportedError(
            f"layer {use.name} has a sparse mask, and its forward pass never called stof's attention, so the mask was "
            "left out: some code replaced the layer, its forward or the forward of the module around it; let that code "
            "call the layer's own forward, or remove the mask with sparsify(model, None)",
            {},
        )
