"""`record_masks`: the masks under which layers computed, and the check of what they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stof import masks
from stof.errors import IsolationError, MaskError, ShapeError, UnsupportedError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

IDS = torch.arange(3, 17)[None]
POSITIONS = torch.cat([torch.arange(5), torch.arange(9)])[None]
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9])
CAUSAL = torch.ones(14, 14, dtype=torch.bool).tril()
PACKED = CAUSAL & (DOCUMENTS[0][:, None] == DOCUMENTS[0])


def recorded(model: Any, **inputs: Any) -> Any:
    with torch.inference_mode(), hf.record_masks(model) as seen:
        model(**inputs)
    return seen


def test_packed() -> None:
    model = hf.enable(models.llama())
    seen = recorded(model, input_ids=IDS, position_ids=POSITIONS)
    assert [one.layer for one in seen] == [f"model.layers.{n}.self_attn" for n in range(len(seen))]
    assert len(seen) == model.config.num_hidden_layers
    for one in seen:
        assert torch.equal(one.to_dense()[0, 0], PACKED)
    seen.check(documents=DOCUMENTS, causal=True)
    with pytest.raises(
        IsolationError, match=r"model.layers.0.self_attn: in row 0, token 3 sees token 0, of document 0, and is of"
    ):
        seen.check(documents=torch.tensor([[0] * 3 + [1] * 11]))
    with pytest.raises(ShapeError, match="documents has shape"):
        seen.check(documents=DOCUMENTS[:, :9])


def test_a_row_of_one_sequence() -> None:
    """What transformers makes of an attention mask of ones: documents see each other."""
    seen = recorded(hf.enable(models.llama()), input_ids=IDS)
    assert torch.equal(seen[0].to_dense()[0, 0], CAUSAL)
    seen.check(causal=True)
    with pytest.raises(IsolationError, match="token 5 sees token 0"):
        seen.check(documents=DOCUMENTS, causal=True)


def test_later_tokens() -> None:
    seen = recorded(hf.enable(models.bert()), input_ids=IDS)
    seen.check()
    with pytest.raises(IsolationError, match="token 0 sees token 1, a later token"):
        seen.check(causal=True)


def test_sparse_and_padding() -> None:
    model = hf.enable(models.bert())
    valid = torch.ones(2, 14, dtype=torch.int64)
    valid[1, 9:] = 0
    inputs = {"input_ids": IDS.expand(2, -1), "attention_mask": valid}
    with hf.sparsify(model, {1: masks.sliding_window(2, 2)}):
        seen = recorded(model, **inputs)
    window = masks.sliding_window(2, 2).to_dense(14)[0, 0]
    keys = valid.bool()[:, None]
    assert torch.equal(seen[0].to_dense()[:, 0], keys.expand(2, 14, 14))
    assert torch.equal(seen[1].to_dense()[:, 0], keys & window)
    seen.check(documents=valid - 1)
    with pytest.raises(IsolationError, match="in row 0, token 0 sees token 9, which is padding"):
        seen.check(documents=(valid - 1)[[1, 0]])


@pytest.mark.parametrize("hidden", [None, torch.finfo(torch.float32).min, -1e9, -torch.inf])
def test_tensors(hidden: float | None) -> None:
    keep = PACKED[None, None]
    mask = keep if hidden is None else torch.where(keep, 0.0, hidden)
    seen = recorded(hf.enable(models.llama()), input_ids=IDS, attention_mask=mask)
    assert torch.equal(seen[0].to_dense()[0, 0], PACKED)
    seen.check(documents=DOCUMENTS, causal=True)


def test_cache() -> None:
    model = hf.enable(models.llama())
    with torch.inference_mode():
        cache = model(IDS[:, :9], use_cache=True).past_key_values
        for tokens in (IDS[:, 9:13], IDS[:, 13:]):
            with hf.record_masks(model) as seen:
                model(tokens, past_key_values=cache)
            end = 13 if tokens.shape[1] == 4 else 14
            assert torch.equal(seen[0].to_dense()[0, 0], CAUSAL[end - tokens.shape[1] : end, :end])
            seen.check(causal=True, documents=torch.zeros(1, end))
            with pytest.raises(IsolationError, match=f"token {end - tokens.shape[1]} sees token 0"):
                seen.check(documents=DOCUMENTS[:, :end])


def test_static_caches() -> None:
    """They have more keys than tokens."""
    transformers = pytest.importorskip("transformers")
    model = hf.enable(models.llama())
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    with torch.inference_mode():
        for tokens, begin in ((IDS[:, :9], 0), (IDS[:, 9:12], 9)):
            with hf.record_masks(model) as seen:
                model(tokens, past_key_values=cache)
            assert seen[0].offset == begin
            assert seen[0].shape[2:] == (tokens.shape[1], 20)
            seen.check(causal=True)
    with torch.inference_mode(), hf.record_masks(model) as seen:
        mask = torch.ones(1, 1, 2, 14, dtype=torch.bool)
        model(IDS[:, 12:], past_key_values=cache, attention_mask=torch.nn.functional.pad(mask, (0, 6)))
    with pytest.raises(UnsupportedError, match="does not say at which keys"):
        seen.check(causal=True)


def test_masks_that_change() -> None:
    """A mask that was recorded is never another one."""
    model, keep = hf.enable(models.bert()), torch.ones(14, dtype=torch.bool)
    hf.sparsify(model, masks.from_function(lambda b, h, q, k: keep[k] & (q >= 0)))
    seen = recorded(model, input_ids=IDS)
    assert seen[0].to_dense().all()
    keep[3:] = False
    with pytest.raises(MaskError, match="was changed"):
        seen[0].to_dense()
    assert recorded(model, input_ids=IDS)[0].to_dense().sum() == 3 * 14


def test_refused() -> None:
    model = models.llama()
    with pytest.raises(UnsupportedError, match="no mask was recorded"):
        recorded(model, input_ids=IDS)
    hf.enable(model)
    with pytest.raises(UnsupportedError, match="no mask was recorded"):
        recorded(torch.compile(model, backend="eager"), input_ids=IDS)
    with torch.inference_mode(), hf.record_masks(model) as seen:
        model.model.layers = model.model.layers[:1]
        model(IDS)
    with pytest.raises(UnsupportedError, match=r"no call of model\.layers\.1\.self_attn"):
        seen.check()
    other = hf.enable(models.bert())
    with torch.inference_mode(), hf.record_masks(other) as seen:
        model(IDS)
        assert not seen
        other(IDS)
    assert len(seen) == other.config.num_hidden_layers


def test_encoder_and_decoder() -> None:
    model = hf.enable(models.t5())
    with torch.inference_mode(), hf.record_masks(model) as seen:
        model(input_ids=IDS, decoder_input_ids=IDS[:, :6])
    shapes = {one.layer.split(".")[0]: one.shape[2:] for one in seen if "EncDec" not in one.layer}
    assert shapes == {"encoder": (14, 14), "decoder": (6, 6)}
    seen.check()
