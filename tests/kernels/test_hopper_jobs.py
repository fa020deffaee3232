"""Lists of the Hopper kernel: decoded again without the kernel, they are the layout's mask, each job dealt once."""

from __future__ import annotations

import collections
import heapq
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.hopper.config import RUN
from stof.kernels.hopper.paired_tile_lists import make_paired_lists
from stof.kernels.hopper.tile_lists import TileLists, make_tile_lists
from stof.kernels.hopper.tile_scheduler import LATE, WORK, WORK_SIZE, chunk_slots, work_costs, work_list
from stof.kernels.implementation import tensors_of
from stof.kernels.packed_integers import compacted_position, run_column
from stof.layout import Layout, build_layout
from stof.layout.orders.named import named_order
from stof.masks.tensors import as_mask
from stof.testing.mask_grid import grid_mask
from tests.examples import examples
from tests.strategies import dense_masks

GRID = ("full", "causal", "window512", "longformer", "bigbird", "strided", "dilated")
EVEN = LayoutConfig(128, 128, 1)
# Rows of one, two and three warpgroups, and columns.
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128))


def layout_of(keep: Tensor, slab: int | None, tile: tuple[int, int] = (128, 128), **options: Any) -> Layout:
    batch, heads, q_len, kv_len = keep.shape
    config = LayoutConfig(*tile, slab)
    return build_layout(as_mask(keep), q_len, kv_len, config, batch=batch, heads=heads, **options)


def grid_layout(name: str, length: int, slab: int | None, tile: tuple[int, int] = (128, 128)) -> Layout:
    return build_layout(grid_mask(name).mask(length), length, length, LayoutConfig(*tile, slab))


def even_layout(length: int, stride: int = 16, tile: tuple[int, int] = (128, 128)) -> Layout:
    """A dilated mask with like rows side by side: rows and columns at one distance."""
    mask, config = masks.dilated_window(900, dilation=stride), LayoutConfig(*tile, 1)
    return build_layout(mask, length, length, config, row_order=named_order(f"remainder {stride}", length))


def columns_of(lists: TileLists, b: int = 0, h: int = 0) -> Tensor:
    """Key column of each column of each tile `[T + 2, block_n]`, at or past `kv_len` where TMA fills in zeros.

    Where columns are compacted, those of the tiles of one batch entry and head.
    """
    records = lists.tile_columns.long()
    if lists.compacted_keys.numel():
        assert lists.slab == lists.block_n
        compacted = lists.compacted_keys.expand(*lists.pattern_of.shape, -1)[b, h].long()
        compacted = torch.where(compacted < 0, lists.kv_len, compacted)
        place = compacted_position(records) + torch.arange(lists.block_n)
        return torch.where(
            place < 0, records + torch.arange(lists.block_n), compacted[place.clamp(0, len(compacted) - 1)]
        )
    if lists.slab == 0:
        assert records.shape[1] == 1
        return records + lists.column_step * torch.arange(lists.block_n)
    out = torch.full((len(records), lists.block_n), -1)
    slabs = lists.block_n // lists.slab
    assert records.shape[1] == slabs
    for start in range(0, slabs, RUN // lists.slab):
        # Half a tile: one copy of a run, or a copy of each slab.
        first, place = records[:, start], start * lists.slab
        run = run_column(first)[:, None] + torch.arange(RUN)
        each = (records[:, start : start + RUN // lists.slab, None] + torch.arange(lists.slab)).flatten(1)
        out[:, place : place + RUN] = torch.where(first[:, None] < 0, run, each)
    assert bool((out >= 0).all())
    return out


def keep_of(words: Tensor, block_n: int) -> Tensor:
    """Bool `[block_m, block_n]` of words `[block_m, 4]` in the accumulator's order."""
    column = torch.arange(block_n)
    at = torch.div(column % 8, 2, rounding_mode="floor")
    shift = 2 * torch.div(column, 8, rounding_mode="floor") + column % 2
    return ((words[:, at] >> shift) & 1).bool()


def rows_of(lists: TileLists) -> Tensor:
    """Original row at each position, as TMA copies them: residue after residue."""
    return torch.arange(lists.q_len).view(-1, lists.row_step).T.flatten()


def seen_keys(layout: Layout) -> Tensor:
    """Bool `[P, kv_len]`: keys that some query of a pattern sees."""
    seen = torch.zeros(layout.patterns, layout.kv_len, dtype=torch.bool)
    seen[layout.pattern_of.long()] = layout.to_dense().any(2)
    return seen


def counted(lists: TileLists, seen: Tensor) -> Tensor:
    """How often each score counts: int `[mask_batch, mask_heads, q_len, kv_len]`; `seen` as `seen_keys` gives it."""
    rows = rows_of(lists)
    times = torch.zeros(len(lists.item_ptr) - 1, lists.q_len, lists.kv_len, dtype=torch.int32)
    for pattern, (first, last) in enumerate(itertools.pairwise(lists.item_ptr.tolist())):
        b, h = (lists.pattern_of == pattern).nonzero()[0].tolist()
        columns = columns_of(lists, b, h)
        for row_block, begin, partial_end, end, *_, bitmap in lists.items[first:last].tolist():
            mine = rows[row_block * lists.block_m : (row_block + 1) * lists.block_m]
            assert begin < end, "a job computes one tile at least"
            for tile in range(begin, end):
                read = columns[tile][columns[tile] < lists.kv_len]
                assert bool(seen[pattern, read].all()), "0 * NaN is NaN: what nobody sees may not be read"
                kept = torch.ones(len(mine), lists.block_n, dtype=torch.bool)
                if tile < partial_end:
                    # The bitmap of an item's first tile comes with the item.
                    number = bitmap if tile == begin else int(lists.tile_bitmap[tile])
                    kept = keep_of(lists.bitmaps[number], lists.block_n)[: len(mine)]
                row, column = kept.nonzero(as_tuple=True)
                at = (mine[row], columns[tile][column])
                times[pattern].index_put_(at, torch.ones_like(row, dtype=torch.int32), accumulate=True)
    return times[lists.pattern_of.long()]


def reads_unseen_keys(layout: Layout) -> bool:
    """Whether some tile, or a slab of one, holds a key that no query of its pattern sees."""
    columns = layout.tile_columns()
    pattern = torch.div(layout.tile_row_block(), layout.row_blocks, rounding_mode="floor")
    return bool(((columns >= 0) & ~seen_keys(layout)[pattern[:, None], columns.clamp(min=0)]).any())


def check_lists(layout: Layout, split_tiles: int) -> TileLists | None:
    """The lists of a layout, or None where its tiles cannot be read without keys that no query sees."""
    if reads_unseen_keys(layout):
        with pytest.raises(UnfitLayoutError, match="its tiles hold keys that no query sees, whose values may be anyth"):
            make_tile_lists(layout, split_tiles)
        return None
    lists = make_tile_lists(layout, split_tiles)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int32 for tensor in tensors_of(lists))
    assert torch.equal(counted(lists, seen_keys(layout)), layout.to_dense().int())
    # The kernel reads ahead: a tile, and the bitmaps of two.
    tiles = int(lists.items[:, 3].max())
    assert len(lists.tile_columns) >= tiles + 1
    assert len(lists.tile_bitmap) >= tiles + 2
    assert 0 <= int(lists.tile_bitmap.min()) <= int(lists.tile_bitmap.max()) < len(lists.bitmaps)
    check_items(lists, layout, split_tiles)
    return lists


def check_items(lists: TileLists, layout: Layout, split_tiles: int) -> None:
    """Chunks of a row block complete, equal to within a tile, with slots of their own."""
    tiles = layout.row_block_ptr.diff().view(layout.patterns, layout.row_blocks)
    chunks = [0]
    for pattern, (first, last) in enumerate(itertools.pairwise(lists.item_ptr.tolist())):
        items = lists.items[first:last].tolist()
        slots: list[int] = []
        for row_block in range(layout.row_blocks):
            count = int(tiles[pattern, row_block])
            wanted = max(1, -(-count // split_tiles)) if split_tiles else 1
            mine = [item for item in items if item[0] == row_block]
            lengths = [item[3] - item[1] for item in mine]
            assert sum(lengths) == max(1, count)
            assert max(lengths) - min(lengths) <= 1
            assert sorted(item[6] for item in mine) == list(range(wanted))
            assert {item[4] for item in mine} == {wanted}
            if wanted > 1:
                assert len({item[5] for item in mine}) == 1
                slots += range(mine[0][5], mine[0][5] + wanted)
        assert sorted(slots) == list(range(len(slots)))
        chunks.append(len(slots))
    assert lists.chunks == max(chunks)
    assert bool(lists.has_full) == any(item[2] < item[3] for item in lists.items.tolist())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("split_tiles", [0, 1, 3])
@pytest.mark.parametrize("slab", [None, 16, 8])
@pytest.mark.parametrize("name", GRID)
def test_grid_masks(name: str, slab: int | None, split_tiles: int) -> None:
    for length, tile in ((1280, (128, 128)), (1000, (192, 128)), (1000, (64, 64))):
        lists = check_lists(grid_layout(name, length, slab, tile), split_tiles)
        assert lists is not None
        assert (lists.row_step, lists.column_step) == (1, 1)


@pytest.mark.parametrize("split_tiles", [0, 1, 3])
def test_evenly_spaced_rows_and_columns(split_tiles: int) -> None:
    for length, stride, tile in (
        (2048, 16, (128, 128)),
        (1280, 5, (128, 128)),
        (384, 1, (128, 128)),
        (960, 5, (192, 128)),
        (320, 1, (192, 128)),
        (960, 5, (64, 128)),
        (320, 5, (64, 64)),
    ):
        lists = check_lists(even_layout(length, stride, tile), split_tiles)
        assert lists is not None
        assert (lists.slab, lists.row_step, lists.column_step) == (0, stride, stride)
        assert torch.equal(lists.row_order[0].long(), rows_of(lists))


def test_rows_of_several_remainders() -> None:
    """A row block may hold some of each where all see the same keys, but not where their columns differ."""
    order = named_order("remainder 2", 640)
    same = build_layout(masks.full(), 640, 640, LayoutConfig(192, 128, 1), row_order=order)
    lists = check_lists(same, 2)
    assert lists is not None
    assert (lists.row_step, lists.column_step) == (2, 1)
    with pytest.raises(UnfitLayoutError, match="not evenly spaced"):
        make_tile_lists(even_layout(640, 2, (192, 128)))


@given(
    data=st.data(),
    slab=st.sampled_from([None, 8, 16]),
    split_tiles=st.sampled_from([0, 1, 2]),
    tile=st.sampled_from(TILES),
)
@examples(60)
def test_every_kept_score_once(data: st.DataObject, slab: int | None, split_tiles: int, tile: tuple[int, int]) -> None:
    q_len = data.draw(st.sampled_from([1, 64, 128, 130, 193, 300]))
    kv_len = data.draw(st.sampled_from([1, 15, 128, 129, 500]))
    keep = data.draw(dense_masks(q_len, kv_len, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))))
    check_lists(layout_of(keep, slab, tile), split_tiles)


@given(
    stride=st.sampled_from([1, 2, 3, 7]),
    texture=st.sampled_from(["random", "band", "empty", "full"]),
    tile=st.sampled_from(TILES),
)
@examples(20)
def test_evenly_spaced_masks(stride: int, texture: str, tile: tuple[int, int]) -> None:
    """Rows see keys of their own remainder only."""
    length = tile[0] * stride
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
    like = (rows - columns) % stride == 0
    keep = {
        "random": like & (torch.rand(length, 1) < 0.7),
        "band": like & ((rows - columns).abs() < 40 * stride),
        "empty": like & False,
        "full": like,
    }[texture]
    order = named_order(f"remainder {stride}", length)
    check_lists(layout_of(keep[None, None], 1, tile, row_order=order), 1)


def test_runs_are_copied_at_once() -> None:
    """Among slabs, half a tile of columns that follow each other is one copy; slots left over repeat the first ones."""
    keep = torch.zeros(1, 1, 128, 1024, dtype=torch.bool)
    keep[..., :128] = True  # a full tile
    keep[..., 3, 512:576] = True
    keep[..., 5, 704:720] = True
    for slab in (8, 16):
        lists = make_tile_lists(layout_of(keep, slab))
        assert lists.slab == slab
        halves = lists.tile_columns[:2].unflatten(1, (2, -1))
        assert halves[..., 0].tolist() == [[-1 - 512, 704], [-1, -1 - 64]]
        assert columns_of(lists)[0].tolist() == [*range(512, 576), *range(704, 720), *range(512, 560)]


def test_keys_that_no_query_sees() -> None:
    """Slabs leave out what tiles of 128 would read, where they hold no such keys themselves."""
    keep = masks.causal().to_dense(300).clone()
    keep[..., 192:256] = False
    assert check_lists(layout_of(keep, None), 0) is None
    assert check_lists(layout_of(keep, 16), 0) is not None
    keep[..., 190] = False
    assert check_lists(layout_of(keep, 8), 0) is None
    # The keys of a head count, whatever others see.
    both = torch.cat([keep, keep | True], 1)
    assert check_lists(layout_of(both, 8), 0) is None


def test_without_slabs_whole_tiles_are_copied() -> None:
    """Gathering that gathers nothing is not paid for."""
    lists = make_tile_lists(grid_layout("causal", 1024, 16))
    assert lists.slab == 0
    assert lists.tile_columns.shape[1] == 1


@pytest.mark.parametrize("slab", [None, 8, 1])
def test_row_blocks_without_tiles(slab: int | None) -> None:
    """They get a tile all the same, which keeps nothing and reads nothing that is not seen."""
    keep = torch.zeros(1, 3, 600, 200, dtype=torch.bool)
    keep[0, 1, 200:250] = True
    keep[0, 2, 200:250, 128:] = True
    for kept in (keep, keep[:, :2], keep[:, 1:], keep[:, :1]):
        lists = check_lists(layout_of(kept, slab), 1)
        assert lists is not None
        tiles = [item[2] - item[1] for item in lists.items.tolist() if item[0] != 1]
        assert set(tiles) == {1}, "partial: all its scores are masked"
        assert not lists.has_full


@pytest.mark.parametrize(
    ("keep", "order", "reason"),
    [
        (masks.dilated_window(500, dilation=16) | masks.global_tokens(3), "remainder 16", "not evenly spaced"),
        (masks.dilated_window(500, dilation=3), "remainder 16", "not evenly spaced"),
        (masks.strided(64, 64, 8), None, "not evenly spaced"),
        (masks.dilated_window(500, dilation=16), "patch 64 16 8 8", "rows are not in an order"),
        (masks.full(), "remainder 32", "rows are not in an order"),  # 32 rows of a remainder: half a box
    ],
)
def test_layouts_that_cannot_be_copied(keep: Any, order: str | None, reason: str) -> None:
    row_order = None if order is None else named_order(order, 1024)
    layout = build_layout(keep, 1024, 1024, EVEN, row_order=row_order)
    with pytest.raises(UnfitLayoutError, match=reason):
        make_tile_lists(layout)


def test_lengths_that_do_not_divide() -> None:
    mask = masks.dilated_window(500, dilation=16)
    layout = build_layout(mask, 2048, 2054, EVEN, row_order=named_order("remainder 16", 2048))
    with pytest.raises(UnfitLayoutError, match="2054 keys do not divide by the distance of columns, 16"):
        make_tile_lists(layout)
    layout = build_layout(masks.full(), 1000, 1008, EVEN, row_order=named_order("remainder 16", 1000))
    with pytest.raises(UnfitLayoutError, match="rows are not in an order that TMA can copy"):
        make_tile_lists(layout)


def costs(jobs: Tensor, lists: TileLists) -> Tensor:
    return work_costs(jobs[:, 0].long(), jobs[:, 3:6].long(), lists).double()


def joined(jobs: Tensor, lists: TileLists, slots: int) -> list[list[int]]:
    """Jobs without the chunks that the last ones were cut into, whose slots come from `slots` on: whole again."""
    whole, chunks = [], collections.defaultdict(list)
    for job in jobs.tolist():
        (chunks[job[7]] if job[6] > 1 and job[7] >= slots else whole).append(job)
    for slot, mine in chunks.items():
        mine.sort(key=lambda job: int(job[8]))
        assert [job[8] for job in mine] == list(range(mine[0][6]))
        assert len({(*job[:3], job[6], job[9]) for job in mine}) == 1
        partial = sum(job[4] - job[3] for job in mine)
        for job, following in itertools.pairwise(mine):
            assert job[5] == following[3]
            assert job[4] == job[5] or following[3] == following[4], "partial tiles come first"
        assert all(job[3] < job[5] and job[10] == int(lists.tile_bitmap[job[3]]) for job in mine)
        first, last = mine[0], mine[-1]
        whole.append([*first[:4], first[3] + partial, last[5], 1, slot, 0, *first[9:]])
    return whole


def check_jobs(lists: TileLists, batch: int, heads: int, blocks: int, heads_at_once: int) -> Tensor:
    """Every item of every batch entry and head once; returns when thread blocks are done, in full tiles."""
    padded = work_list(lists, batch, heads, blocks, heads_at_once)
    assert padded.dtype == torch.int32
    check_lines(padded, lists)
    jobs = padded[:-1, : WORK.columns]
    pattern_of = lists.pattern_of.expand(batch, heads)
    wanted = []
    for b, h in itertools.product(range(batch), range(heads)):
        pattern = int(pattern_of[b, h])
        for item in lists.items[lists.item_ptr[pattern] : lists.item_ptr[pattern + 1]].tolist():
            wanted.append((b, h, pattern, *item[:5], item[6], item[7]))
    found = []
    for job in joined(jobs, lists, batch * heads * lists.chunks):
        row_block, b, h, begin, partial_end, end, parts, _, chunk, pattern, bitmap, nan_bits, _, *rest = job
        found.append((b, h, pattern, row_block, begin, partial_end, end, parts, chunk, bitmap))
        assert not any((nan_bits, *rest))
    assert sorted(found) == sorted(wanted)
    slots = {(slot, parts, b, h, row) for row, b, h, _, _, _, parts, slot, *_ in jobs.tolist() if parts > 1}
    taken = [place for slot, parts, *_ in slots for place in range(slot, slot + parts)]
    assert len(set(taken)) == len(taken)
    assert all(0 <= place < chunk_slots(padded) for place in taken)
    done = [0.0] * blocks
    for cost in costs(jobs, lists).tolist():
        heapq.heapreplace(done, done[0] + cost)
    return torch.tensor(done, dtype=torch.float64)


def check_lines(padded: Tensor, lists: TileLists) -> None:
    """Each job's says how many there are, and the columns of its first tile, which is copied at once."""
    assert padded.shape[1] == WORK_SIZE
    assert not bool(padded[-1].any())
    jobs = padded[:-1]
    assert bool((jobs[:, WORK.work_count] == len(jobs)).all())
    columns = lists.tile_columns[jobs[:, 3].long()]
    end = WORK.columns + columns.shape[1]
    assert torch.equal(jobs[:, WORK.columns : end], columns)
    assert not bool(jobs[:, end:].any())


@pytest.mark.parametrize("slab", [None, 16, 8])
def test_no_thread_blocks_without_jobs(slab: int | None) -> None:
    lists = make_tile_lists(grid_layout("strided", 512, slab, (192, 128)), 1)
    padded = work_list(lists, 1, 1, 132, 1)
    assert 3 < len(padded) - 1 < 132
    assert bool(lists.slab) == (slab is not None)
    check_lines(padded, lists)


@pytest.mark.parametrize("paired", [False, True])
def test_jobs_are_made_on_the_host(paired: bool) -> None:
    """Also where another device is the default one, as `torch.set_default_device("cuda")` makes it."""
    layout = grid_layout("longformer", 2048, None, (64, 64))
    lists = make_paired_lists(layout) if paired else make_tile_lists(layout, 2)
    expected = work_list(lists, 2, 12, 132, 4)
    with torch.device("meta"):
        found = work_list(lists, 2, 12, 132, 4)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tile", [(128, 128), (192, 128)])
@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("name", GRID)
def test_jobs_of_grid_masks(name: str, split_tiles: int, tile: tuple[int, int]) -> None:
    lists = make_tile_lists(grid_layout(name, 2048, None, tile), split_tiles)
    for batch, heads, heads_at_once in ((1, 1, 1), (2, 12, 1), (2, 12, 4), (3, 16, 48)):
        loads = check_jobs(lists, batch, heads, 132, heads_at_once)
        longest = float(costs(work_list(lists, batch, heads, 132, heads_at_once)[:-1], lists).max())
        # Whoever is done takes the next, so no two thread blocks are further apart than one job.
        assert float(loads.max() - loads.min()) <= longest + 1e-6
    # With all heads at once, longest first: what is left over at the end is short.
    loads = check_jobs(lists, 4, 32, 132, 128)
    assert float(loads.max()) <= 1.05 * float(loads.mean())


@given(data=st.data(), split_tiles=st.sampled_from([0, 1, 2]), blocks=st.sampled_from([1, 7, 132]))
@examples(40)
def test_jobs_of_random_masks(data: st.DataObject, split_tiles: int, blocks: int) -> None:
    batch, heads = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]))
    keep = data.draw(dense_masks(data.draw(st.sampled_from([1, 130, 300])), 400, batch, heads))
    layout = layout_of(keep, data.draw(st.sampled_from([None, 8])), data.draw(st.sampled_from(TILES)))
    assume(not reads_unseen_keys(layout))
    lists = make_tile_lists(layout, split_tiles)
    times = data.draw(st.sampled_from([1, 2]))  # masks that are the same in every batch entry or head
    sizes = (batch if batch > 1 else times, heads if heads > 1 else 2 * times)
    loads = check_jobs(lists, *sizes, blocks, data.draw(st.integers(1, sizes[0] * sizes[1])))
    jobs = costs(work_list(lists, *sizes, blocks, 1)[:-1], lists)
    assert float(loads.sum()) == pytest.approx(float(jobs.sum()))
    assert float(loads.max()) <= float(loads.mean()) + float(jobs.max()) + 1e-6


def test_heads_side_by_side() -> None:
    """Jobs come by groups of heads, longest first; but what would stick out at the end comes before all others."""
    lists = make_tile_lists(grid_layout("longformer", 2048, None))
    heads, heads_at_once, blocks = 24, 4, 16
    jobs = work_list(lists, 1, heads, blocks, heads_at_once)[:-1]
    cost = costs(jobs, lists)
    share = cost.sum() / blocks
    group = torch.div(jobs[:, 2], heads_at_once, rounding_mode="floor")
    # When the first of each group of heads starts, if whoever is done takes the next.
    start = torch.stack([cost[group < number].sum() for number in range(heads // heads_at_once)]) / blocks
    large = (cost > share / 8) & (start[group] + LATE * cost > share)
    assert 0 < int(large.sum()) < int((cost > share / 8).sum())
    group[large] = -1
    assert torch.equal(group, group.sort().values)
    for number in group.unique():
        assert torch.equal(cost[group == number], cost[group == number].sort(descending=True).values)


def random_keep(density: float, length: int = 1024) -> Tensor:
    return torch.rand(length, length, generator=torch.Generator().manual_seed(0)) < density


@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 128), (192, 128)])
def test_items_without_full_tiles_begin_where_most_rows_have_a_key(tile: tuple[int, int]) -> None:
    """A window with few scattered keys: no row meets its first key later."""
    window = masks.sliding_window(70, 70).to_dense(1024, 1024)[0, 0]
    layout = build_layout(as_mask(window & random_keep(0.9) | random_keep(0.005)), 1024, 1024, LayoutConfig(*tile))
    lists = check_lists(layout, 0)
    assert lists is not None
    assert not lists.has_full
    covered = (lists.bitmaps != 0).any(2).sum(1)[lists.tile_bitmap.long()]
    for item in lists.items.tolist():
        assert covered[item[1]] == covered[item[1] : item[3]].max()
    assert lists.exact_tiles == 1


@pytest.mark.parametrize(
    ("keep", "exact"),
    [
        (random_keep(0.3), 1),  # every row has a key in the first tile
        (random_keep(0.02), 2),  # 8 % of the rows have their first key in the second
        (random_keep(0.007), 4),
        (random_keep(0.01) | (torch.arange(1024) == 0), 1),  # all in the first
        (random_keep(0.01)[:, :128], 1),  # there is no second
        (torch.zeros(256, 256, dtype=torch.bool), 1),
        (random_keep(0.01) | torch.ones(1024, 1).bool() * (torch.arange(1024) >= 896), 1),  # full tiles
    ],
)
def test_tiles_in_which_rows_find_their_first_keys(keep: Tensor, exact: int) -> None:
    q_len, kv_len = keep.shape
    for tile in ((128, 128), (192, 128), (64, 128)):
        lists = make_tile_lists(build_layout(as_mask(keep), q_len, kv_len, LayoutConfig(*tile)), zero_unseen=True)
        assert lists.exact_tiles == exact
