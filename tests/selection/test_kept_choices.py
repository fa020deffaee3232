"""Choices kept by the structure of a mask: what is a structure, and which choice serves which mask."""

from __future__ import annotations

import pytest
import torch

from stof import masks
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.plans.filled import (
    is_fillable,
    is_fillable_backward,
    keep_choice,
    keep_tiling,
    kept_choice,
    kept_tiling,
    surveyed_keys,
)
from stof.plans.kept_choices import KeptByStructure, KeptChoices, structure_key
from stof.selection import CallSpec, KernelChoice, MaskGeometry, candidates
from stof.selection.backward_tilings import BackwardTiling
from stof.selection.device_model import DEFAULT_DEVICE, load_model
from stof.selection.select import first_of

pytest.importorskip("triton")
CUDA = torch.device("cuda")


def documents(*lengths: int) -> Mask:
    return masks.documents(cu_seqlens=[0, *torch.tensor(lengths).cumsum(0).tolist()])


def geometry(mask: Mask, q_len: int = 512, kv_len: int = 512, batch: int = 1, heads: int = 4) -> MaskGeometry:
    return MaskGeometry(mask, q_len, kv_len, batch=batch, heads=heads)


def call_of(one: MaskGeometry, **options: object) -> CallSpec:
    sizes = {"batch": one.batch, "q_len": one.q_len, "kv_len": one.kv_len, "mask_heads": one.dims[1]}
    return CallSpec(
        "cuda", torch.bfloat16, 128, 128, one.heads, one.heads, compute_capability=(9, 0), **(sizes | options)
    )  # type: ignore[arg-type]


def key_of(mask: Mask, **sizes: int) -> object:
    one = geometry(mask, **sizes)
    return structure_key(one, call_of(one))


ALIKE = [
    (documents(100, 412) & masks.causal(), documents(3, 9, 500) & masks.causal()),
    (masks.sliding_window(30), masks.sliding_window(400, 7)),
    (masks.padding([7]), masks.padding([512])),
    (masks.longformer(20, 3), masks.longformer(44, 9)),
    (masks.dilated_window(30, dilation=4), masks.dilated_window(80, dilation=4)),
    (masks.from_dense(torch.ones(512, 512) > 0), masks.from_dense(torch.rand(512, 512) < 0.5)),
    (masks.causal(), masks.causal().with_query_offset(0)),
]
UNLIKE = [
    (masks.causal(), masks.causal() & masks.padding([3])),
    (masks.causal() & masks.padding([3]), masks.causal() | masks.padding([3])),
    (masks.dilated_window(30, dilation=4), masks.dilated_window(30, dilation=8)),
    (masks.neighborhood_2d(16, 32, 3), masks.neighborhood_2d(32, 16, 3)),
    (masks.random_blocks(2, block_size=64), masks.random_blocks(2, block_size=32)),
    (masks.causal(), ~masks.causal()),
    (masks.causal(), masks.from_dense(torch.ones(512, 512) > 0)),
]


@pytest.mark.parametrize("number", range(len(ALIKE)))
def test_bounds_and_tables_are_no_part_of_a_structure(number: int) -> None:
    one, other = ALIKE[number]
    assert key_of(one) == key_of(other) is not None


@pytest.mark.parametrize("number", range(len(UNLIKE)))
def test_operations_and_sizes_are(number: int) -> None:
    one, other = UNLIKE[number]
    assert key_of(one) != key_of(other)


def test_entries_of_one_structure_count_once() -> None:
    two, three = masks.padding([3, 9]), masks.padding([3, 9, 100])
    assert (
        geometry(two, batch=2).structure == geometry(three, batch=3).structure == geometry(masks.padding([3])).structure
    )
    assert key_of(two, batch=2) == key_of(three, batch=3) != key_of(masks.padding([3]))
    heads = masks.per_head([masks.causal(), masks.sliding_window(3)])
    assert len(geometry(heads, heads=2).structure) == 1  # type: ignore[arg-type]
    assert len(geometry(masks.per_head([masks.causal(), masks.padding([3])]), heads=2).structure) == 2  # type: ignore[arg-type]


def test_lengths_count_by_powers_of_two() -> None:
    assert key_of(masks.causal(), q_len=300, kv_len=400) == key_of(masks.causal(), q_len=512, kv_len=257)
    assert key_of(masks.causal(), q_len=300) != key_of(masks.causal(), q_len=256)


def test_functions_have_no_structure() -> None:
    assert key_of(masks.from_function(lambda b, h, q, k: q - k < 3 * (q % 5))) is None


def test_another_call_has_other_choices() -> None:
    one = geometry(masks.causal())
    keys = {structure_key(one, call_of(one, **options)) for options in ({}, {"has_bias": True}, {"has_sinks": True})}
    assert len(keys | {structure_key(one, call_of(one), "hopper")}) == 4


def test_choices_serve_masks_with_about_as_many_keys() -> None:
    kept = KeptChoices()
    assert kept.near(100) is None
    kept.keep(100, "narrow", "a")
    kept.keep(1600, "wide", "b")
    assert kept.latest is not None
    assert kept.latest.choice == "wide"
    for keys, expected in ((100, "narrow"), (140, "narrow"), (72, "narrow"), (1200, "wide"), (2200, "wide")):
        near = kept.near(keys)
        assert near is not None
        assert kept.latest is near
        assert near.choice == expected
    assert kept.near(400) is kept.near(10) is None


def test_structures_that_were_not_used_for_long_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.plans.kept_choices._MOST", 2)
    kept = KeptByStructure()
    first = kept.of(1)
    first.keep(1, "x", "")
    kept.of(2)
    assert kept.of(1) is first
    kept.of(3)
    assert kept.of(1) is first
    assert kept.of(2).latest is None


def first_choice(one: MaskGeometry, kept: KeptChoices) -> KernelChoice:
    call = call_of(one)
    ranked = candidates(call, CUDA, one, load_model(DEFAULT_DEVICE))
    best = first_of(ranked, call)
    keep_choice(kept, one, ranked, best, repr(one.mask))
    return best


def test_lists_of_the_next_mask_are_filled() -> None:
    kept = KeptChoices()
    mask, other = documents(100, 156, 256) & masks.causal(), documents(130, 382) & masks.causal()
    first_choice(geometry(mask), kept)
    assert kept.latest is not None
    assert is_fillable(kept.latest.choice)
    one = geometry(other)
    serves = kept_choice(kept, one, call_of(one), {})
    assert serves is not None
    assert serves.choice == kept.latest.choice
    assert serves.mask_text == repr(mask)
    assert serves.prepared is not None
    assert isinstance(serves.prepared.lists, FilledTileLists)


def test_masks_unlike_all_others_are_surveyed() -> None:
    kept = KeptChoices()
    first_choice(geometry(masks.sliding_window(20)), kept)
    wide = geometry(masks.sliding_window(500))
    assert kept_choice(kept, wide, call_of(wide), {}) is None
    assert kept_choice(kept, wide, call_of(wide), {"any": "error"}) is None
    first_choice(wide, kept)
    for window in (19, 450):
        one = geometry(masks.sliding_window(window))
        serves = kept_choice(kept, one, call_of(one), {})
        assert serves is not None
        assert serves.mask_text == repr(masks.sliding_window({19: 20, 450: 500}[window]))
        assert serves.prepared is not None
        assert serves.prepared.lists.block_n == serves.choice.layout.block_n  # type: ignore[union-attr]


def test_a_kept_choice_that_failed_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptChoices()
    one = geometry(masks.sliding_window(20))
    first_choice(one, kept)
    monkeypatch.setattr("stof.plans.filled.failures.reason", lambda *of_choice: "too large")
    assert kept_choice(kept, one, call_of(one), {}) is None


def test_calls_with_a_bias_have_no_filled_lists() -> None:
    kept = KeptChoices()
    one = geometry(masks.sliding_window(20))
    first_choice(one, kept)
    serves = kept_choice(kept, one, call_of(one, has_bias=True), {})
    assert serves is not None
    assert serves.prepared is None


def test_unseen_keys_among_seen_ones_are_surveyed() -> None:
    keep = torch.rand(512, 512) < 0.5
    keep[:, 100] = False
    kept = KeptChoices()
    kept.keep(256, KernelChoice("hopper", LayoutConfig(128, 128), None, KernelConfig(4, 2)), "")
    one = geometry(masks.from_dense(keep))
    assert kept_choice(kept, one, call_of(one), {}) is None
    keep[0, 100] = True
    one = geometry(masks.from_dense(keep.clone()))
    assert kept_choice(kept, one, call_of(one), {}) is not None


def test_tilings_of_gradients() -> None:
    kept = KeptChoices()
    ones = [geometry(mask & masks.causal()) for mask in (documents(100, 156, 256), documents(130, 382))]

    def geometries(one: MaskGeometry, swap: bool) -> MaskGeometry:
        return MaskGeometry(masks.transposed(one.mask), one.kv_len, one.q_len, heads=4) if swap else one

    assert kept_tiling(kept, lambda swap: geometries(ones[0], swap)) is None
    keep_tiling(kept, call_of(ones[0]), lambda swap: geometries(ones[0], swap), BackwardTiling(), "first")
    assert kept.latest is not None
    assert is_fillable_backward(kept.latest.choice)
    serves = kept_tiling(kept, lambda swap: geometries(ones[1], swap))
    assert serves is not None
    assert serves.tiling == kept.latest.choice
    assert serves.prepared is not None
    sizes = [(tiles.block_m, tiles.block_n) for tiles in (serves.prepared.dq, serves.prepared.dkv)]
    layouts = (serves.tiling.dq_layout, serves.tiling.dkv_layout)
    assert sizes == [(layout[0].block_m, layout[0].block_n) for layout in layouts if layout is not None]


@pytest.mark.parametrize(
    "choice",
    [
        KernelChoice("block_wise", LayoutConfig(64, 64), None, KernelConfig(4, 3)),
        KernelChoice("hopper", LayoutConfig(128, 128, 16), None, KernelConfig(4, 2)),
        KernelChoice("hopper", LayoutConfig(128, 128), "remainder 4", KernelConfig(4, 2)),
        KernelChoice("hopper", LayoutConfig(128, 128), None, KernelConfig(4, 2, split_tiles=8)),
        KernelChoice("hopper", LayoutConfig(64, 64), None, KernelConfig(4, 5, paired=True)),
        KernelChoice("hopper", LayoutConfig(128, 128), None, KernelConfig(4, 2, zero_unseen=True)),
    ],
)
def test_narrower_forms_are_not_filled(choice: KernelChoice) -> None:
    assert not is_fillable(choice)


def test_average_keys_of_a_row() -> None:
    assert surveyed_keys(geometry(masks.full()), LayoutConfig(128, 128)) == 512
    assert 200 < surveyed_keys(geometry(masks.causal()), LayoutConfig(64, 64)) < 300
