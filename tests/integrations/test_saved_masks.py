"""Sparse masks in checkpoints of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, T5EncoderModel

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
    with pytest.warns(UserWarning, match=r"attn_implementation='sdpa' ignores them; load it with 'stof'"):
        type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(_hidden(loaded), _hidden(model), atol=0, rtol=0)
    hf.sparsify(loaded, None)
    assert not torch.allclose(_hidden(loaded), _hidden(model))


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


def test_only_checkpoints_hold_masks(tmp_path: Path) -> None:
    """Models that are built from the configuration of a sparse or of a loaded model are dense."""
    model = hf.enable(models.bert())
    hf.sparsify(model, {1: WINDOW})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="stof")
    for config in (model.config, loaded.config):
        assert not hasattr(config, "stof_sparse_masks")
    hf.sparsify(model, None)
    model.save_pretrained(tmp_path)
    dense = type(model).from_pretrained(tmp_path, attn_implementation="stof")
    torch.testing.assert_close(_hidden(dense), _hidden(model), atol=0, rtol=0)


def test_parts_with_masks_of_their_own(tmp_path: Path) -> None:
    """A model that has the encoder alone restores the encoder's masks, and warns of the decoder's."""
    model = hf.enable(models.t5())
    hf.sparsify(model.encoder, WINDOW)
    hf.sparsify(model.decoder, {0: masks.sliding_window(2)})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="stof")
    torch.testing.assert_close(_hidden(loaded), _hidden(model), atol=0, rtol=0)
    with pytest.warns(UserWarning, match=r"decoder.block.0.*not restored: .*no layer of this name"):
        encoder = T5EncoderModel.from_pretrained(tmp_path, attn_implementation="stof")
    with torch.no_grad():
        torch.testing.assert_close(encoder(IDS)[0], model.encoder(IDS)[0], atol=0, rtol=0)


def test_masks_without_text(tmp_path: Path) -> None:
    model = hf.enable(models.bert())
    hf.sparsify(model, masks.from_function(lambda b, h, q, kv: q >= kv))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"they have no text that can be read"):
        type(model).from_pretrained(tmp_path, attn_implementation="stof")
