"""How close to what masks need their layouts compute, with the rows' own order and with the one that is found.

`python -m benchmarks.attention.row_orders [--length 4096] [--json FILE]` prints computed over needed scores (64-row
blocks, columns gathered singly) for masks as tensors: in their own order, with rows and columns shuffled alike, and
independently; the row order found for each, and the time to find it. Then the time of attention under the shuffled
masks: estimated for an H200, and measured where there is a GPU. `benchmarks/notes/row-orders.md` quotes both tables.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stof import LayoutConfig, masks
from stof.calibration.layout_alternatives import estimated, estimated_reordered, measured
from stof.layout import build_layout, statistics
from stof.layout.orders.search import find_order
from stof.masks import Mask
from stof.testing.mask_grid import GRID, Shape
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
    q_len, kv_len = keep.shape
    return statistics(
        build_layout(masks.from_dense(keep), q_len, kv_len, config, row_order=row_order)
    ).computed_over_needed


def described(keep: Tensor) -> list[str]:
    """Ratio as it is, ratio with the order found, its name, milliseconds."""
    start = time.perf_counter()
    found = find_order(masks.from_dense(keep), *keep.shape)
    took = 1e3 * (time.perf_counter() - start)
    name, order = found or ("own", None)
    before, after = (f"{computed_over_needed(keep, GATHERED, rows):.2f}" for rows in (None, order))
    return [before, after, name, f"{took:.0f} ms"]


def ratios(length: int, orders: dict[str, tuple[Tensor, Tensor] | None]) -> list[list[str]]:
    """The first table: a line a mask."""
    lines = []
    for name, mask in cases(length).items():
        keep = mask.to_dense(length)[0, 0]
        line = [name, f"{computed_over_needed(keep, PLAIN):.2f}"]
        for order in orders.values():
            line += described(keep if order is None else keep[order[0]][:, order[1]].contiguous())
        lines.append(line)
    return lines


def times(length: int, order: tuple[Tensor, Tensor]) -> list[list[str]]:
    """The second table: attention in float16 under shuffled masks, in microseconds."""
    shape, lines = Shape(1, 32, 32, 128, length, length), []
    for name, mask in cases(length).items():
        keep = mask.to_dense(length)[0, 0][order[0]][:, order[1]].contiguous()
        shuffled = masks.from_dense(keep)
        listed = estimated(shuffled, shape, torch.float16)
        moved = estimated_reordered(shuffled, shape, torch.float16)
        own = next(one for one in listed if one.choice.row_order is None)
        best = [own, *[one for one in listed if one.choice.row_order is not None][:1]]
        line = [name, *(f"{one.estimate_us:.0f}" for one in (*best, *moved[:1]))]
        if torch.cuda.is_available():
            device = torch.device("cuda", 0)
            timed = measured(masks.from_dense(keep.to(device)), shape, torch.float16, device, only=best)
            by_order = {one.choice.row_order: one for one in timed}
            line += [one.note or f"{one.measured_us:.1f}" for one in (by_order[b.choice.row_order] for b in best)]
        lines.append(line)
    return lines


def table(title: str, headings: list[str], lines: list[list[str]]) -> Table:
    out = Table(title=title)
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number and heading != "order" else "left")
    for line in lines:
        out.add_row(*line)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randperm(given.length, generator=generator) for _ in range(2))
    orders = {"own order": None, "shuffled alike": (rows, rows), "shuffled apart": (rows, columns)}
    headings = ["mask", "128 x 128", *(h for name in orders for h in (name, "found", "order", "search"))]
    timed = ["mask", "own order, estimated us", "order found", "all reordered", "own order, measured us", "order found"]
    found = {
        f"computed / needed at {given.length}, {device_name(torch.device('cpu'))}": (
            headings,
            ratios(given.length, orders),
        ),
        f"attention, float16 B1 H32 D128 S{given.length}, shuffled apart": (
            timed if torch.cuda.is_available() else timed[:4],
            times(given.length, (rows, columns)),
        ),
    }
    for title, (names, lines) in found.items():
        Console(width=180).print(table(title, names, lines))
    if given.json is not None:
        given.json.write_text(json.dumps({title: [n, *lines] for title, (n, lines) in found.items()}, indent=1))


if __name__ == "__main__":
    main()
