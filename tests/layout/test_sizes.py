"""What a plan takes follows its tiles, not its lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import stof
from stof import LayoutConfig, masks
from stof.errors import TooLargeError
from stof.kernels.cpu import make_schedule
from stof.layout import build_layout
from stof.layout.builders import strips
from stof.layout.head_mask import HeadMask
from stof.layout.limits import available_bytes, check_strip
from stof.masks.index import Index
from stof.masks.rules import Documents
from tests.examples import examples
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
@examples(60)
def test_schedules_of_few_tiles_among_many_keys(mask: masks.Mask, config: LayoutConfig) -> None:
    """Ranges of keys without tiles are left out on the way, and change nothing."""
    layout = build_layout(mask, 300, 700, config)
    expected = make_schedule(layout).tensors()
    with mock.patch.multiple("stof.kernels.cpu.schedule", COMPACTED_FROM=0, SPAN=64):
        found = make_schedule(layout).tensors()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@given(mask=mask_trees(2500, leaves=3), groups=st.integers(2, 4))
@examples(60)
def test_groups_of_keys_are_asked_about_first(mask: masks.Mask, groups: int) -> None:
    config = LayoutConfig(64, 64, 1)
    expected = build_layout(mask, 200, 2500, config)
    with mock.patch.multiple(strips, ASKED_FROM=0, ASKED_AT_ONCE=groups):
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


LONGEST = 2**31 - 1


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "message"),
    [
        (
            "causal()",
            LONGEST,
            LONGEST,
            "layout of 2,147,483,647 queries .* at least 558,551,906,910,208 tiles",
        ),
        ("full()", 10**6, 10**6, r"at least 244,140,625 tiles: this takes at least 265\.6 GB on cpu"),
        ("full()", 1, LONGEST, "at least 33,554,432 tiles"),
        ("~causal()", 1, LONGEST, "at least 33,552,384 tiles"),
        # No rectangle is known to be full.
        pytest.param(
            "strided(1, 2, causal=False)",
            1,
            10**9,
            "may see 1,000,000,000 keys in 15,625,000 tiles",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_held_is_refused(
    mask: str, q_len: int, kv_len: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of its size is allocated."""
    monkeypatch.setattr("stof.layout.limits.available_bytes", lambda device: 2**33)
    with Largest() as largest, pytest.raises(TooLargeError, match=message + ".*where 8.6 GB are free; plan fewer"):
        stof.plan(masks.parse(mask), q_len, kv_len)
    assert largest.bytes < 2**26


def test_more_memory_holds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.layout.limits._SMALL", 0)
    for free, fits in ((2**13, False), (2**17, True)):
        monkeypatch.setattr("stof.layout.limits.available_bytes", lambda device, free=free: free)
        with nullcontext() if fits else pytest.raises(TooLargeError, match="at least 120 tiles"):
            assert build_layout(masks.causal(), 1024, 1024).tiles == 136


def test_strips_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = HeadMask(masks.causal(), 2**20, 2**20, 0, 0, None, torch.device("cpu"))
    monkeypatch.setattr("stof.layout.limits.available_bytes", lambda device: 2**33)
    check_strip(own, 64, 2**20)
    with pytest.raises(TooLargeError, match="evaluated at once"):
        check_strip(own, 2**11, 2**20)


def test_tiles_beyond_32_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.layout.limits._MOST_NUMBERS", 135)
    with pytest.raises(TooLargeError, match="136 tiles and 1 bitmaps, which 32 bits cannot number"):
        build_layout(masks.causal(), 1024, 1024)


def test_errors_of_the_allocator_say_what_failed() -> None:
    mask = masks.causal()
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError("lists")):
        with (
            mock.patch("stof.plans.plan.host_layout", side_effect=error),
            pytest.raises(TooLargeError, match=f"more memory than there is; plan fewer.*{error}"),
        ):
            stof.plan(mask, 9, 11)
    with (
        mock.patch("stof.plans.plan.host_layout", side_effect=RuntimeError("other")),
        pytest.raises(RuntimeError, match=r"^other"),
    ):
        stof.plan(mask, 9, 11)


def test_the_memory_of_this_machine() -> None:
    free = available_bytes(torch.device("cpu"))
    held = torch.empty(2**20)
    assert held.nbytes < free < 2**50
