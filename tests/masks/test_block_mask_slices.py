"""Slices of FlexAttention's `BlockMask`: they lose its `mask_mod`, and keep its lengths before PyTorch 2.14."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import stof
from stof import masks
from stof.errors import MaskError, MaskFunctionError, StofError
from tests.examples import examples

KEYS = 96
# Told by lengths that do not fit the blocks, by the missing `mask_mod`, or by lengths that are not those of the call.
REFUSED = "it is a slice|sliced BlockMask|made for q_len"


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((q - k) % 3 != 1)


def whole(queries: int, size: int) -> BlockMask:
    return create_block_mask(strided, None, None, queries, KEYS, device="cpu", BLOCK_SIZE=size)


@given(queries=st.integers(1, 96), size=st.sampled_from([16, 32]), data=st.data())
@examples(25)
def test_rows_of_blocks(queries: int, size: int, data: st.DataObject) -> None:
    """A slice alone says nothing of most queries; with the `mask_mod` and lengths of its queries it is a mask."""
    block_mask = whole(queries, size)
    blocks = -(-queries // size)
    first = data.draw(st.integers(0, blocks - 1))
    index: Any = data.draw(st.sampled_from([first, first - blocks, slice(first, first + 1), torch.tensor([first])]))
    sliced = block_mask[:, :, index]
    start = first * size
    rows = min(size, queries - start)
    with pytest.raises(StofError, match=REFUSED):
        stof.attention(torch.randn(1, 1, rows, 8), *torch.randn(2, 1, 1, KEYS, 8), sliced)
    if blocks > 1 and sliced.seq_lengths[0] == queries:
        with pytest.raises(MaskError, match=f"1 blocks of {size} queries, and {queries} queries: it is a slice"):
            masks.from_block_mask(sliced)
    sliced.mask_mod = lambda b, h, q, k: strided(b, h, q + start, k)
    sliced.seq_lengths = (rows, KEYS)
    expected = masks.from_function(strided).to_dense(queries, KEYS)[:, :, start : start + rows]
    assert torch.equal(stof.plan(masks.from_block_mask(sliced), rows, KEYS).to_dense(), expected)
    moved = masks.from_function(strided).with_query_offset(start) if start else masks.from_function(strided)
    assert torch.equal(moved.to_dense(rows, KEYS), expected)


def test_calls_raise_an_error_of_ours() -> None:
    block_mask = whole(96, 32)
    q, k, v = torch.randn(3, 1, 1, 96, 8).unbind()
    for sliced in (block_mask[:, :, 1], block_mask[:, :, 0:2], block_mask[:, :, :0]):
        with pytest.raises(StofError, match=REFUSED):
            stof.attention(q, k, v, sliced)
    # All rows of blocks, but PyTorch takes the function away.
    for sliced in (block_mask[0], block_mask[:, :], block_mask[0, 0]):
        with pytest.raises(MaskFunctionError, match="sliced BlockMask"):
            stof.attention(q, k, v, sliced)
        sliced.mask_mod = block_mask.mask_mod
        torch.testing.assert_close(stof.attention(q, k, v, sliced), stof.attention(q, k, v, block_mask))
