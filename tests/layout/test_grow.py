"""Layouts that grow by some queries and keys equal those built at once."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stof
from stof import LayoutConfig, masks
from stof.errors import ArgumentError, ShapeError
from stof.layout import Layout, build_layout
from stof.layout import extend as grow
from stof.masks import Mask
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.strategies import configs, mask_trees

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_equal(layout: Layout, expected: Layout) -> None:
    layout.validate()
    assert (layout.q_len, layout.kv_len) == (expected.q_len, expected.kv_len)
    for name, tensor in expected.tensors().items():
        assert torch.equal(layout.tensors()[name], tensor), name
        assert layout.tensors()[name].dtype == tensor.dtype, name


@given(data=st.data(), config=configs)
@examples(120)
def test_equals_a_fresh_build(data: st.DataObject, config: LayoutConfig) -> None:
    """Whatever the mask, in several steps: a decoded token, a chunk, nothing."""
    length = 110
    mask = data.draw(mask_trees(length, 2, leaves=3))
    if data.draw(st.booleans()):
        mask = mask & masks.causal()
    # Masks that count their tokens have them all from the start.
    q_len = data.draw(st.sampled_from([1, 16, 40, 64, 90]))
    layout = build_layout(mask, q_len, length, config, batch=2)
    for longer in sorted(data.draw(st.lists(st.integers(q_len, length), min_size=1, max_size=3))):
        layout = grow.extend_layout(layout, mask, longer, length, batch=2)
        assert_equal(layout, build_layout(mask, longer, length, config, batch=2))


GROWING: dict[str, tuple[Mask, bool]] = {
    "causal": (masks.causal(), True),
    "window": (masks.sliding_window(30) | masks.sink_tokens(4), True),
    "strided": (masks.strided(16, 16, 3), True),
    "per head": (masks.per_head([masks.causal(), masks.sliding_window(300), masks.causal()]), True),
    "function": (masks.from_function(lambda b, h, q, k: (q >= k) & (q - k < 50)), True),
    "chunk": (masks.causal().with_query_offset(0) & ~masks.sliding_window(3), True),
    "everything": (masks.full(), False),
    "both ways": (masks.longformer(10, 5), False),
    "random blocks": (masks.random_blocks(2, block_size=16) & masks.causal(), False),
}


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("config", [LayoutConfig(16, 32), LayoutConfig(16, 16, 1), LayoutConfig(32, 64, 8)], ids=str)
def test_queries_and_keys(name: str, config: LayoutConfig) -> None:
    """What old queries cannot see is not evaluated for them; where they might, everything is built anew."""
    mask, cheap = GROWING[name]
    heads = max(mask.heads, 1)
    layout = build_layout(mask, 100, 100, config, heads=heads)
    for length in (101, 128, 250):
        with mock.patch.object(grow, "build_layout", wraps=build_layout) as rebuilt:
            layout = grow.extend_layout(layout, mask, length, length, heads=heads)
        assert rebuilt.called == (not cheap)
        assert_equal(layout, build_layout(mask, length, length, config, heads=heads))


def test_heads_that_begin_to_differ() -> None:
    """Heads with one pattern so far get two when the new rows differ."""
    mask = masks.per_head([masks.causal(), masks.sliding_window(149)])
    layout = build_layout(mask, 100, 100, LayoutConfig(16, 16), heads=2)
    assert layout.patterns == 1
    layout = grow.extend_layout(layout, mask, 200, 200, heads=2)
    assert layout.patterns == 2
    assert_equal(layout, build_layout(mask, 200, 200, LayoutConfig(16, 16), heads=2))


def test_only_new_rows_are_evaluated() -> None:
    mask = masks.sliding_window(255)
    layout = build_layout(mask, 8192, 8192, LayoutConfig(64, 64))
    seen: list[int] = []
    evaluate = type(mask).evaluate

    def counted(self: Mask, index: masks.Index) -> object:
        found = evaluate(self, index)
        if isinstance(found, torch.Tensor):
            seen.append(found.numel())
        return found

    with mock.patch.object(type(mask), "evaluate", counted):
        grown = grow.extend_layout(layout, mask, 8193, 8193)
    # Two tiles: the diagonal and the window's other edge.
    assert sum(seen) <= 2 * 64 * 64
    assert_equal(grown, build_layout(mask, 8193, 8193, LayoutConfig(64, 64)))


def test_plans() -> None:
    """A cache that grows token by token, then by a chunk."""
    mask = masks.sliding_window(20) | masks.sink_tokens(2)
    plan = stof.plan(mask, 60)
    for rows in (1, 1, 40):
        plan = plan.extended(rows)
        q, k, v = make_inputs(q_len=plan.q_len, kv_len=plan.kv_len).qkv
        out, lse = stof.attention(q, k, v, plan, return_lse=True)
        assert_attention(out, lse, q, k, v, mask.to_dense(plan.q_len))
    assert (plan.q_len, plan.kv_len) == (102, 102)
    # Documents list their tokens: the longer list is another mask.
    packed = stof.plan(masks.documents([0] * 30 + [1] * 20) & masks.causal(), 50)
    longer = masks.documents([0] * 30 + [1] * 25) & masks.causal()
    with pytest.raises(ShapeError, match="documents cover 50 tokens"):
        packed.extended(5)
    assert torch.equal(packed.extended(5, longer).to_dense(), longer.to_dense(55))


def test_plans_that_cannot_grow(tmp_path: Path) -> None:
    plan = stof.plan(masks.causal(), 20)
    for rows in (-1, 1.0, True):
        with pytest.raises(ArgumentError, match="rows is an int of 0 or more"):
            plan.extended(rows)  # type: ignore[arg-type]
    plan.save(tmp_path / "plan.safetensors")
    loaded = stof.Plan.load(tmp_path / "plan.safetensors")
    with pytest.raises(ArgumentError, match="give its mask"):
        loaded.extended(1)
    assert torch.equal(loaded.extended(1, masks.causal()).to_dense(), masks.causal().to_dense(21))
