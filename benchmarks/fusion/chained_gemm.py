"""Two products with a narrow value between them in one kernel: adapters and low-rank updates.

`python -m benchmarks.fusion.chained_gemm [--seconds 40] [--store DIR] [--json FILE]`, on a GPU. Every configuration is
checked against float64 before it is timed. One line for each case: Inductor's code for all of it, two calls of
`stof::linear` with their defaults, and the fastest chain; GPU time of CUDA-graph replays, cold L2. Times are kept in
`--store`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from benchmarks.fusion.search_ablation import measured
from benchmarks.results_io import provenance, write_json
from stof.fusion.measure.parallel_compile import compile_candidates
from stof.fusion.measure.segment_timer import SegmentTimer
from stof.fusion.records.store import default_store
from stof.fusion.templates import chain_linear, linear
from stof.tuning.timing import time_calls

# Rows, width, columns between, activation: adapters in BERT-base, low-rank updates in LLaMA-1B.
CASES = [(128, 768, 64, "gelu"), (4096, 768, 64, "gelu"), (16, 2048, 16, "none"), (4096, 2048, 16, "none")]
Given = tuple[Tensor, Tensor, Tensor, Tensor]


def given(rows: int, width: int, inner: int, device: torch.device) -> Given:
    """x, both weights, and what is added."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (rows, width), (inner, width), (width, inner), (rows, width)
    x, down, up, residual = (torch.randn(size, generator=generator, device=device) for size in sizes)
    return x.half(), (down * width**-0.5).half(), (up * inner**-0.5).half(), residual.half()


def plain(x: Tensor, down: Tensor, up: Tensor, residual: Tensor, activation: str) -> Tensor:
    between = F.linear(x, down)
    return F.linear(F.gelu(between) if activation == "gelu" else between, up) + residual


def captured(tensors: list[Given]) -> fx.GraphModule:
    """Dynamo's graph of all cases."""
    graphs: list[fx.GraphModule] = []

    def cases(tensors: list[Given]) -> list[Tensor]:
        return [plain(*tensors[i], CASES[i][3]) for i in range(len(CASES))]

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(cases, backend=keep, dynamic=False, fullgraph=True)(tensors)
    return graphs[0]


def line(case: tuple[int, int, int, str], tensors: Given, best: str, device: torch.device) -> dict[str, Any]:
    """Three ways to compute a case, timed in turn."""
    x, down, up, residual = tensors
    activation = case[3]
    compiled = torch.compile(plain, dynamic=False, fullgraph=True)
    calls = {
        "inductor_us": lambda: compiled(*tensors, activation),
        "two_us": lambda: linear(linear(x, down, None, None, activation, ""), up, None, residual, "none", ""),
        "chain_us": lambda: chain_linear(x, down, None, up, None, residual, activation, best),
    }
    exact = plain(x.double(), down.double(), up.double(), residual.double(), activation)
    times: dict[str, float | None] = {}
    with torch.no_grad():
        off = {name: float((call().double() - exact).abs().max()) for name, call in calls.items()}
        for name, timing in time_calls(calls, device, rounds=11).items():
            times[name] = timing.gpu_us if off[name] <= 2 * off["inductor_us"] + 2e-3 else None
    return {"rows": case[0], "width": case[1], "between": case[2], "activation": activation, **times, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device, timer, start = torch.device("cuda", 0), SegmentTimer(), time.monotonic()
    tensors = [given(*case[:3], device) for case in CASES]
    compiler, store = compile_candidates, default_store(device, asked.store)
    table, taken = measured(captured(tensors), timer, store, asked.seconds, compiler, experimental=True)
    print(f"{taken} times taken in {time.monotonic() - start:.0f} s")
    for (name, config), why in timer.failures.items():
        print(f"{name} {config}: {why}")
    if table is None:
        print("not everything is measured yet; run it again with the same --store to go on")
        return
    starts = [sum(3 + (case[3] != "none") for case in CASES[:i]) for i in range(len(CASES))]
    # The longest segment that begins with a case's first product is all of it.
    whole = [max((s for s in table.segments if s.places[0][0] == at), key=lambda s: s.places[0][1]) for at in starts]
    found = [min((us, c[1]) for c, us in s.times.items() if c and c[0] == "chain_linear")[1] for s in whole]
    rows = [line(case, one, best, device) for case, one, best in zip(CASES, tensors, found, strict=True)]
    if asked.json is not None:
        write_json(asked.json, {"meta": provenance(device), "rows": rows})
    for row in rows:
        print(*(f"{value:.1f}" if isinstance(value, float) else value for value in row.values()), sep=" | ")


if __name__ == "__main__":
    main()
