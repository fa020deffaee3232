"""Lists of the Hopper kernel made on the device: decoded again they are the mask, and the kernel's twin computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.dynamic.block_topk.bitmaps import kept_by_place
from stof.dynamic.block_topk.buffers import BlockBuffers, block_buffers
from stof.dynamic.sizes import DynamicSizes
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.forward import _refresh_launch
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.tile_lists import TileLists
from stof.kernels.hopper.tile_scheduler import WORK, WORK_SIZE, work_list
from stof.kernels.implementation import Options
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.dynamic import NOT_A_NUMBER, BlockTopK
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.kernels.test_hopper_jobs import counted
from tests.kernels.test_hopper_launch import Twin, twin

__all__ = ["twin"]

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="in Triton's interpreter; tests/gpu has the kernels themselves"
    ),
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

# Block size, rows and columns of a tile.
SHAPES = ((64, 64, 64), (64, 64, 128), (128, 64, 64), (128, 64, 128), (128, 128, 128))


def config_of(size: int, block_m: int, block_n: int) -> LayoutConfig:
    """Tiles of two blocks take them as slabs."""
    return LayoutConfig(block_m, block_n, 16 if block_n > size else None)


def buffers_of(mask: Mask, q_len: int, kv_len: int) -> BlockBuffers:
    assert isinstance(mask, BlockTopK)
    problem = DynamicSizes(q_len, kv_len, 64, 64, mask.batch, mask.heads)
    return block_buffers(problem, mask.k, mask.block_size, mask.causal, torch.device("cpu"))


def fill(buffers: BlockBuffers, mask: Mask) -> None:
    assert isinstance(mask, BlockTopK)
    buffers.fill(*mask.tensors())


def scores_of(generator: torch.Generator, *shape: int, textured: bool = False) -> Tensor:
    """Random scores; `textured` ones are often equal, or -inf, for whole rows too."""
    scores = torch.randn(*shape, generator=generator)
    if textured:
        scores = (scores * 1.5).round()
        scores = scores.masked_fill(scores.abs() > 1, -torch.inf)
    return scores


def now(lists: TileLists) -> TileLists:
    """The lists with items that say what the device found."""
    items = lists.items.clone()
    items[:, 1:4] = lists.ranges[:, :3]
    items[:, 7] = lists.ranges[:, 3]
    return replace(lists, items=items)


def assert_lists(lists: TileLists, mask: Mask) -> None:
    """Each kept score counts once, others never, and nothing is read that no query sees."""
    dense = mask.to_dense(lists.q_len, lists.kv_len)
    assert not bool(lists.ranges[:, 4].any())
    assert torch.equal(counted(now(lists), dense.flatten(0, 1).any(1)), dense.int())
    begin, partial_end, end, bitmap = (lists.ranges[:, n].long() for n in range(4))
    assert bool(((begin < end) & (begin <= partial_end) & (partial_end <= end)).all())
    # The kernel reads ahead: a tile, and the bitmaps of two.
    assert int(end.max()) + 1 <= len(lists.tile_columns)
    assert int(end.max()) + 2 <= len(lists.tile_bitmap)
    for numbers in (bitmap, lists.tile_bitmap):
        assert 0 <= int(numbers.min()) <= int(numbers.max()) < len(lists.bitmaps)


@given(data=st.data(), shape=st.sampled_from(SHAPES), causal=st.booleans(), split_tiles=st.sampled_from([0, 1, 2]))
@examples(25)
def test_every_kept_score_once(data: st.DataObject, shape: tuple[int, ...], causal: bool, split_tiles: int) -> None:
    size = shape[0]
    q_len = data.draw(st.sampled_from([1, 63, 64, 128, 300, 384]))
    kv_len = data.draw(st.sampled_from([1, 64, 100, 200, 256, 384]))
    leading = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows, columns = -(-q_len // size), -(-kv_len // size)
    k = data.draw(st.integers(1, columns))
    buffers = None
    for textured in data.draw(st.lists(st.booleans(), min_size=1, max_size=3)):  # nothing of earlier masks is left
        scores = scores_of(generator, *leading, rows, columns, textured=textured)
        mask = masks.block_topk(scores, k, block_size=size, causal=causal)
        if buffers is None:
            buffers = buffers_of(mask, q_len, kv_len)
            if buffers.hopper_refusals():
                with pytest.raises(UnfitLayoutError, match=f"keys past query {q_len - 1}, which no query sees"):
                    buffers.use_hopper(config_of(*shape), split_tiles, captured=False)
                return
            lists = buffers.use_hopper(config_of(*shape), split_tiles, captured=False)
        fill(buffers, mask)
        assert_lists(lists, mask)


def test_lists_first_used_after_an_update() -> None:
    """They are filled at once, and by updates from then on, or before each call where replays hold the updates."""
    generator = torch.Generator().manual_seed(0)
    given_masks = [masks.block_topk(scores_of(generator, 2, 5, 5), 2, causal=True) for _ in range(3)]
    for captured in (False, True):
        buffers = buffers_of(given_masks[0], 320, 320)
        fill(buffers, given_masks[0])
        lists = buffers.use_hopper(LayoutConfig(64, 64), 0, captured)
        assert_lists(lists, given_masks[0])
        before = lists.ranges.clone(), lists.tile_columns.clone()
        fill(buffers, given_masks[1])
        if captured:
            assert torch.equal(lists.ranges, before[0])
            assert torch.equal(lists.tile_columns, before[1])
            buffers.run_pending_fills()
        assert_lists(lists, given_masks[1])
        assert buffers.use_hopper(LayoutConfig(64, 64), 0, not captured) is lists
        fill(buffers, given_masks[2])
        buffers.run_pending_fills()
        assert_lists(lists, given_masks[2])
        assert buffers.bytes() > buffers.work.partial_columns.numel() * 4 + lists.tile_columns.numel() * 4


@pytest.mark.parametrize(("block_m", "block_n"), [(64, 64), (64, 128), (128, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_bitmaps(block_m: int, block_n: int, causal: bool) -> None:
    """Those of tiles at every place relative to a row block, against the rule itself."""
    for kv_len in (5 * block_n, 5 * block_n - 7):
        kept = kept_by_place(block_m, block_n, kv_len)
        assert kept.shape == (3 + 2 * (block_n // block_m), block_m, block_n)
        assert not bool(kept[0].any())
        last = 4 * block_n
        for q0 in range(last - block_n, last + block_n, block_m):
            for begin in (last - block_n, last):
                row, column = q0 + torch.arange(block_m)[:, None], begin + torch.arange(block_n)[None, :]
                if begin >= q0 + block_m:
                    continue
                place = (begin + block_n - q0) // block_m if causal and begin + block_n > q0 else 0
                tail = begin + block_n > kv_len
                expected = (column < kv_len) & (not causal or column <= row)
                assert torch.equal(kept[1 + 2 * place + tail], expected.expand(block_m, block_n))


def test_counts_say_what_there_is() -> None:
    """Where no score is -inf, jobs are dealt out by the tiles that there are."""
    generator = torch.Generator().manual_seed(0)
    for causal in (False, True):
        for config in (LayoutConfig(64, 64), LayoutConfig(64, 128, 16)):
            mask = masks.block_topk(scores_of(generator, 3, 8, 8), 3, causal=causal)
            buffers = buffers_of(mask, 512, 512)
            lists = buffers.use_hopper(config, 0, captured=False)
            fill(buffers, mask)
            counts = buffers.counts(config)
            assert torch.equal(
                (lists.ranges[:, 2] - lists.ranges[:, 0]).view(3, 8), (counts.partial + counts.full).int()
            )
            assert torch.equal(lists.items[:, 3] - lists.items[:, 1], lists.ranges[:, 2] - lists.ranges[:, 0])


@pytest.mark.parametrize("sizes", [(1, 2), (3, 4)])
@pytest.mark.parametrize("split_tiles", [0, 2])
def test_jobs_know_their_items(split_tiles: int, sizes: tuple[int, int]) -> None:
    """Of masks that several batch entries and heads share, too."""
    batch, heads = sizes
    mask = masks.block_topk(torch.randn(heads if batch == 1 else 1, 6, 6), 4)
    buffers = buffers_of(mask, 384, 384)
    lists = buffers.use_hopper(LayoutConfig(64, 64), split_tiles, captured=False)
    jobs = work_list(lists, batch, heads, 5, 1)
    item = lists.items[jobs[:-1, 14].long()]
    assert torch.equal(item[:, 0], jobs[:-1, 0])
    assert torch.equal(item[:, 6], jobs[:-1, 8])
    assert torch.equal(lists.item_ptr[jobs[:-1, 9].long()] <= jobs[:-1, 14], torch.ones(len(item), dtype=torch.bool))


def test_jobs_take_what_the_device_has_found() -> None:
    """With the columns of each job's first tile; and whatever is found, each has a tile to compute."""
    mask = masks.block_topk(torch.randn(2, 6, 6), 4, causal=True)
    buffers = buffers_of(mask, 384, 384)
    lists = buffers.use_hopper(LayoutConfig(64, 128, 16), 1, captured=False)
    fill(buffers, mask)
    jobs = work_list(lists, 1, 2, 7, 1)
    before = jobs.clone()
    _refresh_launch(jobs, lists)()
    found = lists.ranges[jobs[:-1, 14].long()]
    assert torch.equal(jobs[:-1, 3:6], found[:, :3])
    assert torch.equal(jobs[:-1, 10:12], found[:, 3:])
    assert torch.equal(jobs[:-1, WORK.columns : WORK.columns + 8], lists.tile_columns[jobs[:-1, 3].long()])
    same = [0, 1, 2, 6, 7, 8, 9, 12, 13, 14, 15, *range(WORK.columns + 8, WORK_SIZE)]
    assert torch.equal(jobs[:, same], before[:, same])
    assert torch.equal(jobs[-1], before[-1])
    lists.ranges[:, 1:3] = 0
    _refresh_launch(jobs, lists)()
    assert torch.equal(jobs[:-1, 5], jobs[:-1, 3] + 1)


def check_call(buffers: BlockBuffers, lists: TileLists, mask: Mask, split_tiles: int, batch: int = 1) -> None:
    """Two masks in turn through one bound call."""
    heads = buffers.problem.mask_heads * 2
    q, k, v = make_inputs(
        batch=batch,
        heads=heads,
        kv_heads=2,
        q_len=lists.q_len,
        kv_len=lists.kv_len,
        head_dim=64,
        dtype=torch.float16,
    ).qkv
    prepared = PreparedTiles(lists, KernelConfig(4, 2, split_tiles=split_tiles))
    hopper = IMPLEMENTATIONS["hopper"]
    call = hopper.bind(q, k, v, prepared, Options(0.125))
    for factor in (1, -1):
        assert isinstance(mask, BlockTopK)
        other = masks.block_topk(mask.scores * factor, mask.k, block_size=mask.block_size, causal=mask.causal)
        fill(buffers, other)
        keep = other.to_dense(lists.q_len, lists.kv_len)
        # What no query of any head sees may be anything.
        unseen = ~keep.flatten(0, 1).any((0, 1))
        stale = (x.masked_fill(unseen[:, None], torch.nan) for x in (k, v))
        out, lse = call(q, *stale, None, None)
        assert_attention(out, lse, q, k, v, keep)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_calls(twin: Twin, shape: tuple[int, ...], split_tiles: int) -> None:
    """One mask for a pair of heads and all batch entries, no mask of a whole number of tiles."""
    size = shape[0]
    generator = torch.Generator().manual_seed(1)
    for causal, q_len, kv_len in ((True, 300, 300), (False, 200, 333), (True, 256, 400)):
        rows, columns = -(-q_len // size), -(-kv_len // size)
        scores = scores_of(generator, 2, 1, rows, columns, textured=True)
        mask = masks.block_topk(scores, min(3, columns), block_size=size, causal=causal)
        buffers = buffers_of(mask, q_len, kv_len)
        lists = buffers.use_hopper(config_of(*shape), split_tiles, captured=False)
        check_call(buffers, lists, mask, split_tiles, batch=2)
    assert twin.constants["DYNAMIC"]


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("split_tiles", [0, 1])
def test_scores_that_are_not_numbers(split_tiles: int) -> None:
    """Rows of that head are NaN, all of them, and nothing else is."""
    scores = torch.randn(2, 4, 4)
    scores[1, 2, 3] = torch.nan
    mask = masks.block_topk(scores, 2, causal=True)
    buffers = buffers_of(mask, 256, 256)
    lists = buffers.use_hopper(LayoutConfig(64, 64), split_tiles, captured=False)
    q, k, v = make_inputs(heads=2, q_len=256, kv_len=256, head_dim=64, dtype=torch.float16).qkv
    prepared = PreparedTiles(lists, KernelConfig(4, 2, split_tiles=split_tiles))
    call = IMPLEMENTATIONS["hopper"].bind(q, k, v, prepared, Options(0.125))
    fill(buffers, mask)
    assert buffers.flags.tolist() == [0, NOT_A_NUMBER]
    out, lse = call(q, k, v, None, None)
    assert bool(out[:, 1].isnan().all())
    assert bool(lse[:, 1].isnan().all())
    keep = masks.block_topk(scores[:1], 2, causal=True).to_dense(256)
    assert_attention(out[:, :1], lse[:, :1], q[:, :1], k[:, :1], v[:, :1], keep)


def test_what_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    small = buffers_of(masks.block_topk(scores_of(generator, 4, 4), 2, block_size=32), 128, 128)
    with pytest.raises(UnfitLayoutError, match="takes blocks of 64 or 128 made at run time, not 32"):
        small.use_hopper(LayoutConfig(64, 64), 0, captured=False)
    buffers = buffers_of(masks.block_topk(scores_of(generator, 4, 4), 2), 256, 256)
    for config in (LayoutConfig(64, 128), LayoutConfig(128, 128), LayoutConfig(64, 64, 8), LayoutConfig(64, 128, 8)):
        with pytest.raises(UnfitLayoutError, match="does not fit masks like these"):
            buffers.use_hopper(config, 0, captured=False)
