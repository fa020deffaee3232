"""RMSNorms and rotary embeddings as part of LLaMA-1B's products, against Inductor and templates without them.

`python -m benchmarks.fusion.fused_norms products|models [--tokens 4096] [--layers 4] [--json FILE]`, on a GPU.

products: a sum, its norm, and the product of query, key and value with its rotations, or of gate and up with its gate,
as one compiled function: by Inductor alone, the product by a template, the norm folded, and rotated as well; and with
the product before the sum. Checked against float64, GPU time of CUDA-graph replays.
models: some layers by backend "stof" with and without option `fold`: cosine to float32, ms a call. Lines are printed as
they are found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import stof
from benchmarks.results_io import provenance
from stof import masks
from stof.fusion.templates import reference
from stof.testing.oracle import error_budget
from stof.tuning.timing import time_calls, wall_us

EPS, HIDDEN, HEAD_DIM, TURNED = 1e-5, 2048, 64, 2560
CONFIGS = ("", "64x256x64,4s,pingpong", "256x128x64,6s,cooperative")


def rotary(out: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value `[H, S, D]` out of `[S, 3072]`, as models cut, view and rotate them."""
    q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for t in out.split((HIDDEN, TURNED - HIDDEN, 512), -1))
    q, k = (t * cos + torch.cat((-t[..., HEAD_DIM // 2 :], t[..., : HEAD_DIM // 2]), -1) * sin for t in (q, k))
    return q, k, v


def cut(out: Tensor) -> tuple[Tensor, ...]:
    """The same of a product whose heads are rotated."""
    return tuple(t.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for t in out.split((HIDDEN, TURNED - HIDDEN, 512), -1))


Given = tuple[Tensor, ...]


def projected(given: Given, way: str, config: str) -> tuple[Tensor, ...]:
    """Sum, norm, product and rotations."""
    x, y, scale, weight, cos, sin = given
    h = x + y
    if way in ("plain", "template"):
        normed = reference.normalised(h, scale, None, "rms", EPS)
        if way == "plain":
            return h, *rotary(F.linear(normed, weight), cos, sin)
        return h, *rotary(torch.ops.stof.linear(normed, weight, None, None, "none", config), cos, sin)
    if way == "rotated":
        normed = reference.normalised(h, scale, None, "rms", EPS)
        turn = (cos, sin, TURNED, HEAD_DIM, config)
        return h, *cut(torch.ops.stof.rotary_linear(normed, None, None, weight, None, *turn))
    rstd = reference.row_factors(h, EPS)
    if way == "folded":
        return h, *rotary(torch.ops.stof.rms_linear(h, rstd, scale, weight, None, "none", config), cos, sin)
    turn = (cos, sin, TURNED, HEAD_DIM, config)
    return h, *cut(torch.ops.stof.rotary_linear(h, rstd, scale, weight, None, *turn))


def gated(given: Given, way: str, config: str) -> tuple[Tensor, ...]:
    """Sum, norm and gated product."""
    x, y, scale, weight = given
    h = x + y
    if way == "folded":
        rstd = reference.row_factors(h, EPS)
        return h, torch.ops.stof.rms_gated_linear(h, rstd, scale, weight, None, "silu", config)
    normed = reference.normalised(h, scale, None, "rms", EPS)
    if way == "plain":
        return h, reference.gated_linear(normed, weight, None, "silu")
    return h, torch.ops.stof.gated_linear(normed, weight, None, "silu", config)


def summed(given: Given, way: str, config: str) -> tuple[Tensor, ...]:
    """A product, its sum with a residual, and what `gated` or (with tables) `projected` make of it, norm folded."""
    x, before, residual, scale, weight, *tables = given
    rest = (residual, F.linear(x, before), scale, weight, *tables)
    return projected(rest, way, config) if tables else gated(rest, way, config)


# The function, columns of the product after the norm, depth of the one before the sum, ways and configurations.
WAYS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], int, int, tuple[tuple[str, str], ...]]] = {
    "qkv": (
        projected,
        3072,
        0,
        (("plain", ""), ("template", ""), ("rotated", ""), ("folded", ""), *(("both", text) for text in CONFIGS[:2])),
    ),
    "gate up": (gated, 16384, 0, (("plain", ""), ("template", ""), *(("folded", text) for text in CONFIGS))),
    "output, gate up": (summed, 16384, HIDDEN, (("plain", ""), ("folded", ""))),
    "down, qkv": (summed, 3072, 4 * HIDDEN, (("plain", ""), ("both", ""))),
}


def products(tokens: int) -> Iterator[list[Any]]:
    """A line for each way: product, way, configuration, largest error, what is allowed, microseconds."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).half()

    angles = torch.outer(torch.arange(tokens, device="cuda"), 1e4 ** (-torch.arange(0, 64, 2, device="cuda") / 64))
    tables = tuple(table.repeat(1, 2).half() for table in (angles.cos(), angles.sin()))
    for name, (function, rows, depth, ways) in WAYS.items():
        given: Given = (drawn(tokens, HIDDEN), drawn(tokens, HIDDEN))
        if depth:
            given = (drawn(tokens, depth), drawn(HIDDEN, depth, scale=depth**-0.5), drawn(tokens, HIDDEN))
        given += (1 + drawn(HIDDEN) / 4, drawn(rows, HIDDEN, scale=0.022))
        given += tables if name.endswith("qkv") else ()
        right = function(tuple(t.double() for t in given), "plain", "")[1:]
        usual = function(given, "plain", "")[1:]
        allowed = [error_budget(one, exact, torch.float16).allowed for one, exact in zip(usual, right, strict=True)]
        calls: dict[str, Callable[[], object]] = {}
        found: dict[str, list[Any]] = {}
        for way, config in ways:
            torch.compiler.reset()
            compiled = torch.compile(partial(function, way=way, config=config), dynamic=False)
            out = compiled(given)[1:]
            errors = [
                float((a.double() - b).abs().nan_to_num(torch.inf).max()) for a, b in zip(out, right, strict=True)
            ]
            found[f"{way} {config}"] = [name, way, config, f"{max(errors):.1e}", f"{max(allowed):.1e}", "WRONG"]
            if all(error <= most for error, most in zip(errors, allowed, strict=True)):
                calls[f"{way} {config}"] = partial(compiled, given)
        for label, timing in time_calls(calls, torch.device("cuda", 0), rounds=15).items():
            found[label][-1] = round(timing.gpu_us or 0.0, 1)
        yield from found.values()


def models(tokens: int, layers: int) -> Iterator[list[Any]]:
    """A line for each way: way, templates by rule, cosine to float32, ms a call, seconds of the first call."""
    import transformers as t

    config = t.LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=32000, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, 30000, (1, tokens), device="cuda")
    mask = masks.causal() & (masks.sliding_window(511) | masks.sink_tokens(16))
    ways: tuple[tuple[str, dict[str, Any]], ...] = (("stof", {}), ("stof, fold", {"fold": True}), ("stof again", {}))
    for name, options in ways:
        torch.compiler.reset()
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = t.LlamaModel(config).eval()
            for parameter in model.parameters():  # fresh norms have no weight to fold
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        dense = mask.to_dense(tokens, device="cuda").expand(1, 1, tokens, tokens)
        right = model(ids, attention_mask=dense)[0].double().flatten()
        reports: list[Any] = []
        start = time.perf_counter()
        compiled = stof.optimize(
            model.half(), mask=mask, dynamic=False, cuda_graphs=True, report=reports.append, **options
        )
        out = compiled(ids)[0].double().flatten()
        first = time.perf_counter() - start
        cosine = float(F.cosine_similarity(out, right, 0))
        ms = wall_us({name: partial(compiled, ids)}, torch.device("cuda", 0), rounds=30)[name] / 1e3
        used = sorted({row.template for row in reports[-1].segments if row.template})
        yield [name, " ".join(used), round(cosine, 6), round(ms, 3), round(first, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("products", "models"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    lines = []
    for line in products(given.tokens) if given.what == "products" else models(given.tokens, given.layers):
        print(*line, sep=" | ", flush=True)
        lines.append(line)
        if given.json is not None:
            found = {"meta": provenance(torch.device("cuda", 0)), "rows": lines}
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
