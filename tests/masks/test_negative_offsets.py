"""Queries before position 0: what a mask with a negative query offset keeps, in every place that reads it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, Plan, masks
from stof.errors import MaskError
from stof.layout import build_layout
from stof.layout.survey import survey
from stof.masks import Mask
from tests.examples import examples
from tests.strategies import configs, mask_trees

KEYS = 40


@st.composite
def movable(draw: st.DrawFn) -> Mask:
    mask = draw(mask_trees(KEYS, 2, leaves=3))
    assume(mask.allows_negative_queries)
    return mask


@given(mask=movable(), before=st.integers(1, 60), rows=st.integers(1, 70), config=configs)
@examples(60)
def test_layouts_are_those_of_the_dense_mask(mask: Mask, before: int, rows: int, config: LayoutConfig) -> None:
    assume(rows - before <= KEYS or "documents" not in mask.key)
    moved = mask.with_query_offset(-before)
    dense = moved.to_dense(rows, KEYS, batch=2)
    later = max(0, rows - before)
    if later:
        every = mask.to_dense(min(later, KEYS), KEYS, batch=2)
        assert torch.equal(dense[:, :, before : before + KEYS].expand_as(every), every)
    assert torch.equal(build_layout(moved, rows, KEYS, config, batch=2).to_dense(), dense)
    counted = survey(moved, rows, KEYS, [config], batch=2)
    assert torch.equal(counted.kept, dense.sum(-1).flatten(0, 1))
    assert masks.parse(repr(moved)) == moved == pickle.loads(pickle.dumps(moved))
    assert moved.with_query_offset(before) == mask


@given(ids=st.lists(st.integers(-1, 2), min_size=KEYS, max_size=KEYS), before=st.integers(1, 50))
@examples(30)
def test_positions_before_the_first_are_in_no_document(ids: list[int], before: int) -> None:
    for mask in (masks.documents(ids), masks.documents(sorted(ids)), masks.documents(cu_seqlens=[0, 7, 20, KEYS])):
        dense = mask.with_query_offset(-before).to_dense(before + 5, KEYS)[0, 0]
        assert not bool(dense[:before].any())
        assert torch.equal(dense[before:], mask.to_dense(5, KEYS)[0, 0])
        for block in (16, 64):
            layout = build_layout(mask.with_query_offset(-before), before + 5, KEYS, LayoutConfig(block, block))
            assert torch.equal(layout.to_dense()[0, 0], dense)


def expected(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.nan_to_num(neginf=0)[..., None]).exp() @ v.double(), lse


LOWER_RIGHT = {
    "causal": masks.causal(),
    "window": masks.sliding_window(9),
    "prefix": masks.prefix_lm(5),
    "per head": masks.per_head([masks.causal(), masks.dilated_window(12, dilation=3)]),
    "causal documents": masks.causal() & masks.documents([0] * 30 + [1] * 50),
}


@pytest.mark.parametrize("name", LOWER_RIGHT)
@pytest.mark.parametrize(("rows", "keys"), [(83, 80), (300, 80)])
def test_attention_aligned_at_the_lower_right_corner(name: str, rows: int, keys: int) -> None:
    mask = LOWER_RIGHT[name].with_query_offset(keys - rows)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, rows, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, keys, 16, generator=generator)
    out, lse = stof.attention(q, k, v, mask, return_lse=True)
    wanted, wanted_lse = expected(q, k, v, mask.to_dense(rows, keys))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-5)
    nothing = ~mask.to_dense(rows, keys).any(-1).expand(1, 2, rows)
    assert bool(nothing.any()) == (name != "prefix")
    assert bool((out[nothing] == 0).all())
    assert bool((lse[nothing] == -torch.inf).all())


def test_causal_is_a_lower_triangle() -> None:
    for rows, keys in ((30, 20), (21, 20), (90, 20), (20, 30)):
        triangle = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        assert torch.equal(masks.causal().with_query_offset(keys - rows).to_dense(rows, keys)[0, 0], triangle)


@pytest.mark.parametrize("name", LOWER_RIGHT)
def test_plans_are_saved_and_extended(name: str, tmp_path: Path) -> None:
    mask = LOWER_RIGHT[name].with_query_offset(-30)
    plan = stof.plan(mask, 110, 80)
    plan.save(tmp_path / "plan.safetensors")
    loaded = Plan.load(tmp_path / "plan.safetensors")
    assert torch.equal(loaded.to_dense(), mask.to_dense(110, 80))
    assert masks.parse(loaded.mask_text) == mask
    if "documents" not in name:
        assert torch.equal(plan.extended(25).to_dense(), mask.to_dense(135, 105))


def test_offsets_of_both_signs_add_up() -> None:
    mask = masks.causal() | masks.global_tokens(3)
    assert mask.with_query_offset(-5).with_query_offset(5) is mask
    assert mask.with_query_offset(-5).with_query_offset(2) == mask.with_query_offset(-3)
    assert mask.with_query_offset(4).with_query_offset(-9) == mask.with_query_offset(-5)
    assert masks.parse("causal.with_query_offset(-3)") == masks.causal().with_query_offset(-3)
    dense = masks.from_dense(torch.ones(9, 9, dtype=torch.bool))
    assert dense.with_query_offset(4).with_query_offset(-4) is dense
    with pytest.raises(MaskError, match="0 or more, got -1"):
        dense.with_query_offset(4).with_query_offset(-5)


@pytest.mark.parametrize(
    "mask",
    [
        masks.from_dense(torch.ones(4, 4, dtype=torch.bool)),
        masks.from_function(lambda b, h, q, k: q >= k),
        masks.neighborhood_2d(2, 2, 1),
        masks.vertical_slash(torch.tensor([0]), torch.tensor([0])),
        masks.block_topk(torch.ones(1, 1), 1),
        masks.reordered(masks.causal(), rows=torch.tensor([1, 0])),
        ~(masks.causal() & masks.from_dense(torch.ones(4, dtype=torch.bool)[None])),
    ],
)
def test_masks_that_do_not_say_what_such_queries_see(mask: Mask) -> None:
    with pytest.raises(MaskError, match=r"queries before position 0.*named masks"):
        mask.with_query_offset(-1)
