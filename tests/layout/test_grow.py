"""Layouts that grow by some queries and keys equal those built at once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.layout import Layout, build_layout, grow
from stof.masks import Mask
from tests.strategies import configs, mask_trees

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_equal(layout: Layout, expected: Layout) -> None:
    layout.validate()
    assert (layout.q_len, layout.kv_len) == (expected.q_len, expected.kv_len)
    for name, tensor in expected.tensors().items():
        assert torch.equal(layout.tensors()[name], tensor), name
        assert layout.tensors()[name].dtype == tensor.dtype, name


@given(data=st.data(), config=configs)
@settings(max_examples=120)
def test_equals_a_fresh_build(data: st.DataObject, config: LayoutConfig) -> None:
    """Whatever the mask, in several steps: a decoded token, a chunk, nothing."""
    length = 110
    mask = data.draw(mask_trees(length, 2, leaves=3))
    if data.draw(st.booleans()):
        mask = mask & masks.causal()
    # Masks that count their tokens have them all from the start.
    q_len = data.draw(st.sampled_from([1, 16, 40, 64, 90]))
    layout = build_layout(mask, q_len, length, config, batch=2)
    for q_len in sorted(data.draw(st.lists(st.integers(q_len, length), min_size=1, max_size=3))):
        layout = grow.extend_layout(layout, mask, q_len, length, batch=2)
        assert_equal(layout, build_layout(mask, q_len, length, config, batch=2))


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
