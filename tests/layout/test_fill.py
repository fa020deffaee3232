"""Tile lists that are filled on the device keep what the mask keeps, and read no key that no query sees."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.filled_lists import FilledTileLists, prepare_filled
from stof.kernels.hopper.tile_scheduler import WORK
from stof.kernels.triton.backward_tiles import ITEM
from stof.kernels.triton.filled_tiles import filled_backward_tiles
from stof.layout.fill.layouts import pattern_numbers
from stof.layout.fill.mask_input import PinnedMailbox
from stof.layout.fill.tiles import FilledTiles, TileFill, start_fill
from stof.masks import Mask, transposed
from stof.masks.index import Index
from tests.examples import examples
from tests.strategies import dense_masks, mask_trees

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")  # Triton's interpreter runs on the CPU
TILES = st.tuples(st.sampled_from([32, 64, 192]), st.sampled_from([32, 64, 128]))


def dense(mask: Mask, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> Tensor:
    dims = mask.dims(batch, heads)
    b, h, i, j = (torch.arange(n) for n in (*dims, q_len, kv_len))
    keep = mask.evaluate(Index.make(i, j, q_len=q_len, kv_len=kv_len, b=b, h=h))
    return keep.expand(*dims, q_len, kv_len).cpu()


def started(
    mask: Mask, q_len: int, kv_len: int, tile: tuple[int, int], batch: int = 1, heads: int = 1, room: int = 0
) -> TileFill | None:
    dims = mask.dims(batch, heads)
    which = pattern_numbers(mask, q_len, kv_len, dims)
    return start_fill(mask, q_len, kv_len, dims, which, *tile, DEVICE, room)


def filled(
    mask: Mask, q_len: int, kv_len: int, tile: tuple[int, int], every_column: bool, batch: int = 1, heads: int = 1
) -> FilledTiles | None:
    fill = started(mask, q_len, kv_len, tile, batch, heads)
    assert fill is not None
    counts = fill.counts()
    return None if counts is None else fill.write(*counts, every_column=every_column)


def bits_of(lists: FilledTiles, block_n: int) -> Tensor:
    """bool `[n, block_m, block_n]` of all bitmaps."""
    column = torch.arange(block_n)
    word, bit = column % 8 // 2, column // 8 * 2 + column % 2
    return (lists.bitmaps.cpu()[:, :, word] >> bit & 1).bool()


def kept_by(lists: FilledTiles, q_len: int, kv_len: int, tile: tuple[int, int], seen: Tensor) -> Tensor:
    """The mask that lists keep, bool `[mask_batch, mask_heads, q_len, kv_len]`; checks the keys that tiles read.

    Args:
        seen: bool `[P, kv_len]`.
    """
    block_m, block_n = tile
    width = lists.columns.shape[1]
    patterns = len(lists.partial_count) // lists.row_blocks
    keep = torch.zeros(patterns, q_len + block_m, kv_len, dtype=torch.int64)
    pointers, partial = lists.row_block_ptr.tolist(), lists.partial_count.tolist()
    columns, number = lists.columns.cpu(), lists.tile_bitmap.tolist()
    bits = bits_of(lists, block_n)
    assert pointers[-1] == lists.tiles
    assert len(columns) == lists.tiles + 3
    for block in range(patterns * lists.row_blocks):
        pattern, row = block // lists.row_blocks, block % lists.row_blocks * block_m
        for tile_number in range(pointers[block], pointers[block + 1]):
            read = columns[tile_number] if width > 1 else columns[tile_number] + torch.arange(block_n)
            there = (read >= 0) & (read < kv_len)  # TMA fills the others with zeros
            assert there.all() or width == 1
            assert seen[pattern, read[there]].all(), "reads a key that no query sees"
            is_partial = tile_number < pointers[block] + partial[block]
            assert is_partial or number[tile_number] == 1
            here = bits[number[tile_number]]
            if not is_partial:
                assert there.all()
                assert (read.diff() == 1).all()
                here = torch.ones_like(here)
            assert not here[:, ~there].any()
            keep[pattern, row : row + block_m].index_add_(1, read[there].long(), here[:, there].long())
    assert keep.max() <= 1, "a score is kept twice"
    return keep[:, :q_len].bool()[lists.pattern_of.long().cpu()]


def check(
    mask: Mask, q_len: int, kv_len: int, tile: tuple[int, int], *, batch: int = 1, heads: int = 1, must: bool = False
) -> None:
    expected = dense(mask, q_len, kv_len, batch, heads)
    for every_column in (False, True):
        lists = filled(mask, q_len, kv_len, tile, every_column, batch, heads)
        if lists is None:
            assert not must
            return
        pattern_of = lists.pattern_of.flatten().tolist()
        each = expected.flatten(0, 1).any(1)
        seen = torch.stack([each[pattern_of.index(p)] for p in range(max(pattern_of) + 1)])
        assert torch.equal(kept_by(lists, q_len, kv_len, tile, seen), expected)


@examples(8)
@given(st.data(), TILES)
def test_programs(data: st.DataObject, tile: tuple[int, int]) -> None:
    kv_len, batch = data.draw(st.sampled_from([1, 31, 64, 130, 200])), data.draw(st.sampled_from([1, 2]))
    q_len = data.draw(st.sampled_from([kv_len, 1, kv_len // 2 + 1]))
    offset = data.draw(st.sampled_from([0, kv_len - q_len]))
    mask = data.draw(mask_trees(kv_len, batch, leaves=3)).with_query_offset(offset)
    if started(mask, q_len, kv_len, tile, batch) is not None:
        check(mask, q_len, kv_len, tile, batch=batch)


def documents(*steps: int) -> Mask:
    return masks.documents(cu_seqlens=[0, *torch.tensor(steps).cumsum(0).tolist()])


SERVED = [
    (masks.causal() & documents(100, 3, 97, 100), 300, 300, 1),
    (documents(1, 299), 300, 300, 1),
    (masks.padding([300, 17, 130, 0]), 200, 300, 4),
    (masks.padding([300, 17, 130]) & masks.causal(), 300, 300, 3),
    (masks.padding([50, 260]) & masks.sliding_window(40, 40), 300, 300, 2),
    (masks.documents(cu_seqlens=[[0, 100, 300], [0, 7, 300]]) & masks.causal(), 300, 300, 2),
    (masks.documents([0] * 90 + [1] * 60 + [-1] * 50), 200, 200, 1),
    (masks.sliding_window(100), 257, 257, 1),
    (masks.causal().with_query_offset(200), 57, 257, 1),
    (masks.sliding_window(80).with_query_offset(100), 157, 257, 1),
    (masks.full(), 100, 257, 1),
    (masks.longformer(20, 3), 300, 300, 1),
    (masks.documents(cu_seqlens=[0, 90, 150, 200], kv_cu_seqlens=[0, 100, 120, 300]), 200, 300, 1),
    (masks.documents(cu_seqlens=[0, 90, 200], kv_cu_seqlens=[0, 95, 300], within=masks.causal()), 200, 300, 1),
    (masks.sliding_window(512) & ~masks.sliding_window(256), 200, 200, 1),  # keeps nothing
]


@pytest.mark.parametrize("number", range(len(SERVED)))
@pytest.mark.parametrize("swap", [False, True], ids=["mask", "transposed"])
def test_masks_of_new_batches_are_served(number: int, swap: bool) -> None:
    mask, q_len, kv_len, batch = SERVED[number]
    sizes = (kv_len, q_len) if swap else (q_len, kv_len)
    must = number != 9 or swap  # no query sees the first keys of this one
    check(transposed(mask) if swap else mask, *sizes, (64, 128), batch=batch, must=must)


@examples(8)
@given(st.data(), TILES)
def test_bool_tensors(data: st.DataObject, tile: tuple[int, int]) -> None:
    q_len, kv_len = data.draw(st.sampled_from([(1, 40), (70, 160), (130, 130), (33, 256)]))
    keep = data.draw(dense_masks(q_len, kv_len, 2, 2))
    check(masks.from_dense(keep.to(DEVICE)), q_len, kv_len, tile, batch=2, heads=2)


@pytest.mark.parametrize("kv_len", [256, 200])
def test_bool_tensors_of_padding(kv_len: int) -> None:
    keep = torch.rand(2, 1, 130, kv_len) < 0.3
    keep[0, :, :, 77:] = False
    check(masks.from_dense(keep.to(DEVICE)), 130, kv_len, (64, 64), batch=2, must=True)


def test_keys_seen_behind_unseen_ones_are_not_served() -> None:
    keep = torch.ones(100, 100, dtype=torch.bool)
    keep[:, 50] = False
    assert filled(masks.from_dense(keep.to(DEVICE)), 100, 100, (64, 64), False) is None
    holes = masks.documents([0] * 40 + [-1] * 20 + [1] * 40)
    assert filled(holes, 100, 100, (64, 64), False) is None


def work_of(
    mask: Mask, q_len: int, kv_len: int, batch: int, heads: int, at_once: int
) -> tuple[Tensor, FilledTileLists]:
    lists = filled(mask, q_len, kv_len, (64, 64), False, batch, heads)
    assert lists is not None
    prepared = prepare_filled(lists, (q_len, kv_len), 64, KernelConfig())
    assert isinstance(prepared.lists, FilledTileLists)
    return prepared.lists.work_list(batch, heads, at_once).cpu(), prepared.lists


@pytest.mark.parametrize("at_once", [1, 3, 4, 100])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_every_row_block_is_one_work_tile(number: int, at_once: int) -> None:
    mask, q_len, kv_len, batch = SERVED[number]
    heads = 3
    work, lists = work_of(mask, q_len, kv_len, batch, heads, min(at_once, batch * heads))
    count = batch * heads * lists.row_blocks
    assert (work[:count, WORK.work_count] == count).all()
    assert not work[count].any()
    where = work[:count, [WORK.batch, WORK.head, WORK.row_block]].tolist()
    assert len({tuple(one) for one in where}) == count
    pointers, tiles = lists.row_block_ptr.tolist(), len(lists.tile_bitmap) - 3
    pattern_of = lists.pattern_of.expand(batch, heads).tolist()
    for row in work[:count]:
        pattern = pattern_of[int(row[WORK.batch])][int(row[WORK.head])]
        block = pattern * lists.row_blocks + int(row[WORK.row_block])
        begin, end = pointers[block], pointers[block + 1]
        if begin == end:
            begin, end = tiles, tiles + 1
            assert int(lists.tile_columns[tiles]) >= kv_len
            assert int(row[WORK.partial_end]) == end
        assert (int(row[WORK.begin]), int(row[WORK.end])) == (begin, end)
        assert int(row[WORK.pattern]) == pattern
        assert int(row[WORK.parts]) == 1
        assert int(row[WORK.columns]) == int(lists.tile_columns[begin])
        assert int(row[WORK.bitmap]) == int(lists.tile_bitmap[begin])


def test_longest_row_blocks_come_first() -> None:
    mask, q_len, kv_len, _ = SERVED[0]
    work, _ = work_of(mask, q_len, kv_len, 1, 2, 2)
    tiles = work[:-1, WORK.end] - work[:-1, WORK.begin]
    assert (tiles.diff() <= 0).all()


@pytest.mark.parametrize("number", [0, 5])
def test_backward_items(number: int) -> None:
    mask, q_len, kv_len, batch = SERVED[number]
    lists = filled(mask, q_len, kv_len, (32, 64), True, batch)
    assert lists is not None
    items = filled_backward_tiles(lists, q_len).items.cpu()
    assert sorted(items[:, ITEM.row_block].tolist()) == list(range(lists.row_blocks))
    assert (items[:, ITEM.chunks] == 1).all()
    assert not items[:, [ITEM.chunk, ITEM.slot]].any()
    tiles = lists.row_block_ptr.cpu().diff().view(-1, lists.row_blocks).amax(0)
    assert (tiles[items[:, ITEM.row_block].long()].diff() <= 0).all()


@pytest.mark.parametrize("every_column", [False, True])
def test_lists_with_room_for_all_tiles_are_written_again(every_column: bool) -> None:
    """As for the replays of a CUDA graph: other masks, in the same memory, with nothing left of the one before."""
    q_len, tile, lists, fill = 300, (64, 64), None, None
    every = [documents(100, 3, 197), documents(300), documents(*[1] * 300), documents(299, 1)]
    for mask in [*every, *(mask & masks.sliding_window(9) for mask in every)]:
        if fill is None or lists is None:
            fill = started(mask, q_len, q_len, tile, room=700)
            assert fill is not None
            most = fill.max_counts()
            assert most is not None
            lists = fill.write(*most, every_column=every_column)
        else:
            assert fill.refill(mask)
            fill.run_again(lists)
        counts = fill.counts()
        assert counts is not None
        assert len(lists.columns) == most[0] + 3
        tiles = dataclasses.replace(
            lists, columns=lists.columns[: counts[0] + 3], tile_bitmap=lists.tile_bitmap[: counts[0] + 3],
            bitmaps=lists.bitmaps[: counts[1] + 2], tiles=counts[0],
        )  # fmt: skip
        seen = torch.ones(1, q_len, dtype=torch.bool)
        assert torch.equal(kept_by(tiles, q_len, q_len, tile, seen), dense(mask, q_len, q_len))


def test_masks_without_room_are_not_taken() -> None:
    """The mask of before stays, and its counts are written again."""
    mask = documents(100, 3, 197)
    fill = started(mask, 300, 300, (64, 64), room=40)
    assert fill is not None
    most = fill.max_counts()
    assert most is not None
    lists, counts = fill.write(*most, every_column=False), fill.counts()
    before = lists.tile_bitmap.clone()
    for other in (
        documents(*[1] * 300),
        masks.random_blocks(1, block_size=64),
        masks.from_dense(torch.ones(300, 300, dtype=torch.bool)),
    ):
        assert not fill.refill(other)
        fill.run_again(lists)
        assert fill.counts() == counts
        assert torch.equal(lists.tile_bitmap, before)


def test_a_mailbox_that_was_not_read_waits_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(True))
    mailbox = PinnedMailbox(8, pinned=False)
    monkeypatch.setattr(mailbox, "tensor", SimpleNamespace(is_pinned=lambda: True))
    mailbox.put(2, [5])
    assert not waits
    mailbox.put(2, [6, 7])  # a call was interrupted before it read the results
    assert waits
    assert mailbox.read(4) == [0, 0, 6, 7]
    mailbox.put(2, [])
    assert mailbox.read(4) == [0, 0, 6, 7]
    assert len(waits) == 1


def test_work_lists_are_written_again() -> None:
    changing = fill = None
    for mask in (documents(100, 3, 197), documents(300), documents(40, 260)):
        if changing is None or fill is None:
            fill = started(mask, 300, 300, (64, 64), room=40)
            assert fill is not None
            most = fill.max_counts()
            assert most is not None
            tiles = fill.write(*most, every_column=False)
            prepared = prepare_filled(tiles, (300, 300), 64, KernelConfig(), changing=True)
            changing = prepared.lists
            assert isinstance(changing, FilledTileLists)
            work = changing.work_list(1, 3, 2)
        else:
            assert fill.refill(mask)
            fill.run_again(tiles)
            changing.write_work_lists()
        expected, _ = work_of(mask, 300, 300, 1, 3, 2)
        # Row blocks of equal length may be listed in any order: tiles and bitmaps are the same.
        assert torch.equal(work.cpu(), expected)
