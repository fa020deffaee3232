"""Models and calls of transformers that hand masks and offsets on in ways of their own."""

from __future__ import annotations

import pytest
import torch

import stof
from stof.errors import ArgumentError, UnsupportedError

hf = pytest.importorskip("stof.integrations.transformers")
import transformers  # noqa: E402


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
