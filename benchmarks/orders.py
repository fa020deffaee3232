"""How close to what masks need their layouts compute, with the rows' own order and with the one that is found.

`python benchmarks/orders.py [LENGTH]` prints computed over needed scores (64-row blocks, columns gathered singly) for
masks as tensors: in their own order, with rows and columns shuffled alike, and independently; the row order found for
each, and the time to find it. `docs/architecture.md` quotes it at 4096, the default.
"""

from __future__ import annotations

import math
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stof import LayoutConfig, masks
from stof.bench.grid import GRID
from stof.layout import build_layout, statistics
from stof.layout.search import find_order
from stof.masks import Mask
from stof.tuning.machine import device_name

GATHERED, PLAIN = LayoutConfig(64, 64, 1), LayoutConfig(128, 128)


def cases(length: int) -> dict[str, Mask]:
    """The sparse masks of the benchmark grid, documents of several lengths, and a neighbourhood on a square grid."""
    side = math.isqrt(length)
    ends = [round(length * share) for share in (0, 0.05, 0.2, 0.28, 0.55, 0.7, 0.76, 0.9, 1)]
    found = {name: grid.mask(length) for name, grid in GRID.items() if not grid.unmasked}
    found["documents"] = masks.documents(cu_seqlens=ends) & masks.causal()
    if side * side == length:
        found["neighborhood 13x13"] = masks.neighborhood_2d(side, side, 13)
    return found


def computed_over_needed(keep: Tensor, config: LayoutConfig, row_order: Tensor | None = None) -> float:
    return statistics(
        build_layout(masks.from_dense(keep), *keep.shape, config, row_order=row_order)
    ).computed_over_needed


def described(keep: Tensor) -> list[str]:
    """Ratio as it is, ratio with the order found, its name, milliseconds."""
    start = time.perf_counter()
    found = find_order(masks.from_dense(keep), *keep.shape)
    took = 1e3 * (time.perf_counter() - start)
    name, order = found or ("own", None)
    before, after = (f"{computed_over_needed(keep, GATHERED, rows):.2f}" for rows in (None, order))
    return [before, after, name, f"{took:.0f} ms"]


def main(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randperm(length, generator=generator) for _ in range(2))
    table = Table(title=f"computed / needed at {length} x {length}, {device_name(torch.device('cpu'))}")
    shuffles = {"own order": None, "shuffled alike": rows, "shuffled apart": columns}
    table.add_column("mask")
    table.add_column("128 x 128", justify="right")
    for name in shuffles:
        for heading in (name, "found", "order", "search"):
            table.add_column(heading, justify="left" if heading == "order" else "right")
    for name, mask in cases(length).items():
        keep = mask.to_dense(length)[0, 0]
        line = [name, f"{computed_over_needed(keep, PLAIN):.2f}"]
        for order in shuffles.values():
            line += described(keep if order is None else keep[rows][:, order].contiguous())
        table.add_row(*line)
    Console(width=180).print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
