"""What a mask says of whole rectangles is true of every score in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.layout.head_mask import HeadMask
from stof.masks import Index, Mask
from stof.masks.bounds import Interval, TileBounds
from tests.examples import examples
from tests.strategies import mask_trees

LENGTH = 60


def ends(draw: st.DrawFn, length: int, count: int) -> Interval:
    """Random ranges of positions below `length`, int64 `[count]`."""
    pairs = [sorted(draw(st.tuples(*[st.integers(0, length - 1)] * 2))) for _ in range(count)]
    low, high = torch.tensor(pairs).T
    return Interval(low, high)


def asked(mask: Mask, q: Interval, kv: Interval, q_len: int, b: int = 0, kv_len: int = LENGTH) -> TileBounds:
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    rows, columns = (
        Interval(x.low.view(shape), x.high.view(shape)) for x, shape in ((q, (1, 1, -1, 1)), (kv, (1, 1, 1, -1)))
    )
    return mask.tile_bounds(Index(zero + b, zero, rows, columns, q_len, kv_len))  # type: ignore[arg-type]


def assert_true(kept: TileBounds, dense: Tensor, q: Interval, kv: Interval) -> None:
    """`dense [q_len, kv_len]` keeps nothing, or everything, where `kept` says so."""
    shape = (1, 1, len(q.low), len(kv.low))
    nothing, everything = kept.empty.expand(shape)[0, 0], kept.full.expand(shape)[0, 0]
    for i in range(shape[2]):
        for j in range(shape[3]):
            part = dense[int(q.low[i]) : int(q.high[i]) + 1, int(kv.low[j]) : int(kv.high[j]) + 1]
            assert not (bool(nothing[i, j]) and bool(part.any()))
            assert not (bool(everything[i, j]) and not bool(part.all()))


@given(data=st.data())
@examples(150)
def test_masks_say_the_truth(data: st.DataObject) -> None:
    batch, offset = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([0, 0, 13, -11]))
    mask = data.draw(mask_trees(LENGTH, batch))
    if not mask.allows_negative_queries:
        offset = max(0, offset)
    q_len, mask = LENGTH - offset, mask.with_query_offset(offset)
    q, kv = ends(data.draw, q_len, 3), ends(data.draw, LENGTH, 3)
    b = data.draw(st.integers(0, batch - 1))
    dense = mask.to_dense(q_len, LENGTH, batch=batch)
    assert_true(asked(mask, q, kv, q_len, b), dense[min(b, dense.shape[0] - 1), 0], q, kv)


TABLE = torch.arange(LENGTH) // 7
SEVEN = torch.tensor(7)
FUNCTIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    "window and sinks": (lambda b, h, q, k: (q >= k) & ((q - k < 9) | (k < 3)), True),
    "distance": (lambda b, h, q, k: (q - k).abs() <= 5, True),
    "torch.abs": (lambda b, h, q, k: torch.abs(q - k) <= SEVEN, True),
    "reversed": (lambda b, h, q, k: 3 + q - 2 * k > -(4 - k), True),
    "remainder": (lambda b, h, q, k: (k % 16 >= 12) & (torch.remainder(q, 4) == 0), True),
    "blocks": (lambda b, h, q, k: q // 8 == torch.div(k, 8, rounding_mode="floor"), True),
    "logical": (lambda b, h, q, k: torch.logical_or(q < k, torch.logical_not(k != 5)), True),
    "tensor first": (lambda b, h, q, k: torch.ge(SEVEN, k), True),
    "isin": (lambda b, h, q, k: torch.isin(k, torch.tensor([3, 4, 5, 40])), True),
    "clamped": (lambda b, h, q, k: (q - k).clamp(min=0, max=9) < 5, True),
    "mixed with a tensor": (lambda b, h, q, k: (q >= k) & torch.ones(1, 1, 1, 1, dtype=torch.bool), True),
    "alike": (lambda b, h, q, k: (q < 24) == (k < 24), True),
    "one of two": (lambda b, h, q, k: (q < 24) != (k >= 30), True),
    "one of two, a tensor": (lambda b, h, q, k: (q < 24) != torch.ones(1, 1, 1, 1, dtype=torch.bool), True),
    "table": (lambda b, h, q, k: TABLE[q] == TABLE[k], True),
    "true division": (lambda b, h, q, k: q / 2 > k, False),
    "truncated": (lambda b, h, q, k: torch.div(q - k, 3, rounding_mode="trunc") == 0, False),
    "where": (lambda b, h, q, k: torch.where(q < 9, q >= k, q == k), True),
    "float": (lambda b, h, q, k: q - 0.5 > k, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_the_truth_or_nothing(name: str) -> None:
    fn, known = FUNCTIONS[name]
    mask = masks.from_function(fn)
    low = torch.arange(0, LENGTH, 6)
    ranges = Interval(low, low + 5)
    kept = asked(mask, ranges, ranges, LENGTH)
    assert_true(kept, mask.to_dense(LENGTH)[0, 0], ranges, ranges)
    assert bool(kept.empty.any() | kept.full.any()) == known


def test_ranges_have_no_truth_value() -> None:
    """A function with control flow on positions is unknown, never wrong."""
    fn = masks.from_function(lambda b, h, q, k: q >= k if q > 3 else q < k)
    one = Interval(torch.tensor([5]), torch.tensor([9]))
    kept = asked(fn, one, one, LENGTH)
    assert not bool(kept.empty.any() | kept.full.any())


def test_single_positions_are_exact() -> None:
    """Ranges of one position answer as the position itself does."""
    mask = masks.strided(4, 8, 2) | masks.neighborhood_2d(6, 10, 3) & ~masks.dilated_window(20, dilation=3)
    every = torch.arange(LENGTH)
    kept = asked(mask, Interval(every, every), Interval(every, every), LENGTH)
    dense = mask.to_dense(LENGTH)
    assert torch.equal(kept.full, dense)
    assert torch.equal(kept.empty, ~dense)


@pytest.mark.parametrize(
    "mask", [masks.strided(4, 8), masks.random_blocks(1, block_size=16), masks.documents([0] * 64)]
)
def test_the_default_device_does_not_matter(mask: masks.Mask) -> None:
    low = torch.arange(0, 64, 16).view(1, 1, -1, 1)
    tiles = Interval(low, low + 15), Interval(low.mT, low.mT + 15)
    one = HeadMask(mask, 64, 64, 0, 0, None, torch.device("cpu"))
    expected = one.tile_bounds(*tiles)
    with torch.device("meta"):
        found = one.tile_bounds(*tiles)
    assert bool(expected.empty.any() | expected.full.any())
    assert torch.equal(found.empty, expected.empty)
    assert torch.equal(found.full, expected.full)
