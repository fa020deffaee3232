"""Models and calls of transformers that hand masks and offsets on in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stof
from stof.errors import ArgumentError, UnsupportedError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")
import transformers  # noqa: E402
from transformers import masking_utils  # noqa: E402


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_assisted_generation(how: str) -> None:
    """Tokens that are taken back leave offsets that are tensors."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "vocab_size": 100, "max_position_embeddings": 128,
    }  # fmt: skip
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(sliding_window=8, num_hidden_layers=2, **sizes)
    ).eval()
    draft = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes)).eval()
    ids = torch.randint(3, 100, (1, 30))
    given = {"assistant_model": draft} if how == "assistant" else {"prompt_lookup_num_tokens": 3}
    given |= {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **given)
    assert torch.equal(hf.enable(model).generate(ids, **given), expected)


def test_a_model_whose_chunks_count_padding_is_given_a_tensor() -> None:
    """Llama 4 computes with its mask before it makes one of it."""
    config = transformers.Llama4TextConfig(
        attention_chunk_size=8, head_dim=16, num_local_experts=2, intermediate_size_mlp=64, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=100,
        max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.Llama4ForCausalLM(config).eval(), torch.randint(3, 100, (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(hf.enable(model)(ids).logits, expected, atol=1e-4, rtol=1e-4)
        positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
        with pytest.raises(UnsupportedError, match=r"(?s)computes with its masks.*Pass the padded batch") as found:
            model(ids, position_ids=positions)
        assert 'implementation("stof")' not in str(found.value)


def test_a_model_of_two_models() -> None:
    """Its parts are given new configurations; their layers keep the older ones."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    model = transformers.EncoderDecoderModel(
        encoder=transformers.BertModel(transformers.BertConfig(**sizes)), decoder=transformers.BertLMHeadModel(decoder)
    ).eval()
    ids, labels = torch.randint(3, 100, (2, 20)), torch.randint(3, 100, (2, 9))
    call = {"input_ids": ids, "decoder_input_ids": labels, "attention_mask": (torch.rand(2, 20) < 0.8).long()}
    call["attention_mask"][:, 0] = 1
    layers = [part for part in model.modules() if type(part).__name__ in ("BertSelfAttention", "BertCrossAttention")]
    with torch.no_grad():
        expected = model(**call).logits
        for choose, name in ((hf.enable, "stof"), (hf.disable, "sdpa")):
            choose(model)
            assert {layer.config._attn_implementation for layer in layers} == {name}
            torch.testing.assert_close(model(**call).logits, expected, atol=1e-5, rtol=1e-5)
    assert len(layers) == 3


def test_a_decoder_that_masks_its_padding_unasked() -> None:
    """T5Gemma's decoder drops padding tokens where it is given no mask."""
    part = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "vocab_size": 100, "pad_token_id": 0, "dropout_rate": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.T5GemmaConfig(encoder=part, decoder=dict(part), vocab_size=100)
    model = transformers.T5GemmaForConditionalGeneration(config).train()
    ids = torch.randint(3, 100, (2, 20))
    labels = ids.clone()
    labels[:, 3:9] = -100  # padding, as inputs of the decoder
    expected = model(ids, labels=labels).logits
    torch.testing.assert_close(hf.enable(model)(ids, labels=labels).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_is_refused_is_as_before() -> None:
    """Also its parts that could have been served."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    parts = torch.nn.ModuleList(
        [
            transformers.BertModel(transformers.BertConfig(**sizes)),
            transformers.MPNetModel(transformers.MPNetConfig(**sizes)),
        ]
    )
    before = [part.config._attn_implementation for part in parts]
    with pytest.raises(UnsupportedError, match="MPNetModel"):
        hf.enable(parts)
    assert [part.config._attn_implementation for part in parts] == before


def test_what_is_no_module_and_no_mask_of_a_layer() -> None:
    with pytest.raises(ArgumentError, match="got function"):
        stof.optimize(lambda x: x)
    model = transformers.BertModel(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    )
    with pytest.raises(ArgumentError, match="from_function"):
        hf.sparsify(hf.enable(model), lambda b, h, q, kv: q >= kv)


PACKED = {
    "two sequences": [*range(10), *range(14)],
    "one not from 0": [*range(5, 12), *range(17)],
    "many": [*range(3), *range(1), *range(9), *range(11)],
    "going back": [*range(10, 17), *range(2, 8), *range(11)],
}


@pytest.mark.parametrize("build", [models.llama, models.mistral])
@pytest.mark.parametrize("name", PACKED)
def test_packed_positions_are_documents(name: str, build: Callable[[], Any]) -> None:
    """Whichever names the version of transformers gives its functions; never a mask of every score."""
    ids = torch.randint(3, 60, (2, 24))
    call = {"position_ids": torch.tensor(PACKED[name]).expand(2, -1), "use_cache": False}
    model = build()
    with torch.no_grad():
        expected = model(ids, **call).logits
        made: list[hf.ModelMask] = []
        hf.enable(model)
        layers = [part for part in model.modules() if hasattr(part, "is_causal")]
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, args, kw: made.append(kw["attention_mask"]), with_kwargs=True)
        torch.testing.assert_close(model(ids, **call).logits, expected, atol=3e-5, rtol=1e-5)
    assert len(layers) == len(made) == 2
    assert "documents" in repr(made[0].mask)
    assert "from_dense" not in repr(made[0].mask)


@pytest.mark.skipif(not hasattr(masking_utils, "remap_positions_for_packed_sequence"), reason="transformers >= 5.23")
@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1, 5, 0, 1], [0, 1, 2, 3, 2, 1, 0, 1]], ids=["skips", "falls"])
@pytest.mark.parametrize("window", [None, 2])
def test_positions_that_do_not_count_tokens_are_evaluated(positions: list[int], window: int | None) -> None:
    """What distances in positions mean then differs from what distances in tokens do."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])
    inner = masking_utils.sliding_window_overlay(window) if window else masking_utils.causal_mask_function
    function = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(inner, torch.tensor([positions])),
        masking_utils.packed_sequence_mask_function(ids),
    )
    arguments = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": function}
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    got = hf.make_mask(**arguments).mask
    assert "from_dense" in repr(got)
    assert torch.equal(got.to_dense(8, 8), expected)
