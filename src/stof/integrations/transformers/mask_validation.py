"""Refuse attention masks of a wrong shape or dtype that a caller gives a model of transformers or its layers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import masking_utils

from stof.errors import DtypeError, ShapeError, UnsupportedError
from stof.integrations.transformers.model_mask import ModelMask

_HOW_TO_GIVE_SCORES = (
    "write mask[:, None] to give a bool or additive float mask [B, Sq, Skv] a dimension of heads, or "
    "mask.bool()[:, None] for one of 0 and 1"
)


def check_padding(
    given: Tensor | ModelMask | None,
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: object,
) -> None:
    """Refuse a mask of a model's call that has not one value per sequence and token seen.

    Static caches hold more keys than tokens; the mask may be as long as either.

    Raises:
        ShapeError: another number of dimensions, another batch size or another length.
    """
    if given is None:
        return
    if isinstance(given, Tensor) and given.ndim != 2:
        raise ShapeError(
            f"attention_mask is [B, tokens], or [B, heads or 1, Sq, Skv] for every score, got {list(given.shape)}; "
            f"{_HOW_TO_GIVE_SCORES}"
        )
    if given.shape[0] != batch:
        raise ShapeError(
            f"attention_mask has {given.shape[0]} sequences and the inputs have {batch}; give one row each"
        )
    if isinstance(given, ModelMask) or isinstance(q_offset, Tensor):
        return  # masks check their own lengths; compiled code does not know the tokens seen
    if mask_function is masking_utils.bidirectional_mask_function:
        return  # perhaps over another sequence: layers compare the mask with their keys
    length, seen = given.shape[1], q_offset + q_length
    if not seen <= length <= max(seen, kv_offset + kv_length):
        raise ShapeError(
            f"attention_mask has {length} tokens and attention sees {seen}, those in the cache included; "
            + (
                f"for a mask [B, Sq, Skv], which this model flattens, {_HOW_TO_GIVE_SCORES}"
                if length == q_length * seen and q_length > 1
                else "give one value per token"
                if length < seen
                else "give one value per token; in training mode, gradient checkpointing drops the cache of earlier "
                "tokens: call model.eval() before generate()"
            )
        )


def check_scores(given: Tensor, batch: int, heads: int, q_length: int, kv_length: int) -> None:
    """Refuse a mask tensor of a layer that is not `[B | 1, H | 1, Sq | 1, Skv | 1]`.

    Raises:
        ShapeError: naming the shape that is accepted.
        DtypeError: integers, which may stand for bool or for additive values.
    """
    sizes = (batch, heads, q_length, kv_length)
    if given.ndim != 4 or any(got != 1 and got != want for got, want in zip(given.shape, sizes, strict=True)):
        raise ShapeError(
            f"an attention mask tensor of a layer is [B, heads or 1, Sq, Skv], here {list(sizes)} with 1 for what is "
            f"shared, got {list(given.shape)}; 2-D padding masks are for the model, not its layers"
        )
    if given.dtype != torch.bool and not given.is_floating_point():
        raise DtypeError(
            "attention_mask [B, heads or 1, Sq, Skv] is bool (true = attended to) or an additive float mask, got "
            f"{given.dtype}; pass mask.bool() if it holds 0 and 1"
        )


def check_window(window: object, kv_length: int) -> None:
    """Refuse a window that a layer without a mask asks for: masks say windows here.

    Raises:
        UnsupportedError: the window would leave keys out.
    """
    if isinstance(window, int) and 0 < window < kv_length:
        raise UnsupportedError(
            f"the layer has a sliding window of {window} for {kv_length} keys and was given no mask that says so; "
            "give the layer the mask that stof.integrations.transformers.make_mask makes, or call "
            'model.set_attn_implementation("eager")',
            {},
        )
