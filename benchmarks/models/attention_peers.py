"""Models with PyTorch's attention in place of their own, and masks in the forms that it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.mask_formats import mask_mod
from stof.testing.mask_grid import GRID
from stof.testing.models import (
    CAUSAL,
    SINKS,
    WINDOW,
    Case,
    document_lengths,
    image_side,
    mask_of,
    neighborhood,
)


def flex_mask(case: Case, device: torch.device) -> Any:
    """The mask as FlexAttention's BlockMask, from the closed form its users would write; None for no mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    if case.mask == "full" and case.model not in CAUSAL:
        return None
    mod: Callable[..., Tensor]
    if case.mask == "full":
        mod = mask_mod(GRID["causal"], case.seq, case.seq, device)
    elif case.mask == "window+sinks":

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & ((q - k < WINDOW) | (k < SINKS))

    elif case.mask == "neighborhood":
        mod = neighborhood(image_side(case.seq))
    elif case.mask == "documents":
        lengths = torch.tensor(document_lengths(case.seq), device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            keep = document[q] == document[k]
            return (q >= k) & keep if case.model in CAUSAL else keep

    else:
        inner = mask_mod(GRID[case.mask], case.seq, case.seq, device)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            keep = inner(b, h, q, k)
            return (q >= k) & keep if case.model in CAUSAL else keep

    blocks = create_block_mask(mod, None, None, case.seq, case.seq, device=str(device))
    blocks.ndim = 4  # type: ignore[attr-defined]  # GPT-2 asks whether a mask has yet to be made one of every head
    return blocks


def with_attention(model: nn.Module, case: Case, kind: str, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the model that runs its attention as "sdpa" or "flex", and what else its calls take."""
    changed: Any = copy.deepcopy(model)
    value = mask_of(case)
    mask: Any = None
    if kind == "flex":
        mask = flex_mask(case, device)
    elif value is not None:
        mask = value.to_dense(case.seq, device=device).expand(case.batch, 1, case.seq, case.seq)
    name = "sdpa" if kind == "sdpa" else "flex_attention"
    if case.model == "vit" and mask is not None:
        name, mask = _masked(name, mask), None  # ViT takes no mask
    for part in changed.modules():
        if hasattr(part, "set_attn_implementation"):
            # GPT-2 calls attention as FlexAttention wants it, and is only not on transformers' list.
            part._supports_flex_attn |= part._supports_attention_backend
            part.set_attn_implementation(name)
    return changed, {} if mask is None else {"attention_mask": mask}


def _masked(implementation: str, mask: Any) -> str:
    """The name of an attention implementation that runs another one under a mask."""
    from transformers import AttentionInterface

    inner = AttentionInterface()[implementation]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any) -> Any:
        return inner(module, q, k, v, mask, **options)

    name = f"masked_{implementation}"
    AttentionInterface.register(name, attend)
    return name
