"""`make_mask`, registered as a mask interface: transformers calls it once per forward pass for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from stof.errors import UnsupportedError
from stof.handles import FULL, intersection, is_full
from stof.integrations.transformers.mask_recognition import recognize_mask, recognize_plain_mask, recognize_window
from stof.integrations.transformers.mask_validation import check_padding
from stof.integrations.transformers.model_mask import ModelMask
from stof.masks import Mask, from_dense, from_function, padding
from stof.masks.traced import Intersection
from stof.runtime.private import is_exporting


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
    instead: no copy, no graph break, and attention is computed on padded keys too. Compiled code evaluates windows at
    every score; where gradients are enabled it breaks its graph to read them, which `fullgraph=True` refuses. The mask
    of a single query is a tensor as a whole.

    Args:
        attention_mask: bool `[B, tokens seen]` padding, or a `ModelMask` (a packed batch) to intersect with.

    Raises:
        ShapeError: an `attention_mask` of another shape.

    Examples:
        >>> import stof.integrations.transformers as stof_hf
        >>> stof_hf.make_mask(2, 40, 40).mask  # a decoder's mask, without padding
        causal()
    """
    # Given for sliding windows and chunks.
    may_be_window = kwargs.get("local_size") is not None
    if isinstance(attention_mask, ModelMask) and attention_mask.includes_model_mask:
        return attention_mask  # prepared ahead of the forward pass, by generate()
    if isinstance(attention_mask, ModelMask) and attention_mask.split is not None:
        return _of_split_sequence(attention_mask, mask_function)
    given, pads = (None, attention_mask) if not isinstance(attention_mask, ModelMask) else (attention_mask, None)
    compiling = torch.compiler.is_compiling()
    if not compiling:  # both may be tensors: assisted generation drops tokens
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    check_padding(attention_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
    mask: Mask | Intersection | None
    if compiling:
        # Dynamo traces closures and offsets as symbols; only plain masks of whole sequences are recognisable.
        start = all(isinstance(offset, int) and offset == 0 for offset in (q_offset, kv_offset))
        mask = recognize_plain_mask(mask_function) if start else None
        may_break = torch.is_grad_enabled() or (given is not None and given.breaks_graphs)
        if mask is None and start and may_be_window and may_break and not is_exporting():
            mask = _window_outside_graphs(mask_function, q_length, kv_length)
    else:
        assert isinstance(q_offset, int)
        mask = recognize_mask(mask_function, q_length, kv_length, q_offset, kv_offset)
    keep: Tensor | None = None
    if mask is None:
        keep = _evaluated(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, pads, use_vmap, device)
        mask, keep = (FULL, keep) if compiling else (from_dense(keep), None)
    elif pads is not None:
        valid = _cut(pads, kv_length, kv_offset)
        if compiling or q_length == 1:
            keep = valid[:, None, None, :]
        elif (named := padding_of(valid)) is not None:
            mask = intersection(mask, named)
    if given is not None:
        given.refuse_unchecked()
        # Compiled code makes an `Intersection` of the packed sequences in a whole row, which has no offset.
        of_call = given.mask
        of_call = of_call if isinstance(of_call, Intersection) else of_call.with_query_offset(int(q_offset))
        mask = intersection(mask, of_call)
        if given.keep is not None:
            keep = given.keep if keep is None else keep & given.keep
    if q_length == 1 and not isinstance(mask, Intersection) and not compiling and not is_full(mask):
        # A tensor has the same graph at every token: generate() hands this mask to compiled code.
        row = mask.to_dense(1, kv_length, batch=batch_size, device=device)
        mask, keep = FULL, row if keep is None else row & keep
    return ModelMask(
        FULL if is_full(mask) else mask,  # one object: compilers guard on identity
        (batch_size, 1, q_length, kv_length),
        keep=keep,
        q_offset=q_offset,
        kv_offset=kv_offset,
        exact_nan=given is not None and given.exact_nan,
        valid=pads,
        packed=None if given is None else given.packed,
        sequences_unknown=given is not None and given.sequences_unknown,
    )


_window_outside_graphs = torch.compiler.disable(
    recognize_window,
    reason="compiled code that may be differentiated, or that leaves out padding, reads sliding windows outside of its "
    "graph; call the model under torch.no_grad(), or compile it without fullgraph=True",
)


@torch.compiler.disable(reason="masks of split sequences are read outside of compiled graphs")
def _of_split_sequence(given: ModelMask, mask_function: Callable[..., Any]) -> ModelMask:
    """The mask of all tokens, for this rank's."""
    length = given.split.shards.length
    mask = recognize_mask(mask_function, length, length, 0, 0)
    if mask is None:
        raise UnsupportedError(
            f"the model masks by {getattr(mask_function, '__qualname__', mask_function)}, a function of tokens that "
            "stof does not know, so it cannot be computed on split sequences",
            {},
        )
    assert not isinstance(given.mask, Intersection)
    return ModelMask(intersection(mask, given.mask), given.shape, split=given.split, packed=given.packed)


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


def padding_of(valid: Tensor) -> Mask | None:
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
