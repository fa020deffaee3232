"""Parts of masks that end before the mask does, and masks of some heads or batch entries of all."""

from __future__ import annotations

import pytest
import torch

import stof
from stof import masks
from stof.errors import MaskError, ShapeError
from stof.masks import Mask
from stof.masks.compose import DEEPEST
from stof.masks.per_head import for_batch, for_heads
from stof.masks.reorder import in_ranges

LENGTH = 50
MASKS = {
    "documents": masks.documents(cu_seqlens=[0, 9, 30, 50]),
    "random": masks.random_blocks(2, block_size=4),
    "transposed random": masks.transposed(masks.random_blocks(2, block_size=4)),
    "both": masks.bigbird(2, 1, blocks=1, block_size=8) & ~masks.transposed(masks.random_blocks(3, block_size=8)),
    "grid": masks.neighborhood_2d(5, 10, 3),
    "tensor": masks.from_dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.4),
    "by head": masks.per_head([masks.causal(), masks.random_blocks(1, block_size=4), masks.sliding_window(3)] * 2),
    "function": masks.from_function(lambda b, h, q, k: (q - k) % (h + 2) == 0),
    "tensor by head": masks.from_dense(torch.rand(6, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.4),
}


BY_BATCH = {
    "padding": masks.padding([50, 3, 20, 0, 49, 7]),
    "documents": masks.documents([[n // (b + 2) for n in range(LENGTH)] for b in range(6)]) & masks.causal(),
    "prefix": masks.prefix_lm([1, 2, 30, 4, 50, 6]),
    "function": masks.from_function(lambda b, h, q, k: (q - k) % (b + 2) == h),
    "tensor": masks.from_dense(torch.rand(6, 1, 1, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.4),
    "by head": masks.per_head([masks.padding([50, 3, 20, 0, 49, 7]), masks.causal()]),
    "transposed": masks.transposed(masks.padding([50, 3, 20, 0, 49, 7]) | masks.sliding_window(2)),
}


def dense(
    mask: Mask, q_len: int = LENGTH, kv_len: int = LENGTH, heads: int = 6, batch: int | None = None
) -> torch.Tensor:
    return mask.to_dense(q_len, kv_len, heads=heads, batch=batch)


@pytest.mark.parametrize("name", MASKS)
def test_a_part_may_end_before_its_mask(name: str) -> None:
    mask = MASKS[name]
    part = masks.placed(mask, 8, 4, q_len=LENGTH, kv_len=LENGTH)
    expected = dense(mask)[..., 8:20, 4:36]
    assert torch.equal(dense(part, 12, 32), expected)
    assert torch.equal(dense(masks.transposed(part), 32, 12), expected.mT)
    assert torch.equal(dense(masks.placed(part, 2, 3), 10, 29), expected[..., 2:, 3:])
    assert torch.equal(dense(masks.placed(mask, q_len=LENGTH, kv_len=LENGTH), 5, 7), dense(mask)[..., :5, :7])
    tensor = part.as_tensor(12, 32)
    assert tensor is None or torch.equal(tensor.expand_as(expected), expected)
    plan = stof.plan(part, 12, 32, heads=6)
    assert torch.equal(plan.to_dense().expand_as(expected), expected)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([(0, 8), (40, 50)], [(0, 50)]),
        ([(30, 49), (3, 20), (21, 22)], [(32, 50), (0, 16), (16, 32)]),
        ([(5, 17)], [(48, 50), (3, 47)]),
        ([(5, 6), (6, 50)], [(1, 9)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MASKS)
def test_ranges_in_another_order(name: str, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> None:
    """The same scores and as many full tiles, also where two ranges share a tile."""
    mask = MASKS[name]
    part = in_ranges(mask, rows, columns, LENGTH, LENGTH)
    at, seen = (torch.cat([torch.arange(*each) for each in ranges]) for ranges in (rows, columns))
    expected = dense(mask)[..., at, :][..., seen]
    assert torch.equal(dense(part, len(at), len(seen)), expected)
    config = stof.LayoutConfig(16, 16)
    for other, keep in ((part, expected), (masks.transposed(part), expected.mT)):
        plan = stof.plan(other, *keep.shape[2:], heads=6, config=config)
        assert torch.equal(plan.to_dense().expand_as(keep), keep)
        same = stof.plan(masks.from_dense(keep), *keep.shape[2:], heads=6, config=config)
        assert plan.statistics().full_tiles == same.statistics().full_tiles
    with pytest.raises(ShapeError):
        part.check(51, len(seen))


def test_the_deepest_mask_in_ranges_has_a_transpose() -> None:
    mask = masks.causal()
    for level in range(DEEPEST):
        mask = mask & masks.full() if level % 2 else mask | masks.sliding_window(0)
    part = in_ranges(mask, [(4, 8), (0, 4)], [(0, 8)], 8, 8)
    assert torch.equal(masks.transposed(part).to_dense(8, 8), part.to_dense(8, 8).mT)
    with pytest.raises(MaskError, match="levels"):
        part & masks.full()


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_some_heads(name: str) -> None:
    mask = MASKS[name]
    part = for_heads(mask, 2, 3, 6)
    expected = dense(mask).expand(-1, 6, -1, -1)[:, 2:5]
    assert torch.equal(dense(part, heads=3).expand_as(expected), expected)
    assert (part is mask) == (not mask.depends_on_heads)
    plan = stof.plan(part, LENGTH, heads=3)
    assert torch.equal(plan.to_dense().expand_as(expected), expected)
    assert for_heads(mask, 0, 6, 6) is mask
    tensor = part.as_tensor(LENGTH, LENGTH)
    assert tensor is None or torch.equal(tensor.expand_as(expected), expected)


@pytest.mark.parametrize("first", [0, 2, 5])
@pytest.mark.parametrize("name", BY_BATCH)
def test_masks_of_some_batch_entries(name: str, first: int) -> None:
    mask, count = BY_BATCH[name], min(3, 6 - first)
    part = for_batch(mask, first, count, 6)
    expected = dense(mask, heads=2, batch=6)[first : first + count]
    assert torch.equal(dense(part, heads=2, batch=count), expected)
    assert torch.equal(dense(masks.transposed(part), heads=2, batch=count), expected.mT)
    plan = stof.plan(part, LENGTH, batch=count, heads=2)
    assert torch.equal(plan.to_dense().expand_as(expected), expected)
    both = for_heads(part, 1, 1, 2)
    assert torch.equal(dense(both, heads=1, batch=count), expected[:, -1:])
    assert for_batch(mask, 0, 6, 6) is mask
    tensor = part.as_tensor(LENGTH, LENGTH)
    assert tensor is None or torch.equal(tensor.expand_as(expected), expected)


def test_parts_are_written_as_text() -> None:
    inner = masks.documents(cu_seqlens=[0, 9, 30, 50]) & masks.causal()
    for mask in (
        masks.placed(inner, 8, q_len=50),
        masks.placed(inner, 0, 3, kv_len=50, q_len=50),
        for_heads(masks.per_head([inner, masks.full()]), 1, 1, 2),
        for_batch(masks.padding([3, 4, 5]), 1, 2, 3),
    ):
        assert masks.parse(repr(mask)) == mask


def test_errors() -> None:
    part = masks.placed(masks.causal(), 8, q_len=20)
    with pytest.raises(ShapeError, match="the placed mask has 20 queries, the call ends at position 21"):
        stof.plan(part, 13, 30)
    for wrong in (0, 2.0, True):
        with pytest.raises(MaskError, match="kv_len is an int between 1"):
            masks.placed(masks.causal(), kv_len=wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="heads of 6, the inputs have 4"):
        for_heads(MASKS["by head"], 0, 2, 4)
    with pytest.raises(ShapeError, match="that of 3 of 6 heads, the inputs have 2"):
        stof.plan(for_heads(MASKS["by head"], 0, 3, 6), LENGTH, heads=2)
    with pytest.raises(ShapeError, match="batch size of 6, the inputs have 4"):
        for_batch(BY_BATCH["padding"], 0, 2, 4)
    with pytest.raises(ShapeError, match="that of 3 of 6 batch entries, the inputs have 2"):
        stof.plan(for_batch(BY_BATCH["padding"], 0, 3, 6), LENGTH, batch=2)
    shorter = masks.placed(MASKS["tensor"], q_len=LENGTH)
    with pytest.raises(MaskError, match="a dynamic plan takes"):
        stof.dynamic_plan(shorter, 20, LENGTH)
