"""Recorded calls whose documents are others in each replay, with a recorder that replays on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stof
from stof import masks
from stof.errors import UnsupportedError
from stof.integrations.torch.cuda_graphs import CudaGraphRunner, _copy_in
from stof.masks import Mask
from stof.masks.compose import And
from stof.plans import replaced_masks
from stof.plans.replaced_masks import ReplacedMask, replaced_mask, replacing

WINDOW = masks.sliding_window(9, 9)


class FilledPlan:
    """A plan that is made anew where `_FilledPlan` fills its lists on a Hopper GPU."""

    holds = True

    def __init__(self, parts: tuple[Mask, ...], place: int, q: Tensor, k: Tensor) -> None:
        self.parts, self.place, self.lengths = parts, place, (q.shape[2], k.shape[2])
        self.take(parts[place])
        self.fill()

    def take(self, mask: Mask) -> None:
        self.taken = mask

    def fill(self) -> None:
        parts = [*self.parts[: self.place], self.taken, *self.parts[self.place + 1 :]]
        self.plan = stof.plan(And.of(*parts) if len(parts) > 1 else self.taken, *self.lengths)

    def holds_mask(self) -> bool:
        return self.holds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)


class Recorder:
    """Replays call the function again, under the plans of the recording."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.made += 1
        inputs, replaced = {name: value.clone() for name, value in kwargs.items()}, replaced_mask()
        call(**inputs)

        def replay(tensors: Sequence[Tensor], prepare: Callable[[], object] = lambda: None) -> Any:
            self.replayed += 1
            _copy_in([*inputs.values()], tensors)
            prepare()
            replaced_masks._LOCAL.replaced = replaced
            try:
                return call(**inputs)
            finally:
                replaced_masks._LOCAL.replaced = None

        return replay


class Layers(nn.Module):
    """A layer with a window, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def attend(self, x: Tensor, mask: Mask) -> Tensor:
        heads = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return stof.attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.attend(self.attend(x, WINDOW & mask), mask)


@pytest.fixture
def filled_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_masks, "_FilledPlan", FilledPlan)


def runner(module: Layers) -> tuple[CudaGraphRunner, Recorder]:
    recorder = Recorder()
    return CudaGraphRunner(module, module, recorder=recorder, device_type="cpu"), recorder


def documents(*lengths: int) -> Mask:
    return masks.documents(cu_seqlens=[0, *torch.tensor(lengths).cumsum(0).tolist()])


DOCUMENTS = [documents(40, 3, 17), documents(60), documents(*[1] * 60), documents(40, 3, 17), documents(59, 1)]


@pytest.mark.usefixtures("filled_plans")
def test_each_replay_is_under_the_mask_of_its_call() -> None:
    module = Layers().eval()
    calls, recorder = runner(module)
    with torch.no_grad():
        for mask in DOCUMENTS:
            x = torch.randn(1, 60, 8)
            torch.testing.assert_close(calls.call_with_mask(mask, x=x), module(x, mask))
    assert (recorder.made, recorder.replayed) == (1, 4)


@pytest.mark.usefixtures("filled_plans")
def test_masks_that_the_lists_do_not_hold_run_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Layers().eval()
    calls, recorder = runner(module)
    with torch.no_grad():
        for number, mask in enumerate(DOCUMENTS):
            monkeypatch.setattr(FilledPlan, "holds", number != 3)
            # What a replay computes then is not returned.
            monkeypatch.setattr(FilledPlan, "take", FilledPlan.take if number != 3 else lambda self, mask: None)
            x = torch.randn(1, 60, 8)
            torch.testing.assert_close(calls.call_with_mask(mask, x=x), module(x, mask))
            monkeypatch.undo()
            monkeypatch.setattr(replaced_masks, "_FilledPlan", FilledPlan)
    assert (recorder.made, recorder.replayed) == (1, 4)


@pytest.mark.usefixtures("filled_plans")
def test_a_recording_that_does_not_hold_its_mask_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Layers().eval()
    calls, recorder = runner(module)
    monkeypatch.setattr(FilledPlan, "holds", False)
    x = torch.randn(1, 60, 8)
    with torch.no_grad():
        calls.call_with_mask(DOCUMENTS[0], x=x)
        with pytest.warns(RuntimeWarning, match="no query sees"):
            out = calls.call_with_mask(DOCUMENTS[1], x=x)
        torch.testing.assert_close(out, module(x, DOCUMENTS[1]))
        calls.call_with_mask(DOCUMENTS[2], x=x)
    assert (recorder.made, recorder.replayed) == (1, 0)


@pytest.mark.usefixtures("filled_plans")
def test_an_interrupted_recording_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Layers().eval()
    calls, recorder = runner(module)
    x = torch.randn(1, 60, 8)

    def interrupt(self: FilledPlan) -> bool:
        raise KeyboardInterrupt

    with torch.no_grad():
        calls.call_with_mask(DOCUMENTS[0], x=x)
        with monkeypatch.context() as patch:
            patch.setattr(FilledPlan, "holds_mask", interrupt)
            with pytest.raises(KeyboardInterrupt):
                calls.call_with_mask(DOCUMENTS[0], x=x)
        assert replaced_mask() is None
        for mask in DOCUMENTS[1:]:
            torch.testing.assert_close(calls.call_with_mask(mask, x=x), module(x, mask))
    assert recorder.made == 2


def test_lists_hold_what_was_filled_after_they_were_made() -> None:
    plan: Any = object.__new__(replaced_masks._FilledPlan)
    counted, uncounted = (SimpleNamespace(counts=lambda found=found: found) for found in ((3, 1), None))
    for has_room, filled, fills, holds in (
        (True, 1, [counted], True),
        (True, 0, [counted], False),
        (True, 1, [counted, counted], False),
        (False, 1, [counted], False),
        (True, 1, [uncounted], False),
    ):
        plan._has_room, plan._filled, plan._lists = has_room, filled, [(fill, None, None) for fill in fills]
        assert plan.holds_mask() == holds


def test_other_masks_and_plans_are_refused() -> None:
    x = torch.randn(1, 2, 60, 4)
    plan = stof.plan(DOCUMENTS[0], 60)
    with replacing(DOCUMENTS[0]), torch.no_grad():
        for other in (
            masks.causal(),
            WINDOW,
            DOCUMENTS[0] | WINDOW,
            ~DOCUMENTS[0],
            DOCUMENTS[1],
            DOCUMENTS[0] & DOCUMENTS[0],
            plan,
            DOCUMENTS[0] & DOCUMENTS[1],
            DOCUMENTS[0] & masks.sink_tokens(3),
            DOCUMENTS[0] & (DOCUMENTS[0] | WINDOW),
            None,
        ):
            with pytest.raises(UnsupportedError, match="other documents"):
                stof.attention(x, x, x, other)
    assert stof.attention(x, x, x, plan).shape == x.shape


def test_other_devices_are_refused() -> None:
    x = torch.randn(1, 2, 60, 4)
    with replacing(DOCUMENTS[0]), torch.no_grad(), pytest.raises(UnsupportedError, match="lists for the Hopper kernel"):
        stof.attention(x, x, x, DOCUMENTS[0])


def _fail_within(inner: ReplacedMask) -> None:
    assert replaced_mask() is inner
    raise ZeroDivisionError


def test_blocks_nest_and_end_with_errors() -> None:
    with replacing(DOCUMENTS[0]) as outer:
        with pytest.raises(ZeroDivisionError), replacing(DOCUMENTS[1]) as inner:
            _fail_within(inner)
        assert replaced_mask() is outer
    assert replaced_mask() is None
