"""RMSNorms folded into the products after them, against Inductor and against templates without folding.

`python benchmarks/norms.py [--tokens 4096] [--layers 8] [--json FILE]`, on a GPU. First LLaMA-1B's sum, norm and
product (query, key and value; gate and up) as one compiled function: Inductor's code alone, the product by a template
on rows that Inductor normalised, and folded with some configurations; checked against float64, GPU time of CUDA-graph
replays.
Then whole models of some layers by backend "stof" with and without option `fold`: cosine to float32, ms a call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import stof
from stof import masks
from stof.fusion.templates import twins
from stof.testing.oracle import error_budget
from stof.tuning.timing import time_calls, wall_us

EPS = 1e-5
CONFIGS = (
    "",
    "128x128x64,6s,pingpong",
    "64x256x64,4s,pingpong",
    "256x128x64,6s,together",
    "256x128x64,5s,together",
    "128x256x64,5s,together",
)
# Name, rows of the weight, activation ("none" for no gate).
PRODUCTS = (("qkv", 3072, "none"), ("gate up", 16384, "silu"))

Way = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def exact(x: Tensor, y: Tensor, scale: Tensor, weight: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The sum, and the product of its norm."""
    h = x + y
    normed = twins.normalised(h, scale, None, "rms", EPS)
    if activation == "none":
        return h, F.linear(normed, weight)
    return h, twins.gated_linear(normed, weight, None, activation)


def unfolded(activation: str) -> Way:
    def way(x: Tensor, y: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + y
        normed = twins.normalised(h, scale, None, "rms", EPS)
        if activation == "none":
            return h, torch.ops.stof.linear(normed, weight, None, None, "none", "")
        return h, torch.ops.stof.gated_linear(normed, weight, None, activation, "")

    return way


def folded(activation: str, config: str) -> Way:
    operator = torch.ops.stof.rms_linear if activation == "none" else torch.ops.stof.rms_gated_linear

    def way(x: Tensor, y: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + y
        return h, operator(h, twins.row_factors(h, EPS), scale, weight, None, activation, config)

    return way


def products(tokens: int) -> list[list[Any]]:
    """A line for each way: product, way, relative error, PyTorch's, microseconds."""
    generator, lines = torch.Generator("cuda").manual_seed(0), []

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).half()

    for name, rows, activation in PRODUCTS:
        given = (drawn(tokens, 2048), drawn(tokens, 2048), 1 + drawn(2048) / 4, drawn(rows, 2048, scale=2048**-0.5))
        right = exact(*(t.double() for t in given), activation)[1]
        budget = error_budget(exact(*given, activation)[1], right, torch.float16)

        def plain(*given: Tensor, activation: str = activation) -> tuple[Tensor, Tensor]:
            return exact(*given, activation)

        ways: dict[str, Way] = {"Inductor": plain, "template": unfolded(activation)}
        ways |= {f"folded {config or 'default'}": folded(activation, config) for config in CONFIGS}
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        for label, way in ways.items():
            compiled = torch.compile(way, dynamic=False)
            errors[label] = float((compiled(*given)[1].double() - right).abs().nan_to_num(torch.inf).max())
            if errors[label] <= budget.allowed:
                calls[label] = lambda compiled=compiled, given=given: compiled(*given)
        timed = time_calls(calls, torch.device("cuda", 0), rounds=15)
        for label in ways:
            us = timed[label].gpu_us if label in timed else None
            lines.append([name, label, errors[label], budget.plain, "WRONG" if us is None else round(us, 1)])
    return lines


def models(tokens: int, layers: int, dtype: torch.dtype) -> list[list[Any]]:
    """A line for each way: way, cosine to float32, ms a call, seconds of the first call."""
    import transformers as t

    config = t.LlamaConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=32000, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, 30000, (1, tokens), device="cuda")
    mask = masks.causal() & (masks.sliding_window(511) | masks.sink_tokens(16))
    lines = []
    for name, options in {"stof": {}, "stof, fold": {"fold": True}}.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        with torch.device("cuda"), torch.no_grad():
            model = t.LlamaModel(config).eval()
            for parameter in model.parameters():  # fresh norms have no weight to fold
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        dense = mask.to_dense(tokens, device="cuda").expand(1, 1, tokens, tokens)
        with torch.no_grad():
            right = model(ids, attention_mask=dense)[0].double().flatten()
            start = time.perf_counter()
            compiled = stof.optimize(model.to(dtype), mask=mask, dynamic=False, cuda_graphs=True, **options)
            out = compiled(ids)[0].double().flatten()
            first = time.perf_counter() - start
            cosine = float(F.cosine_similarity(out, right, 0))
            ms = wall_us({name: lambda compiled=compiled: compiled(ids)}, torch.device("cuda", 0), rounds=30)[name]
        lines.append([name, round(cosine, 6), round(ms / 1e3, 3), round(first, 1)])
        del model, compiled, out, right
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, tuple[list[str], list[list[Any]]]] = {}
    torch.set_grad_enabled(False)
    title = f"sum, norm and product, float16, {given.tokens} tokens, K 2048"
    found[title] = (["product", "way", "error", "PyTorch's", "us"], products(given.tokens))
    title = f"LLaMA of {given.layers} layers, float16, 1 x {given.tokens}, window and sinks"
    found[title] = (["way", "cosine", "ms", "first call s"], models(given.tokens, given.layers, torch.float16))
    for name, (headings, lines) in found.items():
        table = Table(*headings, title=name)
        for line in lines:
            table.add_row(*map(_shown, line))
        Console(width=120).print(table)
    if given.json is not None:
        given.json.write_text(json.dumps({name: [h, *lines] for name, (h, lines) in found.items()}, indent=1))


def _shown(cell: object) -> str:
    return f"{cell:.2g}" if isinstance(cell, float) and abs(cell) < 0.1 else str(cell)


if __name__ == "__main__":
    main()
