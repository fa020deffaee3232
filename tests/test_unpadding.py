"""Tokens without their padding, against a loop over sequences; values of padding are NaN and reach nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stof.errors import ArgumentError, ShapeError
from stof.unpadding import unpad


@given(data=st.data(), batch=st.integers(1, 5), length=st.integers(1, 12), first=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_tokens_go_to_rows_and_back(data: st.DataObject, batch: int, length: int, first: int) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length).filter(any))
    valid = torch.tensor(kept).view(batch, length)
    longest = int(valid.sum(1).max())
    max_tokens = data.draw(st.none() | st.integers(longest, 2 * longest))
    values = torch.randn(batch, length, 2).masked_fill(~valid[..., None], torch.nan)

    unpadding = unpad(valid, max_tokens=max_tokens, first_position=first)
    packed = unpadding.pack_tokens(values, fill=-1)
    rows, width = unpadding.packed_shape
    assert packed.shape == (rows, width, 2)
    assert not packed.isnan().any()
    assert unpadding.tokens == int(valid.sum())
    assert max_tokens is None or width <= max_tokens
    torch.testing.assert_close(unpadding.unpack(packed), values.nan_to_num(0.0), atol=0, rtol=0)

    # Each query sees the tokens of its sequence, by the sequence's number at each packed place.
    sequence = torch.arange(batch)[:, None].expand(batch, length)
    numbers = unpadding.pack_tokens(sequence, fill=-1)
    seen = (numbers[:, :, None] == numbers[:, None, :]) & (numbers >= 0)[:, :, None]
    assert torch.equal(unpadding.mask.to_dense(width, width, batch=rows).expand(rows, 1, -1, -1)[:, 0], seen)
    for number in range(batch):
        positions = unpadding.position_ids[numbers == number]
        assert positions.tolist() == list(range(first, first + int(valid[number].sum())))


def test_one_row_keeps_the_order_of_sequences() -> None:
    """Also with a bound on its tokens, by which several rows would begin with the longest sequence."""
    unpadding = unpad(torch.tensor([[True, False, False], [True, True, False]]), max_tokens=3)
    assert unpadding.mask == unpad(torch.tensor([[True, False], [True, True]])).mask
    assert unpadding.position_ids.tolist() == [[0, 0, 1]]


def test_what_cannot_be_packed_is_refused() -> None:
    valid = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ShapeError, match="marks no token"):
        unpad(~valid)
    with pytest.raises(ArgumentError, match="at least the longest sequence, 3, got 2"):
        unpad(valid, max_tokens=2)
    with pytest.raises(ArgumentError, match="first_position is an int >= 0"):
        unpad(valid, first_position=-1)
    with pytest.raises(ShapeError, match=r"packed values are \[1, 6\]"):
        unpad(valid).unpack(torch.zeros(2, 3))
    with pytest.raises(ShapeError, match=r"per-token values are \[2, 3\]"):
        unpad(valid).pack_tokens(torch.zeros(1, 6))
