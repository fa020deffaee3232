"""Row blocks in pairs: what each warpgroup walks through is its row block's mask, and what it leaves out is little."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.hopper.jobs import TileLists, make_tile_lists
from stof.kernels.hopper.pairs import MOST_LEFT_OUT, make_paired_lists
from stof.kernels.hopper.queue import job_lists
from stof.layout import Layout, build_layout
from stof.layout.orders import named_order
from stof.masks.tensors import as_mask
from tests.kernels.test_hopper_jobs import GRID, columns_of, grid_layout, keep_of, layout_of, reads_unseen_keys
from tests.strategies import dense_masks

TILE = (64, 64)


def walk(begin: int, end: int, firsts: int, seconds: int, half: int) -> list[int]:
    """The job's tiles that one of its two warpgroups computes, in order, as the kernel finds them: counted in its own
    numbers, it leaves out one before each from `low` to `high`, and `gap` before `jump`."""
    if half == 0:
        low, others = begin + 2, seconds
        high, jump = low + min(firsts, seconds, firsts - 1), begin + 1 + firsts
        gap = seconds - max(firsts - 1, 0) if firsts <= seconds else 0
    else:
        low, others = begin + 1, firsts
        high, jump = low + min(firsts, seconds), low + seconds
        gap = max(firsts - seconds, 0)
    assert gap <= MOST_LEFT_OUT
    tiles, place = [], begin
    for own in range(begin, end - others):
        place += gap * (own == jump) + (low <= own < high)
        tiles.append(place)
        place += 1
    assert place == end, "both end where the job does"
    return tiles


def counted(lists: TileLists) -> Tensor:
    """How often each score counts: int `[mask_batch, mask_heads, q_len, kv_len]`."""
    columns = columns_of(lists)
    rows = -(-lists.q_len // 128) * 128
    times = torch.zeros(len(lists.item_ptr) - 1, rows, lists.kv_len, dtype=torch.int32)
    for pattern, (first, last) in enumerate(itertools.pairwise(lists.item_ptr.tolist())):
        for item in lists.items[first:last].tolist():
            row_block, begin, partial_end, end, *_, bitmap, other, firsts, seconds = item
            # Tiles that are left out lie between tiles with bits.
            assert begin < partial_end <= end
            assert not firsts + seconds or begin + 1 + firsts + seconds < partial_end
            for half, bitmap_of_first in ((0, bitmap), (1, other)):
                for number, tile in enumerate(walk(begin, end, firsts, seconds, half), begin):
                    kept = torch.ones(TILE, dtype=torch.bool)
                    if tile < partial_end:
                        assert number > begin or bitmap_of_first == int(lists.tile_bitmap[begin, half])
                        kept = keep_of(lists.bitmaps[int(lists.tile_bitmap[number, half])], 64)
                    row, column = kept.nonzero(as_tuple=True)
                    at = row_block * 128 + half * 64 + row, columns[tile][column]
                    inside = at[1] < lists.kv_len
                    ones = torch.ones(int(inside.sum()), dtype=torch.int32)
                    times[pattern].index_put_((at[0][inside], at[1][inside]), ones, accumulate=True)
    return times[lists.pattern_of.long(), : lists.q_len]


def check(layout: Layout, split_tiles: int) -> TileLists:
    lists = make_paired_lists(layout, split_tiles)
    tensors, sizes = lists.flatten()
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int32 for tensor in tensors)
    again = TileLists.unflatten(tensors, [int(size) for size in sizes])
    assert torch.equal(counted(again), layout.to_dense().int())
    tiles = int(lists.items[:, 3].max())
    assert len(lists.tile_columns) >= tiles + 1
    assert len(lists.tile_bitmap) >= tiles + 2
    return lists


@pytest.mark.parametrize("slab", [None, 16])
@pytest.mark.parametrize("name", GRID)
def test_grid_masks(name: str, slab: int | None) -> None:
    for length, split_tiles in ((1024, 0), (777, 0), (777, 4)):
        layout = grid_layout(name, length, slab, TILE)
        if not reads_unseen_keys(layout):
            check(layout, split_tiles)


@given(data=st.data(), slab=st.sampled_from([None, 16]), split_tiles=st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=60)
def test_random_masks(data: st.DataObject, slab: int | None, split_tiles: int) -> None:
    heads = data.draw(st.sampled_from([1, 2]))
    keep = data.draw(dense_masks(data.draw(st.sampled_from([1, 64, 130, 300])), 400, 1, heads))
    if data.draw(st.booleans()):
        # Whole slabs, with row blocks that have many tiles alone.
        blocks = torch.rand(1, heads, -(-keep.shape[2] // 64), 25, generator=torch.Generator().manual_seed(1)) > 0.6
        keep = keep & blocks.repeat_interleave(64, 2)[:, :, : keep.shape[2]].repeat_interleave(16, 3)
    layout = layout_of(keep, slab, TILE)
    if not reads_unseen_keys(layout):
        check(layout, split_tiles)


def test_keys_are_copied_once_and_little_is_computed_for_nothing() -> None:
    """Each row block computes its own tiles, filled up with slabs of both, and most copies serve both."""
    for name, most_copied, most_computed in (
        ("longformer", 0.7, 1.2),
        ("bigbird", 0.78, 1.12),
        ("window512", 0.56, 1.01),
    ):
        layout = grid_layout(name, 4096, 16, TILE)
        lists = make_paired_lists(layout)
        copies = lists.items[:, 3] - lists.items[:, 1]
        apart = lists.items[:, 9] + lists.items[:, 10]
        assert int((2 * copies - apart).sum()) <= most_computed * layout.tiles
        assert int(copies.sum()) <= most_copied * layout.tiles


def test_a_job_begins_with_a_tile_in_which_every_row_has_a_key() -> None:
    """Here every row block has such a tile: the global columns."""
    lists = make_paired_lists(grid_layout("longformer", 2048, 16, TILE))
    for half in (7, 8):
        first = lists.bitmaps[lists.items[:, half].long()]
        assert bool((first != 0).any(2).all())
    lists = make_tile_lists(grid_layout("longformer", 2048, 16, TILE))
    assert bool((lists.bitmaps[lists.items[:, 7].long()] != 0).any(2).all())


def test_jobs_say_what_row_blocks_have_alone() -> None:
    lists = make_paired_lists(grid_layout("bigbird", 2048, 16, TILE))
    jobs, starts = job_lists(lists, 2, 4, 16, 4)
    assert len(jobs) - 1 == 8 * len(lists.items)
    for job in (*jobs[:-1], *starts):
        (item,) = (one for one in lists.items if one[0] == job[0])
        assert job[3:6].tolist() == item[1:4].tolist()
        assert (job[10], job[11], job[13], job[14]) == (item[7], item[8], item[9], item[10])


@pytest.mark.parametrize("config", [(128, 128, None), (64, 64, 8), (64, 64, 1), (64, 128, 16)])
def test_refusals(config: tuple[int, int, int | None]) -> None:
    layout = build_layout(masks.causal(), 300, 300, LayoutConfig(*config))
    with pytest.raises(UnfitLayoutError, match="pairs of row blocks have tiles of 64 x 64"):
        make_paired_lists(layout)
    order = named_order("remainder 4", 512)
    permuted = build_layout(masks.dilated_window(500, dilation=4), 512, 512, LayoutConfig(64, 64, 16), row_order=order)
    with pytest.raises(UnfitLayoutError, match="in order"):
        make_paired_lists(permuted)
    nobody = torch.ones(1, 1, 100, 100, dtype=torch.bool)
    nobody[..., 50] = False
    with pytest.raises(UnfitLayoutError, match="no query sees"):
        make_paired_lists(build_layout(as_mask(nobody), 100, 100, LayoutConfig(64, 64, 16)))
