"""Masks over queries and keys in another order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stof
from stof import masks
from stof.errors import MaskError, ShapeError
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.strategies import dense_masks, mask_trees


def permutation(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


@given(data=st.data(), seed=st.integers(0, 99))
@examples(40)
def test_is_the_inner_mask_at_the_original_positions(data: st.DataObject, seed: int) -> None:
    keep = data.draw(dense_masks(30, 40, 1, 2))
    for mask, kv_len in ((masks.from_dense(keep), 40), (data.draw(mask_trees(30)), 30)):
        rows = permutation(30, seed) if data.draw(st.booleans()) else None
        columns = permutation(kv_len, seed + 1) if data.draw(st.booleans()) else None
        dense = mask.to_dense(30, kv_len)
        dense = dense if rows is None else dense[:, :, rows]
        dense = dense if columns is None else dense[..., columns]
        assert torch.equal(masks.reordered(mask, rows, columns).to_dense(30, kv_len), dense)
        assert torch.equal((~masks.reordered(mask, rows, columns)).to_dense(30, kv_len), ~dense)


def test_attention_over_reordered_tensors() -> None:
    mask = masks.sliding_window(9, 2) | masks.global_tokens(3)
    rows, columns = permutation(100, 0), permutation(100, 1)
    q, k, v = make_inputs(heads=2, q_len=100, kv_len=100).qkv
    out, lse = stof.attention(
        q[:, :, rows], k[:, :, columns], v[:, :, columns], masks.reordered(mask, rows, columns), return_lse=True
    )
    back = rows.argsort()
    assert_attention(out[:, :, back], lse[:, :, back], q, k, v, mask.to_dense(100))


def test_it_is_a_value_bound_to_its_tensors() -> None:
    rows = permutation(20, 0)
    mask = masks.reordered(masks.dilated_window(9, dilation=3), rows)
    assert mask == masks.reordered(masks.dilated_window(9, dilation=3), rows)
    assert mask != masks.reordered(masks.dilated_window(9, dilation=3), columns=rows)
    assert mask != masks.reordered(masks.dilated_window(9, dilation=3), rows.clone())
    before = mask.to_dense(20)
    rows.copy_(rows.flip(0))
    assert torch.equal(mask.to_dense(20), before)
    assert mask != masks.reordered(masks.dilated_window(9, dilation=3), rows)
    assert mask.row_orders(8, 8) == ()
    assert masks.reordered(masks.causal()) == masks.causal()


@pytest.mark.parametrize(
    "order", [[0, 1], torch.zeros(3, dtype=torch.int64), torch.arange(3).float(), torch.arange(4).view(2, 2)], ids=str
)
def test_orders_that_are_none(order: object) -> None:
    with pytest.raises(MaskError, match=r"of reordered\(\) is"):
        masks.reordered(masks.causal(), columns=order)  # type: ignore[arg-type]


def test_lengths() -> None:
    mask = masks.reordered(masks.causal(), torch.arange(5), torch.arange(7))
    assert mask.to_dense(5, 7).shape == (1, 1, 5, 7)
    with pytest.raises(ShapeError, match="reorders 5 positions, the call has q_len 6"):
        stof.plan(mask, 6, 7)
    with pytest.raises(ShapeError, match="reorders 7 positions, the call has kv_len 8"):
        stof.plan(mask, 5, 8)
