"""Layouts and tile counts made on the GPU are those made on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from stof import LayoutConfig, masks
from stof.layout import Layout, build_layout
from stof.layout.survey import survey
from stof.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
LENGTH = 1500
MASKS = {
    "longformer": masks.longformer(30, 40),
    "bigbird": masks.bigbird(30, [3, 700], blocks=2, block_size=48),
    "strided": masks.strided(100, 96, 7),
    "documents": masks.causal() & ~masks.documents(cu_seqlens=[0, 200, 777, 1500]),
    "neighbourhood": masks.neighborhood_2d(30, 50, 7),
    "batch": masks.padding([40, 1500, 40]) & masks.dilated_window(300, dilation=7),
    "heads": masks.per_head([masks.causal(), masks.prefix_lm(700), masks.causal()]),
    "queries at the end": masks.sliding_window(90).with_query_offset(200) | masks.padding(10),
}


def assert_same(layout: Layout, expected: Layout) -> None:
    layout.validate()
    for name, tensor in expected.tensors().items():
        assert torch.equal(layout.tensors()[name].cpu(), tensor), name


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("config", [LayoutConfig(128, 128), LayoutConfig(64, 32), LayoutConfig(192, 64)], ids=str)
def test_layouts(name: str, config: LayoutConfig) -> None:
    mask = MASKS[name]
    sizes = {"batch": mask.batch, "heads": mask.heads}
    q_len = LENGTH - 200
    build_layout(mask, q_len, LENGTH, config, **sizes, device=CUDA)
    with mock.patch.object(launch, "launch", wraps=launch.launch) as launched:
        layout = build_layout(mask, q_len, LENGTH, config, **sizes, device=CUDA)
    assert launched.call_count == 3
    assert_same(layout, build_layout(mask, q_len, LENGTH, config, **sizes))


@pytest.mark.parametrize(("columns", "row"), [(1504, 1504), (1500, 1504), (1500, 1500), (1501, 1504)])
def test_dense(columns: int, row: int) -> None:
    """Rows that begin at multiples of 16 bytes or elsewhere, with columns in fours or not."""
    keep = torch.rand(2, 700, row) < 0.001
    keep[:, :300, :200] = True
    config = LayoutConfig(64, 64)
    layout = build_layout(masks.from_dense(keep.to(CUDA)[..., :columns]), 700, columns, config, heads=2, device=CUDA)
    assert_same(layout, build_layout(masks.from_dense(keep[..., :columns]), 700, columns, config, heads=2))


@pytest.mark.parametrize("name", ["longformer", "batch", "heads"])
def test_surveys(name: str) -> None:
    mask = MASKS[name]
    wanted = [LayoutConfig(m, n, slab) for m in (64, 192) for n in (32, 128) for slab in (None, 1, 16)]
    sizes = {"batch": mask.batch, "heads": mask.heads}
    counted = survey(mask, LENGTH, LENGTH, wanted, **sizes, device=CUDA)
    expected = survey(mask, LENGTH, LENGTH, wanted, **sizes)
    assert torch.equal(counted.kept, expected.kept)
    for geometry in wanted:
        assert torch.equal(counted.counts[geometry].partial, expected.counts[geometry].partial)
        assert torch.equal(counted.counts[geometry].full, expected.counts[geometry].full)
