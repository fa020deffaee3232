"""NaN and infinite scores on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

import stof
from stof import masks
from stof.kernels.torch.reference import reference_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("implementation", ["hopper", "block_wise", "row_wise"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(90)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("keys", [slice(5, 6), slice(299, 300), slice(0, 200), slice(None)], ids=str)
def test_scores_that_are_not_finite(
    keys: slice, value: float, mask: masks.Mask, head_dim: int, implementation: str | None
) -> None:
    """Rows give what the definition gives for the keys they see: NaN, or 0 and -inf where all scores are -inf.

    The Hopper kernel gives NaN there: its full tiles do not ask whether all scores are -inf. PyTorch's kernel behind
    "batched" is not here: it adds -inf to scores that are not kept, so a key's NaN reaches every row of a row block.
    """
    if implementation == "hopper":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")
        if value == -torch.inf:
            pytest.skip("NaN by design")
    q, k, v = torch.randn(3, 1, 2, 300, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
    q, k = q.abs(), k.abs()
    k[:, :, keys, 0] = value
    out, lse = stof.attention(q, k, v, mask, return_lse=True, implementation=implementation)
    wanted, wanted_lse = reference_attention(
        q.double(), k.double(), v.double(), mask.to_dense(300, device="cuda"), scale=head_dim**-0.5
    )
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-2, atol=1e-2, equal_nan=True)
    torch.testing.assert_close(out.double(), wanted, rtol=5e-2, atol=5e-2, equal_nan=True)
