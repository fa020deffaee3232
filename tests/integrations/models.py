"""Small random models of the families the tests cover, and batches with padding on either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import stof.integrations.transformers  # noqa: F401  (registers the implementation)

VOCABULARY = 61
LENGTHS = (23, 9, 1)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # attention far from uniform, so that a wrong mask or scale shows
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DECODER = _SMALL | {"num_key_value_heads": 2, "head_dim": 8}


def bert(**changes: Any) -> BertModel:
    return BertModel(BertConfig(**_SMALL | changes)).eval()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**_DECODER | changes)).eval()


def mistral() -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**_DECODER, sliding_window=6)).eval()


def gemma2() -> Gemma2ForCausalLM:
    """Alternating sliding-window and full layers, softcapped scores."""
    config = Gemma2Config(**_DECODER, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=0.05)
    return Gemma2ForCausalLM(config).eval()


def gpt_oss() -> GptOssForCausalLM:
    """Attention sinks."""
    config = GptOssConfig(**_DECODER, sliding_window=6, num_local_experts=2, num_experts_per_tok=1)
    model = GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    # Freshly initialised biases and queries are too small to show whether they are used.
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name or name.endswith(".q.weight"):
            torch.nn.init.normal_(parameter)
    return model


def vit() -> ViTModel:
    config = ViTConfig(
        initializer_range=0.3,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=24,
        patch_size=4,
    )
    return ViTModel(config).eval()


def batch(side: str = "right", lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` with padding on one side."""
    width = max(lengths)
    position = torch.arange(width).expand(len(lengths), width)
    counts = torch.tensor(lengths)[:, None]
    valid = position < counts if side == "right" else position >= width - counts
    ids = torch.randint(1, VOCABULARY, valid.shape)
    return {"input_ids": ids * valid, "attention_mask": valid.long()}


def checkpoint_activations(model: PreTrainedModel, enabled: bool = True) -> None:
    """Turn activation checkpointing on or off by the name that this version of transformers has for it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_{'enable' if enabled else 'disable'}")()
