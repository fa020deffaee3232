"""The attention function of `attn_implementation="stof"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stof.attention import attention
from stof.errors import ShapeError, UnsupportedError
from stof.handles import FULL, is_full
from stof.integrations.transformers.mask_validation import check_scores, check_window
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.recorded_masks import recording
from stof.integrations.transformers.served import refuse_attention_weights, refuse_unread
from stof.integrations.transformers.sparse_mask import counts_positions, mask_of_call
from stof.integrations.transformers.tensor_parallel import local_sinks, mask_of_rank
from stof.masks import causal, from_dense
from stof.runtime.private import is_traced


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
        dropout: the probability that a weight becomes 0; layers give 0 in evaluation mode.
        position_bias: `[1 | B, H, Sq, Skv]`, added to the scores (T5).
        softcap: bound on the scores (Gemma).
        s_aux: `[H]`, logits of attention sinks (GPT-OSS).

    Returns:
        `(out [B, Sq, H, D], None)`.

    Raises:
        UnsupportedError: attention weights, or something else is asked for that stof does not read: a layer's own
            choice of keys, sequence boundaries (`cu_seq_lens_*`) that the model's hook has not read, a paged cache.
        ArgumentError: a dropout outside 0 to below 1.
        ShapeError: a mask tensor that is not 4-D, or a mask made for other lengths.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> q, k, v = torch.randn(3, 1, 4, 40, 16)
        >>> out, weights = stof_hf.attention_forward(nn.Module(), q, k, v, stof_hf.make_mask(1, 40, 40))
        >>> out.shape
        torch.Size([1, 40, 4, 16])
    """
    refuse_attention_weights(kwargs.get("output_attentions"))
    refuse_unread(module, kwargs)
    if attention_mask is None:
        check_window(kwargs.get("sliding_window"), key.shape[2])
    of_layer = mask_of_call(module)
    sparse = None if of_layer is None else mask_of_rank(module, of_layer, query.shape[1])
    s_aux = local_sinks(s_aux, query)
    mask = _as_model_mask(module, query, key, attention_mask, is_causal)
    nan = None
    if mask.exact_nan:
        nan = mask.queries_with_nan(query, key, value)
        query, key, value = query.nan_to_num(), key.nan_to_num(), value.nan_to_num()
    if sparse is not None:
        _check_self_attention(module, mask, attention_mask, query.shape[2], key.shape[2])
    compiling = is_traced(query)
    if not compiling and (seen := recording()) is not None:
        seen.add(module, mask, sparse, attention_mask, query, key)
    if sparse is not None and compiling and counts_positions(module):
        _refuse_offset_sequences(module, mask)
    one_query = query.shape[2] == 1 and sparse is None and softcap is None and s_aux is None
    if mask.split is not None:
        if dropout:
            raise UnsupportedError(
                "attention over a split sequence has no dropout; set the model's attention dropout to 0", {}
            )
        if position_bias is not None:
            raise UnsupportedError("a position bias holds every score, so sequences with one are not split", {})
        combined = mask.narrowed(None if sparse is None else mask.in_sequences(sparse, query.device))
        out = mask.split.attend(query, key, value, combined, scale=scaling, softcap=softcap, sinks=s_aux)
    elif one_query and is_full(mask.mask):
        # One query against a growing cache: a plan for every new length would cost more than it skips.
        added = _bias(position_bias, attention_mask, mask.keep, query.dtype)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=dropout or 0.0, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
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
            dropout_p=dropout or 0.0,
        )
    out = out.transpose(1, 2).contiguous()
    return out if nan is None else out.masked_fill(nan[:, :, None, None], torch.nan), None


def _check_self_attention(
    module: nn.Module, mask: ModelMask, given: ModelMask | Tensor | None, q_len: int, kv_len: int
) -> None:
    if given is not mask and q_len < kv_len:
        what = "no attention_mask" if given is None else "a 4-D attention_mask"
        raise UnsupportedError(
            f"a sparse mask needs to know where the queries stand, and {what} does not say which {q_len} of {kv_len} "
            "tokens they are (a cache holds the others); give the model a 2-D attention_mask, one value per token",
            {},
        )
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


def _refuse_offset_sequences(module: nn.Module, mask: ModelMask) -> None:
    """Refuse sequences that do not begin where their rows do: compiled code counts positions from there."""
    mask.refuse_unknown_sequences()
    if mask.packed is not None and not is_full(mask.packed):
        raise UnsupportedError(
            f"the sparse mask of {type(module).__name__} looks at positions, and compiled code does not know where the "
            "sequences of a packed row begin; call the model without torch.compile, or use a mask by distance, such as "
            "a sliding window",
            {},
        )
    if mask.valid is not None:
        torch._assert_async(
            (mask.valid[:, 0] | ~mask.valid.any(1)).all(),
            "a sparse mask that looks at positions, and padding on the left, which compiled code does not support: pad "
            "on the right, or call the model without torch.compile",
        )


def _as_model_mask(
    module: nn.Module, query: Tensor, key: Tensor, given: ModelMask | Tensor | None, is_causal: bool | None
) -> ModelMask:
    """What was given, as a mask of this call."""
    batch, _, q_len, _ = query.shape
    shape = (batch, 1, q_len, key.shape[2])
    if isinstance(given, ModelMask):
        given.refuse_unchecked()
        if not is_traced(query) and given.shape[2:] != shape[2:]:
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
    if is_traced(given) or shape[2] == 1:
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
