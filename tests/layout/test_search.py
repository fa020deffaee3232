"""Row orders found by looking at a mask: as good as those its name gives away, and none where none helps."""

from __future__ import annotations

import functools
import itertools
import operator
from math import isqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.layout import build_layout, orders, statistics
from stof.layout.orders import search as searches
from stof.layout.orders.cluster import cluster_rows
from stof.layout.orders.named import named_order
from stof.layout.orders.search import CLUSTERED, GOOD_ENOUGH, RowOrders, column_order, computed, find_order
from stof.masks import Mask
from stof.masks.index import Index
from tests.examples import examples
from tests.strategies import dense_masks

pytestmark = pytest.mark.usefixtures("poisoned_memory")

S = 1024
W = 16 * (isqrt(S) // 16)
ENDS = [0, 100, 160, 300, 310, 480, 700, 733, 900, S]
# Mask, its best order by name, computed/needed of that order with 64-row blocks.
TABLE: dict[str, tuple[Mask, str | None, float]] = {
    "causal": (masks.causal(), None, 1.07),
    "window": (masks.sliding_window(255), None, 1.25),
    "longformer": (masks.longformer(W, W), None, 1.71),
    "bigbird": (masks.bigbird(W, W), None, 1.26),
    "documents": (masks.documents(cu_seqlens=ENDS) & masks.causal(), None, 1.75),
    "strided": (masks.strided(128, 128, 8), None, 1.43),
    "dilated": (masks.dilated_window(511, dilation=16), "remainder 16", 2.65),
    "neighborhood": (masks.neighborhood_2d(32, 32, 13), "patch 32 32 8 8", 2.13),
    "checkerboard": (masks.dilated_window(S, S, dilation=2), "remainder 2", 1.01),
}


def shuffled(keep: Tensor, columns: str) -> Tensor:
    """Rows in random order; columns in their own, the same or an independent one."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(keep.shape[0], generator=generator)
    other = torch.randperm(keep.shape[1], generator=generator)
    order = {"own": torch.arange(keep.shape[1]), "same": rows, "independent": other}[columns]
    return keep[rows][:, order].contiguous()


def ratio(keep: Tensor, order: Tensor | None = None) -> float:
    return computed(keep if order is None else keep[order], 64) / int(keep.sum())


def assert_permutation(order: Tensor, rows: int) -> None:
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(rows))


@pytest.mark.parametrize("name", TABLE)
def test_orders_with_a_name_are_found_in_dense_masks(name: str) -> None:
    mask, best, expected = TABLE[name]
    keep = mask.to_dense(S)[0, 0]
    order = None if best is None else named_order(best, S)
    assert ratio(keep, order) <= expected
    found = find_order(masks.from_dense(keep), S, S)
    if best is None:
        assert found is None or ratio(keep, found[1]) < searches.WORTH * ratio(keep)
    else:
        assert order is not None
        assert found is not None
        assert found[0] == best
        assert torch.equal(found[1], order)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", ["own", "same", "independent"])
@pytest.mark.parametrize("name", TABLE)
def test_shuffled_masks_come_out_nearly_as_dense(name: str, columns: str) -> None:
    mask, _, expected = TABLE[name]
    keep = shuffled(mask.to_dense(S)[0, 0], columns)
    found = find_order(masks.from_dense(keep), S, S)
    assert ratio(keep) > GOOD_ENOUGH
    assert found is not None
    assert_permutation(found[1], S)
    assert found[0] == CLUSTERED
    assert ratio(keep, found[1]) <= 1.15 * expected
    layout = build_layout(masks.from_dense(keep), S, S, LayoutConfig(64, 64, 1), row_order=found[1])
    assert statistics(layout).computed == computed(keep[found[1]], 64)
    plain = statistics(build_layout(mask, S, S, LayoutConfig(128, 128)))
    assert statistics(layout).computed < plain.computed


@pytest.mark.parametrize(
    "keep",
    {
        "random": torch.rand(S, S, generator=torch.Generator().manual_seed(0)) < 0.02,
        "half random": torch.rand(S, S, generator=torch.Generator().manual_seed(0)) < 0.5,
        "anti-diagonal": torch.eye(S, dtype=torch.bool).flip(0),
        "empty": torch.zeros(S, S, dtype=torch.bool),
        "full": torch.ones(S, S, dtype=torch.bool),
        "one score": torch.arange(S * S).view(S, S) == 77,
        "one column": (torch.arange(S) == 5).expand(S, S).clone(),
        "one row": (torch.arange(S) == 5)[:, None].expand(S, S).clone(),
        "one row block": torch.rand(64, S, generator=torch.Generator().manual_seed(0)) < 0.1,
        "one query": torch.rand(1, S, generator=torch.Generator().manual_seed(0)) < 0.1,
    }.items(),
    ids=lambda pair: pair[0],
)
def test_masks_without_a_better_order_keep_their_own(keep: tuple[str, Tensor]) -> None:
    assert find_order(masks.from_dense(keep[1]), *keep[1].shape) is None


@pytest.mark.parametrize(
    ("mask", "q_len", "names"),
    [
        (masks.neighborhood_2d(48, 48, 7), 48 * 48, ["patch 48 48 8 8"]),
        (masks.neighborhood_2d(16, 128, 9), 16 * 128, ["patch 16 128 8 8"]),
        (masks.neighborhood_2d(48, 48, (25, 3)), 48 * 48, ["patch 48 48 16 4", "patch 48 48 32 2"]),
        (masks.dilated_window(1000, dilation=37), 1000, ["remainder 37"]),
        (masks.dilated_window(300, 300, dilation=3), 960, ["remainder 3"]),
    ],
    ids=str,
)
def test_grids_and_strides_are_recognised(mask: Mask, q_len: int, names: list[str]) -> None:
    keep = mask.to_dense(q_len)[0, 0]
    found = find_order(masks.from_dense(keep), q_len, q_len)
    assert found is not None
    assert found[0] in names
    assert torch.equal(found[1], named_order(found[0], q_len))  # type: ignore[arg-type]
    assert ratio(keep, found[1]) <= searches.WORTH * ratio(keep)


def test_functions_are_looked_at_like_tensors() -> None:
    found = find_order(masks.from_function(lambda b, h, q, k: (q - k) % 8 == 0), 512, 700)
    assert found is not None
    assert found[0] == "remainder 8"


def test_columns_are_sampled_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = shuffled(masks.sliding_window(255).to_dense(S)[0, 0], "independent")
    whole = find_order(masks.from_dense(keep), S, S)
    monkeypatch.setattr(searches, "_FEWEST_COLUMNS", 256)
    monkeypatch.setattr(searches, "_MOST_COLUMNS", 256)
    sampled = find_order(masks.from_dense(keep), S, S)
    assert whole is not None
    assert sampled is not None
    assert ratio(keep, sampled[1]) < 1.1 * ratio(keep, whole[1])


def test_rows_without_bound_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = shuffled(masks.sliding_window(255).to_dense(S)[0, 0], "same")
    monkeypatch.setattr(searches, "_MOST_ROWS", S - 1)
    assert find_order(masks.from_dense(keep), S, S) is None


def test_autocast_changes_nothing() -> None:
    keep = masks.from_dense(shuffled(masks.sliding_window(255).to_dense(S)[0, 0], "same"))
    before = find_order(keep, S, S)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = find_order(keep, S, S)
    assert before is not None
    assert after is not None
    assert torch.equal(before[1], after[1])


def test_strips_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = shuffled(masks.sliding_window(100).to_dense(300)[0, 0], "same")
    before = find_order(masks.from_dense(keep), 300, 300)
    monkeypatch.setattr(searches, "_STRIP", 1000)
    after = find_order(masks.from_dense(keep), 300, 300)
    assert before is not None
    assert after is not None
    assert torch.equal(before[1], after[1])


def test_heads_get_one_order_that_suits_all() -> None:
    """Two different windows under one shuffle: rows that follow each other are alike in both."""
    both = [shuffled(masks.sliding_window(size).to_dense(512)[0, 0], "same") for size in (63, 127)]
    keep = torch.stack([both[0], both[1], both[0]])
    found = find_order(masks.from_dense(keep), 512, 512, heads=3)
    assert found is not None
    for own in both:
        assert ratio(own, found[1]) < 0.5 * ratio(own)


@given(data=st.data(), q_len=st.sampled_from([1, 63, 65, 128, 200, 321]), kv_len=st.sampled_from([1, 40, 129, 300]))
@examples(60)
def test_whatever_is_found_is_a_permutation_and_pays(data: st.DataObject, q_len: int, kv_len: int) -> None:
    keep = data.draw(dense_masks(q_len, kv_len))[0, 0]
    found = find_order(masks.from_dense(keep), q_len, kv_len)
    if found is not None:
        assert_permutation(found[1], q_len)
        assert computed(keep[found[1]], 64) <= searches.WORTH * computed(keep, 64)
        again = find_order(masks.from_dense(keep.clone()), q_len, kv_len)
        assert again is not None
        assert again[0] == found[0]
        assert torch.equal(again[1], found[1])


@given(data=st.data(), rows=st.sampled_from([1, 2, 16, 65, 127, 300]), block_m=st.sampled_from([1, 16, 64]))
@examples(40)
def test_clusters_are_permutations(data: st.DataObject, rows: int, block_m: int) -> None:
    rows = min(rows, 16 * block_m)
    keep = data.draw(dense_masks(rows, 90))[0, 0]
    assert_permutation(cluster_rows(keep, block_m), rows)


def test_equal_rows_end_up_together() -> None:
    """Block-diagonal groups of one row block each, shuffled, come back whole."""
    groups = torch.arange(512) // 64
    keep = shuffled(groups[:, None] == groups, "independent")
    order = cluster_rows(keep)
    blocks = keep[order].view(8, 64, 512)
    assert bool((blocks == blocks[:, :1]).all())


@pytest.mark.parametrize("name", ["causal", "window", "bigbird", "strided"])
def test_columns_in_order_need_no_gathering(name: str) -> None:
    """Contiguous tiles over reordered keys compute at most half more than single columns gathered."""
    keep = shuffled(TABLE[name][0].to_dense(S)[0, 0], "independent")
    found = find_order(masks.from_dense(keep), S, S)
    assert found is not None
    columns = column_order(masks.from_dense(keep), S, S)
    assert_permutation(columns, S)
    moved = masks.reordered(masks.from_dense(keep), columns=columns)
    contiguous = build_layout(moved, S, S, LayoutConfig(64, 64), row_order=found[1])
    assert torch.equal(contiguous.to_dense()[0, 0], keep[:, columns])
    assert statistics(contiguous).computed <= 1.5 * computed(keep[found[1]], 64)


@given(data=st.data(), rows=st.sampled_from([1, 16, 17, 50]))
@examples(30)
def test_computed(data: st.DataObject, rows: int) -> None:
    keep = data.draw(dense_masks(rows, 33))[0, 0]
    expected = sum(len(block) * int(block.any(0).sum()) for block in keep.split(16))
    assert computed(keep, 16) == expected


class Counted(masks.Mask):
    """A shuffled window that counts how often it is evaluated."""

    def __init__(self) -> None:
        self.keep = masks.from_dense(shuffled(masks.sliding_window(63).to_dense(256)[0, 0], "same"))
        self.evaluations = 0
        self.key = repr(self)

    def __repr__(self) -> str:
        return "counted()"

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return ("remainder 4", "patch 2 5 1 1")

    def evaluate(self, index: Index) -> Tensor:
        self.evaluations += 1
        return self.keep.evaluate(index)


def test_orders_of_a_mask() -> None:
    mask = Counted()
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "device": "cpu"}
    book = RowOrders(mask, 256, 256, **sizes)
    assert book.names == ("remainder 4",)  # the grid has another number of rows
    assert mask.evaluations == 0
    assert book.rows(None) is None
    assert torch.equal(book.rows("remainder 4"), orders.by_remainder(256, 4))  # type: ignore[arg-type]
    assert book.searched_name() == CLUSTERED
    once = mask.evaluations
    assert book.searched_name() == CLUSTERED
    assert mask.evaluations == once
    assert_permutation(book.rows(CLUSTERED), 256)  # type: ignore[arg-type]
    known = RowOrders(masks.dilated_window(255, dilation=16), 256, 256, **sizes)
    assert known.names == ("remainder 16",)
    assert known.searched_name() is None  # nothing that the mask does not name itself


@given(data=st.data())
def test_rows_in_order_keep_ranges_that_never_go_back(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    ids = data.draw(st.lists(st.integers(-1, 3), min_size=len(lengths), max_size=len(lengths)))
    total, offset = sum(lengths), data.draw(st.integers(0, 5))
    parts = [
        masks.full(),
        masks.causal(),
        masks.sliding_window(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))),
        masks.global_tokens(3),
        masks.documents(torch.tensor(ids).repeat_interleave(torch.tensor(lengths))),
    ]
    mask = functools.reduce(operator.and_, data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=3)))
    if not mask.has_monotonic_ranges or offset >= total:
        return
    late = mask.with_query_offset(offset)
    assert late.has_monotonic_ranges
    keep = late.to_dense(total - offset, total)[0, 0]
    seen = [row.nonzero()[:, 0] for row in keep if bool(row.any())]
    assert all(int(row[-1]) - int(row[0]) + 1 == len(row) for row in seen)
    assert all(a[0] <= b[0] and a[-1] <= b[-1] for a, b in itertools.pairwise(seen))


def test_no_order_is_searched_for_rows_that_stand_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "find_order", lambda *given, **named: pytest.fail("searched"))
    mask = masks.documents(cu_seqlens=[0, 5, 9, 40, 41, 64]) & masks.causal()
    assert RowOrders(mask, 64, 64, batch=1, heads=1, device="cpu").searched_name() is None
