"""Small models learn real text with stof as with PyTorch's attention: equal losses in every step."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stof import masks

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("stof.integrations.transformers")

# The language reference that comes with Python, as bytes.
TEXT = torch.tensor(list("".join(sorted(pydoc_data.topics.topics.values())).encode()), dtype=torch.int64)
BATCH, LENGTH, STEPS = 4, 64, 200
WINDOW = masks.sliding_window(12, 12) | masks.sink_tokens(2)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def batch(step: int, masked: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH, 1), generator=generator)
    ids = TEXT[starts + torch.arange(LENGTH)]
    if not masked:
        return {"input_ids": ids, "labels": ids}
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(hidden, 256), "labels": ids.masked_fill(~hidden, -100)}


def losses(build: Callable[[], Any], sparse: bool, use_stof: bool) -> list[float]:
    torch.manual_seed(0)
    model = build().double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    causal = build is not bert
    keep = (WINDOW & masks.causal() if causal else WINDOW).to_dense(LENGTH).expand(BATCH, 1, -1, -1)
    if use_stof:
        hf.enable(model)
        if sparse:
            hf.sparsify(model, WINDOW)
    curve = []
    for step in range(STEPS):
        inputs = batch(step, masked=not causal)
        if sparse and not use_stof:
            inputs["attention_mask"] = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -torch.inf)
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True], ids=["own mask", "sparse"])
@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_losses_are_equal(build: Callable[[], Any], sparse: bool) -> None:
    expected, got = (losses(build, sparse, use_stof) for use_stof in (False, True))
    assert sum(expected[-20:]) < 0.8 * sum(expected[:20]), "the model learns"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=0)
