"""Plans of one structure after another, on a GPU that is not there: Triton's interpreter fills the lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stof import masks
from stof.errors import KernelError, UnfitLayoutError
from stof.kernels.hopper.backward_lists import BackwardLists
from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.layout import LayoutConfig
from stof.masks import Mask, transposed
from stof.masks.tensors import as_mask
from stof.plans import backward, plan
from stof.plans.backward import PlanGradients
from stof.plans.filled import _CountedTiles, is_fillable, is_fillable_backward
from stof.plans.kept_choices import kept_by_structure
from stof.plans.plan import Plan
from stof.selection import IMPLEMENTATIONS, CallSpec, MaskGeometry, select
from stof.selection.backward_tilings import BackwardTiling, best_tiling
from stof.selection.device_model import DEFAULT_DEVICE, load_model
from tests.interpreter import IN_INTERPRETER

pytest.importorskip("triton")
pytestmark = IN_INTERPRETER
CALL = CallSpec("cuda", torch.bfloat16, 128, 128, 4, 4, q_len=512, kv_len=512, compute_capability=(9, 0))


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: torch.device, make: Callable[[], Any]) -> Any:
        del device
        return make()

    for module in (plan, backward):
        monkeypatch.setattr(module, "made_for_calls", make)
    monkeypatch.setattr(select, "device_model", lambda device: load_model(DEFAULT_DEVICE))
    monkeypatch.setattr(select, "shared_memory_limit", lambda device: 227 * 2**10)
    kept_by_structure.clear()


def plan_of(mask: Mask) -> Plan:
    """A plan for a GPU, whose mask is evaluated on the CPU."""
    geometry = MaskGeometry(mask, 512, 512, heads=4)
    return Plan(
        repr(mask), (512, 512), geometry.dims, torch.device("cuda", 0), call_sizes=(None, None), geometry=geometry
    )


def window(size: int) -> Plan:
    return plan_of(masks.sliding_window(size))


def test_the_second_mask_is_not_surveyed_and_has_filled_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    first = window(100)
    best = first.choice(CALL)
    assert not best.filled
    assert first.serving(CALL) == ""
    second = window(101)
    monkeypatch.setattr(MaskGeometry, "survey", None)
    choice = second.choice(CALL)
    assert choice.filled
    assert isinstance(second.prepared(choice).lists, FilledTileLists)
    assert second.serving(CALL) == f"{choice} runs, chosen for {masks.sliding_window(100)!r}"
    assert second.choice(CALL) is choice


def test_masks_unlike_all_before_are_served_by_the_best_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is that of a survey, among tiles that the GPU fills."""
    window(100).choice(CALL)
    monkeypatch.setattr("stof.selection.compiled._ALLOWED_SLOWDOWN", 0.0)
    for size in (5, 20, 400):
        other = window(size)
        ranked = other.candidates(CALL)
        best = next(one.choice for one in ranked if one.choice is not None and is_fillable(one.choice))
        with monkeypatch.context() as patched:
            patched.setattr(MaskGeometry, "survey", None)
            assert other.choice(CALL) == replace(best, filled=True)


def test_bool_tensors_unlike_all_before_are_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    at = torch.arange(512)
    for size in (100, 101):
        assert plan_of(as_mask(at[:, None] - at < size)).choice(CALL).filled == (size == 101)
    monkeypatch.setattr(MaskGeometry, "survey", None)
    with pytest.raises(TypeError):
        plan_of(as_mask(torch.rand(512, 512) < 0.01)).choice(CALL)


@pytest.mark.parametrize("swap", [False, True])
def test_counted_tiles_are_those_of_a_survey(swap: bool) -> None:
    sizes = [LayoutConfig(128, 128), LayoutConfig(64, 32), LayoutConfig(192, 128)]
    of_batch = masks.padding([300, 512, 300]) & masks.causal()
    of_heads = masks.per_head([masks.sliding_window(30, 5), masks.causal(), masks.causal()])
    for mask, batch, heads in ((masks.documents([200, 12, 300]), 1, 1), (of_batch, 3, 2), (of_heads, 1, 3)):
        geometry = MaskGeometry(transposed(mask) if swap else mask, 512, 512, batch=batch, heads=heads)
        counted = _CountedTiles.of(geometry, sizes, torch.device("cpu"))
        assert counted is not None
        expected, actual = geometry.survey(tuple(sizes), None), counted.survey(tuple(sizes), None)
        assert (actual.mask_batch, actual.mask_heads) == (expected.mask_batch, expected.mask_heads)
        for size in sizes:
            assert torch.equal(actual.counts[size].partial, expected.counts[size].partial)
            assert torch.equal(actual.counts[size].full, expected.counts[size].full)


def test_calls_with_a_bias_do_not_read_filled_lists() -> None:
    window(100).choice(CALL)
    with_bias = CallSpec(**(CALL.__dict__ | {"has_bias": True}))
    window(100).choice(with_bias)
    other = window(101)
    plain, biased = other.choice(CALL), other.choice(with_bias)
    assert plain.filled
    assert not biased.filled
    assert not isinstance(other.prepared(biased).lists, FilledTileLists)


def test_first_masks_with_unseen_keys_are_filled_when_their_layout_is_refused() -> None:
    first = plan_of(masks.padding([300]))
    choice = first.choice(CALL)
    assert choice.implementation == "hopper"
    with pytest.raises(UnfitLayoutError) as error:
        first.prepared(choice)
    first.reject(choice, CALL, error.value)
    again = first.choice(CALL)
    assert again.filled
    assert isinstance(first.prepared(again).lists, FilledTileLists)
    # Filled lists that are refused, too, are not filled again.
    first.reject(again, CALL, UnfitLayoutError("refused"))
    assert not first.choice(CALL).filled


def test_a_named_implementation_stays() -> None:
    for size in (100, 101, 102):
        assert window(size).choice(CALL, "block_wise").implementation == "block_wise"
        assert window(size).choice(CALL).implementation == "hopper"


@pytest.fixture
def _triton_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "hopper", replace(IMPLEMENTATIONS["hopper"], backward=None))


def gradients(size: int) -> tuple[Plan, PlanGradients]:
    made = window(size)
    return made, PlanGradients(made)


@pytest.mark.usefixtures("_triton_gradients")
def test_gradients_of_the_second_mask_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    first, of_first = gradients(100)
    surveyed = of_first.choices(CALL)
    assert len(surveyed) > 1
    second, of_second = gradients(101)
    monkeypatch.setattr(MaskGeometry, "survey", None)
    (name, tiling), *others = of_second.choices(CALL)
    assert name == "block_wise"
    assert all(other != "block_wise" for other, _ in others)
    prepared = of_second.prepared(name, tiling)
    assert isinstance(prepared, PreparedBackward)
    assert prepared.dq.slots == prepared.dkv.slots == 0
    del first, second


def test_gradients_of_first_masks_are_filled_if_they_have_tiles_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels for one kind of tiles are as fast as those for both."""
    for mask, filled in ((masks.causal(), True), (masks.full(), False), (masks.sliding_window(30), False)):
        kept_by_structure.clear()
        made = plan_of(mask)
        of_made = PlanGradients(made)
        name, tiling = "block_wise", of_made._tilings("block_wise", CALL)[0]
        monkeypatch.setattr(MaskGeometry, "build", None)
        assert is_fillable_backward(tiling)
        assert ((name, tiling) in of_made._prepared) == filled
        del made


def test_gradients_of_causal_masks_take_one_pass() -> None:
    """Until its kernel fails: Triton's kernels serve then."""
    call = replace(CALL, q_len=8192, kv_len=8192, heads=32, kv_heads=32)
    geometry = MaskGeometry(masks.causal(), 8192, 8192)
    gpu, sizes = torch.device("cuda", 0), (None, None)
    plan = Plan("causal()", (8192, 8192), geometry.dims, gpu, call_sizes=sizes, geometry=geometry)
    of_plan = PlanGradients(plan)
    ((name, tiling),) = of_plan.choices(call)
    assert name == "hopper"
    of_plan.reject(name, tiling, KernelError("too much shared memory"))
    assert of_plan.choices(call)[0][0] == "block_wise"


def test_one_pass_lists_of_later_masks_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mask of a structure decides for all of them, and the device makes their lists."""
    hopper = IMPLEMENTATIONS["hopper"]
    one_pass = hopper.backward
    assert one_pass is not None
    chosen: list[tuple[BackwardTiling, ...]] = [(BackwardTiling(dkv_layout=(LayoutConfig(128, 64), None)),), ()]
    for tilings, name in zip(chosen, ("hopper", "block_wise"), strict=True):
        kept_by_structure.clear()
        monkeypatch.setitem(
            IMPLEMENTATIONS, "hopper",
            replace(hopper, backward=replace(one_pass, tilings=lambda *of, made=tilings: made)),
        )  # fmt: skip
        first, of_first = gradients(100)
        assert of_first.choices(CALL)[0][0] == name
        with monkeypatch.context() as patched:
            patched.setattr(MaskGeometry, "build", None)
            later, of_later = gradients(400)
            found, tiling = of_later.choices(CALL)[0]
            assert found == name
            prepared = of_later.prepared(found, tiling)
            assert isinstance(prepared, BackwardLists if name == "hopper" else PreparedBackward)
        del first, later


def test_padding_keeps_the_one_pass_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its keys some are seen by no query: lists that the device fills say which, as those of the host do."""
    hopper = IMPLEMENTATIONS["hopper"]
    one_pass = hopper.backward
    assert one_pass is not None
    tilings = (BackwardTiling(dkv_layout=(LayoutConfig(128, 64), None)),)
    always = replace(one_pass, tilings=lambda *of: tilings)
    monkeypatch.setitem(IMPLEMENTATIONS, "hopper", replace(hopper, backward=always))
    living = []
    for place, keys in enumerate((300, 512, 290)):
        plan = plan_of(masks.padding([keys]) & masks.sliding_window(100))
        of_plan = PlanGradients(plan)
        living.append(plan)
        with monkeypatch.context() as patched:
            if place > 0:
                patched.setattr(MaskGeometry, "build", None)
            name, tiling = of_plan.choices(CALL)[0]
            assert name == "hopper"
            lists = of_plan.prepared(name, tiling)
        if keys == 512:
            assert lists.seen_keys is None
        else:
            assert lists.seen_keys.tolist() == [[key < keys for key in range(512)]]


@pytest.mark.usefixtures("_triton_gradients")
def test_gradients_of_masks_unlike_all_before_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    first, of_first = gradients(100)
    of_first.choices(CALL)
    monkeypatch.setattr("stof.selection.compiled._ALLOWED_SLOWDOWN", 0.0)
    for size in (101, 5, 400):
        other, of_other = gradients(size)
        expected, _ = best_tiling(CALL, of_other._geometry, whole_tiles=True)
        with monkeypatch.context() as patched:
            patched.setattr(MaskGeometry, "survey", None)
            (_, tiling), *_ = of_other.choices(CALL)
        assert tiling == expected
        del other
    del first


@pytest.mark.usefixtures("_triton_gradients")
def test_a_tiling_that_fails_is_not_tried_under_the_next_mask() -> None:
    first, of_first = gradients(100)
    of_first.choices(CALL)
    second, of_second = gradients(101)
    name, tiling = of_second.choices(CALL)[0]
    of_second.reject(name, tiling, KernelError("does not compile"))
    assert (name, tiling) not in of_second.choices(CALL)
    third, of_third = gradients(102)
    assert len(of_third.choices(CALL)) > 2  # surveyed
    del first, second, third


def test_failing_kernels_that_fill_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from stof.layout.fill import mask_input
    from stof.layout.fill.tiles import TileFill

    def fail(*arguments: object) -> None:
        raise KernelError("does not compile")

    monkeypatch.setattr(mask_input, "_without", set())
    window(100).choice(CALL)
    monkeypatch.setattr(TileFill, "write", fail)
    second = window(101)
    with pytest.warns(RuntimeWarning, match="does not compile"):
        choice = second.choice(CALL)
    assert not choice.filled
    assert not isinstance(second.prepared(choice).lists, FilledTileLists)
    assert not window(102).choice(CALL).filled
