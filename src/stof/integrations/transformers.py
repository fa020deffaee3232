"""Hugging Face transformers: `attn_implementation="stof"`. Importing this module registers it.

    import stof.integrations.transformers as hf
    model = AutoModel.from_pretrained(name, attn_implementation="stof")  # or hf.enable(model)
    hf.sparsify(model, masks.longformer(64, 64))  # optional: a sparse mask for the self-attention layers

The model's own mask (causal, padding, sliding window, packed sequences) becomes one stof mask per forward pass,
shared by all layers. Forward passes only; attention dropout and returned attention weights are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stof.attention import attention
from stof.errors import MissingDependencyError, ShapeError, UnsupportedError
from stof.integrations.given_masks import check_padding, check_scores, check_window
from stof.integrations.model_mask import FULL, ModelMask
from stof.integrations.packing import PackedBatch, pack
from stof.masks import Mask, causal, from_dense, from_function, padding

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
except ImportError as error:
    raise MissingDependencyError(
        'attn_implementation="stof" needs transformers with AttentionInterface and AttentionMaskInterface; '
        "install it with pip install --upgrade transformers"
    ) from error

from stof.integrations.forward_inspection import hands_mask_on
from stof.integrations.mask_recognition import recognize_mask, recognize_plain_mask
from stof.integrations.served import (
    check_can_serve,
    check_module,
    check_when_loaded,
    not_served,
    refuse_unread,
)
from stof.integrations.sparsify import NAME, Sparsified, layer_masks, sparse_mask_of, sparsify

__all__ = [
    "ModelMask",
    "PackedBatch",
    "Sparsified",
    "attention_forward",
    "check_can_serve",
    "disable",
    "enable",
    "layer_masks",
    "make_mask",
    "pack",
    "register",
    "sparsify",
]


def enable(model: nn.Module) -> nn.Module:
    """`model.set_attn_implementation("stof")`, also where transformers does not reach, and checked.

    transformers 5.17 leaves parts that hold a copy of the model's own configuration as they were (T5's encoder and
    decoder), without a word.

    Returns:
        the model.

    Raises:
        UnsupportedError: a part of the model has attention code of its own; all are as before.
    """
    check_can_serve(model)
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
        if not hasattr(part, "_stof_in_order") and hands_mask_on(type(part)):
            part._stof_unpadded_hook = part.register_forward_pre_hook(_mark_unpadded_call, with_kwargs=True)
    return model


def disable(model: nn.Module) -> nn.Module:
    """Give each part of a model the attention it had before `enable`, or PyTorch's where it was loaded with stof's.

    To train it, say. `model.set_attn_implementation` would leave parts that hold a copy of the configuration with stof.

    Returns:
        the model.
    """
    check_module(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    # A part passes its own on to those within it, so these come after it.
    for part, implementation in zip(parts, before, strict=True):
        if implementation == NAME:
            own = "sdpa" if getattr(part, "_supports_sdpa", False) else "eager"
            part.set_attn_implementation(getattr(part, "_stof_before", own))
        elif part.config._attn_implementation != implementation:
            part.set_attn_implementation(implementation)
    return model


def _mark_unpadded_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Say that sequences are whole, where a call gives neither positions nor padding.

    transformers then looks for packed sequences in the positions it makes itself; compiled code cannot look, so it
    would evaluate a mask of every score, all true.
    """
    given = [kwargs.get(name) for name in ("attention_mask", "position_ids", "past_key_values")]
    tokens = args[0] if args else kwargs.get("input_ids")
    own = module.config._attn_implementation == NAME  # type: ignore[union-attr]
    if not own or len(args) > 1 or any(one is not None for one in given) or not isinstance(tokens, Tensor):
        return None
    batch, length = tokens.shape
    whole = ModelMask(
        FULL, (batch, 1, length, length), includes_model_mask=False
    )  # the model's own mask is added to it
    return args, kwargs | {"attention_mask": whole}


def register() -> None:
    """Register `attn_implementation="stof"`; importing this module already did, doing it again changes nothing.

    Raises:
        MissingDependencyError: the installed transformers hands mask functions other arguments.
    """
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise MissingDependencyError(
            "the installed transformers builds masks from other arguments than stof reads (q_length, q_offset); "
            "upgrade it with pip install --upgrade transformers"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
    check_when_loaded(NAME)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | ModelMask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> ModelMask:
    """The mask function transformers calls once per forward pass; arguments as `masking_utils.sdpa_mask`.

    Padding is read on the host to plan with it, one small copy per forward pass. Compiled code keeps it as a tensor
    instead: no copy, no graph break, and attention is computed on padded keys too. The mask of a single query is a
    tensor as a whole.

    Args:
        attention_mask: bool `[B, tokens seen]` padding, or a `ModelMask` (a packed batch) to intersect with.

    Raises:
        ShapeError: an `attention_mask` of another shape.
    """
    del kwargs
    if isinstance(attention_mask, ModelMask) and attention_mask.includes_model_mask:
        return attention_mask  # prepared ahead of the forward pass, by generate()
    compiling = torch.compiler.is_compiling()
    if not compiling:  # both may be tensors: assisted generation takes tokens back
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    check_padding(attention_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
    given, pads = (None, attention_mask) if not isinstance(attention_mask, ModelMask) else (attention_mask, None)
    own: Mask | None
    if compiling:
        # Closures and offsets are symbols here; only plain masks of whole sequences can be told.
        start = all(isinstance(offset, int) and offset == 0 for offset in (q_offset, kv_offset))
        own = recognize_plain_mask(mask_function) if start else None
    else:
        assert isinstance(q_offset, int)
        own = recognize_mask(mask_function, q_length, kv_length, q_offset, kv_offset)
    keep: Tensor | None = None
    if own is None:
        keep = _evaluated(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, pads, use_vmap, device)
        own, keep = (FULL, keep) if compiling else (from_dense(keep), None)
    elif pads is not None:
        valid = _cut(pads, kv_length, kv_offset)
        if compiling or q_length == 1:
            keep = valid[:, None, None, :]
        elif (named := _padding(valid)) is not None:
            own = named if own == FULL else own & named
    if given is not None:
        moved = given.mask.with_query_offset(int(q_offset))
        if moved != FULL:
            own = moved if own == FULL else own & moved
    if q_length == 1 and not compiling and own != FULL:
        # A tensor has the same graph at every token: generate() hands this mask to compiled code.
        row = own.to_dense(1, kv_length, batch=batch_size, device=device)
        own, keep = FULL, row if keep is None else row & keep
    return ModelMask(
        FULL if own == FULL else own,  # one object: compilers guard on identity
        (batch_size, 1, q_length, kv_length),
        keep=keep,
        q_offset=q_offset,
        kv_offset=kv_offset,
    )


def _evaluated(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    pads: Tensor | None,
    use_vmap: bool,
    device: torch.device | str,
) -> Tensor:
    """Bool `[B, 1, Sq, Skv]`: the mask function at every score, padding included."""
    keep: Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=pads,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return keep.contiguous()


def _cut(pads: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """Bool `[B, kv_length]` of exactly this call's keys; keys the mask does not reach are padding."""
    missing = kv_offset + kv_length - pads.shape[-1]
    pads = nn.functional.pad(pads, (0, missing)) if missing > 0 else pads
    return pads[:, kv_offset : kv_offset + kv_length].bool()


def _padding(valid: Tensor) -> Mask | None:
    """A mask for bool `[B, Skv]` valid keys; None when all are."""
    length = valid.shape[1]
    positions = torch.arange(length, device=valid.device)
    first = torch.where(valid, positions, length).amin(1)
    end = torch.where(valid, positions + 1, 0).amax(1)
    counts, firsts, ends = torch.stack([valid.sum(1), first, end]).tolist()
    if min(counts) == length:
        return None
    if any(count and end - first != count for count, first, end in zip(counts, firsts, ends, strict=True)):
        return from_function(lambda b, h, q, kv: valid[b, kv])
    # Empty sequences: `padding` alone drops all their keys.
    starts = [first if count else 0 for count, first in zip(counts, firsts, strict=True)]
    out: Mask | None = padding(ends) if min(ends) < length else None
    if any(starts):
        out = ~padding(starts) if out is None else out & ~padding(starts)
    return out


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of `attn_implementation="stof"`; called by a model's layers.

    Args:
        module: the attention layer; `sparsify` leaves its mask there.
        query: `[B, H, Sq, D]`.
        key, value: `[B, Hkv, Skv, D]`.
        attention_mask: what `make_mask` returned; or a 4-D bool tensor (true = seen), a 4-D additive float tensor,
            or None, where `is_causal` (default: the module's own) decides, as for "sdpa".
        position_bias: `[1 | B, H, Sq, Skv]`, added to the scores (T5).
        softcap: bound on the scores (Gemma).
        s_aux: `[H]`, logits of attention sinks (GPT-OSS).

    Returns:
        `(out [B, Sq, H, D], None)`.

    Raises:
        UnsupportedError: attention dropout, attention weights, or something else is asked for that stof does not read:
            a layer's own choice of keys, sequence boundaries (`cu_seq_lens_*`), a paged cache.
        ShapeError: a mask tensor that is not 4-D, or a mask made for other lengths.
    """
    _refuse_what_no_kernel_returns(dropout, kwargs.get("output_attentions"))
    refuse_unread(module, kwargs)
    if attention_mask is None:
        check_window(kwargs.get("sliding_window"), key.shape[2])
    sparse = sparse_mask_of(module)
    mask = _as_model_mask(module, query, key, attention_mask, is_causal)
    if sparse is not None:
        _check_self_attention(module, mask, query.shape[2], key.shape[2])
    compiling = torch.compiler.is_compiling()
    one_query = query.shape[2] == 1 and sparse is None and softcap is None and s_aux is None
    if one_query and mask.mask == FULL:
        # One query against a growing cache: a plan for every new length would cost more than it skips.
        added = _bias(position_bias, attention_mask, mask.keep, query.dtype)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=added, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        out = attention(
            query,
            key,
            value,
            mask.narrowed(sparse) if compiling else mask.plan(sparse, query, key),
            scale=scaling,
            bias=_bias(position_bias, attention_mask, mask.keep, query.dtype),
            softcap=softcap,
            sinks=s_aux,
        )
    return out.transpose(1, 2).contiguous(), None


def _check_self_attention(module: nn.Module, mask: ModelMask, q_len: int, kv_len: int) -> None:
    if isinstance(mask.q_offset, Tensor):
        raise UnsupportedError(
            "a sparse mask needs to know where the queries stand, and compiled code with a static cache only has a "
            "tensor of it; generate with a dynamic cache, or without torch.compile",
            {},
        )
    if mask.q_offset + q_len > mask.kv_offset + kv_len:
        raise ShapeError(
            f"{type(module).__name__} has a sparse mask, which is for self-attention, and was called with {q_len} "
            f"queries and {kv_len} keys; give sparsify() a mapping or function that returns None for this layer"
        )


def _refuse_what_no_kernel_returns(dropout: float, output_attentions: bool | None) -> None:
    if dropout:
        raise UnsupportedError(
            f"stof attention has no dropout, and the layer asks for {dropout}; call model.eval(), or set the attention "
            'dropout of the configuration to 0, or train with model.set_attn_implementation("sdpa")',
            {},
        )
    if output_attentions:
        raise UnsupportedError(
            "stof attention never holds the attention weights, so output_attentions=True has nothing to return; "
            'call model.set_attn_implementation("eager") to inspect them',
            {},
        )


def _as_model_mask(
    module: nn.Module, query: Tensor, key: Tensor, given: ModelMask | Tensor | None, is_causal: bool | None
) -> ModelMask:
    """What was given, as a mask of this call."""
    batch, _, q_len, _ = query.shape
    shape = (batch, 1, q_len, key.shape[2])
    if isinstance(given, ModelMask):
        if not torch.compiler.is_compiling() and given.shape[2:] != shape[2:]:
            raise ShapeError(
                f"the mask was made for {given.shape[2]} queries and {given.shape[3]} keys, the layer has {q_len} and "
                f"{shape[3]}; an attention_mask has one value per token attended to, and a packed batch runs once, "
                "without earlier tokens in a cache"
            )
        return given  # made for the model's `is_causal`, so that argument says nothing new
    if isinstance(given, Tensor):
        check_scores(given, batch, query.shape[1], q_len, key.shape[2])
        return _from_tensor(given, shape)
    causal_module = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return ModelMask(causal() if causal_module and q_len > 1 else FULL, shape)


def _from_tensor(given: Tensor, shape: tuple[int, int, int, int]) -> ModelMask:
    if given.dtype != torch.bool:
        return ModelMask(FULL, shape)  # additive: it becomes the bias
    if torch.compiler.is_compiling() or shape[2] == 1:
        return ModelMask(FULL, shape, keep=given.expand(-1, -1, -1, shape[3]))
    keep = given.expand(-1, -1, shape[2], shape[3])
    # A tensor used as it is keeps its identity, by which layers share its plan.
    return ModelMask(
        from_dense(given if keep.shape == given.shape and given.is_contiguous() else keep.contiguous()), shape
    )


def _bias(position_bias: Tensor | None, given: object, keep: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Everything additive: T5's bias, a user's float mask, and keys dropped by a tensor nobody reads."""
    bias = position_bias
    if isinstance(given, Tensor) and given.dtype != torch.bool:
        bias = given if bias is None else bias + given
    if keep is None:
        return bias
    zero = torch.zeros((), dtype=dtype, device=keep.device) if bias is None else bias
    return torch.where(keep, zero, -torch.inf)


register()
