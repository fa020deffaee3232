"""Softmax and log-sum-exp of scores of which whole rows may be -inf."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_and_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[..., n]` and log-sum-exp `[...]` over the last dimension; a row of -inf gives zeros and -inf.

    Not `exp(scores - lse)`: at scores of 10^5 the rounding of lse alone is 0.8 % in float32.
    """
    lse = torch.logsumexp(scores, dim=-1)
    return torch.softmax(scores, dim=-1).masked_fill_((lse == -torch.inf)[..., None], 0.0), lse
