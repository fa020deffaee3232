"""What a training case trains: plain blocks or a tiny transformers model, with STOF's attention or a dense one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stof.kernels.dropout import Dropout, dense_kept_weights, draw_seed

HEADS, WIDTH, VOCABULARY = 4, 32, 61
Attend = Callable[..., Tensor]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`stof.attention` by its definition, differentiated by PyTorch; `keep` says which scores the mask keeps."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    kept = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand(scores.shape)
    scores = scores.masked_fill(~kept, -1e30)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]] * kept  # 0 also in rows that keep nothing
    if dropout_p:
        stay = dense_kept_weights(Dropout(dropout_p, draw_seed(q.device)), *weights.shape)
        weights = weights * stay / (1 - dropout_p)
    return weights @ v


class Block(nn.Module):
    """Attention and a projection; `scaled` names the reduction of a tensor-wise scale, as in training in 8 bits."""

    def __init__(self, attend: Attend, kv_heads: int, options: dict[str, Any], scaled: str) -> None:
        super().__init__()
        self.attend, self.kv_heads, self.options, self.scaled = attend, kv_heads, options, scaled
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * 8)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 1, 64))
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        heads = self.qkv(2 * self.norm(x)).unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k, v = heads.split([HEADS, self.kv_heads, self.kv_heads], 1)
        options = dict(self.options)
        if options["bias"]:
            options["bias"] = self.bias[..., : x.shape[1]]
        if options["sinks"]:
            options["sinks"] = self.sinks
        out = self.attend(q, k, v, mask, **options).transpose(1, 2).flatten(2)
        if self.scaled:
            size = out.detach().abs()
            out = out / (0.1 + (size.max() if self.scaled == "max" else size.amax()))
        return x + self.out(out).tanh()


class Stack(nn.Module):
    """Blocks between an embedding and a projection; `call` runs each, and may checkpoint it."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(*given) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)
        self.call: Callable[..., Tensor] = lambda block, *inputs: block(*inputs)

    def forward(self, ids: Tensor, mask: Any) -> Tensor:
        x = self.embed(ids)
        if not x.requires_grad and torch.is_grad_enabled():  # as `enable_input_require_grads` of transformers
            x.requires_grad_()
        for block in self.blocks:
            x = self.call(block, x, mask)
        return self.head(x)


# Self-attention of transformers' models, by the attribute that holds its dropout.
_ATTENTION = {
    "BertSelfAttention": "dropout",
    "T5Attention": "dropout",
    "LlamaAttention": "attention_dropout",
    "Gemma2Attention": "attention_dropout",
}


@functools.cache
def _family(name: str, dropout: float) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    from tests.integrations import models

    AttentionInterface.register("oracle", _attend_in_model)
    AttentionMaskInterface.register("oracle", eager_mask)
    torch.manual_seed(0)
    model = getattr(models, name)().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    for part in model.modules():
        if (attribute := _ATTENTION.get(type(part).__name__)) is not None:
            held = getattr(part, attribute)
            setattr(held, "p", dropout) if isinstance(held, nn.Dropout) else setattr(part, attribute, dropout)
    return model


def transformer(name: str, dropout: float) -> Any:
    """A tiny transformers model in training mode; only attention has dropout."""
    return copy.deepcopy(_family(name, dropout))


def attention_layers(model: Any) -> dict[str, Any]:
    """Self-attention by name, in the order in which `sparsify` counts it."""
    parts = model.named_modules()
    return {name: x for name, x in parts if type(x).__name__ in _ATTENTION and not name.endswith("EncDecAttention")}


def attend_densely(model: Any) -> None:
    """Let a model's attention be `dense_attention`.

    Calls of the model take `kept_scores`: what a layer keeps beside what the model's mask does.
    """
    for part in model.modules():  # T5's encoder has a configuration of its own
        if hasattr(part, "config"):
            part.config._attn_implementation = "oracle"


def _attend_in_model(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    kept_scores: dict[Any, Tensor],
    **ignored: Any,
) -> tuple[Tensor, None]:
    keep = kept_scores.get(module)
    if attention_mask is not None:
        keep = (attention_mask == 0) & (torch.tensor(True) if keep is None else keep)
    out = dense_attention(q, k, v, keep, scale=scaling, softcap=softcap, bias=position_bias, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None
