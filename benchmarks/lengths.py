"""A model compiled once for any length: what each new length costs, and that nothing is compiled for it.

`python benchmarks/lengths.py [--layers 4] [--json FILE]`, on a GPU. LLaMA-1B's layers in float16 by backend "stof" with
dynamic=True; for each length the first call, later calls, the model compiled for that length alone, and eager.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters

import stof
import stof.integrations.transformers
from stof import masks
from stof.fusion.templates.buckets import bucket_of
from stof.tuning.timing import wall_us

LENGTHS = (1000, 1001, 1024, 700, 300, 2000, 4000, 4096)
# Compiled for themselves as well.
ALONE = (1024, 4096)
MASK = masks.causal() & (masks.sliding_window(511) | masks.sink_tokens(16))


def llama(layers: int) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    config = t.LlamaConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        made: nn.Module = t.LlamaModel(config).eval()
    return made.half()


def timed(model: nn.Module, length: int) -> float:
    """Milliseconds a call."""
    ids = torch.randint(1, 30000, (1, length), device="cuda")
    return wall_us({"": lambda: model(ids)}, torch.device("cuda", 0), rounds=10)[""] / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    eager = llama(given.layers)
    stof.integrations.transformers.enable(eager)
    stof.integrations.transformers.sparsify(eager, MASK)
    compiled = stof.optimize(llama(given.layers), mask=MASK, dynamic=True)
    lines: list[list[Any]] = []
    for length in LENGTHS:
        ids = torch.randint(1, 30000, (1, length), device="cuda")
        expected = eager(ids)[0].double().flatten()
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = compiled(ids)[0]
        torch.cuda.synchronize()
        first = 1e3 * (time.perf_counter() - start)
        cosine = float(F.cosine_similarity(out.double().flatten(), expected, 0))
        graphs = counters["stats"]["unique_graphs"]
        lines.append([length, bucket_of(length), graphs, round(cosine, 6), round(first, 1), timed(compiled, length)])
        lines[-1].append(timed(eager, length))
    for length in ALONE:
        torch.compiler.reset()
        alone = stof.optimize(llama(given.layers), mask=MASK, dynamic=False)
        next(line for line in lines if line[0] == length).append(timed(alone, length))
    headings = ["length", "bucket", "graphs", "cosine to eager", "first call ms", "ms", "eager ms", "alone ms"]
    table = Table(*headings, title=f"LLaMA of {given.layers} layers, float16, window and sinks")
    for line in lines:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in line))
    Console(width=120).print(table)
    if given.json is not None:
        given.json.write_text(json.dumps([headings, *lines], indent=1))


if __name__ == "__main__":
    main()
