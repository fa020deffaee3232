"""Masks made of many others: whatever can be built works everywhere, and what cannot says why."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable

import pytest
import torch

import stof
from stof import masks
from stof.errors import MaskError, MaskSyntaxError
from stof.layout.head_mask import HeadMask
from stof.masks import Mask
from stof.masks.bounds import Interval
from stof.masks.compose import DEEPEST

# Functions of a program that calls this library, a test runner's included.
CALLERS = 200

DEEPER: dict[str, Callable[[Mask, int], Mask]] = {
    "and, or": lambda mask, n: mask & ~masks.sliding_window(n) | masks.sink_tokens(n % 5),
    "or, not": lambda mask, n: ~(mask | masks.sliding_window(n)),
    "offsets": lambda mask, n: (mask & masks.sliding_window(n + 9)).with_query_offset(1),
    "and of or": lambda mask, n: masks.sliding_window(n) & (masks.global_tokens(n % 3) | mask),
}


def deepest(name: str) -> Mask:
    mask = masks.causal()
    for n in range(DEEPEST):
        try:
            mask = DEEPER[name](mask, n)
        except MaskError:
            break
    return mask


def called_deeply(work: Callable[[], object], frames: int = CALLERS) -> None:
    if frames:
        called_deeply(work, frames - 1)
    else:
        work()


@pytest.mark.parametrize("name", DEEPER)
def test_the_deepest_masks_work(name: str) -> None:
    mask = deepest(name)
    one = HeadMask(mask, 8, 8, 0, 0, None, torch.device("cpu"))
    tile = [Interval(*(torch.tensor(end).view(1, 1, 1, 1) for end in (0, 7)))] * 2

    def work() -> None:
        assert mask.depth >= DEEPEST - 1  # type: ignore[attr-defined]
        assert masks.parse(repr(mask)) == mask
        assert copy.deepcopy(mask) == mask
        assert pickle.loads(pickle.dumps(mask)) == mask
        dense = mask.to_dense(8)
        kept = one.tile_bounds(*tile)
        assert not (bool(kept.empty) and bool(dense.any()))
        assert not (bool(kept.full) and not bool(dense.all()))
        assert torch.equal(stof.plan(mask, 8).to_dense(), dense)

    called_deeply(work)


@pytest.mark.parametrize("name", DEEPER)
def test_deeper_masks_are_refused_when_they_are_made(name: str) -> None:
    with pytest.raises(MaskError, match=rf"at most {DEEPEST} levels.*to_dense"):
        functools.reduce(DEEPER[name], range(DEEPEST), masks.causal())


def test_long_chains_are_one_level() -> None:
    mask: Mask = masks.causal()
    for n in range(1200):
        mask = mask | masks.sliding_window(n % 9)
    assert mask.depth == 1  # type: ignore[attr-defined]
    assert masks.parse(repr(mask)) == mask
    assert torch.equal(mask.to_dense(12), (masks.causal() | masks.sliding_window(8)).to_dense(12))


@pytest.mark.parametrize(
    "text",
    [
        "~" * 9000 + "causal",
        "(" * 300 + "causal" + ")" * 300,
        "causal()" + ".with_query_offset(1)" * 5000,
        "per_head([" * 250 + "causal" + ", full])" * 250,
    ],
)
def test_text_that_is_nested_too_deeply(text: str) -> None:
    with pytest.raises(MaskSyntaxError, match="not a mask expression"):
        masks.parse(text)


def test_chains_longer_than_python_parses() -> None:
    chain = "causal" + " | causal" * 20000
    if sys.version_info < (3, 11):  # parses it
        assert repr(masks.parse(chain)) == "causal()" + " | causal()" * 20000
    else:
        with pytest.raises(MaskSyntaxError, match="not a mask expression"):
            masks.parse(chain)


def test_text_of_too_many_levels() -> None:
    with pytest.raises(MaskError, match="levels"):
        masks.parse("(" * 150 + "causal" + " & full | full)" * 150)
