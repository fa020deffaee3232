"""Models from transformers with random weights, their inputs, and their masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stof import masks
from stof.errors import ArgumentError, shown
from stof.masks import Mask
from stof.testing.mask_grid import GRID

WINDOW, SINKS = 512, 16

# Sizes as published; LLaMA's are those of a 1.0 B model.
_SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "llama": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
    },
    "t5": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072, "d_kv": 64},
    "vit": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
MODELS = tuple(_SIZES)
CAUSAL = ("gpt2", "llama")
MASKS = ("full", "window+sinks", "longformer", "bigbird")


@dataclass(frozen=True)
class Case:
    """A model, `batch` sequences of `seq` tokens (ViT: images of 196 patches and a class token), and a mask."""

    model: str
    batch: int
    seq: int
    mask: str

    @staticmethod
    def parse(text: str) -> Case:
        """Read `bert,8,512,bigbird`.

        Raises:
            ArgumentError: the text is no case, or there is no such model.
        """
        parts = text.split(",")
        numbers = [part for part in parts[1:3] if part.isdecimal() and len(part) <= 10 and 0 < int(part) < 2**31]
        if len(parts) != 4 or len(numbers) != 2:
            raise ArgumentError(f"a case is model,batch,length,mask, such as bert,8,512,bigbird; got {shown(text)}")
        if parts[0] not in MODELS:
            raise ArgumentError(f"unknown model {parts[0]!r}; there are {', '.join(MODELS)}")
        return Case(parts[0], int(parts[1]), int(parts[2]), parts[3])

    def __str__(self) -> str:
        return f"{self.model},{self.batch},{self.seq},{self.mask}"


def build(name: str, seq: int) -> nn.Module:
    """A model of random weights (seed 0) in evaluation mode, in float32 on the default device.

    Raises:
        ArgumentError: an unknown name.
    """
    import transformers as t

    if name not in _SIZES:
        raise ArgumentError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    sizes = _SIZES[name]
    torch.manual_seed(0)
    made: Any
    if name.startswith("bert"):
        made = t.BertModel(t.BertConfig(**sizes, max_position_embeddings=max(512, seq)), add_pooling_layer=False)
    elif name == "gpt2":
        made = t.GPT2Model(t.GPT2Config(**sizes, n_positions=max(1024, seq), use_cache=False))
    elif name == "llama":
        made = t.LlamaModel(t.LlamaConfig(**sizes, max_position_embeddings=max(2048, seq), use_cache=False))
    elif name == "t5":
        made = t.T5EncoderModel(t.T5Config(**sizes))
    else:
        made = t.ViTModel(t.ViTConfig(**sizes), add_pooling_layer=False)
    module: nn.Module = made.eval()
    return module


def inputs_of(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, or pixels for ViT (float32)."""
    generator = torch.Generator(device).manual_seed(1)
    if case.model == "vit":
        return {"pixel_values": torch.randn(case.batch, 3, 224, 224, generator=generator, device=device)}
    return {"input_ids": torch.randint(1, 30000, (case.batch, case.seq), generator=generator, device=device)}


def mask_of(case: Case) -> Mask | None:
    """The mask as a value; None when the model's own is all there is.

    Raises:
        ArgumentError: a mask that there is not, or one for ViT.
    """
    if case.mask not in MASKS or (case.model == "vit" and case.mask != "full"):
        raise ArgumentError(f"no mask {case.mask!r} for {case.model}; there are {', '.join(MASKS)} (ViT: full)")
    if case.mask == "full":
        return None
    if case.mask == "window+sinks":
        return masks.causal() & (masks.sliding_window(WINDOW - 1) | masks.sink_tokens(SINKS))
    mask = GRID[case.mask].mask(case.seq)
    return masks.causal() & mask if case.model in CAUSAL else mask
