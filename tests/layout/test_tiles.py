"""Tiles in closed form are the tiles that evaluating every score gives, bit for bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.errors import MaskFunctionError
from stof.layout import Layout, build_layout
from stof.layout.builders import closed_form as tiles
from stof.layout.builders import slabs, strips
from stof.layout.survey import survey
from stof.masks import Mask
from tests.examples import examples
from tests.strategies import dense_masks, mask_trees, row_orders

pytestmark = pytest.mark.usefixtures("poisoned_memory")

configs = st.builds(
    LayoutConfig, st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 128]), st.sampled_from([None, 1, 8, 16])
)


def slow(mask: Mask, q_len: int, kv_len: int, config: LayoutConfig, **sizes: int) -> Layout:
    """Every score evaluated."""
    none = mock.Mock(return_value=None)
    with mock.patch.multiple("stof.layout.builders.build", tiles_of=none, _of_small_masks=none):
        return build_layout(mask, q_len, kv_len, config, **sizes)


def assert_same(mask: Mask, q_len: int, kv_len: int, config: LayoutConfig, **sizes: int) -> None:
    layout, expected = build_layout(mask, q_len, kv_len, config, **sizes), slow(mask, q_len, kv_len, config, **sizes)
    for name, tensor in expected.tensors().items():
        assert torch.equal(layout.tensors()[name], tensor), name
        assert layout.tensors()[name].dtype == tensor.dtype


@given(data=st.data(), config=configs, squares=st.booleans())
@examples(100)
def test_expressions(data: st.DataObject, config: LayoutConfig, squares: bool) -> None:
    batch, offset = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([0, 0, 30]))
    mask = data.draw(mask_trees(110, batch, leaves=3)).with_query_offset(offset)
    parts = mock.patch.object(slabs, "_AT_ONCE", 2**12)
    with parts, mock.patch.multiple(tiles, _ON_HOST=0 if squares else 2**14, _SQUARE=2, _AT_ONCE=2**12):
        assert_same(mask, 110 - offset, 110, config, batch=batch)


@given(data=st.data(), config=configs, squares=st.booleans())
@examples(60)
def test_rows_out_of_order(data: st.DataObject, config: LayoutConfig, squares: bool) -> None:
    """By remainder, in patches or at random; of masks and of dense tensors."""
    mask = data.draw(mask_trees(120, leaves=3))
    mask = masks.from_dense(mask.to_dense(120)) if data.draw(st.booleans()) else mask
    order = data.draw(row_orders(120))
    with mock.patch.multiple(tiles, _ON_HOST=0 if squares else 2**14, _SQUARE=2, _AT_ONCE=2**12):
        layout = build_layout(mask, 120, 120, config, row_order=order)
    none = mock.Mock(return_value=None)
    with mock.patch.multiple("stof.layout.builders.build", tiles_of=none):
        assert layout.equals(build_layout(mask, 120, 120, config, row_order=order))


@given(data=st.data(), config=configs)
@examples(40)
def test_dense(data: st.DataObject, config: LayoutConfig) -> None:
    q_len, kv_len = (data.draw(st.sampled_from([1, 16, 33, 130])) for _ in range(2))
    keep = data.draw(dense_masks(data.draw(st.sampled_from([q_len, 1])), kv_len, 2, 2))
    if data.draw(st.booleans()):
        keep = keep.transpose(2, 3).contiguous().transpose(2, 3)
    assert_same(masks.from_dense(keep), q_len, kv_len, config, batch=2, heads=2)


@pytest.mark.parametrize("squares", [False, True])
def test_nothing_kept(squares: bool) -> None:
    """Also where squares of tiles say so, and a mask is left without a tile to be asked about."""
    mask = masks.random_blocks(3, block_size=16) & masks.padding([0, 40])
    with mock.patch.multiple(tiles, _ON_HOST=0 if squares else 2**14, _SQUARE=2):
        assert_same(mask, 110, 110, LayoutConfig(16, 16), batch=2)


LIMITS = torch.tensor([3, 50])
TABLE = torch.arange(220).view(2, 110) // 30
FUNCTIONS = {
    "window and sinks": lambda b, h, q, k: (q >= k) & ((q - k < 20) | (k < 3)),
    "by head and batch": lambda b, h, q, k: (q - k < LIMITS[h]) & (k < LIMITS[b]),
    "table": lambda b, h, q, k: (torch.arange(110) // 30)[q] == (torch.arange(110) // 30)[k],
    "without the leading dimensions": lambda b, h, q, k: q.flatten()[:, None] >= k.flatten(),
    "of rows of a table": lambda b, h, q, k: TABLE[b][q] == TABLE[b][k],
    "of many parts": lambda b, h, q, k: (q >= k) & ((q >= LIMITS[h]) & (k < LIMITS)).any(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Also those that are evaluated score by score."""
    mask = masks.from_function(FUNCTIONS[name])
    assert_same(mask, 110, 110, LayoutConfig(16, 32), batch=2, heads=2)
    assert_same(mask & masks.sliding_window(30), 110, 110, LayoutConfig(16, 32), batch=2, heads=2)


def test_functions_that_raise_say_so() -> None:
    def broken(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(MaskFunctionError, match="on purpose"):
        build_layout(masks.from_function(broken), 64, 64)


def test_few_scores_are_evaluated() -> None:
    """Of a window with sinks, the tiles at the edges alone; of a causal mask, those on the diagonal."""
    seen: list[int] = []
    original = masks.Index

    def counting(mask: Mask) -> int:
        seen.clear()
        evaluate = type(mask).evaluate

        def counted(self: Mask, index: original) -> object:
            found = evaluate(self, index)
            if isinstance(found, torch.Tensor):
                seen.append(found.numel())
            return found

        with mock.patch.object(type(mask), "evaluate", counted):
            build_layout(mask, 4096, 4096, LayoutConfig(64, 64))
        return sum(seen)

    assert counting(masks.causal()) == 64 * 64 * 64
    function = masks.from_function(lambda b, h, q, k: (q >= k) & ((q - k < 512) | (k < 4)))
    # The diagonal, the window's other edge, and the sinks.
    assert counting(function) <= 3 * 64 * 64 * 64


@pytest.mark.parametrize("config", [LayoutConfig(64, 64, 1), LayoutConfig(64, 128, 16)], ids=str)
def test_strips_ask_functions_too(config: LayoutConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered layouts of a function evaluate the stretches of keys that it does not rule out, and are the same."""
    monkeypatch.setattr(strips, "STRIP_SCORES", 2**18)
    mask = masks.from_function(lambda b, h, q, k: (q >= k) & ((q - k < 300) | (k < 20)))
    whole = build_layout(mask, 2000, 2000, config)
    counted = survey(mask, 2000, 2000, [config])
    monkeypatch.setattr(strips, "ASKED_FROM", 0)
    seen = []
    evaluate = type(mask).evaluate

    def counting(self: Mask, index: masks.Index) -> torch.Tensor:
        found = evaluate(self, index)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(type(mask), "evaluate", counting)
    layout = build_layout(mask, 2000, 2000, config)
    assert sum(seen) < 0.6 * 2000 * 2000
    for name, tensor in whole.tensors().items():
        assert torch.equal(layout.tensors()[name], tensor), name
    again = survey(mask, 2000, 2000, [config])
    assert torch.equal(again.kept, counted.kept)
    assert torch.equal(again.counts[config].partial, counted.counts[config].partial)
