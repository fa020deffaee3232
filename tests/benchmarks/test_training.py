"""`python -m benchmarks train`: every way is timed after a check of its gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.models import training
from benchmarks.models.training import training_rows
from stof.testing import models
from stof.testing.models import Case

CASES = [Case.parse(text) for text in ("bert,2,64,bigbird", "bert,2,100,documents", "llama,1,600,window+sinks")]
CASES += [Case.parse("modernbert,2,96,full"), Case.parse("vit,2,65,neighborhood")]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._SIZES, "bert", SIZES)
    monkeypatch.setitem(models._SIZES, "vit", SIZES)
    small = {"local_attention": 16, "global_attn_every_n_layers": 2, "num_hidden_layers": 2}
    monkeypatch.setitem(models._SIZES, "modernbert", SIZES | small)
    monkeypatch.setitem(models._SIZES, "llama", SIZES | {"num_key_value_heads": 1, "vocab_size": 30000})
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def test_rows() -> None:
    ways, modes = ("stof", "sdpa"), ("default", "reduce-overhead")
    rows = list(training_rows(CASES, ways, modes, torch.device("cpu"), 1))
    assert [(row.case, row.way, row.mode) for row in rows] == list(product(map(str, CASES), ways, modes))
    assert all(row.ms and row.tokens_per_s and row.cosine and row.cosine > 0.99 and not row.problem for row in rows)


def test_wrong_gradients_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.ones(sum(p.numel() for p in models.build("bert", 64).parameters() if p.requires_grad))
    monkeypatch.setattr(training, "_exact_gradients", lambda *about: exact)
    (row,) = training_rows(CASES[:1], ("stof",), ("default",), torch.device("cpu"), 1)
    assert row.ms is None
    assert "wrong" in row.problem
