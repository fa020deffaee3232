"""Models of transformers, as processes one after another start them: their code asks for more than a small module's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import stof
from stof import masks
from stof.integrations import transformers as hf
from stof.layout.search import CLUSTERED
from stof.plans import _DECIDED, decide_ahead, decisions_of
from stof.selection import failures
from tests.integrations import models
from tests.integrations.starting import optimized, traced


@pytest.mark.parametrize(("family", "masked"), [("bert", True), ("llama", False)])
def test_a_later_process_traces_nothing(family: str, masked: bool, tmp_path: Path) -> None:
    ids = torch.arange(40).view(2, 20) % models.VOCABULARY

    def first_call() -> tuple[Any, Any, int]:
        model = getattr(models, family)()
        hf.enable(model)
        if masked:
            hf.sparsify(model, masks.sliding_window(4))
        call = optimized(model, tmp_path)
        out, graphs = traced(lambda: call(input_ids=ids, use_cache=False))
        with torch.inference_mode():
            return out[0], model(input_ids=ids, use_cache=False)[0], graphs

    for graphs in (1, 0):
        out, expected, found = first_call()  # of other weights each time
        assert found == graphs
        torch.testing.assert_close(out, expected)


def test_an_attribute_that_was_not_there_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing met that `config.is_causal` is not set; one that a class gives is no part of a model's description."""
    ids = torch.arange(40).view(2, 20) % models.VOCABULARY

    def graphs() -> int:
        model = models.bert()
        call = optimized(model, tmp_path)
        return traced(lambda: call(input_ids=ids))[1]

    assert [graphs(), graphs()] == [1, 0]
    from transformers import BertConfig

    monkeypatch.setattr(BertConfig, "vision_feature_layer", 3, raising=False)
    assert graphs() == 1


def test_decisions_of_plans_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 24, 8)
    mask = masks.sliding_window(5) | masks.global_tokens(3)
    stof.plan_cache.clear()
    expected = stof.attention(q, q, q, mask)
    found = decisions_of({mask.key})
    assert [len(choices) for choices in found.values()] == [1]
    assert not decisions_of({masks.causal().key})
    stof.plan_cache.clear()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was decided")

    monkeypatch.setattr("stof.plans.choose", chosen)
    with pytest.raises(AssertionError, match="decided"):
        stof.attention(q, q, q, mask)
    stof.plan_cache.clear()
    decide_ahead(found)
    torch.testing.assert_close(stof.attention(q, q, q, mask), expected)


def test_choices_that_another_process_cannot_make_are_not_kept() -> None:
    q = torch.randn(1, 2, 24, 8)
    mask = masks.sliding_window(5)
    stof.attention(q, q, q, mask)
    plan = stof.plan(mask, 24, batch=1, heads=2)
    (call, choice), *_ = plan._choices.items()
    plan._choices[call] = replace(choice, row_order=CLUSTERED)
    assert not decisions_of({mask.key})
    plan._choices[call] = choice
    assert decisions_of({mask.key})
    with pytest.warns(RuntimeWarning, match="failed"):
        failures.add(choice, call[0], q.device, "for the test")
    assert not decisions_of({mask.key}), "what failed once may not fail again"
    stof.plan_cache.clear()
    decide_ahead({key: {call: choice} for key in [(mask.key, (), 24, 24, (1, 1), "cpu", None)]})
    assert not stof.plan(mask, 24, batch=1, heads=2)._choices, "it is known to fail here"


@pytest.fixture(autouse=True)
def nothing_decided() -> Iterator[None]:
    yield
    stof.plan_cache.clear()
    _DECIDED.clear()
    failures.clear()
