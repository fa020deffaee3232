"""The one-pass backward kernel of Hopper without a GPU: its lists, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.common import empty_gradient
from stof.kernels.hopper.backward_lists import (
    ITEM,
    LAYOUTS,
    TILE,
    BackwardLists,
    longest_item,
    make_backward_lists,
    most_sums,
    slots_of,
    split_blocks,
)
from stof.kernels.implementation import NeedsGrad, Options
from stof.layout import build_layout
from stof.layout.orders.named import named_order
from stof.masks.tensors import as_mask
from stof.selection import IMPLEMENTATIONS, CallSpec, MaskGeometry
from stof.selection.backward_tilings import BackwardTiling, one_pass_load, one_pass_tile, one_pass_tilings
from stof.selection.device_model import load_model
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.strategies import dense_masks

QUERIES = sorted(layout.block_n for layout in LAYOUTS.values())
WIDTH = {layout.block_n: width for width, layout in LAYOUTS.items()}
CALL = CallSpec("cuda", torch.bfloat16, 128, 128, 32, 32, q_len=8192, kv_len=8192, compute_capability=(9, 0))


@st.composite
def drawn_masks(draw: st.DrawFn, most: int) -> Tensor:
    """A dense mask `[B, H, Sq, Skv]` of up to so many queries and keys; a block of each may see nothing."""
    q_len, kv_len = (draw(st.integers(1, most)) for _ in range(2))
    keep = draw(dense_masks(q_len, kv_len, draw(st.integers(1, 2)), draw(st.sampled_from([1, 2]))))
    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)
    block = draw(st.integers(0, most // 128))
    return keep & (rows // 128 != block) & (columns // 128 != block)


def holds_unseen(keep: Tensor, queries: int) -> bool:
    """Whether a block of 128 keys, or of so many queries, has kept scores and a member without."""
    for seen, size in ((keep.any(2), 128), (keep.any(3), queries)):
        for part in seen.split(size, 2):
            if bool((part.any(2) & ~part.all(2)).any()):
                return True
    return False


def lists_of(keep: Tensor, queries: int) -> BackwardLists:
    batch, heads, q_len, kv_len = keep.shape
    transposed = as_mask(keep.transpose(2, 3).contiguous())
    layout = build_layout(transposed, kv_len, q_len, LayoutConfig(128, queries), batch=batch, heads=heads)
    return make_backward_lists(layout)


def tiles_of(lists: BackwardLists, pattern: int) -> list[tuple[int, list[int]]]:
    """Blocks of keys and fields of the tiles of a pattern, in the order in which thread blocks start."""
    out = []
    for block in reversed(range(lists.row_blocks)):
        begin, end = lists.row_block_ptr[pattern * lists.row_blocks + block :][:2].tolist()
        out += [(block, fields) for fields in lists.tiles[begin:end].tolist()]
    return out


def kept_scores(lists: BackwardLists, fields: list[int]) -> Tensor:
    """Bool `[128, queries]`: which scores of a tile count."""
    if fields[TILE.bitmap] < 0:
        return torch.ones(128, lists.queries, dtype=torch.bool)
    columns = torch.arange(lists.queries)
    words = lists.bitmaps[fields[TILE.bitmap]].long()[:, columns % 8 // 2]
    return (words >> (2 * (columns // 8) + columns % 2)) & 1 > 0


@given(data=st.data(), queries=st.sampled_from(QUERIES), density=st.sampled_from([0.0, 0.02, 0.1, 0.9, 1.0]))
@examples(40)
def test_tiles_with_queries_or_keys_that_are_not_seen(data: st.DataObject, queries: int, density: float) -> None:
    """They may be NaN, and a tile's products would spread it."""
    q_len, kv_len = (data.draw(st.integers(1, 300)) for _ in range(2))
    keep = torch.rand(1, 2, q_len, kv_len) < density
    for dimension in (2, 3):
        keep.index_fill_(dimension, torch.arange(data.draw(st.integers(0, keep.shape[dimension]))), False)
    lists = lists_of(keep, queries)
    assert (lists.seen_queries is None and lists.seen_keys is None) != holds_unseen(keep, queries)
    for seen, size, dimension in ((lists.seen_queries, queries, 3), (lists.seen_keys, 128, 2)):
        if seen is not None:
            wanted = keep.any(dimension)[0]
            blocks = torch.stack([part.any(1) for part in wanted.split(size, 1)], 1)
            in_tiles = blocks.repeat_interleave(size, 1)[:, : wanted.shape[1]]
            assert torch.equal((seen[lists.pattern_of[0].long()] & in_tiles).expand_as(wanted), wanted)


def test_what_nothing_sees_is_read_as_zeros() -> None:
    """Q, K and dO are copied in each call; V is not multiplied with what may be NaN."""
    from stof.kernels.hopper import backward
    from tests.kernels.assemble import Recorded

    keep = torch.ones(1, 2, 200, 300, dtype=torch.bool)
    keep[:, :, 150:] = keep[..., 290:] = False
    q, d_out, out = (torch.randn(1, 2, 200, 64).half() for _ in range(3))
    k, v = (torch.randn(1, 2, 300, 64).half() for _ in range(2))
    record, options = Recorded(), Options(0.1, 0.0)
    with mock.patch.object(backward, "Launch", record.make):
        call = backward.bind_backward(q, k, v, out, d_out, None, lists_of(keep, 128), options, NeedsGrad())
        q[:, :, 150:] = d_out[:, :, 150:] = k[:, :, 290:] = torch.nan
        call(q, k, v, out, torch.zeros(1, 2, 200), d_out, None, None, None)
    *_, main = (launch for launch in record.made if launch.maps)
    for read, tensor, last in zip(main.maps, (q, k, v, d_out), (150, 290, 300, 150), strict=False):
        assert read is not None
        assert torch.equal(read.base[:, :, :last], tensor[:, :, :last])
        assert not read.base[:, :, last:].any()


@pytest.mark.parametrize("step", [1, 2])
def test_tensors_whose_columns_are_apart_are_copied(step: int) -> None:
    """TMA reads contiguous columns, and so does the kernel of lse and delta; others are read in place."""
    from stof.kernels.hopper import backward
    from tests.kernels.assemble import Recorded

    tensors = [torch.randn(1, 2, 128, 64 * step).half()[..., ::step] for _ in range(5)]
    q, k, v, out, d_out = tensors
    record, keep = Recorded(), torch.ones(1, 1, 128, 128, dtype=torch.bool)
    with mock.patch.object(backward, "Launch", record.make):
        call = backward.bind_backward(q, k, v, out, d_out, None, lists_of(keep, 128), Options(0.1, 0.0), NeedsGrad())
        call(q, k, v, out, torch.zeros(1, 2, 128), d_out, None, None, None)
    rows, main = record.made[0], next(launch for launch in record.made if launch.maps)
    for read, tensor in [
        *((tensor_map and tensor_map.base, x) for tensor_map, x in zip(main.maps, (q, k, v, d_out), strict=False)),
        *zip(rows.tensors, (out, d_out), strict=False),
    ]:
        assert read is not None
        assert read.stride(3) == 1
        assert (read.data_ptr() == tensor.data_ptr()) == (step == 1)
        assert torch.equal(read, tensor)


def test_query_heads_of_one_key_head_that_see_other_keys() -> None:
    from stof.kernels.hopper.backward import bind_backward

    keep = torch.ones(1, 2, 128, 128, dtype=torch.bool)
    keep[:, 1, :, 100:] = False
    q, k = torch.randn(1, 2, 128, 64).half(), torch.randn(1, 1, 128, 64).half()
    with pytest.raises(UnfitLayoutError, match="do not see the same keys"):
        bind_backward(q, k, k, q, q, None, lists_of(keep, 128), Options(0.1, 0.0), NeedsGrad())


@given(keep=drawn_masks(300), queries=st.sampled_from(QUERIES))
@examples(40)
def test_lists_are_the_mask(keep: Tensor, queries: int) -> None:
    """Keys past the end never count. Queries past the end may: their weights are 0."""
    lists = lists_of(keep, queries)
    batch, heads, q_len, kv_len = keep.shape
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        pattern = int(lists.pattern_of[b % len(lists.pattern_of), h % lists.pattern_of.shape[1]])
        seen = torch.zeros(lists.row_blocks * 128, -(-q_len // queries) * queries, dtype=torch.bool)
        for block, fields in tiles_of(lists, pattern):
            seen[block * 128 :][:128, fields[TILE.q_block] * queries :][:, :queries] |= kept_scores(lists, fields)
        assert torch.equal(seen[:kv_len, :q_len], keep[b, h].T)
        assert not seen[kv_len:].any()


@given(keep=drawn_masks(600), queries=st.sampled_from(QUERIES))
@examples(40)
def test_thread_blocks_wait_only_for_those_that_started_before(keep: Tensor, queries: int) -> None:
    """Each sum is added to by ranks 0, 1, 2 and so on, in the order of work items."""
    lists = lists_of(keep, queries)
    for pattern in range(int(lists.pattern_of.max()) + 1):
        added: dict[int, int] = {}
        first, last = lists.sum_ptr[pattern, :-1].tolist(), lists.sum_ptr[pattern, 1:].tolist()
        for _, fields in tiles_of(lists, pattern):
            place = fields[TILE.sum]
            assert first[fields[TILE.q_block]] <= place < last[fields[TILE.q_block]]
            assert fields[TILE.rank] == added.get(place, 0)
            added[place] = added.get(place, 0) + 1
        assert sorted(added) == list(range(last[-1]))
        assert last[-1] <= lists.sums


@pytest.mark.parametrize("crowded", [0, 1, 37, 64])
def test_sums_fit_where_their_number_is_not_read(crowded: int) -> None:
    """In lists that the device fills: also of heads that see much more than others, and of queries that see most."""
    rows = torch.arange(4096)
    near = (rows[:, None] - rows).abs() < 200
    heads = [
        torch.ones(4096, 4096, dtype=torch.bool),
        near,
        near & (rows[:, None] < 128) & (rows < 128),
        near | (rows[:, None] < 64 * crowded),
    ]
    lists = lists_of(torch.stack(heads)[None], 64)
    assert int(lists.sum_ptr[:, -1].max()) <= most_sums(64)


def test_queries_that_all_keys_see_have_several_sums() -> None:
    rows = torch.arange(4096)
    keep = ((rows[:, None] - rows).abs() < 100) | (rows[:, None] < 5)
    lists = lists_of(keep[None, None], 64)
    sums = lists.sum_ptr[0].diff()
    assert sums[0] == 3
    assert int(sums[8:].max()) <= 2
    of_first = lists.tiles[:-2][lists.tiles[:-2, TILE.q_block] == 0]
    assert int(of_first[:, TILE.rank].max()) < 16


@pytest.mark.parametrize(("heads", "group"), [(8, 1), (8, 4), (48, 3)])
def test_blocks_of_keys_that_all_queries_see_are_shared(heads: int, group: int) -> None:
    """Items have all tiles of all heads, and add to dK and dV of a block in the order in which they are taken."""
    rows = torch.arange(4096)
    keep = ((rows[:, None] - rows).abs() < 100) | (rows % 2000 < 5)
    lists = lists_of(keep[None, None], 64)
    assert lists.counts is not None
    items = split_blocks(lists, heads, group, 132)
    assert items is not None
    assert items[:, ITEM.row_block].tolist() == sorted(items[:, ITEM.row_block].tolist(), reverse=True)
    taken: list[int] = []
    for block, tiles in enumerate(lists.counts.tolist()):
        of_block = items[items[:, ITEM.row_block] == block]
        assert of_block[:, ITEM.rank].tolist() == list(range(len(of_block)))
        assert of_block[:, ITEM.adding].tolist() == [len(of_block)] * len(of_block)
        chunks = int(of_block[0, ITEM.chunks])
        covered = [
            (head, chunk)
            for _, _, first, count, _, _, chunk, _ in of_block.tolist()
            for head in range(first, first + count)
        ]
        assert sorted(covered) == [(head, chunk) for head in range(group) for chunk in range(chunks)]
        assert (chunks > 1) == (tiles > longest_item(lists.counts, heads, 132))
        assert (len(of_block) > 1) == (chunks > 1 or (group > 1 and heads == 8))
        if len(of_block) > 1:
            assert len(of_block[:, ITEM.slot].unique()) == 1
            taken += range(int(of_block[0, ITEM.slot]), int(of_block[0, ITEM.slot]) + slots_of(len(of_block)))
    assert sorted(taken) == list(range(int(items[-1, ITEM.slot]) + slots_of(int(items[-1, ITEM.adding]))))
    assert split_blocks(lists_of(torch.ones(1, 1, 4096, 4096, dtype=torch.bool), 64), 8, group, 132) is None


def test_heads_of_a_key_head_with_other_masks_are_items_of_their_own() -> None:
    rows = torch.arange(4096)
    keep = ((rows[:, None] - rows).abs() < torch.tensor([50, 100])[:, None, None]) | (rows < 5)
    lists = lists_of(keep[None], 64)
    items = split_blocks(lists, 48, 2, 132)
    assert items is not None
    assert len(items) > 2 * lists.row_blocks
    assert items[:, ITEM.heads].tolist() == [1] * len(items)


def test_no_tile_of_a_causal_mask_is_before_the_diagonal() -> None:
    """So that there is one sum, and each thread block begins two tiles behind the one that started before it."""
    lists = lists_of(torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril(), 64)
    assert lists.sums == 16
    begins = lists.tiles[lists.row_block_ptr[:-1].long(), TILE.q_block]
    assert begins.tolist() == list(range(0, 16, 2))
    assert lists_of(torch.ones(1, 1, 256, 256, dtype=torch.bool), 64).sums == 6


@IN_INTERPRETER
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
@given(keep=drawn_masks(300), queries=st.sampled_from(QUERIES))
@examples(20)
def test_filled_lists_are_the_same(keep: Tensor, queries: int) -> None:
    """Tiles, ranks and bits; the device numbers bitmaps in another order."""
    pytest.importorskip("triton")
    from stof.kernels.hopper.backward_filled import filled_backward_lists
    from stof.layout.fill.layouts import pattern_numbers
    from stof.layout.fill.tiles import start_fill

    batch, heads, q_len, kv_len = keep.shape
    transposed = as_mask(keep.transpose(2, 3).contiguous())
    dims = transposed.dims(batch, heads)
    which = pattern_numbers(transposed, kv_len, q_len, dims)
    fill = start_fill(transposed, kv_len, q_len, dims, which, 128, queries, torch.device("cpu"))
    assert fill is not None
    counts = fill.counts()
    assume(counts is not None)
    lists = filled_backward_lists(fill.write(*counts, True), q_len, kv_len)
    expected = lists_of(keep, queries)
    # Patterns that are equal may have lists of their own.
    for of, other in zip(lists.pattern_of.flatten().tolist(), expected.pattern_of.flatten().tolist(), strict=True):
        made, wanted = tiles_of(lists, of), tiles_of(expected, other)
        fields = [TILE.q_block, TILE.rank, TILE.sum]
        assert [(n, *[x[f] for f in fields]) for n, x in made] == [(n, *[x[f] for f in fields]) for n, x in wanted]
        for (_, one), (_, same) in zip(made, wanted, strict=True):
            assert torch.equal(kept_scores(lists, one), kept_scores(expected, same))
    # Zeros are read of exactly those that see nothing, or that nothing sees, and are in tiles.
    for made_seen, dimension, wanted_seen in (
        (lists.seen_queries, 3, expected.seen_queries),
        (lists.seen_keys, 2, expected.seen_keys),
    ):
        if made_seen is None:
            assert wanted_seen is None
        else:
            assert torch.equal(
                made_seen[lists.pattern_of.long()], keep.any(dimension).expand(*lists.pattern_of.shape, -1)
            )


def test_layouts_that_the_kernel_cannot_read() -> None:
    keep = as_mask(torch.ones(256, 256, dtype=torch.bool))
    for config in (LayoutConfig(64, 64), LayoutConfig(128, 64, 8)):
        with pytest.raises(UnfitLayoutError, match="128 keys x 64 or 128 queries"):
            make_backward_lists(build_layout(keep, 256, 256, config))
    ordered = build_layout(keep, 256, 256, LAYOUTS[128], row_order=named_order("remainder 2", 256))
    with pytest.raises(UnfitLayoutError, match="128 keys"):
        make_backward_lists(ordered)


def tilings(mask: masks.Mask, call: CallSpec = CALL) -> tuple[BackwardTiling, ...]:
    geometry = MaskGeometry(mask, call.q_len, call.kv_len)
    return one_pass_tilings(call, lambda swap: geometry.transposed() if swap else geometry)


def test_it_is_chosen_where_its_estimate_is_lower() -> None:
    for mask in (masks.full(), masks.causal(), masks.from_function(lambda b, h, q, kv: q >= kv).frozen()):
        assert [tiling.dkv_layout for tiling in tilings(mask)] == [(LAYOUTS[128], None)]
    assert tilings(masks.dilated_window(2047, dilation=16)) == ()


@pytest.mark.parametrize(("mask", "cheaper"), [(masks.sliding_window(511), True), (masks.causal(), False)], ids=str)
def test_estimates_of_query_heads_that_share_a_key_head(mask: masks.Mask, cheaper: bool) -> None:
    """Short blocks of keys are one work item for all heads; others add to dK and dV in turn."""
    tile, transposed = one_pass_tile(CALL), MaskGeometry(mask, 8192, 8192).transposed()
    model, layout = load_model("NVIDIA H200"), LayoutConfig(tile.rows, tile.columns)
    times, counts = model.backward[tile.key("dqkv", CALL)], transposed.survey((layout,), None).counts[layout]
    grouped, separate = (
        float(one_pass_load(tile, counts, replace(CALL, kv_heads=kv_heads), model, times) @ times.weights())
        for kv_heads in (8, 32)
    )
    assert (grouped < separate) is cheaper


@pytest.mark.parametrize(
    "changes", [{"has_bias": True}, {"has_dropout": True},
                {"head_dim": 256, "value_dim": 256}, {"value_dim": 64}, {"compute_capability": (10, 0)}],
    ids=str,
)  # fmt: skip
def test_calls_that_it_refuses(changes: dict[str, Any]) -> None:
    backward = IMPLEMENTATIONS["hopper"].backward
    assert backward is not None
    assert not backward.capabilities.refusals(CALL)
    assert backward.capabilities.refusals(replace(CALL, **changes))


def test_gradients_are_in_the_memory_order_of_the_calls_tensors() -> None:
    """Also of tensors that are copied, because TMA cannot read them."""
    from stof.kernels.hopper import backward

    def spread(length: int) -> Tensor:
        return torch.randn(1, length, 2, 64).bfloat16().expand(3, -1, -1, -1).transpose(1, 2)

    q, k, v, d_out = (
        spread(64),
        spread(128),
        torch.randn(3, 128, 2, 64, 3).bfloat16()[..., 1].transpose(1, 2),
        spread(64),
    )
    launches: list[tuple[Any, ...]] = []

    def record(*arguments: Any, **options: Any) -> None:
        del options
        launches.append(arguments)

    lists = lists_of(torch.ones(1, 1, 64, 128, dtype=torch.bool), 128)
    with mock.patch.object(backward, "Launch", record):
        backward.bind_backward(q, k, v, q, d_out, None, lists, Options(0.1, 0.0), NeedsGrad())
    _, convert, main = (arguments[3] for arguments in launches)
    assert tuple(convert[0]) == empty_gradient(q).stride()[:3]
    strides = [tuple(number) for number in main if isinstance(number, tuple)]
    assert strides == [empty_gradient(x).stride()[:3] for x in (k, v)]
