"""Row orders found on the GPU, and attention in them."""

from __future__ import annotations

import pytest
import torch

import stof
from stof import masks
from stof.calibration.layout_alternatives import estimated, measured
from stof.layout.orders.search import CLUSTERED, computed, find_order
from stof.testing import assert_attention, make_inputs
from stof.testing.mask_grid import Shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)


def shuffled(mask: masks.Mask, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randperm(length, generator=generator) for _ in range(2))
    return mask.to_dense(length)[0, 0][rows][:, columns].contiguous()


@pytest.mark.parametrize(
    "mask", [masks.sliding_window(255), masks.strided(128, 128, 8), masks.neighborhood_2d(32, 32, 13)], ids=str
)
def test_a_gpu_finds_as_good_an_order(mask: masks.Mask) -> None:
    keep = shuffled(mask, 1024)
    found, on_cpu = (
        find_order(masks.from_dense(keep.to(device)), 1024, 1024, device=device) for device in (CUDA, "cpu")
    )
    assert found is not None
    assert on_cpu is not None
    assert found[0] == on_cpu[0] == CLUSTERED
    assert found[1].device.type == "cuda"
    assert torch.equal(found[1].sort().values.cpu(), torch.arange(1024))
    assert computed(keep[found[1].cpu()], 64) <= 1.1 * computed(keep[on_cpu[1]], 64)


@pytest.mark.parametrize("implementation", [None, "block_wise"])
def test_attention_under_a_shuffled_mask(implementation: str | None) -> None:
    keep = shuffled(masks.sliding_window(255), 1024).to(CUDA)
    q, k, v = make_inputs(batch=2, heads=8, q_len=1024, kv_len=1024, head_dim=64, dtype=torch.float16, device=CUDA).qkv
    plan = stof.plan(keep, 1024, device=CUDA, batch=2, heads=8)
    out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation=implementation)
    assert_attention(out, lse, q, k, v, keep)
    best = stof.explain(q, k, v, plan)[0]
    assert best.choice is not None
    assert best.choice.row_order == CLUSTERED


def test_alternatives_are_measured() -> None:
    keep = shuffled(masks.sliding_window(255), 1024)
    shape = Shape(1, 4, 4, 64, 1024, 1024)
    best = estimated(masks.from_dense(keep), shape, torch.float16)[:2]
    timed = measured(masks.from_dense(keep.to(CUDA)), shape, torch.float16, CUDA, only=best, rounds=2)
    assert len(timed) == 2
    assert all(one.measured_us is not None and not one.note for one in timed)
