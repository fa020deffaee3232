"""Vertical columns and slash distances on the Hopper kernel: lists made on the device, calls by the kernel's twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.dynamic.mask_buffers import core_of
from stof.dynamic.sizes import DynamicSizes
from stof.dynamic.vertical_slash.buffers import SlashBuffers, vertical_slash_buffers
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.hopper.tile_lists import TileLists
from stof.kernels.implementation import Options, attend_once
from stof.kernels.packed_integers import compacted_position, is_compacted
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.dynamic import NOT_ASCENDING, OUT_OF_RANGE, VerticalSlash
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.kernels.test_hopper_jobs import keep_of
from tests.kernels.test_hopper_launch import Twin, twin
from tests.kernels.test_hopper_runtime import now

__all__ = ["twin"]

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="in Triton's interpreter; tests/gpu has the kernels themselves"
    ),
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

TILE = LayoutConfig(64, 64)


def parts_of(mask: Mask) -> tuple[VerticalSlash, int]:
    core, offset = core_of(mask)
    assert isinstance(core, VerticalSlash)
    return core, offset


def buffers_of(mask: Mask, q_len: int, kv_len: int | None = None) -> SlashBuffers:
    core, offset = parts_of(mask)
    problem = DynamicSizes(q_len, q_len + offset if kv_len is None else kv_len, 64, 64, core.batch, core.heads)
    vertical, slash = core.tensors()
    return vertical_slash_buffers(problem, vertical.shape[-1], slash.shape[-1], offset, torch.device("cpu"))


def fill(buffers: SlashBuffers, mask: Mask) -> None:
    buffers.fill(*parts_of(mask)[0].tensors())


def counted(lists: TileLists, seen: Tensor) -> Tensor:
    """How often each score counts, `[mask_batch, mask_heads, q_len, kv_len]`; `seen` bool `[P, kv_len]`."""
    patterns = len(lists.item_ptr) - 1
    times = torch.zeros(patterns, lists.q_len, lists.kv_len + 1, dtype=torch.int32)
    compacted = lists.compacted_keys.expand(*lists.pattern_of.shape, -1).flatten(0, 1)
    for pattern in range(patterns):
        first, last = lists.item_ptr[pattern : pattern + 2].tolist()
        for row_block, begin, partial_end, end, _, _, _, bitmap in lists.items[first:last].tolist():
            assert begin < end == partial_end
            for tile in range(begin, end):
                start = int(lists.tile_columns[tile])
                columns = torch.arange(start, start + 64)
                if is_compacted(start):
                    columns = compacted[pattern, compacted_position(start) :][:64].long()
                read = columns[(columns >= 0) & (columns < lists.kv_len)]
                assert bool(seen[pattern, read].all()), "0 * NaN is NaN: what nobody sees may not be read"
                keep = keep_of(lists.bitmaps[bitmap if tile == begin else int(lists.tile_bitmap[tile])], 64)
                # Places of no key are read as zeros: none of their scores may count.
                assert not bool(keep[:, (columns < 0) | (columns >= lists.kv_len)].any())
                row, column = keep.nonzero(as_tuple=True)
                at = (row_block * 64 + row, columns[column])
                times[pattern].index_put_(at, torch.ones_like(row, dtype=torch.int32), accumulate=True)
    return times[lists.pattern_of.long()][..., :-1]


def assert_lists(lists: TileLists, mask: Mask) -> None:
    dense = mask.to_dense(lists.q_len, lists.kv_len)
    assert not bool(lists.ranges[:, 4].any())
    assert torch.equal(counted(now(lists), dense.flatten(0, 1).any(1)), dense.int())
    end = int(lists.ranges[:, 2].max())
    assert end + 1 <= len(lists.tile_columns)
    assert end + 2 <= len(lists.tile_bitmap)
    for numbers in (lists.ranges[:, 3], lists.tile_bitmap):
        assert 0 <= int(numbers.min()) <= int(numbers.max()) < len(lists.bitmaps)


def indices(draw: st.DrawFn, leading: tuple[int, ...], limit: int) -> Tensor:
    """Distinct indices below `limit`, ascending, filled up with -1: scattered, in runs, or with gaps near 64."""
    size = draw(st.sampled_from([1, 5, 70, 150]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["scattered", "run", "steps", "few"]))
    rows = []
    for _ in range(max(1, int(torch.tensor(leading).prod()))):
        if kind == "run":
            first = int(torch.randint(limit, (), generator=generator))
            chosen = torch.arange(first, min(limit, first + size))
        elif kind == "steps":
            chosen = torch.randint(62, 67, (size,), generator=generator).cumsum(0) - 62
            chosen = chosen[chosen < limit]
        else:
            count = size if kind == "scattered" else size // 3
            chosen = torch.randperm(limit, generator=generator)[:count].sort().values
        rows.append(torch.nn.functional.pad(chosen, (0, size - len(chosen)), value=-1))
    return torch.stack(rows).view(*leading, size)


@given(data=st.data(), split_tiles=st.sampled_from([0, 1, 3]))
@examples(10)
def test_every_kept_score_once(data: st.DataObject, split_tiles: int) -> None:
    q_len = data.draw(st.sampled_from([64, 192, 320]))
    offset = data.draw(st.sampled_from([0, 0, 5, 64, 100]))
    leading = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    vertical = indices(data.draw, data.draw(st.sampled_from([leading, ()])), q_len + offset)
    slash = indices(data.draw, leading, q_len + offset)
    mask = masks.vertical_slash(vertical, slash).with_query_offset(offset)
    buffers = buffers_of(mask, q_len)
    lists = buffers.use_hopper(TILE, split_tiles, captured=False)
    none = torch.full_like(slash, -1)
    for other in (mask, masks.vertical_slash(vertical, none).with_query_offset(offset), mask):  # nothing is left over
        fill(buffers, other)
        assert not bool(buffers.flags.any())
        assert_lists(lists, other)


@pytest.mark.parametrize(("verticals", "distances"), [(1500, 1300), (5000, 100)])
def test_many_indices(verticals: int, distances: int) -> None:
    """More than are handled at once."""
    vertical, slash = (torch.randperm(6000)[:count].sort().values.int() for count in (verticals, distances))
    mask = masks.vertical_slash(vertical, slash).with_query_offset(5936)
    buffers = buffers_of(mask, 64)
    lists = buffers.use_hopper(TILE, 0, captured=False)
    fill(buffers, mask)
    assert not bool(buffers.flags.any())
    assert_lists(lists, mask)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("q_len", "offset"), [(256, 0), (128, 130)])
@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_calls(twin: Twin, shared: bool, split_tiles: int, q_len: int, offset: int) -> None:
    """A mask for each query head, or for all of them; query heads share key heads."""
    generator = torch.Generator().manual_seed(0)
    kv_len = q_len + offset

    def chosen(count: int, seed: int) -> Tensor:
        generator.manual_seed(seed)
        rows = [torch.randperm(kv_len, generator=generator)[:count].sort().values for _ in range(1 if shared else 4)]
        return torch.stack(rows).int()

    buffers = None
    for seed in range(2):
        mask = masks.vertical_slash(chosen(70, seed), chosen(20, 5 + seed)).with_query_offset(offset)
        if buffers is None:
            buffers = buffers_of(mask, q_len)
            lists = buffers.use_hopper(TILE, split_tiles, captured=False)
            q, k, v = make_inputs(
                batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=64, dtype=torch.float16
            ).qkv
            prepared = PreparedTiles(lists, KernelConfig(4, 2, split_tiles=split_tiles))
            call = IMPLEMENTATIONS["hopper"].bind(q, k, v, prepared, Options(0.125))
        fill(buffers, mask)
        keep = mask.to_dense(q_len, kv_len)
        # What no query of any head sees may be anything.
        unseen = ~keep.flatten(0, 1).any((0, 1))
        stale = (x.masked_fill(unseen[:, None], torch.nan) for x in (k, v))
        out, lse = call(q, *stale, None, None)
        assert_attention(out, lse, q, k, v, keep)
    assert twin.constants["DYNAMIC"]
    assert not twin.constants["HAS_FULL"]


@pytest.mark.usefixtures("twin")
def test_lists_that_mean_nothing() -> None:
    """Rows of that head are NaN, all of them, and nothing else is."""
    vertical, slash = torch.tensor([[3, 9, 70], [3, 99, 70]]), torch.tensor([[0, 5], [2, 128]])
    for bad, flags in (((vertical, slash % 128), NOT_ASCENDING), ((vertical.sort().values, slash), OUT_OF_RANGE)):
        mask = masks.vertical_slash(*bad)
        buffers = buffers_of(mask, 128)
        lists = buffers.use_hopper(TILE, 1, captured=False)
        fill(buffers, mask)
        assert buffers.flags.tolist()[0] == 0
        assert buffers.flags.tolist()[1] & flags
        q, k, v = make_inputs(heads=2, q_len=128, kv_len=128, head_dim=64, dtype=torch.float16).qkv
        prepared = PreparedTiles(lists, KernelConfig(4, 2, split_tiles=1))
        out, lse = attend_once(IMPLEMENTATIONS["hopper"].bind, q, k, v, prepared, Options(0.125))
        assert bool(out[:, 1].isnan().all())
        assert bool(lse[:, 1].isnan().all())
        keep = masks.vertical_slash(bad[0][:1], bad[1][:1]).to_dense(128)
        assert_attention(out[:, :1], lse[:, :1], q[:, :1], k[:, :1], v[:, :1], keep)


def test_no_tiles_are_made_of_distances_that_do_not_ascend() -> None:
    """Where they would lie comes from memory before the table of runs: windows of their bits may be read anywhere."""
    slash = torch.tensor([[0, 30, 99], [-1, 30, 99]])
    mask = masks.vertical_slash(torch.arange(3), slash)
    buffers = buffers_of(mask, 128)
    buffers.use_hopper(TILE, 0, captured=False)
    runs, _, number, _ = buffers.hopper[TILE, 0].tables
    runs[0, 1, -1] = 64  # the number before the second pattern's runs
    fill(buffers, mask)
    assert number[0] > 0
    assert number[1] == 0
    assert buffers.flags.tolist() == [0, NOT_ASCENDING]


def test_what_is_refused() -> None:
    mask = masks.vertical_slash(torch.arange(3), torch.arange(3))
    for q_len, kv_len, reason in ((100, 100, "whole row blocks of 64, not 100"), (64, 65, "to the last query, not 65")):
        with pytest.raises(UnfitLayoutError, match=reason):
            buffers_of(mask, q_len, kv_len).use_hopper(TILE, 0, captured=False)
    with pytest.raises(UnfitLayoutError, match="does not fit masks like these"):
        buffers_of(mask, 64).use_hopper(LayoutConfig(128, 128), 0, captured=False)
