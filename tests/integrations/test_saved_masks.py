"""Sparse masks in checkpoints of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

from stof import masks
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

WINDOW = masks.sliding_window(3, 3)
IDS = models.batch()["input_ids"]


def _hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(IDS, **({"decoder_input_ids": IDS} if hasattr(model, "decoder") else {}))[0]
    return out


@pytest.mark.parametrize("build", [models.bert, models.llama, models.t5])
def test_loading_restores_masks(build: Any, tmp_path: Path) -> None:
    model = hf.enable(build())
    hf.sparsify(model, {0: masks.longformer(2, [0]), 1: WINDOW})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="stof")
    with pytest.warns(UserWarning, match=r"attn_implementation='sdpa' ignores them; give 'stof'"):
        later = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    want = _hidden(model)
    for other in (loaded, hf.enable(later)):
        torch.testing.assert_close(_hidden(other), want, atol=0, rtol=0)
        hf.sparsify(other, None)
        assert not torch.allclose(_hidden(other), want)


def test_a_model_around_the_saved_one(tmp_path: Path) -> None:
    model = hf.enable(models.bert())
    hf.sparsify(model, WINDOW)
    model.save_pretrained(tmp_path)
    around = BertForSequenceClassification.from_pretrained(tmp_path, attn_implementation="stof")
    torch.testing.assert_close(_hidden(around.bert), _hidden(model), atol=0, rtol=0)
    again = tmp_path / "again"
    around.save_pretrained(again)
    around = BertForSequenceClassification.from_pretrained(again, attn_implementation="stof")
    torch.testing.assert_close(_hidden(around.bert), _hidden(model), atol=0, rtol=0)


def test_the_configuration_follows_the_masks(tmp_path: Path) -> None:
    model = hf.enable(models.bert())
    with hf.sparsify(model, WINDOW):
        with hf.sparsify(model, {1: masks.causal()}):
            assert model.config.stof_sparse_masks["masks"] == [None, "causal()"]
        assert model.config.stof_sparse_masks["masks"] == [WINDOW.key] * 2
    assert not hasattr(model.config, "stof_sparse_masks")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="stof")
    torch.testing.assert_close(_hidden(loaded), _hidden(model), atol=0, rtol=0)


def test_masks_without_text(tmp_path: Path) -> None:
    model = hf.enable(models.bert())
    hf.sparsify(model, masks.from_function(lambda b, h, q, kv: q >= kv))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"functions and tensors are not stored; call sparsify\(\) with them"):
        type(model).from_pretrained(tmp_path, attn_implementation="stof")
