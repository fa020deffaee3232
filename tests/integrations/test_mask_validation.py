"""Attention masks of the wrong shape end in an error of stof's, whatever they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stof import masks
from stof.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")
import transformers  # noqa: E402

MODELS = {"bert": models.bert, "llama": models.llama, "mistral": models.mistral}
# Of a batch of 2 sequences of 8 tokens.
WRONG = {
    "3-D": (2, 8, 8), "one sequence": (1, 8), "three sequences": (3, 8), "short": (2, 7), "long": (2, 9),
    "scores of another batch": (3, 1, 8, 8), "scores of other heads": (2, 3, 8, 8),
    "scores of other queries": (2, 1, 7, 8), "scores of more keys": (2, 1, 8, 9), "scores of fewer keys": (2, 1, 8, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "float"])
def test_masks_of_the_wrong_shape(name: str, wrong: str, dtype: torch.dtype) -> None:
    """All ones and all zeros change nothing where they are read wrongly, so they are looked at too."""
    model, ids = hf.enable(MODELS[name]()), torch.randint(3, 60, (2, 8))
    for mask in (torch.ones(WRONG[wrong]), torch.zeros(WRONG[wrong])):
        with torch.no_grad(), pytest.raises(ShapeError, match=r"attention.mask"):
            model(ids, attention_mask=mask.to(dtype))


@pytest.mark.parametrize("build", [models.bert, models.llama, models.mistral, models.gpt2, models.t5])
def test_integers_for_every_score(build: Any) -> None:
    """0 and 1 may mean seen or not, or be added to scores: the caller says which."""
    model, ids = hf.enable(build()), torch.randint(3, 60, (2, 8))
    call = {"input_ids": ids} | ({"decoder_input_ids": ids} if build is models.t5 else {})
    keep = torch.rand(2, 1, 8, 8) < 0.7
    keep |= torch.eye(8, dtype=torch.bool)
    with torch.no_grad():
        additive = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
        want = model(**call, attention_mask=additive)[0]
        torch.testing.assert_close(model(**call, attention_mask=keep)[0], want, atol=1e-5, rtol=1e-5)
        for dtype in (torch.int64, torch.int32, torch.uint8):
            with pytest.raises(DtypeError, match=rf"attention_mask.*{dtype}.*mask\.bool\(\)"):
                model(**call, attention_mask=keep.to(dtype))
        for dtype in (torch.int64, torch.bool, torch.float32):
            with pytest.raises(ShapeError, match=r"attention_mask.*mask\[:, None\].*mask\.bool\(\)\[:, None\]"):
                model(**call, attention_mask=keep[:, 0].to(dtype))


def test_lengths_count_the_tokens_in_the_cache() -> None:
    model, ids = models.llama(), torch.randint(3, 60, (2, 8))
    pads = torch.ones(2, 8, dtype=torch.long)
    pads[1, :3] = 0
    for static in (False, True):
        out: list[Any] = []
        for implementation in ("sdpa", "stof"):
            model.set_attn_implementation(implementation)
            cache = transformers.StaticCache(model.config, 12) if static else transformers.DynamicCache()
            with torch.no_grad():
                model(ids[:, :5], attention_mask=pads[:, :5], past_key_values=cache)
                if implementation == "stof":
                    for length in (3, 7, 13):
                        with pytest.raises(ShapeError, match=rf"{length} tokens"):
                            model(ids[:, 5:], attention_mask=torch.ones(2, length), past_key_values=cache)
                    if static:  # as many as the cache holds: keys after the tokens seen are not asked about
                        pads = torch.nn.functional.pad(pads, (0, 4), value=1)
                out.append(model(ids[:, 5:], attention_mask=pads, past_key_values=cache).logits)
        torch.testing.assert_close(out[1], out[0], atol=3e-5, rtol=1e-5)


def test_generation_without_the_cache_that_checkpointing_drops() -> None:
    """Each new token would see itself alone; PyTorch's attention generates so."""
    model, ids = hf.enable(models.llama()), torch.randint(3, 60, (2, 8))
    with torch.no_grad(), pytest.raises(ShapeError, match=r"checkpointing drops the cache.*model\.eval\(\)"):
        model(ids[:, -1:], attention_mask=torch.ones_like(ids))


def test_cross_attention_has_a_length_of_its_own() -> None:
    model, ids = hf.enable(models.t5()), torch.randint(3, 60, (2, 8))
    encoded = model.encoder(ids)
    call = {"encoder_outputs": encoded, "decoder_input_ids": ids[:, :5]}
    model(attention_mask=torch.ones(2, 8), **call)
    for shape in ((2, 5), (2, 9), (1, 8)):
        with pytest.raises(ShapeError, match=r"attention_mask has"):
            model(attention_mask=torch.ones(shape), **call)


def test_packed_rows_are_those_of_the_call() -> None:
    packed = hf.pack(torch.randint(3, 60, (2, 8)), torch.ones(2, 8, dtype=torch.long))
    inputs = packed.model_inputs()
    inputs["input_ids"] = inputs["input_ids"].expand(3, -1)
    with pytest.raises(ShapeError, match="1 sequences and the inputs have 3"):
        hf.enable(models.bert())(**inputs)


def test_windows_without_a_mask() -> None:
    layer = hf.enable(models.mistral()).model.layers[0].self_attn
    states, positions = torch.randn(1, 9, 32), (torch.ones(1, 9, 8), torch.zeros(1, 9, 8))
    with torch.no_grad(), pytest.raises(UnsupportedError, match="sliding window of 6 for 9 keys"):
        layer(states, positions, None)
    with torch.no_grad():
        layer(states[:, :6], (positions[0][:, :6], positions[1][:, :6]), None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "float"])
def test_a_sparse_mask_needs_the_positions_of_queries(dtype: torch.dtype) -> None:
    """Of scores for some tokens of a cache nobody says which tokens they are."""
    model, ids = hf.enable(models.llama()), torch.randint(3, 60, (1, 12))
    seen = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    scores = seen if dtype == torch.bool else torch.where(seen, 0.0, -torch.inf)
    with torch.no_grad(), hf.sparsify(model, masks.sliding_window(3)):
        want = model(ids).logits
        torch.testing.assert_close(model(ids, attention_mask=scores).logits, want)
        for length in (8, 11):
            cache = transformers.DynamicCache()
            model(ids[:, :length], attention_mask=scores[..., :length, :length], past_key_values=cache)
            with pytest.raises(UnsupportedError, match="4-D attention_mask does not say"):
                model(ids[:, length:], attention_mask=scores[..., length:, :], past_key_values=cache)
            cache = transformers.DynamicCache()
            model(ids[:, :length], past_key_values=cache)
            torch.testing.assert_close(model(ids[:, length:], past_key_values=cache).logits, want[:, length:])


def test_sparse_masks_are_removed_in_order() -> None:
    model, ids = hf.enable(models.llama()), torch.randint(3, 60, (1, 8))
    with torch.no_grad():
        plain = model(ids).logits
    window = masks.sliding_window(3)
    for other in (masks.sliding_window(5), window):
        first, second = hf.sparsify(model, window), hf.sparsify(model, other)
        with pytest.raises(ArgumentError, match="has a newer sparse mask"):
            first.remove()
        second.remove()
        first.remove()
        first.remove()
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, plain)
