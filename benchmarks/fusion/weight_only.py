"""LLaMA-1B's products with few rows and weights of 8-bit values, against Inductor and against 16-bit weights in cuBLAS.

`python -m benchmarks.fusion.weight_only [--rows "1 16 64"] [--stored int8] [--seconds 40] [--json FILE]`, on a GPU.
Every configuration is checked against float64 before it is timed; GPU time of CUDA-graph replays, cold L2. Inductor's
code is what it makes of `F.linear(x, values.to(x.dtype)) * scale`. Times are kept in a folder (`--store`), to go on
later.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from benchmarks.fusion.search_ablation import Table, measured
from benchmarks.results_io import provenance, write_json
from stof.fusion.measure.parallel_compile import compile_candidates
from stof.fusion.measure.segment_timer import SegmentTimer
from stof.fusion.records.store import default_store
from stof.tuning.timing import time_calls

SIZES = {"query, key, value": (3072, 2048), "output": (2048, 2048), "gate, up": (16384, 2048), "down": (2048, 8192)}


def weights_of(n: int, k: int, stored: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values and factors: a random weight, quantised row by row."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(n, k, generator=generator, device=device) * k**-0.5
    limit = 127 if stored == torch.int8 else torch.finfo(stored).max
    scale = weight.abs().amax(1) / limit
    values = weight / scale[:, None]
    return (values.round() if stored == torch.int8 else values).to(stored), scale.to(torch.float16)


def captured(rows: list[int], stored: torch.dtype, device: torch.device) -> fx.GraphModule:
    """Dynamo's graph of every product with every number of rows."""
    weights = [weights_of(n, k, stored, device) for n, k in SIZES.values()]
    xs = [torch.randn(m, weight.shape[1], device=device, dtype=torch.float16) for m in rows for weight, _ in weights]
    graphs: list[fx.GraphModule] = []

    def products(xs: list[Tensor], weights: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [F.linear(x, weights[i % 4][0].to(x.dtype)) * weights[i % 4][1] for i, x in enumerate(xs)]

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(products, backend=keep, dynamic=False, fullgraph=True)(xs, weights)
    return graphs[0]


def sixteen_bits(rows: list[int], device: torch.device) -> list[float]:
    """Microseconds of the same products with float16 weights."""
    calls = {}
    for m in rows:
        for n, k in SIZES.values():
            x, weight = (torch.randn(size, k, device=device, dtype=torch.float16) for size in (m, n))
            calls[f"{m} {n} {k}"] = lambda x=x, weight=weight: F.linear(x, weight)
    return [timing.gpu_us or timing.call_us for timing in time_calls(calls, device).values()]


def lines(table: Table, rows: list[int], plain: list[float]) -> list[dict[str, Any]]:
    """One for each product: the default, the best configuration, and what else there is."""
    found = []
    at = {place[0]: segment for segment in table.segments for place in segment.places}
    for i, us in enumerate(plain):
        times = {c[1]: taken for c, taken in at[i].times.items() if c is not None and c[0] == "scaled_linear"}
        best = min(times, key=times.__getitem__)
        found.append(
            {
                "rows": rows[i // 4], "product": list(SIZES)[i % 4], "float16_us": us,
                "inductor_us": at[i].times[None], "default_us": times[""], "best_us": times[best], "best": best,
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1 16 64")
    parser.add_argument("--stored", choices=["int8", "float8_e4m3fn"], default="int8")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, rows = torch.device("cuda", 0), [int(text) for text in given.rows.split()]
    timer, start = SegmentTimer(), time.monotonic()
    gm = captured(rows, getattr(torch, given.stored), device)
    table, taken = measured(gm, timer, default_store(device, given.store), given.seconds, compile_candidates)
    print(f"{taken} times taken in {time.monotonic() - start:.0f} s")
    for (name, config), why in timer.failures.items():
        print(f"{name} {config}: {why}")
    if table is None:
        print("not everything is measured yet; run it again with the same --store to go on")
        return
    found = lines(table, rows, sixteen_bits(rows, device))
    if given.json is not None:
        write_json(given.json, {"meta": provenance(device), "stored": given.stored, "rows": found})
    for line in found:
        print(*(f"{value:.1f}" if isinstance(value, float) else value for value in line.values()), sep=" | ")


if __name__ == "__main__":
    main()
