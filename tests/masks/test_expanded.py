"""Bool tensors whose strides are 0, as `Tensor.expand` makes them, are masks like their copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.testing import assert_attention, make_inputs

BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 24, 40
KEYS = torch.arange(KV_LEN)

EXPANDED: dict[str, Callable[[], Tensor]] = {
    "one key for all queries": lambda: (KEYS == 5).expand(Q_LEN, KV_LEN),
    "some keys for all queries": lambda: (KEYS % 3 == 1).expand(Q_LEN, KV_LEN),
    "all keys for some queries": lambda: (torch.arange(Q_LEN) % 3 == 1)[:, None].expand(Q_LEN, KV_LEN),
    "one score for all": lambda: torch.tensor(True).expand(Q_LEN, KV_LEN),
    "nothing": lambda: torch.tensor(False).expand(Q_LEN, KV_LEN),
    "one mask for all heads": lambda: (torch.arange(Q_LEN)[:, None] > KEYS).expand(HEADS, Q_LEN, KV_LEN),
    "keys by head": lambda: (torch.arange(HEADS)[:, None] == KEYS % HEADS)[:, None].expand(HEADS, Q_LEN, KV_LEN),
    "keys by sequence": lambda: (torch.tensor([[7], [33]]) > KEYS)[:, None, None].expand(BATCH, HEADS, Q_LEN, KV_LEN),
    "keys by sequence and head": lambda: (
        (torch.arange(BATCH * HEADS)[:, None] % 5 == KEYS % 5).view(BATCH, HEADS, 1, KV_LEN).expand(-1, -1, Q_LEN, -1)
    ),
}


@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.parametrize("way", ["call", "plan", "sized plan", "composed"])
def test_attention_under_an_expanded_tensor(name: str, way: str) -> None:
    keep = EXPANDED[name]()
    assert 0 in keep.stride()
    inputs = make_inputs(batch=BATCH, heads=HEADS, kv_heads=2, q_len=Q_LEN, kv_len=KV_LEN)
    expected = keep.clone()
    dense = masks.from_dense(keep).to_dense(Q_LEN, KV_LEN)
    assert torch.equal(dense, expected.view(dense.shape))
    mask: object = keep
    if way == "plan":
        mask = stof.plan(keep, Q_LEN, KV_LEN)
    elif way == "sized plan":
        mask = stof.plan(keep, Q_LEN, KV_LEN, batch=BATCH, heads=HEADS)
        assert torch.equal(mask.to_dense().expand(BATCH, HEADS, -1, -1), expected.expand(BATCH, HEADS, -1, -1))
    elif way == "composed":
        mask = masks.from_dense(keep) & masks.sliding_window(9, 9)
        expected = expected & masks.sliding_window(9, 9).to_dense(Q_LEN, KV_LEN)
    out, lse = stof.attention(*inputs.qkv, mask, return_lse=True)
    assert_attention(out, lse, *inputs.qkv, expected)


def test_a_write_to_what_was_expanded_is_seen() -> None:
    row = KEYS < 5
    keep = row.expand(Q_LEN, KV_LEN)
    inputs = make_inputs(q_len=Q_LEN, kv_len=KV_LEN)
    for _ in range(2):
        assert_attention(stof.attention(*inputs.qkv, keep), None, *inputs.qkv, keep.clone())
        row.logical_not_()
