"""Masks that look positions up in tables: what their bounds say of rectangles is true of every score in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.layout.head_mask import HeadMask
from stof.masks.bounds import Interval, TileBounds
from stof.masks.tables import extremes
from tests.examples import examples

LENGTH = 70
ROWS, COLUMNS = (1, 1, -1, 1), (1, 1, 1, -1)
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]

Rule = Callable[..., Any]


@given(data=st.data())
@examples(60)
def test_extremes_hold_every_entry(data: st.DataObject) -> None:
    length, tables = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 3))
    limits = torch.iinfo(torch.int64)
    values = st.integers(-3, 3) | st.sampled_from([limits.min, limits.max])
    rows = torch.tensor(data.draw(st.lists(values, min_size=tables * length, max_size=tables * length)))
    rows = rows.view(tables, 1, 1, 1, length)
    ends = st.integers(0, length - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends).map(sorted), min_size=1, max_size=6))
    low, high = torch.tensor(pairs).T.reshape(2, 1, 1, 1, -1)
    least, most = extremes(rows if tables > 1 else rows.flatten(), low, high)
    for table in range(tables):
        for n, (first, last) in enumerate(pairs):
            blocks = rows[table].flatten()[first // 16 * 16 : last // 16 * 16 + 16]
            ends_of_range = least[table if tables > 1 else 0, 0, 0, n], most[table if tables > 1 else 0, 0, 0, n]
            assert ends_of_range == (blocks.min(), blocks.max())


@st.composite
def entries(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """A table of runs, of ascending numbers, or of any numbers, the extreme ones among them."""
    if dtype == torch.bool:
        values: st.SearchStrategy[Any] = st.booleans()
    elif dtype.is_floating_point:
        values = st.sampled_from([float("nan"), float("inf"), -1.5, 0.0, 2.0])
    else:
        info = torch.iinfo(dtype)
        values = st.integers(0, 5) | st.sampled_from([info.min, info.max, info.max - 1])
    runs = draw(st.lists(st.tuples(values, st.integers(1, 40)), min_size=1, max_size=8))
    flat = [value for value, count in runs for _ in range(count)]
    if draw(st.booleans()):
        flat.sort()
    return torch.tensor((flat * LENGTH)[:LENGTH], dtype=dtype)


@st.composite
def positions(draw: st.DrawFn) -> Rule:
    """Something computed of a position that may index a table; some count from its end."""
    return draw(
        st.sampled_from(
            [
                lambda x: x,
                lambda x: x // 2,
                lambda x: x % 17,
                lambda x: (x - 5).clamp(min=0),
                lambda x: (x - 20).abs(),
                lambda x: x - 3,
                lambda x: LENGTH - 1 - x,
            ]
        )
    )


@st.composite
def numbers(draw: st.DrawFn) -> Rule:
    """A number of a batch entry and a position: an entry of a table, perhaps changed."""
    dtype = draw(st.sampled_from([*INTEGERS, torch.float32]))
    at = draw(positions())
    table, other = draw(entries(dtype)), draw(entries(dtype))
    both = torch.stack([table, other])
    looked_up: Rule = draw(
        st.sampled_from(
            [
                lambda b, x: table[at(x)],
                lambda b, x: both[b, at(x)],
                lambda b, x: both.T[at(x), b],
                lambda b, x: both[1, at(x)],
                lambda b, x: table[(table[at(x)] % 50).clamp(min=0)],
            ]
        )
    )
    n = draw(st.integers(1, 3) | st.sampled_from([100, 2**31, 2**62]))
    changed: Rule = draw(
        st.sampled_from(
            [
                lambda x: x,
                lambda x: x + n,
                lambda x: n - x,
                lambda x: x * n,
                lambda x: x * -n,
                lambda x: x // n,
                lambda x: x % n,
                lambda x: -x,
                lambda x: x.abs(),
                lambda x: x.clamp(min=1, max=n),
                lambda x: torch.where(x > n, x, n),
                lambda x: torch.where(x > n, x - n, x + n),
            ]
        )
    )
    return lambda b, x: changed(looked_up(b, x))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    one, other = draw(numbers()), draw(numbers())
    flags = draw(entries(torch.bool))
    n = draw(st.integers(-2, 5) | st.sampled_from([255, 300, 2**32 + 1]))
    return draw(
        st.sampled_from(
            [
                lambda b, h, q, k: one(b, q) == one(b, k),
                lambda b, h, q, k: one(b, q) != other(b, k),
                lambda b, h, q, k: one(b, q) <= other(b, k),
                lambda b, h, q, k: one(b, q) - other(b, k) < n,
                lambda b, h, q, k: one(b, q) + other(b, k) >= n,
                lambda b, h, q, k: one(b, q) == n,
                lambda b, h, q, k: n > one(b, k),
                lambda b, h, q, k: q - k < one(b, q),
                lambda b, h, q, k: q - one(b, q) >= k - one(b, k),
                lambda b, h, q, k: flags[q] & (one(b, q) == one(b, k)),
                lambda b, h, q, k: flags[q] != flags[k],
                lambda b, h, q, k: torch.where(one(b, q) == one(b, k), q >= k, flags[k]),
                lambda b, h, q, k: torch.where(flags[k], one(b, q) < n, False),
                lambda b, h, q, k: torch.isin(one(b, k), torch.tensor([0, 1, 4])) | ~flags[q],
            ]
        )
    )


def assert_true(rule: Rule, low: tuple[Tensor, Tensor], high: tuple[Tensor, Tensor], b: int = 0) -> None:
    """What a rule says of rectangles of queries and keys, if anything, is true of every score."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    q, k = (
        Interval(*(end.view(shape) for end in ends)) for *ends, shape in zip(low, high, [ROWS, COLUMNS], strict=True)
    )
    try:
        kept = TileBounds.of(rule(zero + b, zero, q, k))
    except (TypeError, IndexError, OverflowError, RuntimeError):
        return
    every = torch.arange(LENGTH)
    dense = rule(zero + b, zero, every.view(ROWS), every.view(COLUMNS)).expand(1, 1, LENGTH, LENGTH)[0, 0]
    shape = (len(low[0]), len(low[1]))
    empty, full = (x.expand(1, 1, *shape)[0, 0] for x in (kept.empty, kept.full))
    for i, j in itertools.product(*map(range, shape)):
        part = dense[int(low[0][i]) : int(high[0][i]) + 1, int(low[1][j]) : int(high[1][j]) + 1]
        assert not (bool(empty[i, j]) and bool(part.any()))
        assert not (bool(full[i, j]) and not bool(part.all()))


@given(rule=rules(), starts=st.tuples(st.integers(0, 20), st.integers(0, 20)), b=st.integers(0, 1))
@examples(150)
def test_bounds_are_true(rule: Rule, starts: tuple[int, int], b: int) -> None:
    """Whatever overflows, is NaN or counts from a table's end: a bound is true or there is none."""
    low = torch.arange(0, 50, 10)
    ends = [(low + start % 10, (low + start).clamp(max=LENGTH - 1)) for start in starts]
    assert_true(rule, (ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]), b)


STEPS = torch.arange(LENGTH)
SMALL = (STEPS % 128).to(torch.uint8) + 100
LARGE = STEPS.int() * 2**24
HAZARDS: dict[str, Rule] = {
    "from the end": lambda b, h, q, k: STEPS[q - 8] > 40,
    "past the end, then back": lambda b, h, q, k: STEPS[(q + 8) % LENGTH - LENGTH] < 40,
    "NaN": lambda b, h, q, k: torch.where(STEPS == 20, torch.nan, STEPS.double())[q] >= 0,
    "fractions": lambda b, h, q, k: torch.full((LENGTH,), 0.5)[q] > 0,
    "a sum that wraps around": lambda b, h, q, k: LARGE[q] + LARGE[k] >= 0,
    "a product that wraps around": lambda b, h, q, k: LARGE[q] * 2 >= LARGE[k],
    "a difference that wraps around": lambda b, h, q, k: SMALL[q] - SMALL[k] <= 200,
    "a number that wraps around": lambda b, h, q, k: torch.ones(LENGTH, dtype=torch.int8)[q] == 257,
    "64 bits that wrap around": lambda b, h, q, k: STEPS[q] * 2**58 > STEPS[k],
    "the least number": lambda b, h, q, k: (STEPS + torch.iinfo(torch.int64).min)[q].abs() >= 0,
    "part of a condition": lambda b, h, q, k: torch.where(STEPS[q] < 25, q >= k, q < k),
    "part of a number": lambda b, h, q, k: torch.where(STEPS[q] < 25, STEPS[k], -STEPS[q]) > 0,
}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name: str) -> None:
    low = torch.arange(0, LENGTH, 5)
    for width in (1, 5, 16, 33):
        high = (low + width - 1).clamp(max=LENGTH - 1)
        assert_true(HAZARDS[name], (low, low), (high, high))


def known_tiles(fn: Rule, length: int, b: int = 0) -> float:
    """Share of tiles of 64 x 64 that bounds decide."""
    low = torch.arange(0, length, 64).view(1, 1, -1, 1)
    one = HeadMask(masks.from_function(fn), length, length, b, 0, None, torch.device("cpu"))
    kept = one.tile_bounds(Interval(low, low + 63), Interval(low.mT, low.mT + 63))
    return float((kept.empty | kept.full).expand(1, 1, low.numel(), low.numel()).float().mean())


DOCUMENTS = (torch.arange(1024) * 7 + 300) // 1400
BATCH = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])
VALID = torch.arange(1024) < 700
STARTS = torch.tensor([int((doc == DOCUMENTS).nonzero()[0]) for doc in range(6)])
POSITIONS = torch.arange(1024, dtype=torch.int32) + 17
DECIDED: dict[str, Rule] = {
    "documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
    "a batch": lambda b, h, q, k: BATCH[b, q] == BATCH[b, k],
    "of 32 bits": lambda b, h, q, k: DOCUMENTS.int()[q] == DOCUMENTS.int()[k],
    "padding": lambda b, h, q, k: VALID[k] & VALID[q],
    "inner mask": lambda b, h, q, k: torch.where(
        DOCUMENTS[q] == DOCUMENTS[k], q - STARTS[DOCUMENTS[q]] >= k - STARTS[DOCUMENTS[k]], False
    ),
    "window of positions": lambda b, h, q, k: (POSITIONS[q] - POSITIONS[k]).abs() < 64,
    "one of a list": lambda b, h, q, k: torch.isin(DOCUMENTS[k], torch.tensor([0, 3])) & (DOCUMENTS[q] != 2),
}


@pytest.mark.parametrize("name", DECIDED)
def test_most_tiles_are_decided(name: str) -> None:
    for b in range(2):
        assert known_tiles(DECIDED[name], 1024, b) > 0.5


def test_tables_of_floats_are_unknown() -> None:
    table = torch.arange(1024.0)
    assert known_tiles(lambda b, h, q, k: table[q] >= table[k], 1024) == 0


@pytest.mark.parametrize("name", DECIDED)
def test_plans_are_those_of_dense_masks(name: str) -> None:
    mask = masks.from_function(DECIDED[name])
    sizes = {"batch": 2, "heads": 1}
    assert torch.equal(stof.plan(mask, 1024, **sizes).to_dense(), mask.to_dense(1024, **sizes))


def test_a_table_that_changes_is_read_again() -> None:
    table = torch.zeros(1024, dtype=torch.int64)

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[q] == table[k]

    assert known_tiles(same, 1024) == 1
    table.copy_(torch.arange(1024))
    dense = masks.from_function(same).to_dense(1024)
    assert torch.equal(stof.plan(lambda *at: same(*at), 1024).to_dense(), dense)
    assert torch.equal(dense[0, 0], torch.eye(1024, dtype=torch.bool))
