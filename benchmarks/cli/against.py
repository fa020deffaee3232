"""`python -m benchmarks against`: has a change made attention slower?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer


def against(
    old: Annotated[Path, typer.Argument(help="Another checkout of this repository, such as a git worktree.")],
    masks: Annotated[str, typer.Option(help="Names of grid masks, separated by spaces. Default all.")] = "",
    shapes: Annotated[
        str, typer.Option(help="B,H,D,S or B,H,Hkv,D,Sq,Skv, separated by spaces. Default: the grid's.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")] = 9,
    backward: Annotated[
        bool, typer.Option("--backward", help="Time backward passes instead of forward passes.")
    ] = False,
) -> None:
    """Time the attention grid with two checkouts of stof in turn, each cell checked against float64 (fp16, one GPU)."""
    import math

    import torch
    from rich.table import Table

    from benchmarks.attention.against import changes
    from benchmarks.cli.options import GPU_SHAPES
    from stof.cli.common import table_console
    from stof.errors import DeviceError
    from stof.testing.mask_grid import GRID, Shape, grid_mask

    if not torch.cuda.is_available():
        raise DeviceError("two checkouts are compared on an NVIDIA GPU; PyTorch finds none here")
    wanted = [str(shape) for shape in (shapes or GPU_SHAPES).split() if Shape.parse(shape)]
    cells = [(grid_mask(mask).name, shape) for shape in wanted for mask in masks.split() or GRID]
    with tempfile.TemporaryDirectory() as caches:
        passes = "backward" if backward else "forward"
        cells_timed = changes(old, passes, cells, Path(caches), rounds, lambda line: typer.echo(line, err=True))
    device = torch.cuda.get_device_name()
    table = Table(title=f"Attention, {passes} passes with {old} and with this checkout, {device}, us per pass")
    for heading in ("mask", "shape", "old", "new", "new / old"):
        table.add_column(heading)
    for cell in cells_timed:
        table.add_row(cell.mask, cell.shape, f"{cell.old_us:.2f}", f"{cell.new_us:.2f}", f"{cell.ratio:.3f}")
    console = table_console()
    console.print(table)
    if cells_timed:
        mean = math.exp(sum(math.log(cell.ratio) for cell in cells_timed) / len(cells_timed))
        console.print(f"new / old: {mean:.4f} in the geometric mean, at most {max(c.ratio for c in cells_timed):.3f}")
