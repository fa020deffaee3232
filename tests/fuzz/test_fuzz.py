"""A slice of the fuzzer, and proof that it finds what is wrong."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof.masks import rules
from stof.masks.index import Index
from stof.selection import IMPLEMENTATIONS
from tests.fuzz.campaign import run_chunk
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.run import run_case

# Compiling takes seconds.
SLOW = ("compiled", "exported", "transformers")
# What the check says of a result; empty rows are compared before the others.
WRONG = re.compile("is off by|not exactly 0|-inf elsewhere")


@pytest.fixture(autouse=True)
def _as_it_was(poisoned_memory: None, caplog: pytest.LogCaptureFixture) -> None:
    """Memory holds NaN; slow mask functions are drawn on purpose, so nobody is told; plans of other tests are gone."""
    caplog.set_level("ERROR")
    stof.plan_cache.clear()


def quick_cases(seed: int, device: str = "cpu") -> Iterator[Case]:
    return (case for n in count() if (case := draw_case(seed, n, device)).entry not in SLOW)


def first_failure(seed: int, most: int) -> str:
    for case in islice(quick_cases(seed), most):
        failure = run_case(case, "cpu").failure
        if failure:
            return failure
    return ""


def test_a_slice() -> None:
    refused = 0
    for case in islice(quick_cases(0), 120):
        outcome = run_case(case, "cpu")
        assert not outcome.failure, outcome.failure
        refused += bool(outcome.refused and not case.must_refuse)
    assert refused < 6, "most calls are valid ones and have to be answered"


def test_a_case_is_the_same_in_every_process() -> None:
    for one, other in zip(islice(quick_cases(7), 20), islice(quick_cases(7), 20), strict=True):
        assert one.lines == other.lines


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_programs_compile(device: str) -> None:
    """Also those for a GPU, which is not here to run them: all of it is on the device, and each names what it needs."""
    for number in range(150):
        case = draw_case(3, number, device)
        compile("\n".join(case.lines), "<case>", "exec")
        for line in case.lines:
            made = (" = torch.tensor(", "make_inputs(", "stof.plan(", "dynamic_plan(", "create_block_mask(")
            assert "device" in line or not any(text in line for text in made), line


def test_a_window_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rules.SlidingWindow.evaluate

    def evaluate(self: rules.SlidingWindow, index: Index) -> Tensor:
        return plain(rules.SlidingWindow(self.left + 1, self.right), index)

    monkeypatch.setattr(rules.SlidingWindow, "evaluate", evaluate)
    assert WRONG.search(first_failure(1, 120))


def test_a_plan_that_forgets_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rules.Mask.pattern_ids

    def one_for_all(self: Any, mask_batch: int, mask_heads: int) -> Tensor:
        return plain(self, mask_batch, mask_heads)[:, :1].expand(-1, mask_heads).contiguous()

    monkeypatch.setattr(rules.Mask, "pattern_ids", one_for_all)
    assert WRONG.search(first_failure(1, 300))


def test_an_option_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("stof.attention"), "check_softcap", lambda softcap: 0.0)
    assert "is off by" in first_failure(1, 60)


def test_values_that_are_read_without_need_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense attention gives keys that nobody sees a weight of 0, and 0 * NaN is NaN."""
    monkeypatch.setattr(importlib.import_module("stof.kernels.torch.reference"), "_seen_values", lambda v, *given: v)
    dense = IMPLEMENTATIONS["reference"]
    for name in ("row_block", "batched"):
        monkeypatch.setitem(IMPLEMENTATIONS, name, replace(dense, name=name))
    assert re.search("off by (nan|inf)|not exactly 0", first_failure(1, 100))


def test_an_error_that_is_none_of_ours_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("internal")

    monkeypatch.setattr(stof.Plan, "check_call", broken)
    assert "RuntimeError: internal" in first_failure(1, 10)


def test_a_failure_is_a_program_that_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("stof.attention"), "check_softcap", lambda softcap: 0.0)
        program = first_failure(1, 60)
    space: dict[str, Any] = {}
    exec(program, space)
    assert torch.isfinite(space["out"]).all()


def test_reports_count_calls_and_refusals() -> None:
    numbers = [n for n in range(60) if draw_case(0, n, "cpu").entry == "refused"]
    report = run_chunk(0, numbers, "cpu", interpret=False)
    assert report.cases == report.entries["refused"] == len(numbers) > 0
    assert sum(report.refusals.values()) == len(numbers)
    assert not report.failures


def test_other_dropped_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = importlib.import_module("stof.kernels.cpu.steps")
    plain = steps.kept_weights
    monkeypatch.setattr(steps, "kept_weights", lambda dropout, heads, *at: plain(dropout, heads + 1, *at))
    assert "is off by" in first_failure(1, 60)
