"""The last jobs of a list are cut so that thread blocks end together: nothing is lost, and the result is attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.kernels.hopper import tile_scheduler
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.kernels.hopper.tile_scheduler import chunk_slots, split_tail, work_costs, work_list
from stof.layout import build_layout
from tests.examples import examples
from tests.kernels.test_hopper_jobs import check_jobs, grid_layout, layout_of
from tests.kernels.test_hopper_launch import Twin, check_call, inputs, twin  # noqa: F401, a fixture


def last_end(cost: Tensor, blocks: int) -> float:
    return max(tile_scheduler._simulate(cost.tolist(), blocks)[1])


@given(
    tiles=st.lists(st.integers(1, 70), min_size=1, max_size=60),
    blocks=st.sampled_from([1, 4, 7, 13]),
    weight=st.sampled_from([0.5, 1.0, 1.1]),
    uncut=st.sets(st.integers(0, 59)),
)
@examples(200)
def test_chunks_are_the_jobs(tiles: list[int], blocks: int, weight: float, uncut: set[int]) -> None:
    """Each tile once, chunks in order, what must stay whole whole; and the end comes no later."""
    count = torch.tensor(sorted(tiles, reverse=True))
    cost = count * weight + 0.6
    whole = torch.tensor([job in uncut for job in range(len(tiles))])
    given_back = split_tail(count, cost, whole, blocks)
    assert torch.equal(given_back, split_tail(count, cost, whole, blocks))
    job, chunk, begin, end = given_back
    first = min(blocks, len(tiles))
    assert torch.equal(job[:first], torch.arange(first)), "thread blocks begin with whole jobs"
    for number in range(len(tiles)):
        mine = (job == number).nonzero()[:, 0]
        mine = mine[chunk[mine].argsort()]
        assert torch.equal(chunk[mine], torch.arange(len(mine)))
        bounds = [0, *end[mine].tolist()]
        assert list(itertools.pairwise(bounds)) == list(zip(begin[mine].tolist(), end[mine].tolist(), strict=True))
        assert bounds[-1] == count[number]
        assert len(mine) == 1 or not (whole[number] or number < first)
        assert len(mine) == 1 or int((end - begin)[mine].min()) >= tile_scheduler._MIN_TILES // 2
    length = end - begin
    parts = torch.bincount(job)[job]
    # Both are sums in float32.
    assert last_end(length * weight + torch.where(parts > 1, 0.0, 0.6), blocks) <= last_end(cost, blocks) * (1 + 1e-6)


@pytest.mark.parametrize(("jobs", "tiles"), [(2048, 64), (4096, 128), (1536, 32), (200, 40)])
def test_ends_lie_together(jobs: int, tiles: int) -> None:
    """Rounds that are not full cost no more than the work in them: the end is within 1 % of the mean, or 8 tiles."""
    count = torch.full((jobs,), tiles)
    cost = count + 0.6
    job, _, begin, end = split_tail(count, cost, count == 0, 132)
    cut = torch.bincount(job)[job] > 1
    assert 0 < int(cut.sum()) < 300
    uncut, after = last_end(cost, 132), last_end(end - begin + torch.where(cut, tile_scheduler._MERGE_COST, 0.6), 132)
    mean = float(cost.sum()) / 132
    assert after <= max(1.01 * mean, mean + tile_scheduler._MIN_TILES)
    assert after < uncut


def test_what_is_not_cut() -> None:
    """Rounds that are full, jobs that are short, more rounds than matter, and jobs that all start at once."""
    for jobs, tiles in ((1320, 64), (2048, 15), (132 * 33, 64), (100, 64)):
        count = torch.full((jobs,), tiles)
        assert split_tail(count, count + 0.6, count == 0, 132).shape == (4, jobs)


def test_lists_with_cut_jobs() -> None:
    """Whole items again when joined; slots that no other chunk has, also beside heavy row blocks cut before."""
    lists = make_tile_lists(grid_layout("full", 2048, None))
    check_jobs(lists, 1, 10, 132, 2)
    assert chunk_slots(work_list(lists, 1, 10, 132, 2)) > 0
    keep = torch.zeros(1, 1, 1408, 1408, dtype=torch.bool)
    keep[..., : 18 * 64] = True
    keep[..., :64, :] = True
    lists = make_tile_lists(layout_of(keep, None, (64, 64)), 20)
    assert lists.chunks
    check_jobs(lists, 3, 4, 50, 12)
    slots = chunk_slots(work_list(lists, 3, 4, 50, 12))
    assert slots > 12 * lists.chunks


def test_rows_that_no_warpgroup_has() -> None:
    """A row block with rows for one warpgroup of three takes less time than one with rows for all."""
    lists = make_tile_lists(build_layout(masks.full(), 832, 832, LayoutConfig(192, 128)))
    row_block, tiles = lists.items[:, 0].long(), lists.items[:, 1:4].long()
    cost = work_costs(row_block, tiles, lists)
    assert torch.equal(cost[:-1], cost[:1].expand(4))
    assert float(cost[-1]) < 0.6 * float(cost[0])
    lists = make_tile_lists(build_layout(masks.full(), 896, 896, LayoutConfig(192, 128)))
    between = float(work_costs(row_block[-1:], tiles[-1:], lists))
    assert float(cost[-1]) < between < float(cost[0])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("tile", [(128, 64), (192, 128)])
def test_calls_with_cut_jobs(
    twin: Twin,  # noqa: F811
    tile: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks meet and are merged, whoever comes first; full tiles begin chunks, and so do partial ones."""
    monkeypatch.setattr(tile_scheduler, "_MIN_TILES", 2)
    monkeypatch.setattr(tile_scheduler, "_MERGE_COST", 0.0)
    row, column = torch.arange(70)[:, None], torch.arange(700)
    layout = layout_of((column <= row + 630)[None, None], None, tile)
    check_call(layout, *inputs(batch=33, heads=5, kv_heads=1, q_len=70, kv_len=700))
    assert twin.constants["SPLIT"]
    assert twin.constants["PERSISTENT"]
    assert twin.constants["SKIP_EMPTY"] == (tile[0] == 192)
