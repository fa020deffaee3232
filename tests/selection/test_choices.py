"""The choices there are for a call on a GPU, and which of them are worth weighing or fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stof import LayoutConfig, masks
from stof.kernels.config import KernelConfig
from stof.layout import build_layout
from stof.selection import CallSpec, KernelChoice
from stof.selection import gpu_candidates as gpu
from stof.selection.gpu_choices import fits, geometries, gpu_choices, is_distinct
from tests.selection.fakes import H200_SHARED, Geometry, call_of

CALLS = {
    "fp16 D 64": call_of(),
    "bf16 D 128": call_of(dtype=torch.bfloat16, head_dim=128, q_len=4096, kv_len=4096),
    "fp16 D 256": call_of(head_dim=256, kv_len=3000),
    "fp16 D 192/128": call_of(head_dim=192, value_dim=128),
    "fp32": call_of(dtype=torch.float32, head_dim=96),
    "short": call_of(q_len=5, kv_len=7),
    "decode": call_of(q_len=1, kv_len=16384, heads=32, kv_heads=8),
    "decode 9 rows, D 256": call_of(q_len=9, kv_len=1000, head_dim=256),
    "decode fp32": call_of(q_len=2, kv_len=1000, dtype=torch.float32),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> CallSpec:
    return CALLS[request.param]


def implementations(call: CallSpec) -> list[str]:
    return ["block_wise", "row_wise", *(["decode"] if call.q_len <= 16 else [])]


def test_choices_are_distinct_and_complete(call: CallSpec) -> None:
    geometry = Geometry(masks.causal(), call.q_len, call.kv_len, row_orders=("remainder 16",))
    for name in implementations(call):
        choices = gpu_choices(call, geometry, name)
        assert choices
        assert len(set(choices)) == len(choices)
        assert {choice.implementation for choice in choices} == {name}
        found = geometries(choices)
        assert len(set(found)) == len(found)
        assert {choice.layout for choice in choices} == set(found)
        if name != "row_wise":
            # By gathering and by row order; contiguous columns are no use where like rows were brought together.
            assert {choice.row_order for choice in choices} == {None, "remainder 16"}
            assert all(choice.layout.slab == 1 for choice in choices if choice.row_order and choice.layout)


def test_kernels_can_be_compiled(call: CallSpec) -> None:
    """Triton takes powers of two, of warps and of rows and columns."""
    for name in implementations(call):
        for choice in gpu_choices(call, Geometry(masks.full(), call.q_len, call.kv_len), name):
            if choice.kernel is not None and choice.layout is not None:
                sizes = (choice.kernel.num_warps, choice.layout.block_m, choice.layout.block_n)
                assert [size.bit_count() for size in sizes] == [1, 1, 1]
                assert 1 <= choice.kernel.num_stages <= 5


def test_work_is_cut_where_there_is_enough_of_it(call: CallSpec) -> None:
    for name in implementations(call):
        for choice in gpu_choices(call, Geometry(masks.full(), call.q_len, call.kv_len), name):
            if choice.kernel is None or choice.layout is None:
                continue
            assert choice.kernel.split_tiles * choice.layout.block_n < call.kv_len
            assert 0 <= choice.kernel.side < call.batch * call.heads
            if name == "decode":
                assert choice.layout.block_m >= call.q_len
                assert choice.layout.block_m < 2 * call.q_len
                assert choice.kernel.pack == (call.heads > call.kv_heads)


def test_the_first_choice_fits_everywhere_it_is_made_for(call: CallSpec) -> None:
    """Some choice of every implementation fits each GPU since sm_80, the smallest with 99 KB for a program."""
    for limit in (101_376, 166_912, H200_SHARED):
        for name in implementations(call):
            choices = gpu_choices(call, Geometry(masks.full(), call.q_len, call.kv_len), name)
            assert any(fits(choice, call, limit) for choice in choices), (name, limit)


def test_fits() -> None:
    call = call_of(head_dim=128)
    choice = KernelChoice("block_wise", LayoutConfig(128, 128), None, KernelConfig(8, 3))
    needed = 2 * (128 * 128 + 3 * 128 * 256) + 1024
    assert fits(choice, call, needed)
    assert not fits(choice, call, needed - 1)
    assert fits(KernelChoice("row_wise", LayoutConfig()), call, 1)


def test_a_fixed_layout_is_kept() -> None:
    call, fixed = call_of(), LayoutConfig(32, 16, 8)
    for name in ("block_wise", "row_wise"):
        choices = gpu_choices(call, Geometry(masks.full(), 512, 512, fixed, ("remainder 16",)), name)
        assert choices
        assert {choice.layout for choice in choices} == {fixed}
        assert {choice.row_order for choice in choices} == {None}
    # Triton's tiles are powers of two, and 256 columns are too many.
    for other in (LayoutConfig(64, 256), LayoutConfig(192, 64), LayoutConfig(192, 128, 1)):
        for name, q_len in (("block_wise", 512), ("decode", 1)):
            assert gpu_choices(call_of(q_len=q_len), Geometry(masks.full(), q_len, 512, other), name) == []


def test_wide_tiles_are_not_for_biases() -> None:
    def scores(call: CallSpec, slab: int | None, fixed: LayoutConfig | None = None) -> set[int]:
        """What threads hold of the tiles there are."""
        choices = gpu_choices(call, Geometry(masks.causal(), 512, 512, fixed), "block_wise")
        tiles = [(c.layout, c.kernel.num_warps) for c in choices if c.layout and c.kernel and c.layout.slab == slab]
        return {layout.block_m * layout.block_n // (32 * warps) for layout, warps in tiles}

    for head_dim, plain, biased in ((64, {16, 32, 64, 128}, {16, 32, 64}), (128, {16, 32, 64}, {16, 32, 64})):
        call = call_of(head_dim=head_dim)
        assert scores(call, None) == scores(call, 1) == plain
        call = replace(call, has_bias=True)
        assert scores(call, None) == biased
        # Values come one by one.
        assert scores(call, 1) == scores(replace(call, bias_to_copy=2**20), None) == {16, 32}
    assert scores(call, None, LayoutConfig(128, 128)), "a layout that was given has to do"


def side_of(call: CallSpec) -> int:
    kernel = gpu_choices(call, Geometry(masks.full(), call.q_len, call.kv_len), "block_wise")[0].kernel
    assert kernel is not None
    return kernel.side


def test_heads_side_by_side_share_the_cache() -> None:
    """As many as keep K and V in their share of the L2 cache, in groups of equal size; 0 stands for all."""
    sides = []
    for kv_len in (512, 8192, 32768, 2**20):
        call = call_of(heads=30, batch=2, kv_len=kv_len)
        sides.append(side_of(call) or 60)
        per_head = kv_len * 2 * 64 * 2
        assert 60 % sides[-1] == 0
        assert sides[-1] * per_head <= gpu.L2_SHARE or sides[-1] == 1
    assert sides == sorted(sides, reverse=True)
    assert (sides[0], sides[-1]) == (60, 1)
    # Four query heads read the same keys.
    grouped, single = (side_of(call_of(heads=32, kv_heads=kv_heads, kv_len=32768)) for kv_heads in (8, 32))
    assert grouped == 4 * single


MIXED, EMPTY = masks.causal(), ~masks.full()


@pytest.mark.parametrize(
    ("mask", "layout", "kernel", "expected"),
    [
        (MIXED, LayoutConfig(64, 64), KernelConfig(), True),
        (EMPTY, LayoutConfig(64, 64), KernelConfig(), True),
        (EMPTY, LayoutConfig(64, 64), KernelConfig(split_tiles=8), False),
        (MIXED, LayoutConfig(64, 64), KernelConfig(split_tiles=8), False),  # the longest row block has 8 tiles
        (MIXED, LayoutConfig(64, 64), KernelConfig(split_tiles=7), True),
        # Gathering, when it saves tiles.
        (masks.full(), LayoutConfig(64, 64, 1), KernelConfig(), False),
        (masks.strided(8, 64, 8), LayoutConfig(64, 64, 1), KernelConfig(), True),
    ],
)
def test_worthwhile(mask: Any, layout: LayoutConfig, kernel: KernelConfig, expected: bool) -> None:
    counted = Geometry(mask, 512, 512).survey((layout, replace(layout, slab=None)), None)
    assert is_distinct(KernelChoice("block_wise", layout, None, kernel), counted) == expected


def test_worthwhile_without_a_kernel() -> None:
    counted = Geometry(MIXED, 100, 100).survey((), None)
    assert is_distinct(KernelChoice("row_wise", LayoutConfig()), counted)


def test_something_is_always_worthwhile() -> None:
    for mask in (masks.full(), EMPTY, MIXED, masks.strided(8, 64, 8), masks.longformer(20, 9)):
        for call in CALLS.values():
            geometry = Geometry(mask, call.q_len, call.kv_len)
            for name in implementations(call):
                choices = gpu_choices(call, geometry, name)
                counted = geometry.survey(geometries(choices), None)
                assert any(is_distinct(choice, counted) for choice in choices), (mask, call, name)


def test_texts() -> None:
    kernel = KernelConfig(4, 3, 128, pack=True, split_tiles=9, side=2)
    choice = KernelChoice("decode", LayoutConfig(16, 64, 1), "remainder 16", kernel)
    text = str(choice)
    for part in (
        "decode",
        "16x64 tiles",
        "gathered singly",
        "rows by remainder 16",
        "4 warps",
        "3 stages",
        "128 regis",
    ):
        assert part in text
    for part in ("heads packed", "split at 9 tiles", "2 heads side by side"):
        assert part in text
    assert str(KernelChoice("batched")) == "batched"
    assert "contiguous" in str(KernelChoice("block_wise", LayoutConfig(64, 64)))


def test_layouts_of_choices_can_be_built() -> None:
    for call in CALLS.values():
        for name in implementations(call):
            geometry = Geometry(masks.causal(), min(call.q_len, 64), min(call.kv_len, 64))
            for config in geometries(gpu_choices(call, geometry, name)):
                build_layout(geometry.mask, geometry.q_len, geometry.kv_len, config).validate()
