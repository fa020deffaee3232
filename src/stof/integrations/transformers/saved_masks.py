"""Sparse masks in checkpoints: `save_pretrained` writes them into the configuration, `from_pretrained` restores them.

The configuration of a living model does not hold them, because other models are built from it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from transformers import PreTrainedModel

from stof.errors import MaskError
from stof.integrations.transformers.sparse_mask import NAME, sparse_mask_of
from stof.integrations.transformers.sparsify import self_attention_layers, sparsify
from stof.masks import parse

# In the configuration of a checkpoint: the text of the mask of each layer that has one, by the layer's name.
_SAVED = "stof_sparse_masks"


def keep_in_checkpoints() -> None:
    """Have models save and restore their sparse masks."""
    save, load = PreTrainedModel.save_pretrained, vars(PreTrainedModel)["from_pretrained"].__func__
    if hasattr(save, "_stof_saves"):
        return

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if all(sparse_mask_of(module) is None for module in self.modules()):
            return save(self, *args, **kwargs)
        masks = {layer.name: sparse_mask_of(layer.module) for layer in self_attention_layers(self)}
        texts = {name: mask.key for name, mask in masks.items() if mask is not None}
        setattr(self.config, _SAVED, texts)
        try:
            return save(self, *args, **kwargs)
        finally:
            delattr(self.config, _SAVED)

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        loaded = load(cls, *args, **kwargs)
        _restore(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    save_pretrained._stof_saves = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _restore(model: PreTrainedModel) -> None:
    """Set the masks that a checkpoint's configuration names, or warn; the configuration holds them no more."""
    config: Any = model.config
    texts: Any = vars(config).get(_SAVED)
    if not texts:
        return
    for of_part in [getattr(part, "config", None) for part in model.modules()]:
        if _SAVED in getattr(of_part, "__dict__", {}):
            delattr(of_part, _SAVED)
    if config._attn_implementation != NAME:
        reason = f"attn_implementation={config._attn_implementation!r} ignores them; load it with {NAME!r}"
        warnings.warn(_warning(model, texts, reason), stacklevel=3)
        return
    names = [layer.name for layer in self_attention_layers(model)]
    masks, left = {}, {}
    for saved, text in texts.items():
        # A checkpoint of a model is also loaded by models that it is a part of, and by parts of it.
        places = [
            n for n, name in enumerate(names) if f".{name}".endswith(f".{saved}") or f".{saved}".endswith(f".{name}")
        ]
        try:
            mask = parse(text)
        except MaskError:  # of a function or a tensor, or of a later version
            mask = None
        if len(places) == 1 and mask is not None:
            masks[places[0]] = mask
        else:
            left[saved] = text
    if masks:
        sparsify(model, masks)
    if left:
        warnings.warn(
            _warning(model, left, "they have no text that can be read, or no layer of this name; call sparsify()"),
            stacklevel=3,
        )


def _warning(model: PreTrainedModel, texts: dict[str, str], reason: str) -> str:
    return f"{type(model).__name__} was saved with sparse masks {texts}, which are not restored: {reason}"
