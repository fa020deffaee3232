"""Rows of about equal work for each rank; no processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.distributed.row_ranges import (
    MOST_TOKENS,
    RANGES,
    Assignment,
    assign_rows,
    row_block,
    tile_config,
    tiles_by_row_block,
)
from stof.distributed.ways import Costs, Sizes, choose_way, describe_ways, exchanged_bytes
from stof.layout.survey import survey
from stof.masks import Mask
from tests.examples import examples


def assigned(mask: Mask, length: int, ranks: int) -> tuple[Assignment, Costs]:
    geometry = tile_config(length, ranks)
    counted = survey(mask, length, length, (geometry,), batch=mask.batch, heads=mask.heads)
    assignment = assign_rows(tiles_by_row_block(counted, geometry), length, ranks)
    return assignment, Costs.of(counted, geometry, assignment)


def tokens(assignment: Assignment) -> list[int]:
    return [sum(stop - first for first, stop in ranges) for ranges in assignment.ranges]


def test_even_work_takes_one_range() -> None:
    assignment, _ = assigned(masks.sliding_window(40), 1024, 4)
    assert assignment.ranges == (((0, 256),), ((256, 512),), ((512, 768),), ((768, 1024),))


def test_causal_rows_are_paired() -> None:
    assignment, _ = assigned(masks.causal(), 1024, 4)
    early_and_late = [((128 * n, 128 * n + 128), (896 - 128 * n, 1024 - 128 * n)) for n in (2, 1, 0)]
    assert assignment.ranges == (((384, 640),), *early_and_late)
    assert assignment.imbalance < 1.03
    assert tokens(assignment) == [256] * 4


def test_uneven_documents_are_balanced() -> None:
    ends = [0, 40, 50, 60, 800, 850, 851, 900, 1024]
    assignment, _ = assigned(masks.documents(cu_seqlens=ends) & masks.causal(), 1024, 4)
    assert assignment.imbalance < 1.1
    assert tokens(assignment) == [256] * 4


def test_rows_that_see_all_keys_have_a_short_range() -> None:
    """No equal numbers of tokens balance one row block that costs as much as all others."""
    assignment, _ = assigned(masks.sliding_window(16) | masks.global_tokens(8), 4096, 4)
    assert assignment.imbalance < 1.15
    assert 1.1 < assignment.longest <= MOST_TOKENS
    assert all(len(ranges) == 1 for ranges in assignment.ranges)


@given(data=st.data())
@examples(60)
def test_every_row_is_held_once(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 9))
    length = data.draw(st.integers(ranks, 700))
    blocks = -(-length // row_block(length, ranks))
    seed = data.draw(st.integers(0, 99))
    tiles: Tensor = torch.rand(blocks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tiles = (tiles ** data.draw(st.sampled_from([0, 1, 20]))) * data.draw(st.sampled_from([0, 1]))
    assignment = assign_rows(tiles, length, ranks)
    rows = [row for ranges in assignment.ranges for first, stop in ranges for row in range(first, stop)]
    assert sorted(rows) == list(range(length))
    assert len(assignment.ranges) == ranks
    assert all(1 <= len(ranges) <= RANGES[-1] for ranges in assignment.ranges)
    assert all(ranges == tuple(sorted(ranges)) for ranges in assignment.ranges)
    assert sum(assignment.costs) == pytest.approx(ranks)


def test_ways() -> None:
    """Few key heads are gathered, many are exchanged; heads that do not divide leave keys alone."""
    sizes = Sizes(1, 32, 8, 128, 128, 2)
    _, costs = assigned(masks.causal(), 4096, 4)
    assert choose_way(costs, sizes) == "keys"
    assert choose_way(costs, Sizes(1, 32, 32, 128, 128, 2)) == "heads"
    assert choose_way(costs, Sizes(1, 30, 10, 128, 128, 2)) == "keys"
    refused = describe_ways(costs, Sizes(1, 30, 10, 128, 128, 2))
    assert refused[1] == "way 'heads': refused, 30 query heads do not divide among 4 ranks"
    assert exchanged_bytes(costs, sizes, "keys") == 3072 * 8 * 256 * 2
    assert exchanged_bytes(costs, sizes, "heads") == 1024 * 0.75 * 40 * 256 * 2
    two_key_heads = Sizes(1, 32, 2, 128, 128, 2)
    assert exchanged_bytes(costs, two_key_heads, "heads") == 1024 * 0.75 * 36 * 256 * 2


def test_uneven_heads_cost_time() -> None:
    mask = masks.per_head([masks.full()] * 2 + [masks.sliding_window(3)] * 2)
    _, costs = assigned(mask, 2048, 2)
    sizes = Sizes(1, 4, 4, 64, 64, 2)
    assert "work of the heaviest rank 1.9" in "".join(describe_ways(costs, sizes))
    assert choose_way(costs, sizes) == "keys"
