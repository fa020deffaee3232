"""A slice of the fuzzer of training, and proof that it finds what is wrong."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof.runtime.private import running_node_number

pytest.importorskip("transformers")

from tests.fuzz.campaign import run_chunk
from tests.fuzz.training import Case, draw_case
from tests.fuzz.training_models import VOCABULARY, attend_densely, transformer
from tests.fuzz.training_run import run_case


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")  # slow mask functions are drawn on purpose


def quick_cases(seed: int) -> list[Case]:
    """Compiling takes seconds."""
    return list(islice((case for n in count() if not (case := draw_case(seed, n)).compiled), 30))


def test_a_slice() -> None:
    for case in quick_cases(0):
        failure = run_case(case).failure
        assert not failure, failure


def test_a_case_is_the_same_in_every_process() -> None:
    assert [case.lines for case in quick_cases(7)] == [case.lines for case in quick_cases(7)]


def test_recomputed_calls_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = stof.attention

    def recomputed_otherwise(*args: Any, **kwargs: Any) -> Tensor:
        out = attention(*args, **kwargs)
        return out if running_node_number() is None else out * 1.05

    monkeypatch.setattr(stof, "attention", recomputed_otherwise)
    case = next(case for case in quick_cases(0) if (case.model, case.checkpointing) == ("plain", "non-reentrant"))
    failure = run_case(case).failure
    assert "WRONG" in failure
    assert f"--training --seed 0 --case {case.number}" in failure


@pytest.mark.parametrize("family", ["bert", "gemma2", "llama", "t5"])
def test_the_oracle_is_the_models_own_attention(family: str) -> None:
    ids = torch.randint(3, VOCABULARY, (2, 20))
    valid = (torch.arange(20) < torch.tensor([[20], [9]])).long()
    inputs = {"input_ids": ids, "attention_mask": valid} | ({"decoder_input_ids": ids} if family == "t5" else {})
    model = transformer(family, 0.0)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    expected = model(**inputs)[0]
    attend_densely(model)
    torch.testing.assert_close(
        model(**inputs, kept_scores={})[0][valid.bool()], expected[valid.bool()], atol=1e-4, rtol=1e-4
    )


def test_reports_count_cases() -> None:
    numbers = [case.number for case in quick_cases(0) if case.checkpointing == "none"][:3]
    report = run_chunk(0, numbers, "cpu", interpret=False, training=True)
    assert report.cases == sum(report.entries.values()) == 3
