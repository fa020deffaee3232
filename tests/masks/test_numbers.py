"""Which batch entries and heads share a mask, and what sharing saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.layout import build_layout
from stof.layout.orders.search import find_order
from stof.layout.survey import survey
from stof.masks import Mask
from stof.masks.tensors import DenseMask
from tests.examples import examples
from tests.strategies import dense_masks, mask_trees

WINDOW, CAUSAL = masks.sliding_window(3), masks.causal()


def numbers(mask: Mask, batch: int = 1, heads: int = 1) -> list[list[int]]:
    return mask.pattern_ids(*mask.dims(batch, heads)).tolist()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CAUSAL, [[0]]),
        (masks.padding([3, 9, 3, 3]), [[0], [1], [0], [0]]),
        (masks.prefix_lm([4, 4]), [[0], [0]]),
        (masks.documents([[0, 0, 1], [0, 1, 1], [0, 0, 1]]), [[0], [1], [0]]),
        (masks.per_head([CAUSAL, WINDOW, CAUSAL]), [[0, 1, 0]]),
        (masks.per_head([CAUSAL, WINDOW, CAUSAL]) & masks.padding([3, 9, 3]), [[0, 1, 0], [2, 3, 2], [0, 1, 0]]),
        (~masks.per_head([masks.padding([3, 9]), WINDOW | masks.padding([3, 9]), masks.padding([3, 9])]),
         [[0, 1, 0], [2, 3, 2]]),
        (masks.padding([3, 9, 3]).with_query_offset(2), [[0], [1], [0]]),
        pytest.param(
            masks.per_head([CAUSAL, masks.from_function(lambda b, h, q, k: q >= h)]), [[0, 1]], id="per_head function"
        ),
    ],
    ids=str,
)  # fmt: skip
def test_numbers(mask: Mask, expected: list[list[int]]) -> None:
    assert numbers(mask, len(expected), len(expected[0])) == expected


def test_functions_promise_nothing() -> None:
    assert numbers(masks.from_function(lambda b, h, q, k: (q >= k) & (b >= 0) & (h >= 0)), 2, 3) == [
        [0, 1, 2],
        [3, 4, 5],
    ]


@given(data=st.data(), batch=st.integers(1, 3), heads=st.integers(1, 3))
@examples(60)
def test_equal_numbers_are_equal_masks(data: st.DataObject, batch: int, heads: int) -> None:
    picked = data.draw(dense_masks(20, 20, batch, heads))
    if data.draw(st.booleans()):
        picked = picked[:1].expand(batch, heads, 20, 20)  # shares memory along the batch
    tree = data.draw(mask_trees(20, batch=batch))
    for mask in (tree, masks.from_dense(picked), tree & masks.from_dense(picked)):
        dense = mask.to_dense(20, batch=batch, heads=heads)
        found = mask.pattern_ids(*mask.dims(batch, heads)).expand(dense.shape[:2])
        for number in found.unique():
            alike = dense[found == number]
            assert torch.equal(alike, alike[:1].expand_as(alike))
    firsts = picked.flatten(0, 1).flatten(1).unique(dim=0)
    assert len(masks.from_dense(picked).pattern_ids(batch, heads).unique()) == len(
        firsts
    )  # tensors are compared in full


def test_equal_heads_cost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 equal heads of a tensor: one is evaluated, one is stored, one is surveyed and searched."""
    seen: list[int] = []
    evaluate = DenseMask.evaluate

    def watched(mask: DenseMask, index: Any) -> torch.Tensor:
        seen.append(int(index.h))
        return evaluate(mask, index)

    monkeypatch.setattr(DenseMask, "evaluate", watched)
    rows = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    one = masks.sliding_window(31).to_dense(256)[0, 0][rows].contiguous()
    every = masks.from_dense(one.expand(16, 256, 256).contiguous())
    layout = build_layout(every, 256, 256, heads=16)
    alone = build_layout(masks.from_dense(one), 256, 256)
    assert layout.patterns == 1
    assert layout.pattern_of.tolist() == [[0] * 16]
    for name, tensor in alone.tensors().items():
        if name != "pattern_of":
            assert torch.equal(tensor, layout.tensors()[name]), name
    counted = survey(every, 256, 256, [LayoutConfig(64, 64)], heads=16)
    assert counted.kept.shape == (8, 256)
    found = find_order(every, 256, 256, heads=16)
    assert set(seen) == {0}
    assert found is not None
    assert torch.equal(found[1], find_order(masks.from_dense(one), 256, 256)[1])  # type: ignore[index]


def test_memory_grows_with_distinct_masks_only() -> None:
    generator = torch.Generator().manual_seed(0)
    several = torch.rand(4, 300, 300, generator=generator) < 0.1

    def bytes_of(distinct: int, heads: int, batch: int = 1) -> int:
        chosen = torch.arange(heads * batch).view(batch, heads) % distinct
        layout = build_layout(masks.from_dense(several[chosen]), 300, 300, batch=batch, heads=heads)
        assert layout.patterns == distinct
        assert torch.equal(layout.to_dense(), several[chosen])
        return sum(t.numel() * t.element_size() for t in layout.tensors().values()) - 4 * heads * batch

    assert bytes_of(1, 1) == bytes_of(1, 32) == bytes_of(1, 8, 4)
    assert bytes_of(4, 4) == bytes_of(4, 32) == bytes_of(4, 2, 4)
    assert bytes_of(4, 32) > 3.9 * bytes_of(1, 32)
