"""A model compiled once for any length: what each new length costs, and that nothing is compiled for it.

`python -m benchmarks.models.dynamic_shapes [--layers 4] [--json FILE]`, on a GPU. LLaMA-1B's layers in float16 by
backend "stof" with dynamic=True; for each length the first call, later calls and eager. Lines are printed as they are
found.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import stof
import stof.integrations.transformers
from benchmarks.results_io import provenance
from stof import masks
from stof.fusion.templates.row_buckets import bucket_of
from stof.tuning.timing import wall_us

LENGTHS = (1000, 1001, 700, 1024, 300, 2000, 4096)
# Compiled for themselves as well.
ALONE = (1024,)
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
    return round(wall_us({"": lambda: model(ids)}, torch.device("cuda", 0), rounds=10)[""] / 1e3, 3)


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
    headings = ["length", "bucket", "graphs", "cosine to eager", "first call ms", "ms", "eager ms"]
    lines: list[list[Any]] = []
    print(*headings, sep=" | ")
    for length in LENGTHS:
        ids = torch.randint(1, 30000, (1, length), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = compiled(ids)[0]
        torch.cuda.synchronize()
        first = round(1e3 * (time.perf_counter() - start), 1)
        expected = eager(ids)[0]  # afterwards: it finds the mask's plan ready, not the other way round
        cosine = round(float(F.cosine_similarity(out.double().flatten(), expected.double().flatten(), 0)), 6)
        graphs = counters["stats"]["unique_graphs"]
        lines.append([length, bucket_of(length), graphs, cosine, first, timed(compiled, length), timed(eager, length)])
        print(*lines[-1], sep=" | ", flush=True)
    for length in ALONE:
        torch.compiler.reset()
        alone = stof.optimize(llama(given.layers), mask=MASK, dynamic=False)
        lines.append([length, "compiled for this length alone", timed(alone, length)])
        print(*lines[-1], sep=" | ", flush=True)
    if given.json is not None:
        found = {"meta": provenance(torch.device("cuda", 0)), "columns": headings, "rows": lines}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
