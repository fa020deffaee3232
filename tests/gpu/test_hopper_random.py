"""Random calls of the widest heads and with a bias, on a real GPU of compute capability 9.0."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof.kernels.hopper.config import padded_width
from stof.masks.tensors import as_mask
from stof.testing import assert_attention
from tests.gpu.test_hopper import (
    BIAS_STAGES,
    HALVES,
    HOPPER,
    STAGES,
    check_layout,
    layout_of,
    random_inputs,
    random_keep,
    readable,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]


def random_bias(chance: random.Random, batch: int, heads: int, q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor:
    """Shared by batch entries, heads or rows, or not; -inf here and there; NaN in the memory around it."""
    some = [chance.choice([1, size]) for size in (batch, heads, q_len)]
    whole = torch.full((*some[:2], some[2] + 1, -(-kv_len // 8) * 8 + 8), torch.nan, dtype=dtype, device="cuda")
    bias = whole[:, :, : some[2], :kv_len]
    bias.copy_(torch.randn(bias.shape, device="cuda") * chance.choice([0.1, 3.0]))
    if chance.random() < 0.3:
        bias.masked_fill_(torch.rand(bias.shape, device="cuda") < 0.1, -torch.inf)
    return bias.expand(batch, heads, -1, -1) if chance.random() < 0.3 else bias


def check_whole(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, **options: Any) -> None:
    """Through the public operator: the selector's own tile, order and splitting."""
    out, lse = stof.attention(q, k, v, keep, return_lse=True, implementation="hopper", **options)
    assert_attention(out, lse, q, k, v, keep, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", range(2))
@pytest.mark.parametrize(
    ("head_dim", "with_bias"),
    [(136, False), (192, False), (256, False), *((width, True) for width in (40, 96, 192, 256))],
)
def test_random_calls(head_dim: int, with_bias: bool, family: int) -> None:
    """In a tile of the test's choice, and every third whole. Few kernels: compiling is what takes time."""
    chance = random.Random(1000 * family + 2 * head_dim + with_bias)
    stages = (BIAS_STAGES if with_bias else STAGES)[padded_width(head_dim)]
    dtype, tile, group = chance.choice(HALVES), chance.choice(list(stages)), chance.choice([1, 3])
    slab, split_tiles = None if with_bias else chance.choice([None, 8, 16]), chance.choice([0, 1, 3])
    option = chance.choice(["plain", "softcap", "sinks", "scale"])
    for number in range(30):
        batch, kv_heads = chance.randint(1, 3), chance.randint(2, 3)
        heads = kv_heads * group
        # No multiples of 16, for which there would be kernels of their own; also short ones.
        q_len, kv_len = 16 * chance.choice([0, 3, 20, 40]) + chance.randint(2, 15), chance.randint(1, 1500)
        q, k, v = random_inputs(
            batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype,
            memory=chance.choice(["bhsd", "bshd", "packed"]), seed=number,
        )  # fmt: skip
        keep = readable(random_keep(chance, batch, heads, q_len, kv_len, 100 * head_dim + number))
        options: dict[str, Any] = {
            "plain": {},
            "softcap": {"softcap": 8.0},
            "sinks": {"sinks": torch.randn(heads, device="cuda")},
            "scale": {"scale": -0.25},
        }[option]
        if with_bias:
            # Whole tiles alone: of no head may all keys be unseen.
            keep[:, :, -1] = True
            options = {**options, "bias": random_bias(chance, batch, heads, q_len, kv_len, dtype)}
        try:
            if number % 3 == 0:
                check_whole(q, k, v, keep, **options)
            layout = layout_of(as_mask(keep), q, k, slab, tile=tile)
            check_layout(layout, q, k, v, split_tiles, chance.randint(0, 4), **options)
        except AssertionError as error:
            raise AssertionError(f"call {number}: {list(keep.shape)}, {sorted(options)}") from error
