"""NaN and infinity in keys, values and queries stay where the mask leaves them."""

from __future__ import annotations

import pytest
import torch

import stof
from stof import LayoutConfig, masks
from stof.kernels.cpu.schedule import COLUMN_MULTIPLE
from stof.testing import make_inputs
from tests.test_attention import IMPLS

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CONFIGS = (
    None,
    *(LayoutConfig(64, 64, slab) for slab in (None, 1, 8, 16)),
    LayoutConfig(64, 64, 1, compact_columns=True),
)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("implementation", ["row_block", "batched"])
def test_columns_a_row_block_does_not_need_are_not_read(implementation: str, poison: float) -> None:
    """NaN in K or V reaches only row blocks that need its column, or one close by: `row_block` rounds the width of a
    row block up into columns that other rows keep. Within such a block NaN in V reaches all rows, as in PyTorch's own
    attention: a weight of 0 times NaN is NaN.
    """
    if implementation not in IMPLS:
        pytest.skip(f"no implementation {implementation}")
    q, k, v = make_inputs(q_len=256).qkv
    mask = masks.sliding_window(20)
    clean = stof.attention(q, k, v, mask, implementation=implementation)
    reach = COLUMN_MULTIPLE - 1 if implementation == "row_block" else 0
    for column in (0, 100, 255):
        for tensor in (k, v):
            spoiled = tensor.clone()
            spoiled[:, :, column] = poison
            args = (q, spoiled, v) if tensor is k else (q, k, spoiled)
            out = stof.attention(*args, mask, implementation=implementation)
            block = torch.arange(256) // 64
            close = slice(max(0, column - reach), column + reach + 1)
            needs = mask.to_dense(256)[0, 0, :, close].any(1).view(4, 64).any(1)[block]
            assert torch.equal(out[:, :, ~needs], clean[:, :, ~needs])


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("used", [190, 200, 207])
def test_columns_no_row_keeps_are_never_read(implementation: str, config: LayoutConfig | None, used: int) -> None:
    """The unused tail of a KV cache may hold anything, and so may keys in the midst that nobody sees."""
    q, k, v = make_inputs(q_len=256).qkv
    hole = masks.from_function(lambda b, h, i, j: (j < 70) | (j >= 75))
    mask = masks.sliding_window(20, 20) & masks.padding(used) & hole
    plan = stof.plan(mask, 256, config=config)
    clean = stof.attention(q, k, v, plan, implementation=implementation)
    for poisoned in (slice(used, None), slice(70, 75)):
        k[:, :, poisoned], v[:, :, poisoned] = torch.nan, torch.nan
    assert torch.equal(stof.attention(q, k, v, plan, implementation=implementation), clean)


@pytest.mark.parametrize("implementation", IMPLS)
def test_keys_of_heads_that_see_less(implementation: str) -> None:
    """What one head or sequence does not see may be NaN there, though others see the key; groups share their keys."""
    q, k, v = make_inputs(batch=2, heads=4, kv_heads=2, q_len=40).qkv
    windows = [masks.sliding_window(3), masks.sliding_window(5), masks.full(), masks.causal()]
    hole = masks.from_function(lambda b, h, i, j: (h >= 2) | (j < 10) | (j >= 14))
    mask = masks.per_head(windows) & masks.padding([33, 40]) & hole
    wanted = stof.attention(q, k, v, mask, implementation="row_block")
    for tensor in (k, v):
        tensor[0, :, 33:], tensor[:, 0, 10:14] = torch.nan, torch.nan
    out = stof.attention(q, k, v, mask, implementation=implementation)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("biased", [False, True])
def test_queries_that_keep_nothing_may_be_nan(
    implementation: str, softcap: float | None, value_dim: int, biased: bool
) -> None:
    """Padding tokens: their rows are 0 and -inf like those of other queries that see no key."""
    q, k, v = (torch.randn(1, 2, 9, dim) for dim in (16, 16, value_dim))
    bias = torch.randn(1, 2, 9, 9) if biased else None
    mask = masks.documents([0, 0, 0, 0, 1, -1, -1, -1, -1])
    wanted = stof.attention(q, k, v, mask, softcap=softcap, bias=bias, implementation="reference")
    q[:, :, 5:] = torch.nan
    options = {"softcap": softcap, "bias": bias, "implementation": implementation}
    out, lse = stof.attention(q, k, v, mask, return_lse=True, **options)
    assert bool((out[:, :, 5:] == 0).all())
    assert bool((lse[:, :, 5:] == -torch.inf).all())
    torch.testing.assert_close(out[:, :, :5], wanted[:, :, :5])
