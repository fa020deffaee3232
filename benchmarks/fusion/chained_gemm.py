"""Two products with a narrow value between them in one kernel: adapters and low-rank updates.

`python -m benchmarks.fusion.chained_gemm [--json FILE]`, on a GPU. One line for each case: Inductor's code for all of
it, two calls of `stof::linear` with their defaults, and the fastest configuration of the chained kernel; GPU time of
CUDA-graph replays, cold L2. Each is checked against float64 before it is timed. STOF does not use this kernel: two
calls of `stof::linear` were faster in all cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results_io import provenance, write_json
from stof.fusion.templates.device_properties import pdl_options
from stof.fusion.templates.gemm_config import GemmConfig
from stof.fusion.templates.operators import linear
from stof.runtime.cache_keys import on_grid
from stof.tuning.timing import time_calls

# Rows, width, columns between, activation: adapters in BERT-base, low-rank updates in LLaMA-1B.
CASES = [(128, 768, 64, "gelu"), (4096, 768, 64, "gelu"), (16, 2048, 16, "none"), (4096, 2048, 16, "none")]
# The columns of a block of rows are split among programs.
CONFIGS = (
    "16x64x128,4w,3s,tile", "16x64x128,4w,3s,tile,split4", "16x64x128,4w,3s,tile,split8",
    "16x64x128,4w,3s,tile,split16", "16x64x128,4w,3s,tile,split32", "32x64x64,4w,4s,tile",
    "32x64x64,4w,4s,tile,split4", "32x64x64,4w,4s,tile,split8", "64x128x64,4w,3s,tile",
    "64x128x64,4w,3s,tile,split2", "64x128x64,4w,3s,tile,split4", "16x64x32,4w,2s,tile,split4", "64x64x32,4w,2s,tile",
    "128x128x64,8w,3s,tile",
)  # fmt: skip
INDUCTOR, TWO = "Inductor", "two calls"
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def random_tensors(rows: int, width: int, inner: int, device: torch.device) -> Tensors:
    """x, both weights, and what is added."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (rows, width), (inner, width), (width, inner), (rows, width)
    x, down, up, residual = (torch.randn(size, generator=generator, device=device) for size in sizes)
    return x.half(), (down * width**-0.5).half(), (up * inner**-0.5).half(), residual.half()


def plain(x: Tensor, down: Tensor, up: Tensor, residual: Tensor, activation: str) -> Tensor:
    between = F.linear(x, down)
    return F.linear(F.gelu(between) if activation == "gelu" else between, up) + residual


def chain(
    x: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    config: GemmConfig,
) -> Tensor:
    """`act(x @ down.T + down_bias) @ up.T + up_bias + residual`; what lies between is rounded to x's dtype.

    Args:
        x: `[M, K]`, float16 or bfloat16.
        down: `[R, K]`, R at most 256: the kernel holds R columns in registers.
        up: `[N, R]`.
        down_bias, up_bias: None or `[R]`, `[N]`.
        residual: None or `[M, N]`.
        config: of kind "tile"; `split` programs share the columns of a block of rows.

    Rows of all matrices are contiguous.
    """
    from benchmarks.fusion.chain_kernel import chain_kernel

    rows, depth = x.shape
    columns, inner = up.shape
    out = x.new_empty(rows, columns)
    on_grid(chain_kernel, (-(-rows // config.block_m) * config.split,))(
        x, down, down_bias, up, up_bias, residual, out,
        rows, columns, depth, inner, x.stride(0), down.stride(0), up.stride(0),
        0 if residual is None else residual.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        INNER=max(16, 1 << (inner - 1).bit_length()),  # what tensor cores take at the least, and a power of two
        PARTS=config.split, ACTIVATION=activation, FAST=x.device.type == "cuda",
        HAS_DOWN_BIAS=down_bias is not None, HAS_UP_BIAS=up_bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=config.warps, num_stages=config.stages, **pdl_options(x),
    )  # fmt: skip
    return out


def line(case: tuple[int, int, int, str], device: torch.device) -> dict[str, Any]:
    """All ways to compute a case, timed in turn; a time is None where the result is wrong."""
    rows, width, inner, activation = case
    x, down, up, residual = tensors = random_tensors(rows, width, inner, device)
    compiled = torch.compile(plain, dynamic=False, fullgraph=True)
    calls: dict[str, Callable[[], Tensor]] = {
        INDUCTOR: lambda: compiled(*tensors, activation),
        TWO: lambda: linear(linear(x, down, None, None, activation, ""), up, None, residual, "none", ""),
    }
    for text in CONFIGS:
        config = GemmConfig.parse(text)
        if config.block_m < 4 * rows + 16 and config.split <= -(-width // config.block_n):
            calls[text] = partial(chain, x, down, None, up, None, residual, activation, config)
    exact = plain(x.double(), down.double(), up.double(), residual.double(), activation)
    with torch.no_grad():
        off = {name: float((call().double() - exact).abs().max()) for name, call in calls.items()}
        timings = time_calls(calls, device, rounds=11)
    times = {name: timing.gpu_us for name, timing in timings.items() if off[name] <= 2 * off[INDUCTOR] + 2e-3}
    chains = {name: us for name, us in times.items() if name not in (INDUCTOR, TWO) and us is not None}
    best = min(chains, key=chains.__getitem__, default=None)
    return {
        "rows": rows, "width": width, "between": inner, "activation": activation, "inductor_us": times.get(INDUCTOR),
        "two_us": times.get(TWO), "chain_us": None if best is None else chains[best], "best": best,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    lines = [line(case, device) for case in CASES]
    if options.json is not None:
        write_json(options.json, {"meta": provenance(device), "rows": lines})
    for row in lines:
        print(*(f"{value:.1f}" if isinstance(value, float) else value for value in row.values()), sep=" | ")


if __name__ == "__main__":
    main()
