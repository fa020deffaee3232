"""Compacted columns for the Hopper kernel, on a real GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import Options, attend_once
from stof.layout import Layout, build_layout
from stof.layout.survey import survey, survey_of_layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention
from tests.gpu.test_hopper import HALVES, HOPPER, STAGES, bound, check_layout, random_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.usefixtures("poisoned_memory"),
]

STRIDED = masks.strided(100, 128, 8)


def layout_of(mask: Mask, q: Tensor, k: Tensor, tile: tuple[int, int]) -> Layout:
    config = LayoutConfig(*tile, 1, compact_columns=True)
    sizes = {"batch": q.shape[0], "heads": q.shape[1]}
    layout = build_layout(mask, q.shape[2], k.shape[2], config, **sizes, device="cuda")
    assert bool((layout.tile_base < 0).any()), "nothing was compacted"
    return layout


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "tile"), [*((64, tile) for tile in STAGES[64]), *((128, tile) for tile in STAGES[128])], ids=str
)
def test_strided_masks(head_dim: int, tile: tuple[int, int], dtype: torch.dtype) -> None:
    """Grouped heads, whole row blocks and odd lengths, split or not."""
    for length, split_tiles in ((2048, 0), (1501, 2)):
        q, k, v = random_inputs(q_len=length, head_dim=head_dim, dtype=dtype)
        check_layout(layout_of(STRIDED, q, k, tile), q, k, v, split_tiles, side=3)


@pytest.mark.parametrize("tile", [(64, 64), (128, 128)], ids=str)
def test_lists_by_head_and_sequence(tile: tuple[int, int]) -> None:
    """Single columns, other ones in every head; sinks and softcap; memory that is not contiguous."""
    generator = torch.Generator("cuda").manual_seed(0)
    share = torch.tensor([0.01, 0.02, 0.1, 0.2], device="cuda").view(1, 4, 1, 1)
    lines = torch.rand(2, 4, 1, 1531, generator=generator, device="cuda") < share
    q, k, v = random_inputs(q_len=777, kv_len=1531, memory="bshd")
    options = {"softcap": 20.0, "sinks": torch.randn(4, device="cuda")}
    for kept in (lines, lines[:, 1:2], lines[:1], lines[:1, 2:3]):
        keep = kept.expand(*kept.shape[:2], 777, 1531).contiguous()
        check_layout(layout_of(as_mask(keep), q, k, tile), q, k, v, 1, **options)


def test_keys_that_no_query_sees() -> None:
    """Only what is compacted is read."""
    q, k, v = random_inputs(q_len=1003)
    layout = layout_of(masks.strided(0, 64, 3, causal=False), q, k, (64, 64))
    unseen = ~layout.to_dense().any(2)[:, :, :, None]
    stale = [x.masked_fill(unseen, torch.nan) for x in (k, v)]
    out, lse = bound(layout, q, k, v)(q, *stale, None, None)
    assert_attention(out, lse, q, k, v, layout.to_dense())


@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 128), (192, 128)], ids=str)
def test_unseen_keys_as_zeros(tile: tuple[int, int], mask_heads: int) -> None:
    """Keys in the middle, at the front and at the end, and NaN in them; split row blocks too."""
    q, k, v = random_inputs(q_len=777, kv_len=1531, kv_heads=4)
    seen = torch.rand(2, mask_heads, 1, 1531, device="cuda") < 0.9
    seen[:, :, :, 1400:] = False
    seen[1, :, :, :200] = False
    keep = seen & (torch.rand(2, mask_heads, 777, 1531, device="cuda") < 0.5)
    layout = build_layout(as_mask(keep), 777, 1531, LayoutConfig(*tile), batch=2, heads=mask_heads, device="cuda")
    unseen = ~layout.to_dense().any(2)[:, :, :, None]
    stale = [x.masked_fill(unseen, torch.nan) for x in (k, v)]
    for split_tiles in (0, 2):
        prepared = IMPLEMENTATIONS["hopper"].prepare(
            layout, KernelConfig(4, 2, split_tiles=split_tiles, zero_unseen=True)
        )
        out, lse = attend_once(IMPLEMENTATIONS["hopper"].bind, q, *stale, prepared, Options(0.125))
        assert_attention(out, lse, q, k, v, layout.to_dense())


def test_a_causal_mask_with_unseen_keys_runs_on_the_hopper_kernel() -> None:
    """Through the public function: whole tiles are tried, found unfit, and read with zeros."""
    q, k, v = random_inputs(q_len=2048, kv_len=2048, kv_heads=4)
    keep = torch.rand(2048, 2048, device="cuda") < 0.2
    keep[:, 100::300] = False
    mask = masks.causal() & masks.from_dense(keep)
    unseen = ~mask.to_dense(2048, device="cuda").any(2)[:, :, :, None]
    stale = [x.masked_fill(unseen, torch.nan) for x in (k, v)]
    plan = stof.plan(mask, 2048, 2048, batch=2, heads=4, device="cuda")
    out = stof.attention(q, *stale, plan, implementation="hopper")
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=mask.to_dense(2048, device="cuda")
    )
    assert float((out.double() - want).abs().max()) < 5e-3
    fastest = next(one.choice for one in stof.explain(q, k, v, plan) if one.choice.implementation == "hopper")
    assert "unseen keys as zeros" in str(fastest)


def test_capture_and_repetition() -> None:
    """The copy is part of the call: replays see the keys of now, and repeat themselves bit for bit."""
    q, k, v = random_inputs(q_len=2048)
    layout = layout_of(STRIDED, q, k, (64, 64))
    call = bound(layout, q, k, v)
    call(q, k, v, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(q, k, v, None, None)
    k.copy_(k.flip(2))
    v.copy_(v.flip(2))
    graph.replay()
    assert_attention(out, lse, q, k, v, layout.to_dense())
    first = out.clone()
    for _ in range(100):
        graph.replay()
        assert torch.equal(out, first)


def test_counts_and_layouts_are_those_of_the_cpu() -> None:
    """Masks with a program and dense ones."""
    dense = as_mask(STRIDED.to_dense(1003, 1003).cuda())
    for config in (LayoutConfig(64, 64, 1, compact_columns=True), LayoutConfig(192, 128, 1, compact_columns=True)):
        expected = build_layout(STRIDED, 1003, 1003, config)
        for mask in (STRIDED, dense):
            layout = build_layout(mask, 1003, 1003, config, device="cuda")
            assert all(torch.equal(t.cpu(), expected.tensors()[name]) for name, t in layout.tensors().items())
            counts = survey(mask, 1003, 1003, [config], device="cuda").counts[config]
            own = survey_of_layout(layout).counts[config]
            assert torch.equal(counts.partial, own.partial)
            assert torch.equal(counts.full, own.full)
            assert counts.compacted_keys == own.compacted_keys > 0


def test_the_selector_may_choose_it() -> None:
    """Where the model says that it pays, and through the public operator."""
    q, k, v = random_inputs(batch=1, heads=32, kv_heads=32, q_len=8192, head_dim=128)
    mask = masks.strided(128, 128, 8)
    offered = [
        c for c in stof.explain(q, k, v, mask) if c.choice and c.choice.layout and c.choice.layout.compact_columns
    ]
    assert offered
    assert all(c.estimate_us for c in offered)
