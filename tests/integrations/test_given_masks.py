"""Which attention masks a model's call may be given: one value for each sequence and token seen."""

from __future__ import annotations

import pytest
import torch

from stof.errors import ShapeError

given_masks = pytest.importorskip("stof.integrations.transformers.given_masks")


@pytest.mark.parametrize(
    ("length", "q_length", "kv_length", "q_offset"),
    [
        (5, 5, 5, 0),
        (8, 3, 8, 5),
        (12, 3, 12, 5),  # a static cache: as many as it holds
        (8, 3, 12, 5),  # or those seen
        (8, 3, 4, 5),  # a window's cache holds fewer
    ],
)
def test_lengths_that_are_taken(length: int, q_length: int, kv_length: int, q_offset: int) -> None:
    given = torch.ones(2, length)
    given_masks.check_padding(given, 2, q_length, kv_length, q_offset, 0, None)


@pytest.mark.parametrize(("length", "kv_length"), [(7, 8), (9, 8), (7, 12), (13, 12), (9, 4)])
def test_lengths_that_are_refused(length: int, kv_length: int) -> None:
    with pytest.raises(ShapeError, match=f"attention_mask has {length} tokens and attention sees 8"):
        given_masks.check_padding(torch.ones(2, length), 2, 3, kv_length, 5, 0, None)
