"""Attention of variable lengths on a GPU, its lengths there as well: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

import stof
from tests.test_varlen import by_sequence, ends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 20)])
def test_sequences_of_other_lengths(window: tuple[int, int], head_dim: int) -> None:
    """Forward and backward, against each sequence in float64; new lengths in the second call."""
    for q_lengths, kv_lengths in (([300, 1, 77, 500], [400, 130, 77, 500]), ([40, 700, 138], [40, 707, 360])):
        q, k, v = (torch.randn(sum(n), heads, head_dim, dtype=torch.float64, requires_grad=True)
                   for n, heads in ((q_lengths, 4), (kv_lengths, 2), (kv_lengths, 2)))  # fmt: skip
        expected, _ = by_sequence(q, k, v, q_lengths, kv_lengths, kv_lengths, window)
        inputs = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
        out = stof.varlen_attention(*inputs, ends(q_lengths).cuda(), ends(kv_lengths).cuda(), window_size=window)
        d_out = torch.randn_like(expected)
        gradients = torch.autograd.grad(out, inputs, d_out.to("cuda", torch.bfloat16))
        for made, wanted in zip((out, *gradients), (expected, *torch.autograd.grad(expected, (q, k, v), d_out)),
                                strict=True):  # fmt: skip
            assert (
                float((made.detach().cpu().double() - wanted.detach()).abs().max())
                < 0.02 * float(wanted.detach().abs().max()) + 0.02
            )
