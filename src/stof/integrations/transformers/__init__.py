"""Hugging Face transformers: `attn_implementation="stof"`. Importing this module registers it.

    import stof.integrations.transformers as hf
    model = AutoModel.from_pretrained(name, attn_implementation="stof")  # or hf.enable(model)
    hf.sparsify(model, masks.longformer(64, 64))  # optional: a sparse mask for the self-attention layers

The model's own mask (causal, padding, sliding window, packed sequences) becomes one stof mask per forward pass,
shared by all layers. Models train with it, with attention dropout; returned attention weights are refused.
"""

from __future__ import annotations

import contextlib
import inspect

from torch import nn

from stof.errors import MissingDependencyError, UnsupportedError

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
except ImportError as error:
    raise MissingDependencyError(
        'attn_implementation="stof" needs transformers with AttentionInterface and AttentionMaskInterface; '
        "install it with pip install --upgrade transformers"
    ) from error

from stof.integrations.transformers.attention import attention_forward
from stof.integrations.transformers.isolation import check_isolation
from stof.integrations.transformers.mask_interface import make_mask
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.packed_calls import watch
from stof.integrations.transformers.packing import PackedBatch, pack
from stof.integrations.transformers.parallel import Parallelised, parallelise
from stof.integrations.transformers.recorded_masks import LayerMask, RecordedMasks, record_masks
from stof.integrations.transformers.saved_masks import keep_in_checkpoints
from stof.integrations.transformers.served import check_can_serve, check_module, check_when_set, not_served
from stof.integrations.transformers.sparse_mask import NAME
from stof.integrations.transformers.sparsify import Sparsified, layer_masks, sparsify
from stof.integrations.transformers.unpadded import encoders_of, is_sentence_transformer, undo_unpad_calls, unpad_calls

__all__ = [
    "LayerMask",
    "ModelMask",
    "PackedBatch",
    "Parallelised",
    "RecordedMasks",
    "Sparsified",
    "attention_forward",
    "check_can_serve",
    "check_isolation",
    "disable",
    "enable",
    "layer_masks",
    "make_mask",
    "pack",
    "parallelise",
    "record_masks",
    "register",
    "sparsify",
]


def enable(model: nn.Module, *, unpad: bool | None = None) -> nn.Module:
    """`model.set_attn_implementation("stof")`, also where transformers does not reach, and checked.

    transformers 5.17 leaves parts that hold a copy of the model's own configuration as they were (T5's encoder and
    decoder), without a word.

    Args:
        model: a transformers model, or a module around some, such as a `SentenceTransformer`.
        unpad: for encoders: calls with padding on the right compute on real tokens alone. The batch is packed before
            the model and unpacked behind it, so hidden states are zeros at padding; lengths are read on the host. Calls
            with other per-token inputs than `token_type_ids`, or that ask for attention weights, and compiled code
            compute on padding. The model is checked as for `pack`. False undoes it. None is False, but for models of
            sentence-transformers: their encoders leave out padding where they can, and log at level INFO where not.

    Returns:
        the model.

    Raises:
        UnsupportedError: a part of the model has attention code of its own, or with `unpad` is no encoder; all are as
            before.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> stof_hf.enable(model).config._attn_implementation
        'stof'
    """
    check_can_serve(model)
    encoders = encoders_of(model) if unpad else []
    if unpad is None and is_sentence_transformer(model):
        with contextlib.suppress(UnsupportedError):
            encoders = encoders_of(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    for part in parts:
        part.set_attn_implementation(NAME)
    left = sorted({type(part).__name__ for part in parts if part.config._attn_implementation != NAME})
    if left or not parts:
        for part, implementation in zip(parts, before, strict=True):
            if part.config._attn_implementation != implementation:
                part.set_attn_implementation(implementation)
        names = ", ".join(left) or type(model).__name__
        raise UnsupportedError(not_served(names), {})
    for part, implementation in zip(parts, before, strict=True):
        if implementation != NAME:
            part._stof_before = implementation
    undo_unpad_calls(model)
    unpad_calls(encoders, required=unpad is True)
    return model


def disable(model: nn.Module) -> nn.Module:
    """Give each part of a model the attention it had before `enable`, or PyTorch's where it was loaded with stof's.

    Calls compute on padding again.

    To train it, say. `model.set_attn_implementation` would leave parts that hold a copy of the configuration with stof.

    Returns:
        the model.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> stof_hf.disable(stof_hf.enable(model)).config._attn_implementation
        'sdpa'
    """
    check_module(model)
    undo_unpad_calls(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    # Setting a part also sets the parts within it, so those follow.
    for part, implementation in zip(parts, before, strict=True):
        if implementation == NAME:
            default = "sdpa" if getattr(part, "_supports_sdpa", False) else "eager"
            part.set_attn_implementation(getattr(part, "_stof_before", default))
        elif part.config._attn_implementation != implementation:
            part.set_attn_implementation(implementation)
    return model


def register() -> None:
    """Register `attn_implementation="stof"`; importing this module already did, doing it again changes nothing.

    Raises:
        MissingDependencyError: the installed transformers hands mask functions other arguments.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> from transformers import AttentionInterface
        >>> stof_hf.register()
        >>> AttentionInterface()["stof"] is stof_hf.attention_forward
        True
    """
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise MissingDependencyError(
            "the installed transformers builds masks from other arguments than stof reads (q_length, q_offset); "
            "upgrade it with pip install --upgrade transformers"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
    check_when_set(watch)
    keep_in_checkpoints()


register()
