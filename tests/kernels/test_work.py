"""Work of the block-wise kernel: decoded again without the kernel, it is the layout's mask."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.common import PARTIAL_TILE_COST
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import Options, attend_once, tensors_of
from stof.kernels.triton import block_wise as triton_attention
from stof.kernels.triton.work_list import BIAS_VECTOR, WORK_ITEM, Work, make_work, prepare
from stof.layout import Layout, build_layout
from stof.masks.tensors import as_mask
from stof.runtime import counters as scratch
from stof.runtime.counters import zeroed_counters
from stof.testing import assert_attention, make_inputs
from tests.examples import examples
from tests.strategies import dense_masks, row_orders

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

geometries = st.builds(
    LayoutConfig,
    block_m=st.sampled_from([1, 4, 16, 32, 64, 128]),
    block_n=st.sampled_from([16, 32, 64, 128]),
    slab=st.sampled_from([None, 1, 8, 16]),
)


def layout_of(keep: Tensor, config: LayoutConfig, **options: Any) -> Layout:
    batch, heads, q_len, kv_len = keep.shape
    mask = as_mask(keep.to(DEVICE))
    return build_layout(mask, q_len, kv_len, config, batch=batch, heads=heads, device=DEVICE, **options)


def bit(words: Tensor, column: int) -> Tensor:
    """The bit of a tile's column, from `[block_m, 4]` words, as the kernel's accumulator wants it."""
    j, rest = divmod(column, 8)
    q, b = divmod(rest, 2)
    return ((words[:, q] >> (2 * j + b)) & 1).bool()


@dataclass
class Tile:
    """A tile as the kernel sees it: key columns `[block_n]` and kept scores `[block_m, block_n]` (None: all)."""

    columns: Tensor
    keep: Tensor | None


def item_tiles(work: Work, pattern: int, number: int) -> list[Tile]:
    """An item's tiles in the kernel's order."""
    item = work.items[pattern, number].tolist()
    _, partial, partial_end, full, full_end, *_ = item
    bitmap, first_full, own_partial, to_partial, own_full, to_full, position = item[9:]
    tiles: list[Tile] = []
    listed: list[Tensor] = []
    steps = torch.arange(work.block_n, device=DEVICE, dtype=torch.int32)
    for tile in range(partial, partial_end):
        row, shift = (tile + to_partial, position) if work.shared and tile < own_partial else (tile, 0)
        # The kernel takes the bitmap of the first tile from the item, the others from the list.
        others = row if work.shared else int(work.partial_bitmap[tile])
        words = work.bitmaps[bitmap if tile == partial else others]
        keep = torch.stack([bit(words, column) for column in range(work.block_n)], 1)
        columns = work.partial_columns[row]
        if work.contiguous_tiles:
            columns = (columns + steps).clamp(max=first_full)
        tiles.append(Tile(columns + shift, keep))
        listed.append(work.partial_columns[row])
    for tile in range(full, full_end):
        start = first_full + (tile - full) * work.block_n
        run = torch.arange(start, start + work.block_n, device=DEVICE, dtype=torch.int32)
        row, shift = (tile + to_full, position) if work.shared and tile < own_full else (tile, 0)
        listed.append(run if work.full_runs else work.full_columns[row])
        tiles.append(Tile(listed[-1] + shift + (steps if work.contiguous_tiles else 0), None))
    if tiles:
        assert torch.equal(work.first_columns[pattern, number], listed[0])
    return tiles


def counted(work: Work) -> Tensor:
    """How often each score is computed and kept: int `[mask_batch, mask_heads, q_len, kv_len]`."""
    patterns, items = work.items.shape[:2]
    times = torch.zeros(patterns, work.q_len, work.kv_len, dtype=torch.int32, device=DEVICE)
    for pattern in range(patterns):
        order = work.row_order[pattern].long() if work.row_order.numel() else torch.arange(work.q_len, device=DEVICE)
        for number in range(items):
            row_block = int(work.items[pattern, number, 0])
            if row_block < 0:
                continue
            rows = order[row_block * work.block_m : (row_block + 1) * work.block_m]
            for tile in item_tiles(work, pattern, number):
                assert 0 <= int(tile.columns.min()) <= int(tile.columns.max()) < work.kv_len
                kept = torch.ones(len(rows), work.block_n, dtype=torch.int32, device=DEVICE)
                if tile.keep is not None:
                    # Every column that is read is one that some row keeps: the values of the others may be anything.
                    assert work.contiguous_tiles or not bool(tile.keep[len(rows) :].any())
                    kept = tile.keep[: len(rows)].int()
                    seen = tile.columns[kept.any(0)]
                    assert bool(torch.isin(tile.columns, seen).all())
                times[pattern].index_put_((rows[:, None], tile.columns.long()[None, :]), kept, accumulate=True)
    return times[work.pattern_of.long()]


@given(data=st.data(), config=geometries, split_tiles=st.sampled_from([0, 1, 2, 5]))
@examples(120)
def test_every_kept_score_once(data: st.DataObject, config: LayoutConfig, split_tiles: int) -> None:
    q_len = data.draw(st.sampled_from([1, config.block_m, config.block_m + 1, 2 * config.block_m + 3, 61]))
    kv_len = data.draw(st.sampled_from([1, 15, 64, 129, 300]))
    keep = data.draw(dense_masks(q_len, kv_len, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))))
    layout = layout_of(keep, config, row_order=data.draw(row_orders(q_len)))
    work = make_work(layout, split_tiles)
    assert torch.equal(counted(work), keep.to(DEVICE).int())
    check_shapes(work, layout)
    check_items(work, layout, split_tiles)
    check_bias_vectors(work, layout)


def check_bias_vectors(work: Work, layout: Layout) -> None:
    """Columns gathered by 8, 16 or whole tiles are read in vectors of 8 keys, each with one that exists."""
    assert work.bias_vectors == (layout.config.slab != 1)
    if not work.bias_vectors:
        return
    for pattern, number in itertools.product(*map(range, work.items.shape[:2])):
        if int(work.items[pattern, number, 0]) < 0:
            continue
        for tile in item_tiles(work, pattern, number):
            columns = tile.columns.view(-1, BIAS_VECTOR)
            begin = columns // BIAS_VECTOR * BIAS_VECTOR
            assert torch.equal(begin, begin[:, :1].expand_as(begin))
            whole = (begin + torch.arange(BIAS_VECTOR, device=DEVICE)).flatten()
            kept = slice(None) if tile.keep is None else tile.keep.any(0)
            assert torch.equal(whole[kept], tile.columns[kept])


def check_shapes(work: Work, layout: Layout) -> None:
    tensors = list(tensors_of(work))
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int32 for tensor in tensors)
    assert all(tensor.device.type == DEVICE.type for tensor in tensors)
    # Two rows of padding, which the kernel reads ahead; the numbers of the tiles run on from pattern to pattern.
    partial = int(work.items[..., 2].max()) if work.has_partial else 0
    assert len(work.partial_columns) == len(work.partial_bitmap) == partial + 2
    assert bool((work.partial_columns[-2:] == 0).all())
    assert bool((work.partial_bitmap[-2:] == 0).all())
    assert len(work.full_columns) == 2 + (0 if work.full_runs else int(work.items[..., 4].max()))
    assert 0 <= int(work.partial_bitmap.min()) <= int(work.partial_bitmap.max()) < len(work.bitmaps)
    assert work.items.shape[2] == len(WORK_ITEM)
    assert work.bitmaps.shape[1:] == (layout.config.block_m, 4)


def check_items(work: Work, layout: Layout, split_tiles: int) -> None:
    """Longest first; chunks of a row block complete, equal to within a tile, and with slots of their own."""
    tiles = layout.row_block_ptr.diff().view(layout.patterns, layout.row_blocks)
    chunks, splits = [0], [0]
    for pattern, items in enumerate(work.items.tolist()):
        real = [item for item in items if item[0] >= 0]
        assert items[: len(real)] == real, "missing items are last"
        costs = [(item[2] - item[1]) * PARTIAL_TILE_COST + (item[4] - item[3]) for item in real]
        assert all(a >= b - 1e-6 for a, b in itertools.pairwise(costs))
        slots: list[int] = []
        numbers: list[int] = []
        for row_block in range(layout.row_blocks):
            count = int(tiles[pattern, row_block])
            wanted = max(1, -(-count // split_tiles)) if split_tiles else 1
            mine = sorted((item for item in real if item[0] == row_block), key=lambda item: item[7])
            lengths = [item[2] - item[1] + item[4] - item[3] for item in mine]
            assert len(mine) == wanted
            assert sum(lengths) == count
            assert max(lengths) - min(lengths) <= 1
            assert [item[7] for item in mine] == list(range(wanted))
            assert {item[5] for item in mine} == {wanted}
            if wanted > 1:
                assert len({(item[6], item[8]) for item in mine}) == 1
                slots += range(mine[0][6], mine[0][6] + wanted)
                numbers.append(mine[0][8])
        assert sorted(slots) == list(range(len(slots)))
        assert sorted(numbers) == list(range(len(numbers)))
        chunks.append(len(slots))
        splits.append(len(numbers))
    assert (work.chunks, work.splits) == (max(chunks), max(splits))


@pytest.mark.parametrize("slab", [None, 1])
def test_full_runs(slab: int | None) -> None:
    """Without a list of columns the kernel counts on from an item's first full tile: only where none is left out."""
    keep = masks.full().to_dense(64, 256)
    assert make_work(layout_of(keep, LayoutConfig(16, 16, slab))).full_runs
    keep[..., 100] = False
    work = make_work(layout_of(keep, LayoutConfig(16, 16, slab)))
    assert work.has_full
    assert not work.full_runs
    # One tile to an item: nothing follows anything, unless a tile has the hole inside.
    assert make_work(layout_of(keep, LayoutConfig(16, 16, slab)), 1).full_runs == (slab is None)


@pytest.mark.parametrize("kind", ["partial", "full"])
@pytest.mark.parametrize("first", [0, 4, 8])
def test_tiles_that_begin_anywhere_are_not_bias_vectors(first: int, kind: str) -> None:
    """No builder makes such tiles, but a file may hold them."""
    keep = masks.full().to_dense(16, 64) & (torch.arange(64) < 48)
    keep[..., :1, ::16] = kind == "full"
    layout = layout_of(keep, LayoutConfig(16, 16))
    assert make_work(replace(layout, tile_base=layout.tile_base + first)).bias_vectors == (first != 4)


def test_identical_masks_share_their_work() -> None:
    keep = (torch.rand(1, 1, 40, 90) < 0.3).expand(3, 4, 40, 90)
    work = make_work(layout_of(keep, LayoutConfig(16, 16, 1)))
    assert work.items.shape[0] == 1
    assert work.pattern_of.shape == (3, 4)
    assert bool((work.pattern_of == 0).all())


def test_an_empty_mask_has_items_without_tiles() -> None:
    layout = layout_of(torch.zeros(1, 1, 40, 90, dtype=torch.bool), LayoutConfig(16, 16))
    work = make_work(layout, 1)
    assert work.items.shape == (1, 3, len(WORK_ITEM))
    assert not work.has_partial
    assert not work.has_full
    assert (work.chunks, work.splits) == (0, 0)


def test_counters_are_zero_again() -> None:
    """The merge counts its chunks in memory that the next call finds as it was."""
    held: list[Tensor] = []

    def remembered(count: int, device: torch.device) -> Tensor:
        held.append(zeroed_counters(count, device))
        return held[-1]

    inputs = make_inputs(batch=2, heads=4, q_len=40, kv_len=120, dtype=torch.float16, device=DEVICE)
    keep = (masks.longformer(9, 5) | masks.global_tokens(2)).to_dense(40, 120)
    config = KernelConfig(split_tiles=2)
    prepared = prepare(layout_of(keep, LayoutConfig(16, 16, 1)), config)
    work = prepared.work
    assert work.splits > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "zeroed_counters", remembered)
        for _ in range(2):
            out, lse = attend_once(triton_attention.bind, *inputs.qkv, prepared, Options(0.25))
            assert_attention(out, lse, *inputs.qkv, keep.to(DEVICE), scale=0.25)
    assert len(held) == 2
    assert all(len(counters) >= 2 * 4 * work.splits for counters in held)
    assert all(not bool(counters.any()) for counters in held)


def test_counters_count() -> None:
    for count in (1, 1000, 5000):
        counters = zeroed_counters(count, DEVICE)
        assert counters.dtype == torch.int32
        assert len(counters) >= count
        assert not bool(counters.any())


def test_counters_that_are_replaced_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may still count in them; and of two threads that find none, the second takes the first one's."""
    by_stream: dict[tuple[int, int], Tensor] = {}
    outgrown: list[Tensor] = []
    monkeypatch.setattr(scratch, "_by_stream", by_stream)
    monkeypatch.setattr(scratch, "_outgrown", outgrown)
    monkeypatch.setattr(scratch, "_arena", {})
    monkeypatch.setattr(scratch, "_cleared", lambda count, device: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    device = torch.device("cuda", 0)

    class Interrupted:
        """A lock that another thread held, and stored counters meanwhile."""

        def __enter__(self) -> None:
            by_stream.setdefault((0, 5), first)

        def __exit__(self, *error: object) -> None: ...

    first = torch.zeros(1024, dtype=torch.int32)
    monkeypatch.setattr(scratch, "_lock", Interrupted())
    assert zeroed_counters(10, device) is first
    larger = zeroed_counters(5000, device)
    assert len(larger) >= 5000
    assert zeroed_counters(10, device) is larger
    assert len(outgrown) == 1
    assert outgrown[0] is first


def test_too_many_bitmaps_are_refused() -> None:
    accumulator_order(torch.zeros(3, 64, 2, dtype=torch.int32), 64)
    with pytest.raises(UnfitLayoutError, match="32-bit"):
        accumulator_order(torch.empty(2**23, 64, 2, dtype=torch.int32, device="meta"), 64)
