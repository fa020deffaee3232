"""Attention with a bias for every score, against PyTorch's: SDPA with mask and bias as one tensor, and FlexAttention.

`python -m benchmarks.attention.bias [--cells TEXT] [--impls TEXT] [--json FILE]`, on a GPU, in float16. The bias is
`[1, H, S, S]`, normally distributed. Every result is checked against float64 before it is timed; lines are printed as
they are found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import stof
from benchmarks.failures import first_line
from benchmarks.peers.mask_formats import mask_mod
from benchmarks.results_io import provenance
from stof.calibration.measure import BIAS, cell_bias, cell_mask
from stof.testing.attention_check import TOLERANCE, AttentionProblem, Expected
from stof.testing.mask_grid import Shape
from stof.tuning.timing import time_calls

CELLS = (
    "full:1,12,64,4096 causal:1,12,64,4096 longformer:1,12,64,4096 full:8,12,64,512 "
    "full:1,32,128,4096 causal:1,32,128,4096 longformer:1,32,128,4096"
)
IMPLS = "hopper block_wise sdpa flex"


def ours(problem: AttentionProblem, bias: Tensor, implementation: str) -> Callable[[], Tensor]:
    """`stof.attention` with a ready plan, by one implementation; "stof" leaves the choice to it."""
    plan = stof.plan(
        problem.grid_mask.mask(problem.shape.q_len), problem.shape.q_len, problem.shape.kv_len, device=problem.device
    )
    name = None if implementation == "stof" else implementation
    return lambda: stof.attention(problem.q, problem.k, problem.v, plan, bias=bias, implementation=name)


def sdpa(problem: AttentionProblem, bias: Tensor) -> Callable[[], Tensor]:
    """Mask and bias as one tensor, made beforehand."""
    both = bias.masked_fill(~problem.keep, float("-inf"))
    return lambda: F.scaled_dot_product_attention(problem.q, problem.k, problem.v, attn_mask=both)


def flex(problem: AttentionProblem, bias: Tensor) -> Callable[[], Tensor]:
    """The bias added by a `score_mod`, under the mask's own blocks of 128 x 128."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + bias[0, h, q, kv]

    q_len, kv_len = problem.shape.q_len, problem.shape.kv_len
    block_mask = None
    if not problem.grid_mask.unmasked:
        keep = mask_mod(problem.grid_mask, q_len, kv_len, problem.device)
        block_mask = create_block_mask(keep, None, None, q_len, kv_len, device=str(problem.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(problem.q, problem.k, problem.v, score_mod=add, block_mask=block_mask)


def prepared(name: str, problem: AttentionProblem, bias: Tensor) -> Callable[[], Tensor]:
    if name == "sdpa":
        return sdpa(problem, bias)
    return flex(problem, bias) if name == "flex" else ours(problem, bias, name)


def measure(mask: str, sizes: str, impls: list[str], device: torch.device) -> list[dict[str, Any]]:
    """One row for each implementation: its error against float64, and its time where that is small."""
    shape = Shape.parse(sizes)
    problem = AttentionProblem.draw(cell_mask(mask, shape), shape, device, torch.float16)
    bias = cell_bias(mask + BIAS, problem)
    assert bias is not None
    expected = Expected.of(problem, 256, bias)
    rows: list[dict[str, Any]] = []
    calls: dict[str, Callable[[], object]] = {}
    for name in impls:
        row: dict[str, Any] = {"mask": mask, "shape": sizes, "impl": name, "max_rel_err": None, "us": None}
        rows.append(row)
        try:
            call = prepared(name, problem, bias)
            row["max_rel_err"] = expected.error(call())
        except Exception as error:  # a peer that cannot run this is a line of the table, not its end
            row["error"] = first_line(error)
            continue
        if row["max_rel_err"] <= TOLERANCE[torch.float16]:
            calls[name] = call
    timings = time_calls(calls, device)
    for row in rows:
        found = timings.get(row["impl"])
        row["us"] = None if found is None or found.gpu_us is None else round(found.gpu_us, 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", default=CELLS, help="MASK:B,H,D,S, separated by spaces")
    parser.add_argument("--impls", default=IMPLS, help="stof, names of its implementations, sdpa, flex")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 256
    device, impls = torch.device("cuda", 0), given.impls.split()
    rows: list[dict[str, Any]] = []
    print("mask", "shape", *(f"{name} us" for name in impls), sep=" | ", flush=True)
    for mask, sizes in map(partial(str.split, sep=":"), given.cells.split()):
        found = measure(mask, sizes, impls, device)
        rows += found
        shown = [row["us"] if row["us"] is not None else row.get("error", "wrong") for row in found]
        print(mask, sizes, *shown, sep=" | ", flush=True)
        if given.json is not None:
            content = {"meta": provenance(device), "rows": rows}
            given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
