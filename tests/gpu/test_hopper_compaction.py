"""Compacted columns for the Hopper kernel, on a real GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.layout import Layout, build_layout
from stof.layout.survey import survey, survey_of_layout
from stof.masks import Mask
from stof.masks.tensors import as_mask
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
