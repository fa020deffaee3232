"""Row blocks in pairs: what each warpgroup walks through is its row block's mask, and little comes for nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.hopper.paired_tile_lists import MOST_SKIPPED, make_paired_lists
from stof.kernels.hopper.tile_lists import TileLists, make_tile_lists
from stof.kernels.hopper.tile_scheduler import WORK, work_list
from stof.kernels.implementation import tensors_of
from stof.kernels.packed_integers import pair_bitmap_row, pair_skipped
from stof.layout import Layout, build_layout
from stof.layout.orders.named import named_order
from stof.masks.tensors import as_mask
from tests.examples import examples
from tests.kernels.test_hopper_jobs import GRID, columns_of, grid_layout, keep_of, layout_of, reads_unseen_keys
from tests.strategies import dense_masks

TILE = (64, 64)


def walk(tile_bitmap: Tensor, begin: int, end: int, left_out: int, member: int) -> list[tuple[int, int]]:
    """The job's tiles that one of its warpgroups computes, in order, as the kernel finds them, and their bitmaps."""
    tiles, place = [], begin
    for own in range(begin, end - left_out):
        entry = int(tile_bitmap[own, member])
        gap, number = pair_skipped(entry), pair_bitmap_row(entry)
        # Nothing is left out before the first, which goes on with what the job before has left.
        assert gap <= MOST_SKIPPED * (own > begin)
        place += gap
        tiles.append((place, number))
        place += 1
    assert place == end, "all end where the job does"
    return tiles


def counted(lists: TileLists) -> Tensor:
    """How often each score counts: int `[mask_batch, mask_heads, q_len, kv_len]`."""
    columns = columns_of(lists)
    rows = -(-lists.q_len // lists.block_m) * lists.block_m
    times = torch.zeros(len(lists.item_ptr) - 1, rows, lists.kv_len, dtype=torch.int32)
    for pattern, (first, last) in enumerate(itertools.pairwise(lists.item_ptr.tolist())):
        for item in lists.items[first:last].tolist():
            job, begin, partial_end, end, parts = item[:5]
            bitmaps, left_out = item[7:9], item[9:]
            assert begin < partial_end <= end
            assert parts == 1
            for member in range(2):
                walked = walk(lists.tile_bitmap, begin, end, left_out[member], member)
                assert bitmaps[member] == walked[0][1]
                # From the last tile with bits on all compute everything.
                with_bits = partial_end - left_out[member] - begin
                assert with_bits > 0
                assert [tile for tile, _ in walked[with_bits - 1 :]] == list(range(partial_end - 1, end))
                for number, (tile, bitmap) in enumerate(walked, begin):
                    kept = torch.ones(TILE, dtype=torch.bool)
                    if number < begin + with_bits:
                        kept = keep_of(lists.bitmaps[bitmap], 64)
                    row, column = kept.nonzero(as_tuple=True)
                    at = (2 * job + member) * 64 + row, columns[tile][column]
                    inside = at[1] < lists.kv_len
                    ones = torch.ones(int(inside.sum()), dtype=torch.int32)
                    times[pattern].index_put_((at[0][inside], at[1][inside]), ones, accumulate=True)
    return times[lists.pattern_of.long(), : lists.q_len]


def check(layout: Layout) -> TileLists:
    lists = make_paired_lists(layout)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int32 for tensor in tensors_of(lists))
    assert torch.equal(counted(lists), layout.to_dense().int())
    tiles = int(lists.items[:, 3].max())
    assert len(lists.tile_columns) >= tiles + 1
    assert len(lists.tile_bitmap) >= tiles + 2
    return lists


@pytest.mark.parametrize("slab", [None, 16])
@pytest.mark.parametrize("name", GRID)
def test_grid_masks(name: str, slab: int | None) -> None:
    for length in (1024, 777):
        layout = grid_layout(name, length, slab, TILE)
        if not reads_unseen_keys(layout):
            check(layout)


@given(data=st.data(), slab=st.sampled_from([None, 16]))
@examples(80)
def test_random_masks(data: st.DataObject, slab: int | None) -> None:
    heads = data.draw(st.sampled_from([1, 2]))
    keep = data.draw(dense_masks(data.draw(st.sampled_from([1, 64, 130, 300])), 400, 1, heads))
    if data.draw(st.booleans()):
        # Whole slabs, with row blocks that have many tiles alone.
        share = data.draw(st.sampled_from([0.1, 0.4, 0.9]))
        seeded = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
        blocks = torch.rand(1, heads, -(-keep.shape[2] // 64), 25, generator=seeded) < share
        keep = keep & blocks.repeat_interleave(64, 2)[:, :, : keep.shape[2]].repeat_interleave(16, 3)
    layout = layout_of(keep, slab, TILE)
    if not reads_unseen_keys(layout):
        check(layout)


@pytest.mark.parametrize(
    ("name", "most_copied", "most_computed"),
    [("longformer", 0.7, 1.06), ("bigbird", 0.78, 1.04), ("window512", 0.56, 1.01)],
)
def test_keys_are_copied_once(name: str, most_copied: float, most_computed: float) -> None:
    """Each row block computes its own tiles, filled up with slabs of both, and most copies serve both."""
    layout = grid_layout(name, 4096, 16, TILE)
    lists = make_paired_lists(layout)
    copies = int((lists.items[:, 3] - lists.items[:, 1]).sum())
    assert copies <= most_copied * layout.tiles
    assert 2 * copies - int(lists.items[:, 9:].sum()) <= most_computed * layout.tiles


def test_a_job_begins_with_a_tile_in_which_every_row_has_a_key() -> None:
    """Here every row block has such a tile: the global columns."""
    lists = make_paired_lists(grid_layout("longformer", 64 * 30, 16, TILE))
    first = lists.bitmaps[lists.items[:, 7:9].long()]
    assert bool((first != 0).any(3).all())
    lists = make_tile_lists(grid_layout("longformer", 2048, 16, TILE))
    assert bool((lists.bitmaps[lists.items[:, 7].long()] != 0).any(2).all())


def test_jobs_say_what_row_blocks_leave_out() -> None:
    lists = make_paired_lists(grid_layout("bigbird", 2048, 16, TILE))
    jobs = work_list(lists, 2, 4, 16, 4)
    assert len(jobs) - 1 == 8 * len(lists.items)
    for job in jobs[:-1]:
        (item,) = (one for one in lists.items if one[0] == job[0])
        assert job[3:6].tolist() == item[1:4].tolist()
        assert torch.equal(job[WORK.pair_bitmap : WORK.pair_bitmap + 2], item[7:9])
        assert torch.equal(job[WORK.pair_skipped : WORK.pair_skipped + 2], item[9:])


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
