"""Sparse masks for the self-attention layers of a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from stof.errors import ArgumentError, MaskError, StofError
from stof.integrations.transformers.layer_code import calls_interface
from stof.integrations.transformers.self_attention import is_cross_attention
from stof.integrations.transformers.served import check_module
from stof.integrations.transformers.sparse_mask import (
    NAME,
    AttentionLayer,
    attention_layer,
    owner_of,
    set_mask,
    sparse_mask_of,
)
from stof.masks import NAMED_MASKS, Mask
from stof.masks.tensors import as_mask

PerLayer = Mask | str | Mapping[int, Mask | None] | Callable[[int], Mask | None] | None


class Sparsified:
    """Sparse masks set by `sparsify`; `remove()`, or the end of a `with` block, restores what was there before.

    Attributes:
        layers: names of the self-attention layers, in the order they are numbered.
        masks: the mask of each of them; None where a layer keeps only the model's own.
    """

    def __init__(self, layers: list[AttentionLayer], masks: list[Mask | None]) -> None:
        self.layers = tuple(layer.name for layer in layers)
        self.masks = tuple(masks)
        self._layers = layers
        self._before = [(sparse_mask_of(layer.module), owner_of(layer.module)) for layer in layers]
        self._owner = object()
        for layer, mask in zip(layers, masks, strict=True):
            set_mask(layer, mask, self._owner)

    def remove(self) -> None:
        """Put back the masks that were set before; a second call changes nothing.

        Raises:
            ArgumentError: a layer has a mask that was set later.
        """
        for layer in self._layers:
            if owner_of(layer.module) not in (None, self._owner):
                newer = sparse_mask_of(layer.module)
                raise ArgumentError(
                    f"{type(layer.module).__name__} has a newer sparse mask, {newer!r}; remove that one first"
                )
        for layer, before in zip(self._layers, self._before, strict=True):
            set_mask(layer, *before)
        self._layers, self._before = [], []

    def __enter__(self) -> Sparsified:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Sparsified({len(self.layers)} layers, {', '.join(sorted({repr(mask) for mask in self.masks}))})"


def sparsify(model: nn.Module, mask: PerLayer) -> Sparsified:
    """Give the self-attention layers of a model a sparse mask: each sees what its own mask AND this one keep.

    The model's causal, padding or window mask stays in force; cross-attention is left alone. Positions are those within
    each sequence, cached tokens included: packed or padded on the left, it has the outputs that it has alone. Random
    blocks are drawn among as many keys as a row, or a cache, holds. The mask lives on the layers, for all threads,
    until it is replaced or removed: by `sparsify(model, None)`, or by `remove` or the end of a `with` block of what is
    returned. Under activation checkpointing, call `backward()` before the mask changes: layers are recomputed under the
    mask they have.

    `save_pretrained` writes the masks into the configuration as text, and `from_pretrained` restores them; it warns
    where it cannot: of masks of functions and tensors, and with another attention implementation.

    A 4-D `attention_mask` says nothing of sequences, so positions count from the start of the row under it.

    A compiled model is compiled anew for every other mask, since Dynamo treats integers on modules as constants. With
    `torch._dynamo.config.allow_unspec_int_on_nn_module = True` one graph serves all masks, unless batches are packed.

    Args:
        model: a transformers model (or a part, such as `model.encoder`) running `attn_implementation="stof"`.
        mask: one mask for all layers (or its text); a mapping or a function from the layer's number, counted from
            0 over this model's self-attention layers, to a mask or None; or None to remove masks. A mask function
            `(b, h, q_idx, kv_idx)` goes through `stof.masks.from_function` first.

    Raises:
        ArgumentError: no self-attention layer, another attention implementation, or a layer number out of range.
        UnsupportedError: the `forward` of a layer was replaced on the instance, and never reaches stof's attention; or
            in a backward pass, that is in a function under activation checkpointing, where masks may not change. Also
            in a backward pass that recomputes a layer's call from before its mask changed.
        MaskError: something that is no mask.

    Calls raise `UnsupportedError` where sequences do not begin where their rows do and the mask has random blocks, or
    the batch is packed, the code compiled and the mask looks at more than distances. Compiled code raises
    `RuntimeError` for padding on the left under such a mask.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> model = stof_hf.enable(model)
        >>> ids = torch.arange(40)[None]
        >>> with torch.no_grad(), stof_hf.sparsify(model, masks.sliding_window(7)):
        ...     out = model(ids).last_hidden_state
        >>> stof_hf.sparsify(model, {0: masks.sliding_window(7)}).masks[1] is None  # one layer; until it is removed
        True
    """
    check_module(model)
    per_layer = layer_masks(model, mask)
    layers = self_attention_layers(model)
    if mask is not None:
        for layer in layers:
            config: Any = layer.module.config
            if not _runs_stof(layer):
                raise ArgumentError(
                    f"layer {layer.name} runs attn_implementation={config._attn_implementation!r}, which would ignore "
                    "a stof mask; call stof.integrations.transformers.enable(model)"
                )
    return Sparsified(layers, per_layer)


def layer_masks(model: nn.Module, mask: PerLayer) -> list[Mask | None]:
    """The mask of each self-attention layer, as `sparsify` would set it, which also raises so; nothing is changed.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> stof_hf.layer_masks(stof_hf.enable(model), {1: masks.sliding_window(7)})
        [None, sliding_window(left=7, right=0)]
    """
    names = [layer.name for layer in self_attention_layers(model)]
    if not names:
        raise ArgumentError(
            f"{type(model).__name__} has no self-attention layer that runs through transformers' attention interface; "
            "sparsify() takes a model whose set_attn_implementation() works"
        )
    return _per_layer(mask, names)


def _runs_stof(layer: AttentionLayer) -> bool:
    config: Any = layer.module.config
    return bool(config._attn_implementation == NAME)


def _per_layer(mask: PerLayer, names: list[str]) -> list[Mask | None]:
    count = len(names)
    if mask is None:
        return [None] * count
    if isinstance(mask, Mapping):
        unknown = [number for number in mask if number not in range(count)]
        if unknown:
            raise ArgumentError(f"the model has self-attention layers 0 to {count - 1}, the mapping names {unknown}")
        return [_checked(mask.get(number)) for number in range(count)]
    if any(mask is function for function in NAMED_MASKS.values()):
        as_mask(mask)  # refuses it: `masks.padding` would take a layer's number for a length
    if isinstance(mask, Mask | str) or not callable(mask):
        return [_checked(mask)] * count
    try:
        per_layer = [mask(number) for number in range(count)]
    except StofError:
        raise
    except Exception as error:  # whatever a user's function raises
        raise ArgumentError(
            f"a function here takes a layer's number (0 to {count - 1}) and gives its mask or None, and this one "
            f"raises {type(error).__name__}: {error}; a mask function goes through stof.masks.from_function first"
        ) from error
    return list(map(_checked, per_layer))


def _checked(mask: object) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, str):
        return as_mask(mask)
    raise MaskError(
        f"a layer's mask is a mask from stof.masks, its text, or None, got {type(mask).__name__}; "
        "wrap tensors with masks.from_dense and functions with masks.from_function"
    )


def self_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Layers that call the attention interface, in model order, without those that attend to another sequence."""
    return [
        attention_layer(model, name)
        for name, module in model.named_modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation")
        and calls_interface(module)
        and not is_cross_attention(name, module)
    ]
