"""One Transformer layer fused by hand with the templates, against the same layer left to torch.compile.

Both sides run the same scaled_dot_product_attention, both under CUDA graphs, and the rest of the fused layer (rotary
embeddings) is compiled by Inductor as well: what differs is what the templates hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.failures import first_line
from benchmarks.fusion.gemm import EPS, Row, summaries
from stof.fusion.templates import reference
from stof.tuning.timing import time_calls

# Fusing must not cost accuracy: cosine to the float32 layer.
COSINE = 0.999
PEERS = {"inductor": "default", "inductor max-autotune": "max-autotune-no-cudagraphs"}
FUSED = "fused by hand"

Weights = Mapping[str, Tensor]
Configs = Mapping[str, str | None]
LayerFunction = Callable[[Tensor, Weights], Tensor]


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer; tokens = batch * length."""

    model: str
    batch: int
    length: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def layer_shape(model: str, batch: int, length: int) -> LayerShape:
    """BERT-base's or LLaMA-1B's sizes."""
    sizes = (768, 3072, 12, 12) if model == "bert" else (2048, 8192, 32, 8)
    return LayerShape(model, batch, length, *sizes)


def weights_of(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights by name, seed 0, scaled so that values keep their size."""
    generator = torch.Generator(device).manual_seed(0)
    kv = shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "q": (shape.hidden, shape.hidden),
        "k": (kv, shape.hidden),
        "v": (kv, shape.hidden),
        "o": (shape.hidden, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "up": (shape.inner, shape.hidden),
    }
    sizes |= {"gate": (shape.inner, shape.hidden)} if shape.model == "llama" else {}
    made = {
        name: torch.randn(size, generator=generator, device=device).mul_(size[1] ** -0.5).to(dtype)
        for name, size in sizes.items()
    }
    biases = [f"{name}_bias" for name in sizes] + ["norm1_bias", "norm2_bias"] if shape.model == "bert" else []
    for name in ("norm1", "norm2", *biases):
        size = sizes[name.removesuffix("_bias")][0] if name.removesuffix("_bias") in sizes else shape.hidden
        values = torch.randn(size, generator=generator, device=device) * 0.1
        made[name] = (values if name.endswith("_bias") else values + 1).to(dtype)
    if shape.model == "llama":
        angles = torch.arange(shape.length, device=device)[:, None] * (
            10000.0 ** (-torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        )
        made["cos"], made["sin"] = (torch.cat((f, f), -1).to(dtype) for f in (angles.cos(), angles.sin()))
    return made


def packed(w: Weights, model: str) -> dict[str, Tensor]:
    """Weights as the templates want them: q, k, v and gate, up one below the other, RMSNorm weights folded in."""
    made = dict(w)
    if model == "bert":
        made["qkv"] = torch.cat((w["q"], w["k"], w["v"]))
        made["qkv_bias"] = torch.cat((w["q_bias"], w["k_bias"], w["v_bias"]))
    else:
        made["qkv"] = torch.cat((w["q"], w["k"], w["v"])) * w["norm1"]
        made["gate_up"] = torch.cat((w["gate"], w["up"])) * w["norm2"]
    return made


def plain_layer(shape: LayerShape) -> LayerFunction:
    """The layer as models write it: `layer(x [B, S, hidden], weights)`."""
    return _plain_bert(shape) if shape.model == "bert" else _plain_llama(shape)


def fused_layer(shape: LayerShape, configs: Configs) -> LayerFunction:
    """The layer made of templates, on `packed` weights.

    Args:
        configs: a configuration for each product's name, "" for the default; None leaves it to Inductor.
    """
    return _fused_bert(shape, configs) if shape.model == "bert" else _fused_llama(shape, configs)


def _plain_bert(shape: LayerShape) -> LayerFunction:
    def layer(x: Tensor, w: Weights) -> Tensor:
        q, k, v = (F.linear(x, w[name], w[f"{name}_bias"]) for name in ("q", "k", "v"))
        a = F.linear(_attention(shape, q, k, v, causal=False), w["o"], w["o_bias"])
        a = F.layer_norm(a + x, (shape.hidden,), w["norm1"], w["norm1_bias"], EPS)
        h = F.linear(F.gelu(F.linear(a, w["up"], w["up_bias"])), w["down"], w["down_bias"])
        return F.layer_norm(h + a, (shape.hidden,), w["norm2"], w["norm2_bias"], EPS)

    return layer


def _fused_bert(shape: LayerShape, configs: Configs) -> LayerFunction:
    def layer(x: Tensor, w: Weights) -> Tensor:
        qkv = _linear(configs["qkv"], x, w["qkv"], w["qkv_bias"], None, "none")
        a = _attention(shape, *qkv.split(shape.hidden, -1), causal=False)
        a = _linear_norm(configs["out"], a, w["o"], w["o_bias"], x, w["norm1"], w["norm1_bias"])
        h = _linear(configs["ffn in"], a, w["up"], w["up_bias"], None, "gelu")
        return _linear_norm(configs["ffn out"], h, w["down"], w["down_bias"], a, w["norm2"], w["norm2_bias"])

    return layer


def _plain_llama(shape: LayerShape) -> LayerFunction:
    def layer(x: Tensor, w: Weights) -> Tensor:
        n = reference.normalised(x, w["norm1"], None, "rms", EPS)
        q, k, v = (F.linear(n, w[name]) for name in ("q", "k", "v"))
        x = x + F.linear(_attention(shape, q, k, v, causal=True, w=w), w["o"])
        n = reference.normalised(x, w["norm2"], None, "rms", EPS)
        return x + F.linear(F.silu(F.linear(n, w["gate"])) * F.linear(n, w["up"]), w["down"])

    return layer


def _fused_llama(shape: LayerShape, configs: Configs) -> LayerFunction:
    kv = shape.kv_heads * shape.head_dim

    def layer(x: Tensor, w: Weights) -> Tensor:
        qkv = _normed(configs["qkv"], x, w["qkv"])
        a = _attention(shape, *qkv.split((shape.hidden, kv, kv), -1), causal=True, w=w)
        x = _linear(configs["out"], a, w["o"], None, x, "none")
        h = _gated(configs["gate up"], reference.normalised(x, None, None, "rms", EPS), w["gate_up"])
        return _linear(configs["down"], h, w["down"], None, x, "none")

    return layer


def _linear(
    config: str | None, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str
) -> Tensor:
    if config is None:
        return reference.linear(x, weight, bias, residual, activation)
    return torch.ops.stof.linear(x, weight, bias, residual, activation, config)


def _linear_norm(
    config: str | None, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    if config is None:
        return reference.linear_norm(x, weight, bias, residual, scale, shift, "layer", EPS)[1]
    h = torch.ops.stof.linear_norm(x, weight, bias, residual, scale, shift, "layer", EPS, config)
    return h[1]


def _normed(config: str | None, x: Tensor, weight: Tensor) -> Tensor:
    if config is None:
        return reference.norm_linear(x, None, None, weight, None, "rms", EPS, "none")
    return torch.ops.stof.norm_linear(x, None, None, weight, None, "rms", EPS, "none", config)


def _gated(config: str | None, x: Tensor, weight: Tensor) -> Tensor:
    if config is None:
        return reference.gated_linear(x, weight, None, "silu")
    return torch.ops.stof.gated_linear(x, weight, None, "silu", config)


def _attention(shape: LayerShape, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, w: Weights | None = None) -> Tensor:
    """Heads apart, rotated where there are angles, and together again; `[B, S, hidden]`."""
    q, k, v = (x.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for x in (q, k, v))
    if w is not None:
        q, k = (_rotated(x, w["cos"], w["sin"]) for x in (q, k))
    grouped = shape.heads != shape.kv_heads
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def configs_from(rows: Iterable[Row], model: str, tokens: int) -> dict[str, str | None]:
    """The fastest configuration of each product in results of `benchmarks gemm`; None where Inductor was faster.

    Products that were not measured get the default.
    """
    names = ("qkv", "out", "ffn in", "ffn out") if model == "bert" else ("qkv", "out", "gate up", "down")
    found: dict[str, str | None] = dict.fromkeys(names, "")
    for line in summaries(rows):
        if line.model == model and line.tokens == tokens and line.gemm in found:
            found[line.gemm] = line.best if line.speedup >= 1 else None
    return found


@dataclass(frozen=True)
class LayerRow:
    """One way to run a layer. `us` is None when its result was wrong or it failed (`problem` says how)."""

    model: str
    batch: int
    length: int
    dtype: str
    impl: str
    us: float | None
    cosine: float | None
    first_call_s: float
    problem: str = ""


def run_layer(
    shape: LayerShape, configs: Configs, device: torch.device, dtype: torch.dtype, rounds: int, peers: Iterable[str]
) -> list[LayerRow]:
    """Check every way against the float32 layer, then time those that are right."""
    w = weights_of(shape, device, dtype)
    x = torch.randn(
        shape.batch, shape.length, shape.hidden, generator=torch.Generator(device).manual_seed(1), device=device
    ).to(dtype)
    exact = plain_layer(shape)(x.float(), {name: t.float() for name, t in w.items()})
    ways: dict[str, tuple[LayerFunction, Weights]] = {
        name: (torch.compile(plain_layer(shape), mode=PEERS[name], dynamic=False), w) for name in peers
    }
    ways[FUSED] = torch.compile(fused_layer(shape, configs), dynamic=False), packed(w, shape.model)
    calls: dict[str, Callable[[], Any]] = {}
    rows = []
    for name, (function, weights) in ways.items():
        start = time.perf_counter()
        cosine, problem = None, ""
        try:
            out = function(x, weights)
            cosine = float(F.cosine_similarity(out.double().flatten(), exact.double().flatten(), 0))
            problem = "" if cosine >= COSINE else f"WRONG: cosine {cosine:.6f} to float32"
        except Exception as failure:  # whatever a compiler raises must not end the comparison
            problem = first_line(failure)
        if not problem:
            calls[name] = lambda function=function, weights=weights: function(x, weights)  # type: ignore[misc]
        first = time.perf_counter() - start
        text = str(dtype).removeprefix("torch.")
        rows.append(LayerRow(shape.model, shape.batch, shape.length, text, name, None, cosine, first, problem))
    timings = time_calls(calls, device, rounds=rounds)
    found = {name: timing.gpu_us for name, timing in timings.items()}
    return [replace(row, us=found.get(row.impl)) for row in rows]
