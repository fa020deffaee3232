"""NaN and infinity that a query sees are in its result, as by definition; other rows are as they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.kernels.torch.reference import reference_attention
from tests.test_attention import IMPLS

MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.sliding_window(3, 2),
    "global": masks.sliding_window(4) | masks.global_tokens(2),
    "strided": masks.strided(2, 5),
    "one key": masks.sliding_window(0, 0),
}
VALUES = (torch.nan, torch.inf, -torch.inf, 1e30)  # in query and key: overflow


def same(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLS)
@given(data=st.data())
def test_spoiled_queries_and_keys(implementation: str, data: st.DataObject) -> None:
    draw = data.draw
    mask = MASKS[draw(st.sampled_from(sorted(MASKS)))]
    length = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 33, 70, 530]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q, k, v = (torch.randn(1, 2, length, 8, generator=generator).abs().to(dtype) for _ in range(3))
    for _ in range(draw(st.integers(1, 3))):
        tensor, place = draw(st.sampled_from([q, k])), draw(st.integers(0, length - 1))
        width = draw(st.sampled_from([1, 8]))
        tensor[0, draw(st.integers(0, 1)), place, :width] = draw(st.sampled_from(VALUES))
    keep = mask.to_dense(length)
    wide = [x.double() for x in (q, k, v)] if dtype == torch.float64 else [x.float() for x in (q, k, v)]
    wanted, wanted_lse = reference_attention(*wide, keep, scale=0.25)
    out, lse = stof.attention(q, k, v, mask, scale=0.25, implementation=implementation, return_lse=True)
    # Rows that share a tile with a spoiled key may be spoiled too: a weight of 0 times NaN. Compare those that are not,
    # and those whose definition is NaN or infinite.
    clean = ~(out.isnan().any(-1) & ~wanted.isnan().any(-1))
    same(out[clean], wanted[clean], 1e-4 if dtype != torch.bfloat16 else 2e-2)
    assert torch.equal(lse[clean].isnan(), wanted_lse[clean].isnan())
    same(lse[clean], wanted_lse[clean], 1e-4 if dtype != torch.bfloat16 else 2e-2)
    lost = wanted.isnan().any(-1)
    assert bool(out[lost].isnan().any(-1).all()), "NaN that a row sees is gone"


@pytest.mark.parametrize("implementation", IMPLS)
def test_exact_zeros_are_no_lost_scores(implementation: str) -> None:
    """A log-sum-exp of 0 is right for one key and a query of zeros."""
    q, k, v = torch.zeros(1, 2, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    out, lse = stof.attention(q, k, v, masks.causal(), implementation=implementation, return_lse=True)
    assert lse[0, 0, 0] == 0
    torch.testing.assert_close(lse[0, 0], torch.arange(1.0, 41).log())
    torch.testing.assert_close(out, v.cumsum(2) / torch.arange(1, 41)[:, None])
