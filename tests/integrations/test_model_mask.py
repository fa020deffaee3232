"""Masks of whole sequences, in the coordinates of a model's call."""

from __future__ import annotations

import pytest
import torch

from stof import masks
from stof.handles import FULL
from stof.layout.builders.build import build_layout
from stof.layout.config import LayoutConfig
from stof.masks import Mask

pytest.importorskip("transformers")
ModelMask = pytest.importorskip("stof.integrations.transformers.model_mask").ModelMask

SPARSE: dict[str, Mask] = {
    "window": masks.sliding_window(6),
    "documents": masks.documents([0] * 17 + [1] * 23),
    "random blocks": masks.random_blocks(2, block_size=4),
    "dense": masks.from_dense(torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) < 0.5),
    "per head": masks.per_head([masks.causal(), masks.full()]),
    "function": masks.from_function(lambda b, h, q, kv: (q >= kv) & (kv % 3 > h)),
    "reducing function": masks.from_function(lambda b, h, q, kv: torch.stack([q >= kv, kv < 5 + h]).any()),
    "reordered": masks.reordered(masks.causal(), torch.randperm(40, generator=torch.Generator().manual_seed(0))),
    "composed": masks.padding([33]) & ~masks.strided(3, 7),
}


@pytest.mark.parametrize("name", SPARSE)
def test_keys_that_begin_later(name: str) -> None:
    """Where a cache has dropped its first keys."""
    sparse = SPARSE[name]
    mask = ModelMask(FULL, (1, 2, 8, 20), q_offset=32, kv_offset=20).narrowed(sparse)
    expected = sparse.to_dense(40, batch=1, heads=2).expand(1, 2, 40, 40)[:, :, 32:, 20:]
    assert torch.equal(mask.to_dense(8, 20, heads=2).expand_as(expected), expected)
    layout = build_layout(mask, 8, 20, LayoutConfig(16, 16), heads=2)
    assert torch.equal(layout.to_dense().expand_as(expected), expected)
    again = ModelMask(FULL, (1, 2, 8, 20), q_offset=32, kv_offset=20).narrowed(sparse)
    assert again == mask
