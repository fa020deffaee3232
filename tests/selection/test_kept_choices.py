"""Choices kept by the structure of a mask: what is a structure, and which choice serves which mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stof import masks
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.plans.filled import (
    ServingChoice,
    is_fillable,
    is_fillable_backward,
    keep_choice,
    keep_tiling,
    kept_choice,
    kept_tiling,
)
from stof.plans.kept_choices import KeptByStructure, KeptChoices, structure_key
from stof.selection import CallSpec, KernelChoice, MaskGeometry, candidates
from stof.selection.backward_tilings import BackwardTiling
from stof.selection.compiled import compiled_or_best
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


def test_lengths_count_by_powers_of_two() -> None:
    assert key_of(masks.causal(), q_len=300, kv_len=400) == key_of(masks.causal(), q_len=512, kv_len=257)
    assert key_of(masks.causal(), q_len=300) != key_of(masks.causal(), q_len=256)


def test_functions_have_no_structure() -> None:
    assert key_of(masks.from_function(lambda b, h, q, k: q - k < 3 * (q % 5))) is None


def test_another_call_has_other_choices() -> None:
    one = geometry(masks.causal())
    keys = {structure_key(one, call_of(one, **options)) for options in ({}, {"has_bias": True}, {"has_sinks": True})}
    assert len(keys | {structure_key(one, call_of(one), "hopper")}) == 4


def test_choices_serve_masks_with_like_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptChoices()
    assert kept.near((1.0, 2.0)) is None
    kept.keep((1.0, 2.0), "narrow", "a")
    kept.keep((1.0, 4.0), "wide", "b")
    for statistics, expected in (((1.0, 2.0), "narrow"), ((1.4, 2.2), "narrow"), ((0.6, 4.4), "wide")):
        near = kept.near(statistics)
        assert near is not None
        assert near.choice == expected
    assert kept.near((1.0, 3.0)) is kept.near((2.0, 2.0)) is kept.near((1.0, 2.0, 2.0)) is None
    kept.keep((1.0, 2.0), "other", "c")
    assert kept.near((1.0, 2.0)) == ("other", "c")
    monkeypatch.setattr("stof.plans.kept_choices._MOST_CHOICES", 2)
    kept.keep((9.0, 9.0), "third", "d")
    assert kept.near((1.0, 2.0)) is None


def test_structures_that_were_not_used_for_long_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.plans.kept_choices._MOST", 2)
    kept = KeptByStructure()
    first = kept.of(1)
    kept.of(2).keep((1.0,), "x", "")
    assert kept.of(1) is first
    kept.of(3)
    assert kept.of(1) is first
    assert kept.of(2).near((1.0,)) is None


def first_choice(one: MaskGeometry, kept: KeptChoices) -> KernelChoice:
    call = call_of(one)
    ranked = candidates(call, CUDA, one, load_model(DEFAULT_DEVICE))
    best = first_of(ranked, call)
    keep_choice(kept, one, ranked, best, repr(one.mask))
    return best


def served(kept: KeptChoices, mask: Mask, **options: object) -> ServingChoice | None:
    one = geometry(mask)
    return kept_choice(kept, one, call_of(one, **options), CUDA, {}, {}, repr(mask))


def test_lists_of_the_next_mask_are_filled() -> None:
    kept = KeptChoices()
    mask = documents(100, 156, 256) & masks.causal()
    first_choice(geometry(mask), kept)
    serves = served(kept, documents(120, 146, 246) & masks.causal())
    assert serves is not None
    assert is_fillable(serves.choice)
    assert serves.mask_text == repr(mask)
    assert serves.prepared is not None
    assert isinstance(serves.prepared.lists, FilledTileLists)
    assert serves.prepared.lists.block_n == serves.choice.layout.block_n  # type: ignore[union-attr]


def test_masks_unlike_all_others_are_surveyed_where_whole_tiles_may_be_slow() -> None:
    kept = KeptChoices()
    first_choice(geometry(masks.sliding_window(20)), kept)
    kept.may_count = False
    assert served(kept, masks.sliding_window(500)) is None
    first_choice(geometry(masks.sliding_window(500)), kept)
    for window, like in ((19, 20), (450, 500)):
        serves = served(kept, masks.sliding_window(window))
        assert serves is not None
        assert serves.mask_text == repr(masks.sliding_window(like))


def test_a_kept_choice_that_failed_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptChoices()
    first_choice(geometry(masks.sliding_window(20)), kept)
    monkeypatch.setattr("stof.plans.filled.failures.reason", lambda *of_choice: "too large")
    assert served(kept, masks.sliding_window(20)) is None


def test_a_layout_that_does_not_fit_serves_if_its_lists_are_filled() -> None:
    kept = KeptChoices()
    one = geometry(masks.sliding_window(20))
    choice = first_choice(one, kept)
    errors = {choice.layout_key: "its tiles hold keys that no query sees"}
    serves = kept_choice(kept, one, call_of(one), CUDA, {}, errors, "")
    assert serves is not None
    assert serves.prepared is not None
    # Lists that were filled before have been refused, too.
    assert kept_choice(kept, one, call_of(one), CUDA, {serves.choice: serves.prepared}, errors, "") is None
    again = kept_choice(kept, one, call_of(one), CUDA, {serves.choice: serves.prepared}, {}, "")
    assert again is not None
    assert again.prepared is None


def test_calls_with_a_bias_have_no_filled_lists() -> None:
    kept = KeptChoices()
    first_choice(geometry(masks.sliding_window(20)), kept)
    serves = served(kept, masks.sliding_window(20), has_bias=True)
    assert serves is not None
    assert serves.prepared is None
    # Lists that are filled for other calls are not those of this one.
    without = served(kept, masks.sliding_window(20))
    assert without is not None
    assert without.choice != serves.choice == replace(without.choice, filled=False)


def test_a_named_implementation_is_kept_apart() -> None:
    one = geometry(masks.sliding_window(100))
    call = call_of(one)
    ranked = [c for c in candidates(call, CUDA, one, load_model(DEFAULT_DEVICE)) if c.name == "block_wise"]
    kept = KeptChoices()
    keep_choice(kept, one, ranked, first_of(ranked, call), "")
    near = kept.near(one.statistics)
    assert near is not None
    assert near.choice.implementation == "block_wise"


def test_a_tiling_that_failed_is_dropped() -> None:
    kept = KeptByStructure()
    kept.of(1).keep((1.0,), BackwardTiling(), "")
    kept.of(2).keep((1.0,), "another", "")
    kept.drop(BackwardTiling())
    assert kept.of(1).near((1.0,)) is None
    assert kept.of(2).near((1.0,)) is not None


def test_unseen_keys_among_seen_ones_have_no_filled_lists() -> None:
    kept = KeptChoices()
    keep = torch.ones(512, 512) > 0
    choice = KernelChoice("hopper", LayoutConfig(128, 128), None, KernelConfig(4, 2))
    kept.keep(geometry(masks.from_dense(keep)).statistics, choice, "")
    keep[:, 100] = False
    serves = served(kept, masks.from_dense(keep.clone()))
    assert serves is not None
    assert serves.prepared is None
    keep[0, 100] = True
    serves = served(kept, masks.from_dense(keep.clone()))
    assert serves is not None
    assert serves.prepared is not None


def test_tilings_of_gradients() -> None:
    kept = KeptChoices()
    ones = [geometry(mask & masks.causal()) for mask in (documents(100, 156, 256), documents(120, 146, 246))]

    def geometries(one: MaskGeometry, swap: bool) -> MaskGeometry:
        return MaskGeometry(masks.transposed(one.mask), one.kv_len, one.q_len, heads=4) if swap else one

    assert kept_tiling(kept, call_of(ones[0]), lambda swap: geometries(ones[0], swap), "") is None
    keep_tiling(kept, call_of(ones[0]), lambda swap: geometries(ones[0], swap), BackwardTiling(), "first")
    serves = kept_tiling(kept, call_of(ones[1]), lambda swap: geometries(ones[1], swap), "")
    assert serves is not None
    assert is_fillable_backward(serves.tiling)
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


def test_compiled_kernels_are_taken_unless_another_is_much_faster() -> None:
    times = {"best": 100.0, "close": 104.0, "far": 200.0}
    for compiled, expected in (
        ((), "best"),
        (("far",), "best"),
        (("close", "far"), "close"),
        (("best", "close"), "best"),
    ):
        assert compiled_or_best(times, lambda name, compiled=compiled: name in compiled) == expected
