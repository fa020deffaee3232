"""Every named mask against a formula written out in plain Python loops, the laws of composition, and offsets."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof import masks
from stof.errors import MaskError, ShapeError
from stof.masks import Index, Mask, rules
from stof.masks.tensors import as_mask
from tests.examples import examples
from tests.strategies import mask_trees, named_masks

Formula = Callable[[int, int], bool]


def naive(formula: Formula, q_len: int, kv_len: int) -> Tensor:
    keep = np.zeros((q_len, kv_len), dtype=bool)
    for i in range(q_len):
        for j in range(kv_len):
            keep[i, j] = formula(i, j)
    return torch.from_numpy(keep)


PATTERNS: dict[str, tuple[Mask, Formula]] = {
    "full": (masks.full(), lambda i, j: True),
    "causal": (masks.causal(), lambda i, j: j <= i),
    "window": (masks.sliding_window(5), lambda i, j: i - 5 <= j <= i),
    "window both sides": (masks.sliding_window(3, 7), lambda i, j: i - 3 <= j <= i + 7),
    "window of one": (masks.sliding_window(0), lambda i, j: i == j),
    "window wider than all": (masks.sliding_window(2**31 - 1, 2**31 - 1), lambda i, j: True),
    "dilated": (masks.dilated_window(9, 4, dilation=3), lambda i, j: -4 <= i - j <= 9 and (i - j) % 3 == 0),
    "dilated by one": (masks.dilated_window(4, dilation=1), lambda i, j: 0 <= i - j <= 4),
    "strided": (masks.strided(4, 6, 2), lambda i, j: j <= i and (i - j < 4 or j % 6 in (4, 5))),
    "strided both ways": (masks.strided(3, 5, causal=False), lambda i, j: abs(i - j) < 3 or j % 5 == 4),
    "strided, no summaries": (masks.strided(3, 5, 0), lambda i, j: 0 <= i - j < 3),
    "strided, summaries only": (masks.strided(0, 4, 4), lambda i, j: j <= i),
    "global": (masks.global_tokens(3), lambda i, j: 0 <= i < 3 or 0 <= j < 3),
    "global, none": (masks.global_tokens(0), lambda i, j: False),
    "global, listed": (masks.global_tokens([9, 2, 9, 500]), lambda i, j: i in (2, 9) or j in (2, 9)),
    "sinks": (masks.sink_tokens(4), lambda i, j: 0 <= j < 4 and j <= i),
    "longformer": (masks.longformer(5, 2), lambda i, j: abs(i - j) <= 5 or 0 <= i < 2 or 0 <= j < 2),
    "prefix": (masks.prefix_lm(6), lambda i, j: 0 <= j < 6 or j <= i),
    "padding": (masks.padding(7), lambda i, j: 0 <= j < 7),
    "padding, all": (masks.padding(0), lambda i, j: False),
}


@pytest.mark.parametrize("q_len", [1, 13, 30])
@pytest.mark.parametrize("name", PATTERNS)
def test_named_pattern(name: str, q_len: int) -> None:
    mask, formula = PATTERNS[name]
    assert torch.equal(mask.to_dense(q_len, 30)[0, 0], naive(formula, q_len, 30))


@pytest.mark.parametrize("offset", [-45, -7, -1])
@pytest.mark.parametrize("name", PATTERNS)
def test_named_pattern_of_queries_before_the_first_key(name: str, offset: int) -> None:
    mask, formula = PATTERNS[name]
    keep = mask.with_query_offset(offset).to_dense(40, 30)[0, 0]
    assert torch.equal(keep, naive(lambda i, j: formula(i + offset, j), 40, 30))


@pytest.mark.parametrize(("q_offset", "kv_offset"), [(0, 11), (6, -9), (-4, 3), (-5, -12)])
@pytest.mark.parametrize("name", PATTERNS)
def test_named_pattern_at_other_positions(name: str, q_offset: int, kv_offset: int) -> None:
    mask, formula = PATTERNS[name]
    placed = masks.placed(mask, q_offset, kv_offset)
    keep = naive(lambda i, j: formula(i + q_offset, j + kv_offset), 25, 30)
    assert torch.equal(placed.to_dense(25, 30)[0, 0], keep)
    assert torch.equal(masks.transposed(placed).to_dense(30, 25)[0, 0], keep.T)


@pytest.mark.parametrize("cumulative", [[0, 4, 4, 11, 20], [0, 20]])
def test_documents_by_cumulative_lengths(cumulative: list[int]) -> None:
    owner = [n for n in range(len(cumulative) - 1) for _ in range(cumulative[n], cumulative[n + 1])]
    mask = masks.documents(cu_seqlens=cumulative)
    assert torch.equal(mask.to_dense(20)[0, 0], naive(lambda i, j: owner[i] == owner[j], 20, 20))
    assert mask == masks.documents(cu_seqlens=torch.tensor(cumulative, dtype=torch.int32))


def test_documents_by_ids() -> None:
    ids = [3, 3, -1, 0, 0, 3, -1, -2]
    expected = naive(lambda i, j: ids[i] == ids[j] and ids[i] >= 0, 8, 8)
    assert torch.equal(masks.documents(ids).to_dense(8)[0, 0], expected)
    assert masks.documents(ids) == masks.documents(torch.tensor(ids))
    assert masks.documents(ids).key == "documents([3, -1, 0, 3, -1, -2], cu_seqlens=[0, 2, 3, 5, 6, 7, 8])"
    both = masks.documents([ids, ids[::-1]])
    assert torch.equal(both.to_dense(8)[1, 0], expected.flip(0, 1))
    assert both.batch == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (5, 1), (5, 40)])
def test_documents_of_id_tensors(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """A row that ends with the id with which the next begins, and a view that is not contiguous, too."""
    ids = torch.randint(-1, 3, shape[::-1]).repeat_interleave(2, 0)[: shape[1]].to(dtype).T
    mask = masks.documents(ids)
    assert mask.key == masks.documents(ids.tolist()).key == masks.parse(mask.key).key
    expected = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]
    assert torch.equal(mask.to_dense(shape[1])[:, 0], expected)
    assert masks.documents(ids[0]) == masks.documents(ids[0].tolist())


def test_documents_of_ids_and_cumulative_lengths() -> None:
    mask = masks.documents([4, 4, -1, 0, 4], cu_seqlens=[0, 2, 3, 3, 5, 8])
    assert mask == masks.documents([4, 4, 4, 0, 0, 4, 4, 4])
    several = masks.documents(torch.tensor([[0, -1], [1, 0]]), cu_seqlens=[[0, 2, 8], [0, 8, 8]])
    assert several == masks.documents([[0, 0] + [-1] * 6, [1] * 8])


def test_documents_with_fewer_queries_are_the_first_rows() -> None:
    ids = [0, 0, 1, 1, 1]
    assert torch.equal(masks.documents(ids).to_dense(2, 5), masks.documents(ids).to_dense(5)[:, :, :2])


@pytest.mark.parametrize("kernel", [3, (1, 5), (7, 3)])
def test_neighborhood(kernel: int | tuple[int, int]) -> None:
    tall, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    height, width = 5, 6

    def formula(i: int, j: int) -> bool:
        near_rows = abs(i // width - j // width) <= (tall - 1) / 2
        return near_rows and abs(i % width - j % width) <= (wide - 1) / 2

    assert torch.equal(masks.neighborhood_2d(height, width, kernel).to_dense(30)[0, 0], naive(formula, 30, 30))


@pytest.mark.parametrize("kv_len", [40, 45])
@pytest.mark.parametrize("blocks", [1, 3, 50])
def test_random_blocks(blocks: int, kv_len: int) -> None:
    """Whole blocks, the asked number of distinct ones for each row block, the same for its rows."""
    keep = masks.random_blocks(blocks, block_size=8, seed=5).to_dense(30, kv_len)[0, 0]
    kv_blocks = -(-kv_len // 8)
    for start in range(0, 30, 8):
        rows = keep[start : start + 8]
        assert bool((rows == rows[0]).all())
        chosen = {j // 8 for j in range(kv_len) if rows[0, j]}
        assert len(chosen) == min(blocks, kv_blocks)
        assert [bool(x) for x in rows[0]] == [j // 8 in chosen for j in range(kv_len)]


def test_random_blocks_depend_on_the_seed_alone() -> None:
    first = masks.random_blocks(3, block_size=16, seed=1).to_dense(512)
    assert torch.equal(first, masks.random_blocks(3, block_size=16, seed=1).to_dense(512))
    assert not torch.equal(first, masks.random_blocks(3, block_size=16, seed=2).to_dense(512))
    counts = masks.random_blocks(1, block_size=1, seed=3).to_dense(20_000, 8)[0, 0].sum(0)
    assert bool((counts > 2200).all()), "every block is drawn about equally often (2500 expected)"


def test_random_blocks_are_pinned() -> None:
    """The choice is part of saved results: it must not move with torch versions or devices."""
    mask = masks.random_blocks(3, block_size=64, seed=0)
    chosen = mask.choose(torch.arange(4), 64).tolist()  # type: ignore[attr-defined]
    assert chosen == PINNED_BLOCKS


def reach(length: int) -> int:
    return 16 * (isqrt(length) // 16)


def test_benchmark_masks_as_defined() -> None:
    """The grid of DESIGN.md at S = 256 and 1024, from its own words."""
    for length in (256, 1024):
        w = reach(length)
        i, j = np.arange(length)[:, None], np.arange(length)[None, :]
        longformer = (abs(i - j) <= w) | (i < w) | (j < w)
        grid = {
            masks.sliding_window(511): (i >= j) & (i - j < 512),
            masks.longformer(w, w): longformer,
            masks.strided(128, 128, 8): (i >= j) & ((i - j < 128) | (j % 128 >= 120)),
            masks.dilated_window(2047, dilation=16): (i >= j) & ((i - j) % 16 == 0) & (i - j < 2048),
        }
        for mask, expected in grid.items():
            assert np.array_equal(mask.to_dense(length)[0, 0].numpy(), expected), repr(mask)
        # BigBird: Longformer's mask, and 3 random 64-wide key blocks for each 64 rows
        bigbird = masks.bigbird(w, w, blocks=3, block_size=64).to_dense(length)[0, 0].numpy()
        extra = masks.random_blocks(3, block_size=64).to_dense(length)[0, 0].numpy()
        assert np.array_equal(bigbird, longformer | extra)
        blocks = extra.reshape(length // 64, 64, length // 64, 64)
        assert (blocks.any((1, 3)) == blocks.all((1, 3))).all()
        assert (blocks.any((1, 3)).sum(1) == min(3, length // 64)).all()


@given(a=mask_trees(), b=mask_trees(), c=mask_trees())
def test_laws_of_composition(a: Mask, b: Mask, c: Mask) -> None:
    def dense(mask: Mask) -> Tensor:
        return mask.to_dense(20, 32)

    assert torch.equal(dense(a & b), dense(a) & dense(b))
    assert torch.equal(dense(a | b), dense(a) | dense(b))
    assert torch.equal(dense(~a), ~dense(a))
    assert torch.equal(dense(~(a & b)), dense(~a | ~b))
    assert torch.equal(dense(a & (b | c)), dense((a & b) | (a & c)))
    assert ~~a == a
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert hash((a & b) & c) == hash(a & (b & c))


@given(mask=mask_trees(), cached=st.integers(0, 31), rows=st.integers(1, 32))
def test_offset_is_the_later_rows(mask: Mask, cached: int, rows: int) -> None:
    rows = min(rows, 32 - cached)
    shifted = mask.with_query_offset(cached)
    assert torch.equal(shifted.to_dense(rows, 32), mask.to_dense(32)[:, :, cached : cached + rows])
    assert (shifted == mask) == (cached == 0)


def test_offsets_add_up_and_commute_with_composition() -> None:
    a, b = masks.sliding_window(4), masks.sink_tokens(2)
    twice = a.with_query_offset(3).with_query_offset(4)
    assert torch.equal(twice.to_dense(5, 32), a.with_query_offset(7).to_dense(5, 32))
    joined = (a | ~b).with_query_offset(6)
    assert torch.equal(joined.to_dense(5, 32), (a.with_query_offset(6) | ~b.with_query_offset(6)).to_dense(5, 32))


@given(mask=mask_trees(batch=3))
def test_rectangles_are_parts_of_the_whole(mask: Mask) -> None:
    """Evaluation may ask for any rows in any order, for some batch entries."""
    whole = mask.to_dense(32)
    rows, columns, entry = torch.tensor([31, 0, 7, 7]), torch.tensor([5, 30]), torch.tensor([2])
    index = Index.make(rows, columns, q_len=32, kv_len=32, b=entry)
    part = mask.evaluate(index).expand(1, 1, 4, 2)
    assert torch.equal(part[0, 0], whole[-1 if mask.batch == 1 else 2, 0][rows][:, columns])


def test_batch_bound_masks() -> None:
    mask = masks.padding([3, 0, 5])
    assert mask.batch == 3
    keep = mask.to_dense(4, 6)
    assert keep.shape == (3, 1, 4, 6)
    for b, length in enumerate((3, 0, 5)):
        assert torch.equal(keep[b, 0], naive(lambda i, j, n=length: j < n, 4, 6))
    prefix = masks.prefix_lm(torch.tensor([1, 4, 2])) & mask
    assert torch.equal(prefix.to_dense(4, 6)[1], torch.zeros(1, 4, 6, dtype=torch.bool))
    with pytest.raises(ShapeError, match="batch size of 3, the inputs have 2"):
        mask.dims(2, 1)
    with pytest.raises(ShapeError, match="different batch sizes"):
        mask & masks.padding([1, 2])


def test_one_value_serves_every_batch_size() -> None:
    assert masks.padding([5]).batch == 1
    assert masks.padding([5]) == masks.padding(5) == masks.padding(torch.tensor(5))
    assert masks.padding([5]).dims(7, 1) == (1, 1)


def test_per_head() -> None:
    parts = [masks.causal(), masks.full(), masks.sliding_window(2), masks.causal()]
    mask = masks.per_head(parts)
    assert mask.heads == 4
    assert torch.equal(mask.to_dense(9), torch.cat([part.to_dense(9) for part in parts], 1))
    both = ~mask & masks.padding([4, 9])
    assert both.to_dense(9).shape == (2, 4, 9, 9)
    assert torch.equal(both.to_dense(9)[0], (~mask).to_dense(9)[0] & (torch.arange(9) < 4))
    assert masks.per_head([masks.causal()]) == masks.causal()
    with pytest.raises(ShapeError, match="number of heads of 4, the inputs have 8"):
        mask.dims(1, 8)
    with pytest.raises(ShapeError, match="different numbers of heads"):
        mask & masks.per_head(parts[:2])
    with pytest.raises(MaskError, match="do not depend on the head"):
        masks.per_head([mask, mask])
    with pytest.raises(MaskError, match="non-empty"):
        masks.per_head([])


def test_per_head_of_functions_that_look_at_the_head() -> None:
    odd = masks.from_function(lambda b, h, i, j: (h % 2 == 1) & (i >= j))
    mask = masks.per_head([odd, odd, masks.full()])
    expected = torch.stack([torch.zeros(6, 6), torch.ones(6, 6).tril(), torch.ones(6, 6)]).bool()
    assert torch.equal(mask.to_dense(6)[0], expected)


def test_plans_evaluate_each_mask_of_per_head_for_its_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int]]] = []
    evaluate = rules.SlidingWindow.evaluate

    def noted(self: Any, index: Index) -> Tensor:
        seen.append((self.left, index.h.flatten().tolist()))
        return evaluate(self, index)

    monkeypatch.setattr(rules.SlidingWindow, "evaluate", noted)
    mask = masks.per_head([masks.sliding_window(left) for left in (5, 300, 5, 70)])
    stof.plan(mask, 400)
    assert {left for left, _ in seen} == {5, 70, 300}
    assert all({5: h[0] in (0, 2), 300: h == [1], 70: h == [3]}[left] and len(h) == 1 for left, h in seen)
    seen.clear()
    mask.to_dense(9)
    assert seen == [(5, [0, 2]), (300, [1]), (70, [3])]


@given(data=st.data())
@examples(40)
def test_per_head_of_any_heads(data: st.DataObject) -> None:
    """Whichever heads are asked about, in any order, get what their masks keep for them."""
    by_head = masks.from_function(lambda b, h, i, j: (i + j + b) % (h + 2) == 0)
    parts = data.draw(st.lists(mask_trees(12, 2) | st.just(by_head), min_size=2, max_size=5))
    mask = masks.per_head(parts)
    heads = torch.tensor(data.draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=6)))
    rows, b = torch.arange(12), torch.arange(2)
    keep = mask.evaluate(Index.make(rows, rows, q_len=12, kv_len=12, b=b, h=heads)).expand(2, len(heads), 12, 12)
    for place, h in enumerate(heads):
        one = Index.make(rows, rows, q_len=12, kv_len=12, b=b, h=h.view(1))
        assert torch.equal(keep[:, place], parts[int(h)].evaluate(one).expand(2, 1, 12, 12)[:, 0])


@given(mask=named_masks())
def test_masks_are_values(mask: Mask) -> None:
    assert mask == mask.with_query_offset(0)
    assert mask != ~mask
    assert mask != 5
    assert len({mask, mask & mask, ~mask}) == 3
    with pytest.raises(MaskError, match="no truth value"):
        bool(mask)
    with pytest.raises(AttributeError):
        mask.key = "other"  # type: ignore[misc]


def test_composing_with_anything_else_is_a_type_error() -> None:
    for other in (1, "causal", None, torch.ones(2, 2, dtype=torch.bool)):
        with pytest.raises(TypeError, match="from_dense"):
            masks.causal() & other  # type: ignore[operator]
        with pytest.raises(TypeError):
            masks.causal() | other  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len"),
    [
        (masks.padding([40]), 4, 32),
        (masks.documents([0] * 16), 16, 32),
        (masks.documents([0] * 16), 32, 16),
        (masks.neighborhood_2d(4, 4, 3), 16, 32),
        (masks.documents([0] * 16).with_query_offset(1), 16, 16),
        (masks.causal() & masks.documents([0] * 16), 8, 8),
        (~masks.padding([40]), 4, 32),
        (masks.causal(), 0, 4),
        (masks.causal(), 4, -1),
        (masks.causal(), 2.0, 4),
        (masks.causal(), True, 4),
        (masks.causal(), 2**31, 4),
    ],
)
def test_lengths_that_do_not_fit(mask: Mask, q_len: int, kv_len: int) -> None:
    with pytest.raises(ShapeError):
        mask.to_dense(q_len, kv_len)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"heads": 0}, {"batch": -1}, {"heads": 1.0}])
def test_sizes_below_one(sizes: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match="is an int between 1 and"):
        masks.causal().to_dense(4, **sizes)


# From the hash as first released.
PINNED_BLOCKS = [[20, 14, 39], [11, 58, 34], [14, 11, 19], [24, 30, 57]]


def test_a_pattern_that_was_not_called() -> None:
    with pytest.raises(MaskError, match=r"call it, as in masks.causal\(\)"):
        as_mask(masks.causal)


def drawn(row_block: int, blocks: int, kv_blocks: int, seed: int) -> list[int]:
    """Floyd's sampling in Python's integers, with the hash that `random_blocks` promises for every release."""

    def mixed(x: int) -> int:
        for factor in (0x45D9F3B, 0x2C1B3C6D):
            x = ((x ^ (x >> 16)) * factor) & 0x7FFFFFFF
        return x ^ (x >> 15)

    picked: list[int] = []
    for turn, top in enumerate(range(kv_blocks - min(blocks, kv_blocks), kv_blocks)):
        key = row_block * 1_000_003 + turn * 7_919 + (seed & 0xFFFF_FFFF) * 104_729
        draw = mixed(mixed(key & 0x7FFFFFFF) + 0x9E3779B) % (top + 1)
        picked.append(top if draw in picked else draw)
    return picked


@pytest.mark.parametrize("blocks", [1, 3, 16, 17, 40, 150, 500])
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_random_blocks_are_always_the_same(blocks: int, size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.masks.rules._TABLE", 600)  # a few row blocks at a time
    mask = masks.random_blocks(blocks, block_size=size, seed=seed)
    q_len, kv_len = 20, 1001
    expected = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for row in range(q_len):
        for block in drawn(row // size, blocks, -(-kv_len // size), seed):
            expected[row, block * size : (block + 1) * size] = True
    assert torch.equal(mask.to_dense(q_len, kv_len)[0, 0], expected)
    assert torch.equal(stof.plan(mask, q_len, kv_len).to_dense()[0, 0], expected)


@pytest.mark.parametrize("lengths", [[1, 2**31], [2**31, 1], [2**40, 5], [3, -1]])
def test_lengths_beyond_any_sequence_are_refused(lengths: list[int]) -> None:
    with pytest.raises(MaskError, match="lengths is between 0 and 2147483647"):
        masks.padding(lengths)
    assert masks.padding([1, 2**31 - 1]).batch == 2


@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 64, 65, 1024, 1056, 1057])
def test_bits_need_as_many_words_as_the_keys_take(kv_len: int) -> None:
    words = -(-kv_len // 32)
    assert masks.from_bits(torch.zeros(4, words, dtype=torch.int32), kv_len).kv_len == kv_len
    for other in {max(1, words - 1), words + 1} - {words}:
        with pytest.raises(MaskError, match=rf"\[Sq, {words}\]"):
            masks.from_bits(torch.zeros(4, other, dtype=torch.int32), kv_len)
