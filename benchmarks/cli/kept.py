"""`python -m benchmarks kept`: what choices that are kept for the structure of a mask cost, by the cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stof.cli.common import must_be_writable, names, table_console


def kept(
    shapes: Annotated[str, typer.Option(help="B,H,D,S or B,H,Hkv,D,S,S, separated by spaces; default two.")] = "",
    structures: Annotated[str, typer.Option(help="Names, separated by spaces; all when empty.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Masks of each structure, after as many that are surveyed.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
) -> None:
    """Compare choices kept for structures with choosing anew for each mask, by estimates for an H200; nothing runs."""
    from dataclasses import asdict

    from rich.table import Table

    from benchmarks.attention.kept_choices import SHAPES, STRUCTURES, regrets
    from benchmarks.results_io import write_json
    from stof.testing.mask_grid import Shape

    must_be_writable(output)
    asked = [Shape.parse(text) for text in shapes.split() or SHAPES]
    chosen = names("--structures", structures, STRUCTURES) or list(STRUCTURES)
    rows = [row for shape in asked for row in regrets(shape, chosen, count, seed)]
    table = Table(title="Estimated time of kept choices above that of the best for each mask")
    for heading in ("structure", "pass", "masks", "surveyed", "mean", "worst", "us", "under"):
        table.add_column(heading, justify="left" if heading in ("structure", "pass", "under") else "right")
    for direction in ("forward", "backward"):
        for name in [*chosen, ""]:
            selected = [row for row in rows if row.direction == direction and name in (row.structure, "")]
            worst = max(selected, key=lambda row: row.share)
            mean = sum(row.share for row in selected) / len(selected)
            surveyed = sum(row.surveyed for row in selected)
            figures = (str(len(selected)), str(surveyed), f"{mean:.1%}", f"{worst.share:.1%}", f"{worst.best_us:.0f}")
            table.add_row(name or "all", direction, *figures, worst.mask[:40])
    table_console().print(table)
    if output is not None:
        write_json(output, {"regrets": [asdict(row) for row in rows]})
