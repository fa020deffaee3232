"""Who computes attention under a mask that changes in every step: stof, FlexAttention, varlen_attn and SDPA."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import stof
from benchmarks.attention.changing_masks import Kind
from stof.testing.mask_grid import Shape

# Tokens up to which SDPA gets a dense mask, and up to which create_block_mask runs eagerly, on S x S tensors.
_DENSE, _EAGER = 16384, 32768


@dataclass(frozen=True)
class Prepared:
    """An implementation of one kind and shape.

    Attributes:
        make: the mask that it takes, from the source of one step.
        attend: attention of q, k, v under it.
    """

    make: Callable[[Any], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Way:
    """One implementation under test.

    Attributes:
        prepare: what is done once for a kind and shape.
        missing: why it cannot serve them, or None.
        sequence_major: whether tensors are `[B, S, H, D]` instead of `[B, H, S, D]`.
    """

    prepare: Callable[[Kind, Shape, torch.device], Prepared]
    missing: Callable[[Kind, Shape, torch.device], str | None] = lambda kind, shape, device: None
    sequence_major: bool = False


def _stof(kind: Kind, shape: Shape, device: torch.device) -> Prepared:
    if not kind.dynamic:
        return Prepared(kind.mask, stof.attention)
    plans: list[stof.DynamicPlan] = []

    def make(source: Any) -> stof.DynamicPlan:
        mask = kind.mask(source)
        if plans:
            plans[0].update(mask)
        else:
            lengths = (shape.q_len, shape.kv_len)
            plans.append(stof.dynamic_plan(mask, *lengths, batch=shape.batch, heads=shape.heads, device=device))
        return plans[0]

    return Prepared(make, stof.attention)


def _flex(kind: Kind, shape: Shape, device: torch.device, compiled: bool) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    batch = shape.batch if kind.batched else None
    heads = shape.heads if kind.per_head else None
    attend: Any = torch.compile(flex_attention, dynamic=False)
    create = torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask
    grouped = shape.heads != shape.kv_heads

    def make(source: Any) -> Any:
        mod = kind.mod(source, shape, device)
        return create(mod, batch, heads, shape.q_len, shape.kv_len, device=str(device))

    return Prepared(make, lambda q, k, v, mask: attend(q, k, v, block_mask=mask, enable_gqa=grouped))


def _flex_eager_missing(kind: Kind, shape: Shape, device: torch.device) -> str | None:
    del device
    entries = (shape.batch if kind.batched else 1) * (shape.heads if kind.per_head else 1)
    if entries * shape.q_len * shape.kv_len > _EAGER**2:
        return f"create_block_mask would need {entries} S x S tensors"
    return None


def _varlen(kind: Kind, shape: Shape, device: torch.device) -> Prepared:
    from torch.nn.attention.varlen import varlen_attn

    assert kind.ends is not None
    ends_of = kind.ends
    # PyTorch 2.10 has neither option, and takes grouped heads without being asked.
    known = inspect.signature(varlen_attn).parameters
    options: Any = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = shape.heads != shape.kv_heads

    def make(source: Any) -> tuple[Tensor, int]:
        ends = torch.as_tensor(ends_of(source), dtype=torch.int32)
        return ends.to(device), int(ends.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor, int]) -> Tensor:
        ends, longest = mask
        out = varlen_attn(q[0], k[0], v[0], ends, ends, longest, longest, **options)
        assert isinstance(out, Tensor)
        return out[None]

    return Prepared(make, attend)


def _varlen_missing(kind: Kind, shape: Shape, device: torch.device) -> str | None:
    if kind.ends is None or shape.batch > 1:
        return "takes documents of one sequence alone"
    if device.type != "cuda":
        return "runs on CUDA devices only"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    return None


def _sdpa(kind: Kind, shape: Shape, device: torch.device) -> Prepared:
    grouped = shape.heads != shape.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    return Prepared(lambda source: kind.dense(source, shape, device), attend)


def _sdpa_missing(kind: Kind, shape: Shape, device: torch.device) -> str | None:
    del kind, device
    return None if shape.q_len <= _DENSE else f"a dense mask is given up to {_DENSE} tokens"


WAYS: dict[str, Way] = {
    "stof": Way(_stof),
    "flex": Way(partial(_flex, compiled=True)),
    "flex-eager-mask": Way(partial(_flex, compiled=False), _flex_eager_missing),
    "varlen": Way(_varlen, _varlen_missing, sequence_major=True),
    "sdpa": Way(_sdpa, _sdpa_missing),
}
