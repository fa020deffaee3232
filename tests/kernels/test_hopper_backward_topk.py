"""Lists of Hopper's one-pass backward kernel for block top-k masks made at run time, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import LayoutConfig, masks
from stof.dynamic.block_topk.buffers import BlockBuffers
from stof.dynamic.block_topk.one_pass import OnePassLists
from stof.dynamic.gradients import DynamicGradients
from stof.dynamic.mask_buffers import fill_buffers
from stof.errors import UnsupportedError
from stof.kernels.hopper.backward_lists import LAYOUTS, TILE, BackwardLists
from stof.masks import Mask
from stof.selection import CallSpec
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.kernels.test_hopper_backward import QUERIES, kept_scores, tiles_of
from tests.kernels.test_work import DEVICE
from tests.test_dynamic import buffers_of

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]

CALL = CallSpec("cuda", torch.bfloat16, 128, 128, 4, 4, q_len=512, kv_len=512, compute_capability=(9, 0))


def lists_of(buffers: BlockBuffers, queries: int) -> BackwardLists:
    config = next(layout for layout in LAYOUTS.values() if layout.block_n == queries)
    if ("hopper", config) not in buffers.backward:
        buffers.backward["hopper", config] = buffers.one_pass_lists(config)
    lists = buffers.backward["hopper", config]
    assert isinstance(lists, OnePassLists)
    return lists.lists


def topk_buffers(mask: Mask, q_len: int, kv_len: int) -> BlockBuffers:
    buffers = buffers_of(mask, q_len, kv_len, block=64)
    assert isinstance(buffers, BlockBuffers)
    return buffers


def check(lists: BackwardLists, keep: Tensor) -> None:
    """The lists are the mask `[P, Sq, Skv]`; each sum is added to in the order in which work items are taken."""
    patterns, q_len, kv_len = keep.shape
    queries = lists.queries
    for pattern in range(patterns):
        seen = torch.zeros(lists.row_blocks * 128, -(-q_len // queries) * queries, dtype=torch.bool)
        added: dict[int, int] = {}
        first, last = lists.sum_ptr[pattern, :-1].tolist(), lists.sum_ptr[pattern, 1:].tolist()
        for block, fields in tiles_of(lists, pattern):
            part = seen[block * 128 :][:128, fields[TILE.q_block] * queries :][:, :queries]
            assert not part.any()  # each tile is listed once
            part |= kept_scores(lists, fields)
            place = fields[TILE.sum]
            assert first[fields[TILE.q_block]] <= place < last[fields[TILE.q_block]]
            assert fields[TILE.rank] == added.get(place, 0)
            added[place] = added.get(place, 0) + 1
        assert torch.equal(seen[:kv_len, :q_len], keep[pattern].T)
        # Queries past the end may be kept, keys may not.
        assert not seen[kv_len:].any()
        assert sorted(added) == list(range(last[-1]))
        assert last[-1] <= lists.sums
    assert int(lists.row_block_ptr[-1]) <= len(lists.tiles) - 2
    # Queries and keys of tiles are all in some kept score: others may be NaN, and 0 * NaN is NaN.
    for dim, size in ((1, 128), (2, queries)):
        for part in keep.any(dim).split(size, 1):
            assert bool((part.all(1) | ~part.any(1)).all())


@IN_INTERPRETER
@given(data=st.data(), queries=st.sampled_from(QUERIES))
@examples(40)
def test_lists_are_the_mask(data: st.DataObject, queries: int) -> None:
    """In every step, with ends of rows and columns, blocks that nothing sees, and queries that see nothing."""
    q_len, kv_len = (data.draw(st.sampled_from([1, 64, 100, 128, 190, 256, 450, 700])) for _ in range(2))
    causal = data.draw(st.booleans())
    if causal and kv_len > q_len and q_len % 128:
        kv_len = q_len
    rows, columns = -(-q_len // 128), -(-kv_len // 128)
    leading = data.draw(st.sampled_from([(), (2,), (2, 2), (2, 1)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    k = data.draw(st.integers(1, columns))
    buffers = None
    for _ in range(2):  # nothing is left of the first mask
        scores = torch.randn(*leading, rows, columns, generator=generator)
        scores[torch.rand(scores.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))] = -torch.inf
        mask = masks.block_topk(scores.to(DEVICE), k, block_size=128, causal=causal)
        buffers = buffers or topk_buffers(mask, q_len, kv_len)
        lists = lists_of(buffers, queries)
        fill_buffers(buffers, mask)
        keep = mask.to_dense(q_len, kv_len, device=DEVICE).cpu()
        check(lists, keep.reshape(-1, q_len, kv_len))


@IN_INTERPRETER
@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 900), (900, 128), (300, 300)])
@pytest.mark.parametrize("queries", QUERIES)
def test_bad_patterns_have_every_block_in_a_tile(q_len: int, kv_len: int, queries: int) -> None:
    """Their log-sum-exp is NaN, so that all of their gradients become NaN; the other patterns are as ever."""
    scores = torch.randn(3, -(-q_len // 128), -(-kv_len // 128))
    good = scores.clone()
    scores[1, 0, 0] = torch.nan
    mask = masks.block_topk(scores.to(DEVICE), 1, block_size=128)
    buffers = topk_buffers(mask, q_len, kv_len)
    lists = lists_of(buffers, queries)
    fill_buffers(buffers, mask)
    tiles = tiles_of(lists, 1)
    assert {block for block, _ in tiles} == set(range(-(-kv_len // 128)))
    assert {fields[TILE.q_block] for _, fields in tiles} == set(range(-(-q_len // queries)))
    assert all(fields[TILE.bitmap] < 0 for _, fields in tiles)
    assert int(lists.row_block_ptr[-1]) <= len(lists.tiles) - 2
    keep = masks.block_topk(good, 1, block_size=128).to_dense(q_len, kv_len).view(3, q_len, kv_len)
    for pattern in (0, 2):
        seen = torch.zeros(lists.row_blocks * 128, -(-q_len // queries) * queries, dtype=torch.bool)
        for block, fields in tiles_of(lists, pattern):
            seen[block * 128 :][:128, fields[TILE.q_block] * queries :][:, :queries] |= kept_scores(lists, fields)
        assert torch.equal(seen[:kv_len, :q_len], keep[pattern].T)


@pytest.mark.parametrize(
    ("changes", "block_size", "name"),
    [
        ({}, 128, "hopper"),
        ({"head_dim": 64, "value_dim": 64, "kv_heads": 2, "mask_heads": 4}, 128, "hopper"),
        ({}, 64, "block_wise"),
        ({"has_sinks": True}, 128, "block_wise"),
        ({"has_softcap": True}, 128, "hopper"),
        ({"has_bias": True}, 128, None),
        ({"head_dim": 256, "value_dim": 256}, 128, "block_wise"),
        ({"dtype": torch.float32}, 128, "block_wise"),
        ({"compute_capability": (8, 0)}, 128, "block_wise"),
    ],
    ids=str,
)
def test_when_the_one_pass_kernel_serves(changes: dict[str, Any], block_size: int, name: str | None) -> None:
    scores = torch.randn(4, 512 // block_size, 512 // block_size).to(DEVICE)
    buffers = topk_buffers(masks.block_topk(scores, 2, block_size=block_size), 512, 512)
    gradients = _gradients(buffers)
    if name is None:
        with pytest.raises(UnsupportedError, match="no implementation"):
            gradients.choices(replace(CALL, **changes))
        return
    implementation, tiling = gradients.choices(replace(CALL, **changes))[0]
    assert implementation == name
    if name == "hopper":
        assert tiling.dkv_layout == (LAYOUTS[replace(CALL, **changes).head_dim], None)


def test_a_refused_layout_leaves_the_other_kernels() -> None:
    scores = torch.randn(4, 4, 4).to(DEVICE)
    gradients = _gradients(topk_buffers(masks.block_topk(scores, 2, block_size=128), 512, 512))
    gradients._failed[("hopper", gradients.choices(CALL)[0][1])] = "does not fit"
    ((name, tiling),) = gradients.choices(CALL)
    assert (name, tiling.dq_layout) == ("block_wise", (LayoutConfig(64, 64), None))


class _Plan:
    """What `DynamicGradients` refers to; `choices` asks it for nothing."""


def _gradients(buffers: BlockBuffers) -> DynamicGradients:
    plan: Any = _Plan()
    return DynamicGradients(plan, buffers)
