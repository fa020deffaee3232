"""Masks at other positions and transposed ones keep what their definitions say, in every place that reads them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.errors import MaskError, ShapeError
from stof.layout import build_layout
from stof.layout.survey import survey
from stof.masks import Mask
from stof.masks.bounds import Interval
from stof.masks.compose import DEEPEST
from tests.examples import examples
from tests.masks.test_bounds import asked, assert_true, ends
from tests.strategies import configs, dense_masks, mask_trees

KEYS = 60
TABLE = torch.arange(4 * KEYS).view(2, 2, KEYS) * 7 % 5 < 2
LIMITS = torch.arange(KEYS) * 11 % KEYS

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "all four indices": lambda b, h, q, k: (q - 2 * k > 3 * h) | ((k + b) % 4 == 0),
    "table": lambda b, h, q, k: TABLE[b, h, q] & (LIMITS[k] > 20),
    "score by score": lambda b, h, q, k: torch.stack([q > k + h, k == 2 * q + b]).any(),
    "floats": lambda b, h, q, k: q - 0.5 * b > k,
}


@st.composite
def problems(draw: st.DrawFn, batch: int = 2, heads: int = 2) -> tuple[Mask, int, int]:
    """A mask of any kind, and lengths that it fits."""
    q_len, kv_len = draw(st.integers(1, KEYS)), KEYS
    kind = draw(st.sampled_from(["named", "named", "function", "dense", "run time", "mixed"]))
    function = masks.from_function(FUNCTIONS[draw(st.sampled_from(sorted(FUNCTIONS)))])
    sizes = draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
    keep = draw(dense_masks(draw(st.sampled_from([q_len, q_len, 1])), kv_len, *sizes))
    if kind == "function":
        return function, q_len, kv_len
    if kind == "dense":
        return masks.from_dense(keep), q_len, kv_len
    if kind == "run time":
        return draw(run_time_masks(q_len, kv_len)), q_len, kv_len
    named = draw(mask_trees(kv_len, batch, leaves=4))
    if kind == "mixed":
        return (named | masks.from_dense(keep)) & ~(function & masks.sliding_window(9, 4)), q_len, kv_len
    return named, q_len, kv_len


@st.composite
def run_time_masks(draw: st.DrawFn, q_len: int, kv_len: int) -> Mask:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["block_topk", "vertical_slash", "from_bits"]))
    if kind == "block_topk":
        scores = torch.randn(2, 2, -(-q_len // 16), -(-kv_len // 16), generator=generator)
        return masks.block_topk(scores, 1, block_size=16, causal=draw(st.booleans()))
    if kind == "vertical_slash":
        vertical, slash = (torch.randperm(n, generator=generator)[:9].sort().values for n in (kv_len, q_len))
        return masks.vertical_slash(vertical, slash)
    return masks.from_bits(torch.randint(-(2**31), 2**31 - 1, (q_len, 2), dtype=torch.int32), kv_len)


def dense(mask: Mask, q_len: int, kv_len: int) -> Tensor:
    return mask.to_dense(q_len, kv_len, batch=2, heads=2)


@given(problem=problems())
@examples(100)
def test_transposed_is_the_transpose(problem: tuple[Mask, int, int]) -> None:
    mask, q_len, kv_len = problem
    other = masks.transposed(mask)
    assert torch.equal(dense(other, kv_len, q_len), dense(mask, q_len, kv_len).mT)
    assert masks.transposed(other) is mask
    assert (other.batch, other.heads, other.dims(2, 2)) == (mask.batch, mask.heads, mask.dims(2, 2))
    if q_len != kv_len and mask.key.startswith("from_dense"):
        with pytest.raises(ShapeError):
            other.to_dense(q_len, kv_len)


@given(problem=problems(), data=st.data())
@examples(100)
def test_placed_is_a_part(problem: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, q_len, kv_len = problem
    q_offset, kv_offset = data.draw(st.integers(0, q_len - 1)), data.draw(st.integers(0, kv_len - 1))
    part = masks.placed(mask, q_offset, kv_offset)
    whole = dense(mask, q_len, kv_len)
    rows, columns = q_len - q_offset, kv_len - kv_offset
    assert torch.equal(dense(part, rows, columns), whole[..., q_offset:, kv_offset:])
    assert torch.equal(dense(masks.transposed(part), columns, rows), whole[..., q_offset:, kv_offset:].mT)
    assert masks.placed(masks.transposed(mask), kv_offset, q_offset) == masks.transposed(part)
    assert masks.placed(part, -q_offset, -kv_offset) == mask


@given(data=st.data())
@examples(100)
def test_bounds_are_true(data: st.DataObject) -> None:
    q_offset, kv_offset = (data.draw(st.sampled_from([0, 13, -11])) for _ in range(2))
    batch = data.draw(st.integers(1, 2))
    mask = data.draw(mask_trees(KEYS + kv_offset, batch))
    assume(mask.allows_negative_queries or q_offset >= 0)
    assume(mask.allows_negative_keys or kv_offset >= 0)
    q_len = KEYS + kv_offset - q_offset
    part = masks.placed(mask, q_offset, kv_offset)
    keep = part.to_dense(q_len, KEYS, batch=batch)
    b = data.draw(st.integers(0, batch - 1))
    q, kv = ends(data.draw, q_len, 3), ends(data.draw, KEYS, 3)
    assert_true(asked(part, q, kv, q_len, b), keep[min(b, len(keep) - 1), 0], q, kv)
    other = asked(masks.transposed(part), kv, q, KEYS, b, q_len)
    assert_true(other, keep[min(b, len(keep) - 1), 0].T, kv, q)


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(),
        masks.causal(),
        masks.sliding_window(3, 9),
        masks.strided(4, 8, 2),
        masks.longformer(3, 2),
        masks.neighborhood_2d(6, 10, 3) & ~masks.dilated_window(20, dilation=3),
        masks.documents(cu_seqlens=[0, 5, 12, 18, 60]),
        masks.prefix_lm(9) & masks.padding(31),
        masks.random_blocks(2, block_size=4),
        masks.from_function(FUNCTIONS["causal"]),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_bounds_are_those_of_the_inner_mask(mask: Mask) -> None:
    """No worse: layouts are built as fast."""
    low = torch.arange(0, KEYS, 6)
    tiles = masks.Index.make(low, low, q_len=KEYS, kv_len=KEYS)
    q, kv = (torch.stack([x, x + 5]) for x in (tiles.q, tiles.kv))
    at = masks.Index(tiles.b, tiles.h, Interval(*q), Interval(*kv), KEYS, KEYS)  # type: ignore[arg-type]
    expected, bounds = mask.tile_bounds(at), masks.transposed(mask).tile_bounds(at)
    shape = (1, 1, len(low), len(low))
    assert torch.equal(bounds.empty.expand(shape), expected.empty.expand(shape).mT)
    assert torch.equal(bounds.full.expand(shape), expected.full.expand(shape).mT)
    moved = masks.placed(masks.placed(mask, 6, 12), -6, -12)
    assert moved is mask


@given(problem=problems(), config=configs, data=st.data())
@examples(60)
def test_layouts(problem: tuple[Mask, int, int], config: LayoutConfig, data: st.DataObject) -> None:
    """Closed form, strips, dense tensors, gathered and compacted columns, several patterns."""
    mask, q_len, kv_len = problem
    expected = dense(mask, q_len, kv_len).mT
    other = masks.transposed(mask)
    layout = build_layout(other, kv_len, q_len, config, batch=2, heads=2)
    assert torch.equal(layout.to_dense(), expected)
    counted = survey(other, kv_len, q_len, [config], batch=2, heads=2)
    assert torch.equal(counted.kept, expected.sum(-1).flatten(0, 1))
    none = mock.Mock(return_value=None)
    with mock.patch.multiple("stof.layout.builders.build", tiles_of=none, _of_small_masks=none):
        again = build_layout(other, kv_len, q_len, config, batch=2, heads=2)
    for name, tensor in layout.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    order = torch.randperm(kv_len, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    ordered = build_layout(other, kv_len, q_len, config, batch=2, heads=2, row_order=order)
    assert torch.equal(ordered.to_dense(), expected)


@pytest.mark.parametrize("config", [LayoutConfig(64, 64), LayoutConfig(128, 64, 8)], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        masks.sliding_window(100, 50) | masks.sink_tokens(3),
        masks.longformer(60, 20),
        masks.documents(cu_seqlens=[0, 700, 1111, 2900, 4096]) & masks.causal(),
        masks.from_function(lambda b, h, q, k: (q >= k) & (q - k < 200)),
    ],
    ids=lambda mask: mask.key.split("<")[0],
)
def test_most_scores_are_never_evaluated(mask: Mask, config: LayoutConfig) -> None:
    evaluated: list[int] = []
    plain = type(mask).evaluate

    def counting(self: Mask, index: masks.Index) -> Tensor:
        evaluated.append(len(torch.broadcast_tensors(index.q, index.kv)[0].flatten()))
        return plain(self, index)

    counts = []
    for one in (mask, masks.transposed(mask)):
        evaluated.clear()
        with mock.patch.object(type(mask), "evaluate", counting):
            layout = build_layout(one, 4096, 4096, config)
        counts.append(sum(evaluated))
    assert counts[1] <= 1.4 * counts[0] < 4096 * 4096
    assert torch.equal(layout.to_dense(), mask.to_dense(4096).mT)


def test_a_tensor_is_viewed() -> None:
    mask = masks.from_dense(torch.rand(2, 1, 30, 50) < 0.3)
    keep = mask.as_tensor(30, 50)
    views = [masks.transposed(mask).as_tensor(50, 30), masks.placed(mask, 7, 20).as_tensor(23, 30)]
    assert all(keep is not None and view is not None and view._is_view() for view in views)
    assert torch.equal(views[0], keep.mT)  # type: ignore[union-attr]
    assert torch.equal(views[1], keep[..., 7:, 20:])  # type: ignore[index]
    padding = masks.from_dense(torch.rand(2, 1, 1, 50) < 0.3)
    assert torch.equal(masks.transposed(padding).to_dense(50, 9), padding.to_dense(9, 50).mT)
    assert (masks.causal() | mask).as_tensor(30, 50) is None
    for change in (masks.transposed, lambda m: masks.placed(m, 3, 4)):
        assert masks.transposed(change(mask)).copies() == mask.copies()
        with pytest.raises(ShapeError, match="the dense mask is"):
            change(mask).to_dense(30, 49)


@pytest.mark.parametrize("change", [masks.transposed, lambda m: masks.placed(m, 0, 5)], ids=["transposed", "placed"])
def test_masks_that_change(change: Callable[[Mask], Mask]) -> None:
    limit = torch.tensor(5)
    mask = change(masks.from_function(lambda b, h, q, k: q - k > limit))
    assert mask.may_change
    frozen = mask.frozen()
    before = mask.to_dense(30, 30)
    assert not frozen.may_change
    assert not frozen.changed()
    assert frozen == mask.frozen()
    assert [int(x) for x in frozen.copies()] == [5]
    limit += 4
    assert frozen.changed()
    assert mask.frozen() != frozen
    assert not torch.equal(mask.to_dense(30, 30), before)
    with pytest.raises(MaskError, match="was changed"):
        frozen.to_dense(30, 30)
    scores = torch.randn(2, 2)
    blocks = change(masks.block_topk(scores, 1, block_size=16))
    kept = blocks.frozen()
    whole = kept.to_dense(27, 27)
    scores.neg_()
    assert blocks.may_change
    assert torch.equal(kept.to_dense(27, 27), whole)
    assert not torch.equal(blocks.to_dense(27, 27), whole)


def test_values() -> None:
    mask = masks.causal() & masks.sliding_window(9)
    other = masks.transposed(mask)
    part = masks.placed(mask, 4, 7)
    assert other != mask
    assert other == masks.transposed(masks.causal() & masks.sliding_window(9))
    assert hash(part) == hash(masks.placed(mask, 4, 7))
    assert masks.placed(mask) is mask
    assert masks.placed(mask, 4) == mask.with_query_offset(4)
    assert masks.placed(part, 1, -7) == mask.with_query_offset(5)
    assert other.with_query_offset(3) == masks.transposed(masks.placed(mask, 0, 3))
    assert other.row_orders(9, 9) == ()
    assert masks.transposed(masks.dilated_window(9, dilation=3)).row_orders(9, 9) == ("remainder 3",)
    assert other.has_monotonic_ranges
    for value in (other, part, ~part | other, masks.transposed(~part), masks.per_head([other, part])):
        assert masks.parse(repr(value)) == value == pickle.loads(pickle.dumps(value))


def test_the_deepest_mask_has_a_transpose() -> None:
    mask: Mask = masks.causal()
    for n in range(1, DEEPEST):
        mask = (mask & masks.sliding_window(n)) if n % 2 else (mask | masks.sink_tokens(n))
    assert torch.equal(masks.transposed(mask).to_dense(20, 9), mask.to_dense(9, 20).mT)
    with pytest.raises(MaskError, match="levels"):
        _ = ~masks.transposed(~mask)


@pytest.mark.parametrize(
    "mask",
    [
        masks.from_dense(torch.ones(4, 4, dtype=torch.bool)),
        masks.from_function(lambda b, h, q, k: q >= k),
        masks.neighborhood_2d(2, 2, 1),
        masks.random_blocks(2),
        masks.block_topk(torch.ones(1, 1), 1),
        masks.causal() | masks.bigbird(3),
    ],
    ids=lambda mask: mask.key.split("<")[0],
)
def test_masks_without_keys_before_the_first(mask: Mask) -> None:
    with pytest.raises(MaskError, match=r"no keys before position 0.*0 or more, got -1.*named masks"):
        masks.placed(mask, 3, -1)
    with pytest.raises(MaskError, match="no keys before position 0"):
        masks.transposed(mask).with_query_offset(-1)


@pytest.mark.parametrize("make", [masks.placed, masks.transposed])
def test_other_things_than_masks(make: Callable[[Any], Mask]) -> None:
    with pytest.raises(TypeError, match="from_dense makes one of a bool tensor"):
        make(torch.ones(4, 4, dtype=torch.bool))


@pytest.mark.parametrize("offset", [2**31, -(2**31), True, 1.5, "3", None])
def test_bad_offsets(offset: Any) -> None:
    with pytest.raises(MaskError, match="a key offset is an int between"):
        masks.placed(masks.causal(), 0, offset)


@pytest.mark.parametrize(
    "mask",
    [
        masks.longformer(4, 2),  # few row blocks with many tiles
        masks.documents([0] * 33 + [1] * 40 + [2] * 23) & masks.causal(),
        masks.per_head([masks.strided(5, 16, 2), masks.bigbird(3, 4, block_size=8)]),
    ],
    ids=["global tokens", "documents", "per head"],
)
def test_attention(mask: Mask) -> None:
    """Of keys over queries, as gradients are computed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 96, 16, generator=generator)
    scores = (q.double() @ k.double().mT * 16**-0.5).masked_fill(~mask.to_dense(96).mT, -torch.inf)
    out = stof.attention(q, k, v, masks.transposed(mask))
    torch.testing.assert_close(out.double(), scores.softmax(-1).nan_to_num() @ v.double(), rtol=1e-4, atol=1e-5)
    text = stof.attention(q, k, v, repr(masks.transposed(mask)))
    assert torch.equal(text, out)
