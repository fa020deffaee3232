"""Plans of one structure after another, on a GPU that is not there: Triton's interpreter fills the lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stof import masks
from stof.errors import KernelError, UnfitLayoutError
from stof.kernels.hopper.filled_lists import FilledTileLists
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.masks import Mask
from stof.plans import backward, plan
from stof.plans.backward import PlanGradients
from stof.plans.kept_choices import kept_by_structure
from stof.plans.plan import Plan
from stof.selection import CallSpec, MaskGeometry, select
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
    on_host = lambda *given, **sizes: MaskGeometry(*given, **(sizes | {"device": "cpu"}))  # noqa: E731
    monkeypatch.setattr(backward, "MaskGeometry", on_host)
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


def gradients(size: int) -> tuple[Plan, PlanGradients]:
    made = window(size)
    return made, PlanGradients(made)


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
