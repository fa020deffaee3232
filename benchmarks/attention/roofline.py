"""The least time that attention could take in every cell of a result file, and how near calls come to it.

`python -m benchmarks.attention.roofline measure --json FILE` measures on a GPU what floors are made of: a copy's bytes
a second, a kernel that does nothing, and a call of one tile a head. `python -m benchmarks.attention.roofline table
RESULTS FILE` prints a table of floors, without a GPU. A floor is the largest of three:

- *start*: a call of one tile a head;
- *matrix*: scores of the layout that wastes least, of all that a GPU could use, at the rate of the fastest call under a
  full mask with that head dimension, whoever's it is;
- *bytes*: q, keys, values and the output once, at a copy's rate.

So all else is hidden, and whatever a call must do one after the other overlaps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import stof
from benchmarks.attention.decode import copy_rate
from benchmarks.attention.report import CLASSES, Cell, cells_of, time_of
from benchmarks.attention.run import Row
from benchmarks.results_io import provenance, read_results, write_json
from stof.calibration.layout_alternatives import estimated
from stof.testing import assert_attention
from stof.testing.mask_grid import GRID, Shape
from stof.tuning.timing import time_calls

HEADINGS = ("mask", "shape", "stof us", "floor us", "bound by", "reached", "speed-up", "at the floor")


def measured(device: torch.device) -> dict[str, Any]:
    """What floors are made of, on this device; microseconds of GPU time, cold L2.

    Raises:
        AssertionError: attention is off by more than its dtype explains.
    """
    small, out = torch.zeros(32, device=device), torch.empty(32, device=device)
    calls = {"nothing": partial(torch.neg, small, out=out)}
    for head_dim in (64, 128):
        q, k, v = (torch.randn(1, 12, 64, head_dim, device=device, dtype=torch.float16) for _ in range(3))
        keep = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device)
        assert_attention(*stof.attention(q, k, v, "full", return_lse=True), q, k, v, keep)
        calls[f"tile of {head_dim}"] = partial(stof.attention, q, k, v, "full")
    timed = time_calls(calls, device, rounds=15)
    return {"copy_gb_s": copy_rate(device) / 1e9, "start_us": {name: timing.gpu_us for name, timing in timed.items()}}


def fastest(cells: list[Cell], head_dim: int) -> float:
    """Operations a microsecond of the fastest call of all under a full mask with that head dimension; 0 for none."""
    rates = [0.0]
    for cell in cells:
        batch, heads, _, width, q_len, kv_len = cell.sizes
        times = [us for us in map(time_of, cell.rows.values()) if us]
        if cell.mask == "full" and width == head_dim and times:
            rates.append(4 * batch * heads * width * q_len * kv_len / min(times))
    return max(rates)


def floor(cell: Cell, rate: float, copied: float, start: float) -> tuple[float, str]:
    """The floor in microseconds, and what it is: start, matrix or bytes.

    Args:
        rate: operations a microsecond.
        copied: bytes a microsecond, read and written ones both counted.
        start: microseconds.
    """
    batch, heads, kv_heads, head_dim, q_len, kv_len = cell.sizes
    layouts = estimated(GRID[cell.mask].mask(q_len), Shape(*cell.sizes), torch.float16)
    waste = max(1.0, min(one.computed_over_needed for one in layouts))
    scores = (cell.density or 0.0) * q_len * kv_len * waste
    parts = {
        "start": start,
        "matrix": 4 * batch * heads * head_dim * scores / rate,
        # Under every mask of the grid each key is seen by some query.
        "bytes": 2 * batch * head_dim * (2 * heads * q_len + 2 * kv_heads * kv_len) / copied,
    }
    largest = max(parts, key=lambda name: parts[name])
    return parts[largest], largest


def table(results: Path, measurements: Path) -> str:
    """A line for every cell in which a peer was timed beside STOF, and the geometric means of both classes."""
    found = read_results(results, Row)
    cells = [cell for cell in cells_of(found.rows, found.not_run) if cell.mask in GRID]
    known = json.loads(measurements.read_text())
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    shares: dict[str, list[tuple[float, float, float]]] = {}
    for cell in cells:
        if cell.ours is None or cell.best is None or cell.speedup is None:
            continue
        start = known["start_us"][f"tile of {cell.sizes[3]}"]
        us, what = floor(cell, fastest(cells, cell.sizes[3]), known["copy_gb_s"] * 1e3, start)
        reached, possible = us / cell.ours, cell.best[1] / us
        shares.setdefault(cell.kind, []).append((reached, cell.speedup, possible))
        numbers = f"{cell.ours:.1f} | {us:.1f} | {what} | {reached:.0%} | {cell.speedup:.2f}x | {possible:.2f}x"
        lines.append(f"| {cell.mask} | {cell.shape} | {numbers} |")
    lines.append("")
    for kind in CLASSES:
        if kind in shares:
            means = [statistics.geometric_mean(of) for of in zip(*shares[kind], strict=True)]
            lines.append(
                f"- {kind}: {means[0]:.0%} of the floor (geometric mean of {len(shares[kind])} cells); {means[1]:.2f}x "
                f"over the best peer, {means[2]:.2f}x if every call took its floor"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="on a GPU")
    measuring.add_argument("--json", type=Path, required=True)
    printing = commands.add_parser("table", help="floors of a result file's cells")
    printing.add_argument("results", type=Path)
    printing.add_argument("measurements", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        Console(soft_wrap=True).print(table(given.results, given.measurements), markup=False, highlight=False)
        return
    device = torch.device("cuda")
    found = measured(device)
    write_json(given.json, {"meta": provenance(device), **found})
    Console(soft_wrap=True).print_json(data=found)


if __name__ == "__main__":
    main()
