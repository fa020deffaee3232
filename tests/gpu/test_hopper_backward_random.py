"""Random calls of the one-pass backward kernel on a Hopper GPU, 2080 of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.kernels.hopper.backward_lists import LAYOUTS
from stof.kernels.hopper.config import padded_width
from stof.kernels.implementation import NeedsGrad
from tests.gpu.test_hopper import HALVES, HOPPER, random_inputs, random_keep
from tests.gpu.test_hopper_backward import bound
from tests.kernels.gradients import assert_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]


def with_global_tokens(chance: random.Random, keep: Tensor) -> Tensor:
    """The mask with some keys that all queries see, which are shared by several work items, or queries that see all."""
    step = chance.randint(200, 700)
    rows, columns = (torch.arange(length, device=keep.device) for length in keep.shape[2:])
    return keep | (columns % step < chance.randint(0, 3)) | (rows[:, None] % step < chance.randint(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("family", range(10))
@pytest.mark.parametrize("option", ["plain", "softcap", "sinks", "lse"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_random_calls(head_dim: int, option: str, family: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients against float64, and equal bits again; few thread blocks, so that items are split and grouped."""
    chance = random.Random(f"{head_dim} {option} {family}")
    dtype, queries = chance.choice(HALVES), LAYOUTS[padded_width(head_dim)].block_n
    for number in range(13):
        blocks = chance.choice([3, 16, 132])
        monkeypatch.setattr("stof.kernels.hopper.backward.multiprocessors", lambda device, count=blocks: count)
        batch, kv_heads, group = chance.randint(1, 3), chance.randint(1, 3), chance.choice([1, 1, 2, 3, 4])
        q_len, kv_len = chance.randint(1, 1700), chance.randint(1, 1300)
        if chance.random() < 0.2:  # long blocks of keys, whose last items are split
            batch, group, q_len = 1, min(group, 2), chance.randint(3000, 6000)
        heads = kv_heads * group
        q, k, v = random_inputs(
            batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype,
            memory=chance.choice(["bhsd", "bshd", "packed"]), seed=number,
        )  # fmt: skip
        keep = random_keep(chance, batch, heads, q_len, kv_len, 1000 * family + number)
        keep = with_global_tokens(chance, keep) if chance.random() < 0.5 else keep
        call: dict[str, Any] = {
            "q": q, "k": k, "v": v, "d_out": torch.randn_like(q), "keep": keep, "scale": chance.choice([0.1, -0.25]),
        }  # fmt: skip
        if option == "softcap":
            call["softcap"] = chance.choice([0.5, 8.0])
        elif option == "sinks":
            call["sinks"] = torch.randn(heads, device="cuda") * 3
        elif option == "lse":
            call["d_lse"] = torch.randn(batch, heads, q_len, device="cuda")
        try:
            attend, arguments = bound(call, queries, NeedsGrad(sinks=option == "sinks"))
        except UnfitLayoutError:  # heads that share a key head, and do not see the same keys
            assert group > 1
            assert keep.shape[1] > 1
            continue
        gradients = attend(*arguments)
        assert_gradients(gradients, call)
        again = attend(*arguments)
        for one, other in zip(gradients, again, strict=True):
            assert one is None or other is None or torch.equal(one, other)
