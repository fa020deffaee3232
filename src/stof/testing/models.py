"""Models from transformers with random weights, their inputs, and their masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from stof import masks
from stof.errors import ArgumentError, shown
from stof.masks import Mask
from stof.testing.mask_grid import GRID

WINDOW, SINKS = 512, 16
# Rows and columns of ViT's patches.
PATCH = 16

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
    "modernbert": {},
    "t5": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072, "d_kv": 64},
    "vit": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
MODELS = tuple(_SIZES)
CAUSAL = ("gpt2", "llama")
MASKS = ("full", "window+sinks", "longformer", "bigbird", "documents", "neighborhood")
# Patches of an image that a patch sees on each side, in rows and in columns.
REACH = 3


@dataclass(frozen=True)
class Case:
    """A model, `batch` sequences of `seq` tokens (ViT: a class token and the patches of a square image), and a mask."""

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
    elif name == "modernbert":
        made = t.ModernBertModel(t.ModernBertConfig(**sizes))
    else:
        made = t.ViTModel(t.ViTConfig(**sizes, image_size=PATCH * image_side(seq)), add_pooling_layer=False)
    module: nn.Module = made.eval()
    return module


def image_side(seq: int) -> int:
    """Patches in a row of ViT's images: as many as make `seq` tokens, else 14."""
    side = math.isqrt(max(0, seq - 1))
    return side if side and side * side + 1 == seq else 14


def inputs_of(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, or pixels for ViT (float32)."""
    generator = torch.Generator(device).manual_seed(1)
    if case.model == "vit":
        side = PATCH * image_side(case.seq)
        return {"pixel_values": torch.randn(case.batch, 3, side, side, generator=generator, device=device)}
    return {"input_ids": torch.randint(1, 30000, (case.batch, case.seq), generator=generator, device=device)}


def mask_of(case: Case) -> Mask | None:
    """The mask as a value; None when the model's own is all there is.

    Raises:
        ArgumentError: a mask that there is not, or that is not for this model.
    """
    if case.mask not in MASKS or ((case.model == "vit") != (case.mask == "neighborhood") and case.mask != "full"):
        known = ", ".join(mask for mask in MASKS if mask != "neighborhood")
        raise ArgumentError(f"no mask {case.mask!r} for {case.model}; there are {known} (ViT: full, neighborhood)")
    if case.mask == "full":
        return None
    if case.mask == "documents":
        documents = masks.documents(cu_seqlens=[0, *accumulate(document_lengths(case.seq))])
        return masks.causal() & documents if case.model in CAUSAL else documents
    if case.mask == "neighborhood":
        # Dense values, like FlexAttention's BlockMask: compiled training breaks its graph under a function that reads
        # variables.
        return masks.from_dense(masks.from_function(neighborhood(image_side(case.seq))).to_dense(case.seq))
    if case.mask == "window+sinks":
        return masks.causal() & (masks.sliding_window(WINDOW - 1) | masks.sink_tokens(SINKS))
    mask = GRID[case.mask].mask(case.seq)
    return masks.causal() & mask if case.model in CAUSAL else mask


def document_lengths(seq: int) -> list[int]:
    """Documents packed into one sequence: a half, a quarter, ..., none shorter than 16."""
    lengths: list[int] = []
    while seq >= 32:
        lengths.append(seq // 2)
        seq -= seq // 2
    return [*lengths, seq]


def neighborhood(side: int) -> Callable[..., Any]:
    """A mask function: patches see those within `REACH`; the class token sees all, and all see it."""

    def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        row, column = (q - 1) // side - (kv - 1) // side, (q - 1) % side - (kv - 1) % side
        return (row.abs() <= REACH) & (column.abs() <= REACH) | (q == 0) | (kv == 0)

    return keep
