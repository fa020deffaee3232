"""Times the choices behind the CPU implementation, each checked against float64 first.

Row-block heights, rows that share columns, what widths are rounded up to, and columns gathered at once, on masks of the
benchmark grid at B1 H12 D64 S4096 in float32; at S512, columns gathered at once again, and on random masks from how
many rows on one call takes several row blocks. Comments in `selection/select.py` and `kernels/cpu/` quote what
`python -m benchmarks.attention.cpu_constants` printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

import stof
from benchmarks.attention.run import run_attention
from benchmarks.cli.tables import results_table
from benchmarks.paper.selector import random_mask
from benchmarks.peers import PEERS, Call, Peer
from stof.kernels.cpu import schedule
from stof.testing.attention_check import AttentionProblem
from stof.testing.mask_grid import GridMask, Shape, grid_mask
from stof.tuning.machine import device_name

CPU = torch.device("cpu")
Choices = dict[str, dict[str, Any]]
HEIGHTS: Choices = {f"{rows} rows": {"block_m": rows} for rows in (32, 64, 128)}
SHARED: Choices = {
    f"share {rows} from {columns}": {"block_m": 64, "SHARED_ROWS": rows, "SHARED_COLUMNS": columns}
    for rows, columns in (((1024, 256), 384), ((1024, 256), 256), ((1024,), 384), ((512,), 384))
}
WIDTHS: dict[str, dict[str, Any]] = {
    f"width x{multiple}": {"block_m": 64, "COLUMN_MULTIPLE": multiple} for multiple in (1, 16)
}
GATHERED: dict[str, dict[str, Any]] = {
    f"gather {most}": {"block_m": 64, "MAX_GATHERED_COLUMNS": most} for most in (0, 512, 1024, 2048)
}
TALL: Choices = {f"tall from {rows}": {"block_m": 64, "TALL_ROWS": rows} for rows in (128, 768)}
COMPARISONS: dict[str, Choices] = {
    "longformer bigbird strided": GATHERED,
    "window512 longformer bigbird strided causal": HEIGHTS,
    "causal": SHARED,
    "window512": WIDTHS,
}


def random_grid_mask(density: float) -> GridMask:
    return GridMask(f"random {density:.0%}", partial(random_mask, device=CPU, density=density), dense_like=False)


def prepare(choice: dict[str, Any], problem: AttentionProblem) -> Call:
    """A plan made with the choice in force; constants are put back at once."""
    constants = {name: value for name, value in choice.items() if name != "block_m"}
    before = {name: getattr(schedule, name) for name in constants}
    config = stof.LayoutConfig(choice["block_m"], 64, 1)
    stof.plan_cache.clear()
    try:
        for name, value in constants.items():
            setattr(schedule, name, value)
        length = problem.shape.q_len
        plan = stof.plan(problem.grid_mask.mask(length), length, device=CPU, config=config)
    finally:
        for name, value in before.items():
            setattr(schedule, name, value)
    return lambda: stof.attention(problem.q, problem.k, problem.v, plan)


def time_choices(masks: Sequence[GridMask], shape: str, choices: Choices, peers: Sequence[str] = ()) -> None:
    """Time the choices and some peers of the benchmark, and print a table."""
    ours = [Peer(name, "", lambda problem: None, partial(prepare, choice)) for name, choice in choices.items()]
    rows = run_attention(
        masks,
        [Shape.parse(shape)],
        [*ours, *(PEERS[name] for name in peers)],
        device=CPU,
        dtype=torch.float32,
        rounds=7,
        report=lambda line: None,
    )
    Console(width=140).print(results_table(rows, f"{device_name(CPU)}, float32, ms per call"))


def main() -> None:
    time_choices([random_grid_mask(density) for density in (0.02, 0.05, 0.2)], "1,12,64,512", TALL, ["sdpa"])
    time_choices([grid_mask("bigbird"), random_grid_mask(0.01)], "1,12,64,512", GATHERED, ["sdpa"])
    for masks, choices in COMPARISONS.items():
        peers = ["sdpa-native"] if masks == "causal" else []
        time_choices([grid_mask(name) for name in masks.split()], "1,12,64,4096", choices, peers)


if __name__ == "__main__":
    main()
