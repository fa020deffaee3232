"""Row blocks in pairs on a real GPU: each warpgroup has tiles of its own, and leaves out the other's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import BoundCall, Options
from stof.layout import Layout
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS
from stof.selection.gpu_candidates import _PAIRED_STAGES
from stof.testing import MEMORY_LAYOUTS, assert_attention
from stof.testing.mask_grid import grid_mask
from tests.gpu.test_hopper import GRID, HALVES, HOPPER, layout_of, random_inputs
from tests.strategies import dense_masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

TILE = (64, 64)


def bound(layout: Layout, q: Tensor, k: Tensor, v: Tensor, side: int = 0) -> BoundCall:
    hopper = IMPLEMENTATIONS["hopper"]
    config = KernelConfig(4, _PAIRED_STAGES, side=side, paired=True)
    prepared = hopper.prepare(layout, config)
    return hopper.bind(q, k, v, prepared, Options(q.shape[3] ** -0.5))


def check(layout: Layout, q: Tensor, k: Tensor, v: Tensor, side: int = 0) -> None:
    out, lse = bound(layout, q, k, v, side)(q, k, v, None, None)
    assert_attention(out, lse, q, k, v, layout.to_dense())


def inputs(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return random_inputs(**{"head_dim": 128, "heads": 6, "kv_heads": 3} | sizes)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("slab", [None, 16])
@pytest.mark.parametrize("name", GRID)
def test_grid_masks(name: str, slab: int | None, dtype: torch.dtype) -> None:
    for length, side in ((2048, 4), (1003, 0), (1501, 2)):
        q, k, v = inputs(q_len=length, dtype=dtype)
        layout = layout_of(grid_mask(name).mask(length), q, k, slab, tile=TILE)
        try:
            check(layout, q, k, v, side)
        except UnfitLayoutError:
            assert length == 1003 or length == 1501


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_memory(memory: str) -> None:
    for head_dim in (72, 96, 128):
        q, k, v = inputs(head_dim=head_dim, q_len=500, kv_len=700, memory=memory)
        mask = masks.longformer(40, 48) | masks.strided(16, 64, 16)
        check(layout_of(mask, q, k, 16, tile=TILE), q, k, v)


@given(data=st.data(), slab=st.sampled_from([None, 16]))
@settings(max_examples=120, deadline=None)
def test_random_masks(data: st.DataObject, slab: int | None) -> None:
    """Also row blocks that have many tiles alone, and unlike numbers of them."""
    batch = data.draw(st.sampled_from([1, 3, 40]))
    keep = data.draw(dense_masks(data.draw(st.sampled_from([1, 64, 130, 700])), 900, 1, 1)).cuda()
    seed = data.draw(st.integers(0, 2**20))
    generator = torch.Generator(device="cuda").manual_seed(seed)
    blocks = torch.rand(1, 1, 11, 57, generator=generator, device="cuda") < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    keep = keep & blocks.repeat_interleave(64, 2)[:, :, : keep.shape[2]].repeat_interleave(16, 3)[..., :900]
    q, k, v = inputs(batch=batch, q_len=keep.shape[2], kv_len=900, seed=seed)
    layout = layout_of(as_mask(keep), q, k, slab, tile=TILE)
    try:
        check(layout, q, k, v, data.draw(st.sampled_from([0, 2])))
    except UnfitLayoutError:
        assert not bool(keep.any(2).all())


@pytest.mark.parametrize("reach", [6.0, 150.0, -150.0])
def test_scores_that_outgrow_the_first_tile(reach: float) -> None:
    """Tiles that are taken again, in one warpgroup or in both, with bits and without."""
    q, k, v = (x.clone() for x in inputs(q_len=500, kv_len=1500))
    q[..., 0] = 8
    q[:, :, 64:128, 0] = -8
    k[..., 0] = (torch.linspace(-1, 1, 1500, device="cuda") * (reach * 128**0.5 / 8)).half()
    keep = torch.rand(500, 1500, device="cuda") > 0.9
    keep[:, 320:1024] = True
    for mask in (as_mask(keep), masks.sliding_window(300) | masks.global_tokens(16)):
        for slab in (None, 16):
            check(layout_of(mask, q, k, slab, tile=TILE), q, k, v)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_keys_that_are_no_numbers(value: float) -> None:
    """Rows that see them are as float64 says; row blocks that do not even touch their tile are right."""
    q, k, v = (x.clone() for x in inputs(q_len=1024, kv_len=1024))
    mask = masks.sliding_window(64, 64)
    k[:, :, 500] = value
    layout = layout_of(mask, q, k, None, tile=TILE)
    out, lse = bound(layout, q, k, v)(q, k, v, None, None)
    clean = [x.clone() for x in (q, k, v)]
    clean[1][:, :, 500] = 0
    expected, _ = bound(layout, *clean)(*clean, None, None)
    far = torch.ones(1024, dtype=torch.bool, device="cuda")
    far[384:640] = False
    assert torch.equal(out[:, :, far], expected[:, :, far])
    assert bool(torch.isfinite(lse[:, :, far]).all())


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
def test_many_calls_are_alike(name: str) -> None:
    """A warpgroup that skips tiles without waiting for their copies gives other results in one of 1,700 calls."""
    q, k, v = inputs(batch=4, heads=16, kv_heads=16, q_len=1024)
    layout = layout_of(grid_mask(name).mask(1024), q, k, 16, tile=TILE)
    call = bound(layout, q, k, v, side=4)
    out, lse = call(q, k, v, None, None)
    unlike = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(6000):
        again, lse_again = call(q, k, v, None, None)
        unlike += (again != out).any() | (lse_again != lse).any()
    assert int(unlike) == 0
