"""Padded batches flattened to one row for PyTorch's `varlen_attn`, as transformers' flattening collator does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "torch_varlen"


def attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers for one row of encoders' sequences, `[1, heads, tokens, head_dim]`."""
    from torch.nn.attention.varlen import varlen_attn

    assert attention_mask is None
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    ends, longest = cu_seq_lens_q, max_length_q
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window)
    assert isinstance(out, Tensor)
    return out[None], None


def use_varlen(model: Any) -> None:
    """Let a model of transformers compute its attention so."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    # Masks are not registered under this name, so models make none.
    model.set_attn_implementation(NAME)


def flattened(ids: Tensor, lengths: Tensor, first_position: int, device: torch.device) -> dict[str, Any]:
    """Arguments of a model for a batch padded on the right.

    Args:
        ids: int64 `[B, S]` on the CPU.
        lengths: int64 `[B]` on the CPU.
        first_position: of each sequence.
    """
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    is_token = positions < lengths[:, None]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(device)
    longest = int(lengths.max())
    return {
        "input_ids": ids[is_token][None].to(device),
        "position_ids": positions[is_token][None].to(device) + first_position,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }
