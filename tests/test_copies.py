"""Copies and pickles of what names a mask by its number, key or address: they carry the mask."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stof
from stof import masks
from stof.errors import MaskError
from stof.masks import Mask
from stof.testing import assert_attention

LENGTH = 40


def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask function that pickles find by its name."""
    return (q - kv).abs() <= 3 * (h + 1)


WIDTH = SimpleNamespace(value=4)


def wide(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Depends on the head, and on a value that changes."""
    return (q - kv).abs() <= WIDTH.value * (h + 1)


def random_keep(seed: int) -> Tensor:
    return torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.4


MASKS: dict[str, Callable[[], Mask]] = {
    "named": lambda: masks.causal() & masks.sliding_window(5),
    "numbered": lambda: masks.padding([30, 17]),
    "function": lambda: masks.from_function(near),
    "tensor": lambda: masks.from_dense(random_keep(0)),
    "both": lambda: masks.from_function(near) | masks.from_dense(random_keep(1)),
    "scores": lambda: masks.block_topk(torch.arange(9.0).view(1, 3, 3), 2, block_size=16),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "shallow": copy.copy, "deep": copy.deepcopy, "pickled": lambda value: pickle.loads(pickle.dumps(value)),
}  # fmt: skip


class Attending(nn.Module):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        return stof.attention(x, x, x, self.given)


@functools.cache
def inputs() -> Tensor:
    return torch.randn(2, 2, LENGTH, 8, generator=torch.Generator().manual_seed(3))


def check(call: Callable[[Tensor], Tensor], keep: Tensor) -> None:
    x = inputs()
    with torch.inference_mode():
        assert_attention(call(x), None, x, x, x, keep)


def dense(mask: Mask) -> Tensor:
    return mask.to_dense(LENGTH, batch=2, heads=2).clone()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("made", COPIES)
@pytest.mark.parametrize("kind", ["mask", "plan", "sized plan"])
@pytest.mark.parametrize("name", MASKS)
def test_copies_outlive_what_they_were_made_from(name: str, kind: str, made: str) -> None:
    mask = MASKS[name]()
    keep = dense(mask)
    sizes = {"batch": 2, "heads": 2} if kind == "sized plan" else {}
    module = Attending(mask if kind == "mask" else stof.plan(mask, LENGTH, **sizes))
    check(module, keep)
    other = COPIES[made](module)
    if made == "shallow":
        other.given = copy.copy(module.given)
    del module, mask
    stof.plan_cache.clear()
    gc.collect()
    check(other, keep)


@pytest.mark.parametrize("name", ["function", "tensor", "both"])
def test_copies_of_compiled_modules(name: str) -> None:
    torch._dynamo.reset()
    for kind in ("mask", "plan"):
        mask = MASKS[name]()
        keep = dense(mask)
        module = torch.compile(Attending(mask if kind == "mask" else stof.plan(mask, LENGTH)), backend="eager")
        check(module, keep)
        others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        del module, mask
        stof.plan_cache.clear()
        gc.collect()
        for other in others:
            check(other, keep)


@pytest.mark.parametrize("made", ["deep", "pickled"])
def test_copies_have_tensors_of_their_own(made: str) -> None:
    """Writing to one is not seen by the other, nor is a plan found under the other's key."""
    scores = torch.arange(9.0).view(1, 3, 3)
    mask = masks.block_topk(scores, 2, block_size=16)
    old = dense(mask)
    module = Attending(mask)
    check(module, old)
    other = COPIES[made](module)
    assert other.given.key != mask.key
    scores.neg_()
    assert not torch.equal(dense(mask), old)
    check(other, old)
    check(module, dense(mask))


@pytest.mark.parametrize("made", ["deep", "pickled"])
def test_copied_plans_know_whether_their_mask_changed(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = stof.plan(masks.from_function(wide) & masks.from_dense(random_keep(0)), LENGTH, batch=1, heads=1)
    COPIES[made](plan)._check_unchanged()
    monkeypatch.setattr(WIDTH, "value", 9)
    for changed in (plan, COPIES[made](plan), COPIES[made](COPIES[made](plan))):
        with pytest.raises(MaskError, match="was changed after"):
            changed._check_unchanged()


@pytest.mark.parametrize("made", ["same", *COPIES])
def test_plans_that_get_their_sizes_from_calls_refuse_masks_that_changed(
    made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = masks.from_function(wide) & masks.from_dense(random_keep(0))
    plan = stof.plan(mask, LENGTH)
    check(Attending(plan), dense(mask))
    given = plan if made == "same" else COPIES[made](plan)
    monkeypatch.setattr(WIDTH, "value", 9)
    x = inputs()[:1]
    with pytest.raises(MaskError, match="was changed after"):
        stof.attention(x, x, x, given)


@pytest.mark.parametrize("made", COPIES)
def test_copies_of_dynamic_plans(made: str) -> None:
    """Each has the mask of the time it was copied, and takes updates of its own."""
    first, second = random_keep(0), random_keep(1)
    plan = stof.dynamic_plan(first.clone(), LENGTH, batch=2, heads=2)
    check(Attending(plan), first[None, None])
    other = COPIES[made](plan)
    assert other.number != plan.number
    plan.update(second.clone())
    assert torch.equal(plan.to_dense()[0, 0], second)
    assert torch.equal(plan.mask.to_dense(LENGTH)[0, 0], second)
    check(Attending(other), first[None, None])
    check(Attending(plan), second[None, None])
    del plan
    other.update(second.clone())
    check(Attending(other), second[None, None])


@pytest.mark.parametrize("write", [None, "other values", "same values"])
def test_a_bool_tensor_is_compared_once(write: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison waits for a GPU; the copy of a new tensor needs none."""
    compared: list[None] = []
    equal = torch.equal

    def counted(a: torch.Tensor, b: torch.Tensor) -> bool:
        compared.append(None)
        return equal(a, b)

    monkeypatch.setattr(torch, "equal", counted)
    keep = torch.rand(16, 16) > 0.5
    mask = masks.from_dense(keep)
    assert not compared
    if write is not None:
        keep.copy_(~keep if write == "other values" else keep.clone())
    again = masks.from_dense(keep)
    assert len(compared) == 1
    assert (again == mask) == (write != "other values")
    assert torch.equal(again.to_dense(16)[0, 0], keep)
