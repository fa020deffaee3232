"""The Hopper kernel's capabilities and choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from stof import LayoutConfig, masks
from stof.errors import UnfitLayoutError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.config import blocks_per_sm, padded_width
from stof.kernels.hopper.tile_lists import make_tile_lists
from stof.layout import build_layout
from stof.layout.orders.named import named_order
from stof.layout.survey import survey
from stof.masks import Mask
from stof.selection import IMPLEMENTATIONS, KernelChoice, candidates, choose, failures
from stof.selection.cost_model import kernel_key
from stof.selection.gpu_candidates import (
    _CHUNK_KEYS,
    _CHUNK_KEYS_OF_ONE,
    _HOPPER_L2_SHARE,
)
from stof.selection.gpu_choices import fits, gpu_choices, is_l2_bound
from stof.selection.select import NO_LAYOUT_ERRORS, LayoutErrors
from stof.testing.mask_grid import grid_mask
from tests.selection.fakes import GPU, H200_SHARED, Geometry, call_of, fake_gpu


@pytest.fixture(autouse=True)
def _no_failures() -> Iterator[None]:
    failures.clear()
    yield
    failures.clear()


# Stages by tile, for heads up to 64 wide and for wider ones.
NARROW = {(128, 128): 4, (192, 128): 3, (64, 128): 2, (64, 64): 3}
WIDE = {(128, 128): 2, (64, 64): 2}
WIDEST = {(128, 64): 2, (64, 64): 2}
TILES = {64: NARROW, 128: WIDE, 256: WIDEST}
BIASED = {64: {(128, 128): 3, (192, 64): 4, (64, 64): 2}, 128: {(128, 64): 3, (64, 64): 2}, 256: {(64, 64): 2}}
DILATED = masks.dilated_window(500, dilation=16)


def choices_of(mask: Mask | None = None, fixed: LayoutConfig | None = None, **changes: Any) -> list[KernelChoice]:
    call = call_of(**changes)
    orders = ("remainder 16", "patch 16 32 8 8")
    geometry = Geometry(masks.causal() if mask is None else mask, call.q_len, call.kv_len, fixed, orders)
    return gpu_choices(call, geometry, "hopper")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "takes float16, bfloat16, not torch.float32"),
        ({"dtype": torch.float64}, "takes float16, bfloat16, not torch.float64"),
        (
            {"has_bias": True, "tiled_bias": False},
            "takes a bias in 16 bits with a value for every key",
        ),
        ({"head_dim": 100}, "head_dim 100 is no multiple of 8"),
        ({"head_dim": 264}, "head_dim 264 is outside 8..256"),
        ({"head_dim": 4}, "head_dim 4 is outside 8..256"),
        ({"value_dim": 48}, "value width must equal head_dim"),
        ({"compute_capability": (8, 0)}, "needs compute capability 9.0, not 8.0"),
        ({"compute_capability": (8, 9)}, "needs compute capability 9.0, not 8.9"),
        ({"compute_capability": (10, 0)}, "runs on compute capability 9.0 alone, not 10.0"),
        ({"compute_capability": (12, 0)}, "runs on compute capability 9.0 alone, not 12.0"),
        ({"device": "cpu", "compute_capability": (0, 0)}, "runs on cuda, not cpu"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    fake_gpu(monkeypatch)
    call = call_of(**changes)
    refusals = IMPLEMENTATIONS["hopper"].capabilities.refusals(call)
    assert reason in refusals
    if call.device == "cuda":
        (one,) = [c for c in candidates(call, GPU, Geometry(masks.causal(), 512, 512)) if c.name == "hopper"]
        assert one.refusals == tuple(refusals)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16, "head_dim": 128},
        {"head_dim": 8},
        {"head_dim": 192, "dtype": torch.bfloat16, "has_softcap": True},
        {"head_dim": 256, "has_sinks": True},
        {"has_bias": True, "has_softcap": True, "has_sinks": True},
        {"has_bias": True, "head_dim": 256, "dtype": torch.bfloat16},
        {"tiled_bias": False},
        {"head_dim": 96, "kv_heads": 3, "mask_heads": 12},
        {"has_softcap": True, "has_sinks": True, "q_len": 1, "kv_len": 3},
    ],
)
def test_what_it_takes(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    fake_gpu(monkeypatch)
    call = call_of(**changes)
    weighed = candidates(call, GPU, Geometry(masks.causal(), call.q_len, call.kv_len))
    mine = [c for c in weighed if c.name == "hopper"]
    assert mine
    assert not any(c.refusals for c in mine)
    # Decoding is another kernel's business: with few rows there is no estimate, and so no preference.
    assert all((c.estimate_us is None) == (call.q_len <= 16) for c in mine)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 192, 256])
def test_choices(head_dim: int, has_bias: bool) -> None:
    choices = choices_of(head_dim=head_dim, q_len=4096, kv_len=4096, heads=2, has_bias=has_bias)
    assert len(set(choices)) == len(choices)
    assert {choice.implementation for choice in choices} == {"hopper"}
    tiles = (BIASED if has_bias else TILES)[padded_width(head_dim)]
    kinds: dict[tuple[Any, ...], set[int]] = {}
    pairs: list[tuple[Any, ...]] = []
    for choice in choices:
        assert choice.kernel is not None
        assert choice.layout is not None
        tile = (choice.layout.block_m, choice.layout.block_n)
        if choice.kernel.paired:
            pairs.append((tile, choice.layout.slab, choice.row_order, choice.kernel))
            continue
        assert (choice.kernel.num_warps, choice.kernel.num_stages) == (4, tiles[tile])
        assert choice.layout.compact_columns == (choice.layout.slab == 1 and choice.row_order is None)
        keys = kinds.setdefault((tile, choice.layout.slab, choice.row_order), set())
        keys.add(choice.kernel.split_tiles * choice.layout.block_n)
    # A bias is copied in whole tiles.
    expected = {(tile, slab, None) for tile in tiles for slab in ((None,) if has_bias else (None, 16, 8, 1))}
    if head_dim in TILES and not has_bias:  # 256 rows of each remainder
        expected |= {(tile, 1, "remainder 16") for tile in tiles if 256 % tile[0] == 0}
    assert set(kinds) == expected
    # Pairs of row blocks: whole ones, of heads up to 128 wide.
    wide = padded_width(head_dim) == 128 and not has_bias
    assert [pair[:3] for pair in pairs] == ([((64, 64), None, None), ((64, 64), 16, None)] if wide else [])
    assert {(kernel.num_stages, kernel.split_tiles) for *_, kernel in pairs} <= {(5, 0)}
    for (tile, *_), keys in kinds.items():
        lengths = {*_CHUNK_KEYS, _CHUNK_KEYS_OF_ONE} if tile[0] == 64 else set(_CHUNK_KEYS)
        assert keys == {0, *(chunk for chunk in lengths if chunk < 4096)}


def test_few_chunks_where_row_blocks_fill_the_machine() -> None:
    """Four at most, of one warpgroup eight, unless there are few row blocks."""
    for heads, rows, least in ((1, 64, 512), (1, 128, 512), (64, 64, 1024), (64, 128, 2048)):
        keys = {
            c.kernel.split_tiles * c.layout.block_n
            for c in choices_of(q_len=8192, kv_len=8192, heads=heads)
            if c.layout and c.layout.block_m == rows and c.kernel and c.kernel.split_tiles
        }
        assert min(keys) == least


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_choices_with_a_bias_fit(head_dim: int) -> None:
    width = padded_width(head_dim)
    for choice in choices_of(head_dim=head_dim, has_bias=True):
        assert choice.layout is not None
        assert choice.kernel is not None
        block_m, block_n = choice.layout.block_m, choice.layout.block_n
        # Q, what leaves of the output at once, and at each stage K, V and the bias of a tile.
        leaving = {64: 64, 128: 64, 256: 128}[width]
        stage = block_n * (2 * width + block_m)
        needed = 2 * (block_m * (width + leaving) + choice.kernel.num_stages * stage)
        call = call_of(head_dim=head_dim, has_bias=True)
        assert fits(choice, call, needed + 4096)
        assert not fits(choice, call, needed)
        assert blocks_per_sm(block_m, block_n, width) * (needed + 2048) <= H200_SHARED + 1024
        assert kernel_key(choice, call) == kernel_key(choice, call_of(head_dim=head_dim)) + "/bias"


def test_three_thread_blocks_are_for_short_row_blocks() -> None:
    layout = LayoutConfig(64, 64, None)
    choice = KernelChoice("hopper", layout, None, KernelConfig(4, 3))
    window = masks.sliding_window
    cases = (window(300), 64, False), (window(550), 64, False), (window(1000), 64, True), (window(1000), 128, False)
    for mask, head_dim, expected in cases:
        call = call_of(head_dim=head_dim, q_len=2048, kv_len=2048)
        counted = survey(mask, 2048, 2048, (layout,))
        assert is_l2_bound(choice, call, counted) == expected
    counted = survey(masks.causal(), 1024, 1024, (layout,))  # 8.5 tiles on average, most of them in long row blocks
    assert is_l2_bound(choice, call_of(q_len=1024, kv_len=1024), counted)
    assert not is_l2_bound(replace(choice, implementation="block_wise"), call_of(), counted)


def test_starved_tiles_serve_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made with such a layout, or whose wider tiles turned out not to fit, still runs on the kernel."""
    fake_gpu(monkeypatch)
    call, layout = call_of(q_len=2048, kv_len=2048), LayoutConfig(64, 64)

    def layouts(geometry: Geometry, errors: LayoutErrors = NO_LAYOUT_ERRORS) -> set[LayoutConfig | None]:
        found = candidates(call, GPU, geometry, layout_errors=errors)
        return {c.choice.layout for c in found if c.name == "hopper" and not c.refusals and c.choice is not None}

    geometry = Geometry(masks.causal(), 2048, 2048)
    assert layouts(geometry)
    assert layout not in layouts(geometry)
    fixed = Geometry(masks.causal(), 2048, 2048, fixed=layout)
    assert layouts(fixed) == {layout}
    assert choose(call, GPU, fixed, "hopper").layout == layout
    others = [choice for choice in gpu_choices(call, geometry, "hopper") if choice.layout != layout]
    assert layouts(geometry, {choice.layout_key: "keys nobody sees" for choice in others}) == {layout}


def test_pairs_are_for_short_row_blocks() -> None:
    (pair,) = (
        c for c in choices_of(head_dim=128) if c.kernel and c.kernel.paired and c.layout and c.layout.slab is None
    )
    for mask, length, serves in (("full", 1024, True), ("causal", 8192, False), ("window512", 8192, True)):
        geometry = Geometry(grid_mask(mask).mask(length), length, length)
        call = call_of(head_dim=128, q_len=length, kv_len=length)
        assert pair.layout is not None
        assert is_l2_bound(pair, call, geometry.survey((pair.layout,), None)) is not serves


def test_rows_of_two_remainders_share_no_row_block() -> None:
    heights = {c.layout.block_m for c in choices_of(q_len=512, kv_len=512) if c.layout and c.row_order}
    assert heights == set()  # 32 rows of each
    heights = {c.layout.block_m for c in choices_of(q_len=3072, kv_len=3072) if c.layout and c.row_order}
    assert heights == {64, 192}


def test_heads_side_by_side_share_the_cache() -> None:
    for kv_len, heads in ((512, 12), (8192, 30), (2**20, 12)):
        (side,) = {c.kernel.side for c in choices_of(kv_len=kv_len, heads=heads, batch=2) if c.kernel}
        assert (2 * heads) % (side or 1) == 0
        assert (side or 2 * heads) * kv_len * 2 * 64 * 2 <= _HOPPER_L2_SHARE or side == 1


def test_choices_fit_the_gpu_they_are_made_for() -> None:
    for head_dim in (8, 64, 72, 128, 192, 256):
        call = call_of(head_dim=head_dim)
        for choice in choices_of(head_dim=head_dim):
            assert fits(choice, call, H200_SHARED)
            # Q of three row blocks or of one and half its output, and at each stage K and V of a tile.
            assert choice.layout is not None
            block_m, block_n = choice.layout.block_m, choice.layout.block_n
            width = padded_width(head_dim)
            rows = 192 if (block_m, width) == (128, 256) else 3 * block_m
            stages = TILES[width][block_m, block_n]
            if choice.kernel is not None and choice.kernel.paired:
                # Two of twice the rows.
                rows, stages, block_m = 4 * block_m, choice.kernel.num_stages, 2 * block_m
            needed = 2 * width * (rows + 2 * stages * block_n)
            assert fits(choice, call, needed + 4096)
            assert not fits(choice, call, needed)
            # So many thread blocks are launched; the hardware takes 1 KB more for each.
            assert blocks_per_sm(block_m, block_n, width) * (needed + 2048) <= H200_SHARED + 1024


@pytest.mark.parametrize("slab", [None, 8, 16])
@pytest.mark.parametrize("tile", NARROW)
def test_fixed_layouts_it_takes(tile: tuple[int, int], slab: int | None) -> None:
    fixed = LayoutConfig(*tile, slab)
    choices = choices_of(fixed=fixed, kv_len=4096)
    assert {(choice.layout, choice.row_order) for choice in choices} == {(fixed, None)}
    assert {choice.kernel.num_stages for choice in choices if choice.kernel} == {NARROW[tile]}
    assert {bool(choice.kernel and choice.kernel.split_tiles) for choice in choices} == {False, True}


@pytest.mark.parametrize(
    ("fixed", "changes"),
    [
        (LayoutConfig(128, 128, 1), {}),
        (LayoutConfig(64, 32), {}),
        (LayoutConfig(64, 128), {"head_dim": 128}),
        (LayoutConfig(128, 64, 8), {}),
        (LayoutConfig(256, 128), {}),
        (LayoutConfig(128, 128), {"permuted_rows": True}),
        (LayoutConfig(192, 128, 1), {}),
        (LayoutConfig(192, 64), {}),
        (LayoutConfig(192, 128), {"head_dim": 128}),
        (LayoutConfig(128, 128), {"head_dim": 256}),
        (LayoutConfig(128, 128, 16), {"has_bias": True}),
        (LayoutConfig(192, 128), {"has_bias": True}),
        (LayoutConfig(192, 128), {"permuted_rows": True}),
    ],
)
def test_fixed_layouts_it_does_not_take(
    monkeypatch: pytest.MonkeyPatch, fixed: LayoutConfig, changes: dict[str, Any]
) -> None:
    assert choices_of(fixed=fixed, **changes) == []
    fake_gpu(monkeypatch)
    weighed = candidates(call_of(**changes), GPU, Geometry(masks.causal(), 512, 512, fixed))
    assert [c.refusals for c in weighed if c.name == "hopper"] == [("the plan's layout has tiles it does not take",)]
    assert not weighed[0].refusals


@pytest.mark.parametrize(
    ("mask", "length", "heights"),
    [
        (masks.full(), 2048, {64, 128}),
        (masks.causal(), 2048, {64, 128}),
        (masks.longformer(40, 40), 2048, {128}),  # half of a remainder's rows leave out some keys
        (DILATED, 2048, {64, 128}),
        (~masks.full(), 2048, {64, 128}),
    ],
)
def test_layouts_of_choices_can_be_prepared_or_say_why(mask: Mask, length: int, heights: set[int]) -> None:
    for config, name in {(c.layout, c.row_order) for c in choices_of(mask, q_len=length, kv_len=length) if c.layout}:
        order = None if name is None else named_order(name, length)
        layout = build_layout(mask, length, length, config, row_order=order)
        if name is None:
            assert make_tile_lists(layout).row_order.numel() == 0
        elif config.block_m in heights:
            assert make_tile_lists(layout).row_order.shape == (1, length)
        else:
            with pytest.raises(UnfitLayoutError, match="not evenly spaced"):
                make_tile_lists(layout)


def test_a_bias_to_copy_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's, 6 MB, is worth it; one as large as all scores of a long sequence is not, where few of them are kept."""
    fake_gpu(monkeypatch)

    def first(mask: Mask, length: int, batch: int, to_copy: int) -> tuple[str, float]:
        call = call_of(batch=batch, heads=12, q_len=length, kv_len=length, has_bias=True, bias_to_copy=to_copy)
        best = candidates(call, GPU, Geometry(mask, length, length))[0]
        assert best.estimate_us is not None
        return best.name, best.estimate_us

    whole = 2 * 12 * 512 * 512
    as_it_lies, copied = (first(masks.full(), 512, 8, size) for size in (0, whole))
    assert as_it_lies[0] == copied[0] == "hopper"
    assert as_it_lies[1] + 2 * whole / 4.2e6 < copied[1] < as_it_lies[1] + 30
    sparse = masks.sliding_window(256)
    assert [first(sparse, 8192, 1, size)[0] for size in (0, 2 * 12 * 8192**2)] == ["hopper", "block_wise"]
