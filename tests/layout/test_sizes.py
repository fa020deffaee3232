"""What a plan takes follows its tiles, not its lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import stof
from stof import LayoutConfig, masks
from stof.kernels.cpu import make_schedule
from stof.layout import build_layout, strips
from stof.masks.index import Index
from stof.masks.rules import Documents
from tests.strategies import mask_trees

FAR = 10**9


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns, and how many operators run."""

    bytes = operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        ("sink_tokens(4)", 1),
        ("causal()", 1),
        ("padding([100])", 2),
        ("sliding_window(511) | sink_tokens(16)", 1),
        ("random_blocks(3)", 3),
        ("dilated_window(512, dilation=4)", 1),
        ("full() & ~causal() & padding([70])", 2),  # lists no ranges of keys: rectangles are asked
        ("~full()", 0),
    ],
)
def test_few_tiles_among_many_keys(mask: str, tiles: int) -> None:
    with Largest() as largest:
        plan = stof.plan(masks.parse(mask), 1, FAR)
    assert plan.layout.tiles == tiles
    assert largest.bytes < 2**21


def test_a_window_at_the_end_of_many_keys() -> None:
    mask = masks.sliding_window(511) | masks.sink_tokens(16)
    with Largest() as largest:
        plan = stof.plan(mask.with_query_offset(FAR - 3), 3, FAR)
    columns = plan.layout.tile_columns()[plan.layout.tile_live()].sort().values
    assert torch.equal(columns, torch.cat([torch.arange(16), torch.arange(FAR - 3 - 511, FAR)]))
    assert largest.bytes < 2**21


@given(
    mask=mask_trees(700),
    config=st.builds(LayoutConfig, st.sampled_from([16, 64]), st.just(64), st.sampled_from([None, 1, 16])),
)
@settings(max_examples=60)
def test_schedules_of_few_tiles_among_many_keys(mask: masks.Mask, config: LayoutConfig) -> None:
    """Ranges of keys without tiles are left out on the way, and change nothing."""
    layout = build_layout(mask, 300, 700, config)
    expected = make_schedule(layout).tensors()
    with mock.patch.multiple("stof.kernels.cpu.schedule", COMPACTED_FROM=0, SPAN=64):
        found = make_schedule(layout).tensors()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@given(mask=mask_trees(2500, leaves=3), groups=st.integers(2, 4))
@settings(max_examples=60)
def test_groups_of_keys_are_asked_about_first(mask: masks.Mask, groups: int) -> None:
    config = LayoutConfig(64, 64, 1)
    expected = build_layout(mask, 200, 2500, config)
    with (
        mock.patch.object(type(mask), "spans", return_value=None),
        mock.patch.multiple(strips, ASKED_FROM=0, ASKED_AT_ONCE=groups),
    ):
        assert build_layout(mask, 200, 2500, config).equals(expected)


class CountedRuns(tuple[tuple[int, int], ...]):
    """Runs of documents that count how often they are walked through."""

    walks = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        type(self).walks += 1
        return super().__iter__()


def test_many_short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are evaluated near the diagonal only, and the list of documents is not read anew for every part of it."""
    length, scores = 20_000, 0
    evaluate = Documents.evaluate

    def counted(mask: Documents, index: Index) -> torch.Tensor:
        nonlocal scores
        keep = evaluate(mask, index)
        scores += keep.numel()
        return keep

    monkeypatch.setattr(Documents, "evaluate", counted)
    mask = Documents((CountedRuns((token, 1) for token in range(length)),))
    assert mask == masks.documents(torch.arange(length))
    plan = stof.plan(mask, length)
    assert plan.layout.tiles == -(-length // plan.layout.config.block_m)
    assert scores <= 2048 * length
    assert CountedRuns.walks < 20


@pytest.mark.parametrize("share", [0.5, 1])
def test_many_random_blocks(share: float) -> None:
    """Operators by the number of blocks drawn, not by pairs of them."""
    length = 600
    blocks = int(share * length)
    with Largest() as largest:
        plan = stof.plan(masks.random_blocks(blocks, block_size=1), length)
    assert int(plan.to_dense().sum()) == blocks * length
    assert largest.operators < 20 * blocks
