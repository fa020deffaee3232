"""What a mask says of where its queries look: nothing it keeps lies outside, and building by it changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stof import LayoutConfig, masks
from stof.layout import build_layout
from stof.layout.builders import strips
from stof.layout.head_mask import HeadMask
from stof.layout.survey import survey
from stof.masks import Mask
from stof.masks.bounds import Interval
from tests.strategies import mask_trees

LENGTH = 48


def ruled_out(mask: Mask, first: int, last: int, kv_len: int, q_len: int, b: int = 0, h: int = 0) -> torch.Tensor:
    """Bool `[kv_len]`: keys that no query from `first` to `last` sees, by the bounds of single columns."""
    own = HeadMask(mask, q_len, kv_len, b, h, None, torch.device("cpu"))
    rows = Interval(*(torch.tensor(end).view(1, 1, 1, 1) for end in (first, last)))
    return (
        own.tile_bounds(rows, Interval.of(torch.arange(kv_len).view(1, 1, 1, -1)))
        .empty.expand(1, 1, 1, kv_len)
        .flatten()
    )


@given(data=st.data(), batch=st.integers(1, 2), offset=st.integers(0, 20))
def test_nothing_is_kept_where_it_is_ruled_out(data: st.DataObject, batch: int, offset: int) -> None:
    mask = data.draw(mask_trees(LENGTH, batch))
    q_len = LENGTH - offset
    if offset and data.draw(st.booleans()):
        mask = mask.with_query_offset(offset)
    first = data.draw(st.integers(0, q_len - 1))
    last = data.draw(st.integers(first, q_len - 1))
    dense = mask.to_dense(q_len, LENGTH, batch=batch, heads=1)
    for b in range(dense.shape[0]):
        assert not bool(dense[b, :, first : last + 1, ruled_out(mask, first, last, LENGTH, q_len, b)].any())


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.full(), [(0, 48)]),
        (masks.causal(), [(0, 20)]),
        (masks.sliding_window(3, 2), [(7, 22)]),
        (masks.dilated_window(6, dilation=3), [(4, 20)]),
        (masks.strided(4, 8), [(7, 20)]),
        (masks.global_tokens(4), [(0, 4)]),
        (masks.global_tokens(11), [(0, 48)]),
        (masks.global_tokens([2, 30]), [(2, 3), (30, 31)]),
        (masks.global_tokens([2, 15]), [(0, 48)]),
        (masks.sink_tokens(4), [(0, 4)]),
        (masks.prefix_lm(25), [(0, 25)]),
        (masks.prefix_lm([5, 25]), [(0, 20)]),
        (masks.padding([7, 9]), [(0, 7)]),
        (masks.documents(cu_seqlens=[0, 5, 12, 18, 48]), [(5, 48)]),
        (masks.documents(cu_seqlens=[0, 10, 20, 48]), [(10, 20)]),
        (masks.documents([0] * 12 + [1] * 12 + [0] * 12 + [2] * 12), [(0, 48)]),
        (masks.neighborhood_2d(6, 8, 3), [(0, 32)]),
        (masks.causal() & masks.sliding_window(3, 2), [(7, 20)]),
        (masks.sliding_window(3) & masks.padding(5), []),
        (masks.sliding_window(3) | masks.sink_tokens(2), [(0, 2), (7, 20)]),
        (masks.sliding_window(3) | masks.full(), [(0, 48)]),
        (masks.sliding_window(3).with_query_offset(10), [(17, 30)]),
        (masks.per_head([masks.sliding_window(3), masks.sliding_window(1)]), [(7, 20)]),
        (masks.vertical_slash(torch.tensor([3]), torch.tensor([0])), [(0, 20)]),
        (masks.block_topk(torch.ones(3, 3), 1, block_size=16, causal=True), [(0, 16)]),
        (masks.block_topk(torch.ones(3, 3), 1, block_size=16), [(0, 16)]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else value.key.split("<")[0],
)
def test_what_is_known_of_queries_10_to_19(mask: Mask, expected: list[tuple[int, int]]) -> None:
    """Keys that some query may see, in the first batch entry and head."""
    kept = torch.zeros(LENGTH, dtype=torch.bool)
    for low, high in expected:
        kept[low:high] = True
    assert torch.equal(~ruled_out(mask, 10, 19, LENGTH, LENGTH), kept)


def test_random_blocks_say_which() -> None:
    mask = masks.random_blocks(2, block_size=64)
    kept = mask.to_dense(4096)[0, 0, 64:128].any(0)
    assert int(kept.sum()) == 128
    assert torch.equal(~ruled_out(mask, 64, 127, 4096, 4096), kept)


BIG = (
    masks.sliding_window(100, 50) | masks.sink_tokens(3),
    masks.longformer(60, 20),
    masks.bigbird(60, 20),
    masks.documents(cu_seqlens=[0, 700, 1111, 2900, 3000]) & masks.causal(),
    masks.dilated_window(400, dilation=8),
    masks.sliding_window(5) & masks.padding(200),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mask", BIG, ids=str)
@pytest.mark.parametrize("config", [LayoutConfig(64, 64, 1), LayoutConfig(128, 128), LayoutConfig(64, 256, 8)], ids=str)
def test_building_by_spans_changes_nothing(mask: Mask, config: LayoutConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tiles in the same order as from evaluating every score, also where strips are cut elsewhere."""
    monkeypatch.setattr(strips, "STRIP_SCORES", 2**17)
    q_len, kv_len = 2950, 3000
    layout = build_layout(mask, q_len, kv_len, config)
    counted = survey(mask, q_len, kv_len, [config])
    monkeypatch.setattr(strips, "_spans", lambda own, first, counts, block_m: [None] * len(counts))
    whole = build_layout(mask, q_len, kv_len, config)
    for name, tensor in whole.tensors().items():
        assert torch.equal(getattr(layout, name), tensor), name
    again = survey(mask, q_len, kv_len, [config])
    assert torch.equal(counted.kept, again.kept)
    assert torch.equal(counted.counts[config].partial, again.counts[config].partial)
    assert torch.equal(counted.counts[config].full, again.counts[config].full)


@pytest.mark.slow
def test_a_million_keys() -> None:
    """Work grows with what is seen: a dense evaluation would take 10^12 scores."""
    length = 2**20
    mask = masks.sliding_window(255) | masks.sink_tokens(4)
    layout = build_layout(mask, length, length, LayoutConfig(256, 256))
    # Two tiles a row block, and the sinks' own but for the first two.
    blocks = length // 256
    assert layout.tiles == 3 * blocks - 3
