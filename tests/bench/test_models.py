"""`stof bench models`: masks agree whatever form a peer takes them in, wrong results have no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from stof.bench import models
from stof.bench.models import Case, flex_mask, mask_of, run_case
from stof.errors import ArgumentError

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.mark.parametrize("mask", models.MASKS)
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_masks_are_the_same_in_every_form(model: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WINDOW", 20)
    case = Case(model, 1, 256, mask)
    value, blocks = mask_of(case), flex_mask(case, torch.device("cpu"))
    q, k = torch.arange(256)[:, None], torch.arange(256)[None]
    dense = value.to_dense(256)[0, 0] if value is not None else (q >= k) | torch.tensor(model == "bert")
    own = blocks.mask_mod(0, 0, q, k) if blocks is not None else torch.ones(256, 256, dtype=torch.bool)
    assert torch.equal(dense, own.expand(256, 256))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown model 'opt'"):
        models.build("opt", 8)
    with pytest.raises(ArgumentError, match="no mask 'spiral'"):
        mask_of(Case("bert", 1, 8, "spiral"))
    with pytest.raises(ArgumentError, match="no mask 'bigbird' for vit"):
        mask_of(Case("vit", 1, 8, "bigbird"))
    with pytest.raises(ArgumentError, match="unknown implementation 'magic'"):
        models.ways(nn.Identity(), Case("bert", 1, 8, "full"), ["magic"], torch.device("cpu"), None)


def test_a_case_is_checked_then_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._SIZES, "bert", TINY)
    case = Case("bert", 2, 64, "longformer")
    rows = run_case(case, ["eager-sdpa", "stof"], torch.device("cpu"), torch.float32, 1, None)
    assert [row.impl for row in rows] == ["eager-sdpa", "stof"]
    assert all(row.problem == "" and row.ms is not None and row.ms > 0 for row in rows)
    assert all(row.cosine == pytest.approx(1.0, abs=1e-6) for row in rows)


def test_wrong_and_failing_ways_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._SIZES, "bert", TINY)

    def prepared(model: nn.Module, case: Case, impls: object, device: object, budget_s: object) -> Any:
        def break_down() -> Any:
            raise RuntimeError("no such kernel")

        spoiled = models.copy.deepcopy(model)
        for parameter in spoiled.parameters():
            parameter.data.normal_()
        return {"wrong": lambda: (spoiled, {}), "fails": break_down}

    monkeypatch.setattr(models, "ways", prepared)
    wrong, fails = run_case(Case("bert", 1, 32, "full"), [], torch.device("cpu"), torch.float32, 1, None)
    assert wrong.ms is None
    assert wrong.problem.startswith("WRONG: cosine")
    assert fails.ms is None
    assert fails.problem == "RuntimeError: no such kernel"
