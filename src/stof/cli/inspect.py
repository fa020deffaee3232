"""`stof inspect`: what a mask compiles to, as figures and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from stof.drawing import DrawStyle
    from stof.layout import Layout, LayoutConfig, LayoutStatistics
    from stof.plans import Plan

Q_LEN = 4096

# Wider drawings of square masks are higher than most terminals.
WIDEST_DRAWING = 80


def inspect(
    mask: Annotated[
        str,
        typer.Argument(help="A mask, e.g. 'longformer(64, 64) & causal()', or a plan file (*.safetensors)."),
    ],
    q_len: Annotated[int | None, typer.Option(min=1, help=f"Queries; default {Q_LEN}.")] = None,
    kv_len: Annotated[int | None, typer.Option(min=1, help="Keys; default as many as queries.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size; default the mask's own, else 1.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; default the mask's own, else 1.")] = None,
    block_m: Annotated[int | None, typer.Option(help="Rows of a row block; default as attention uses.")] = None,
    block_n: Annotated[int | None, typer.Option(help="Columns of a tile; default as attention uses.")] = None,
    slab: Annotated[
        str | None,
        typer.Option(help="Columns gathered together: 1, 8, 16, or none to keep tiles contiguous."),
    ] = None,
    row_order: Annotated[
        str | None,
        typer.Option(help="Permute rows: remainder:16 (dilated masks) or patch:64x64:8x8 (2-D neighbourhoods)."),
    ] = None,
    pattern: Annotated[int, typer.Option(min=0, help="Which distinct (batch, head) mask to draw.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the mask and its tiles here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    draw: Annotated[bool, typer.Option("--draw/--no-draw", help="Draw the mask in the terminal.")] = True,
) -> None:
    """Show what a mask compiles to: density, tiles by kind, cost, and pictures."""
    from rich.console import Console

    from stof.errors import ArgumentError

    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads, "block_m": block_m, "block_n": block_n}
    given = {name: value for name, value in (sizes | {"slab": slab, "row_order": row_order}).items() if value}
    plan = _load(mask, given) if mask.endswith(".safetensors") else _compile(mask, given)
    if not pattern < plan.layout.patterns:
        raise ArgumentError(f"--pattern is between 0 and {plan.layout.patterns - 1} for this mask, got {pattern}")
    if png is not None:
        _write_png(plan, png, pattern)
    if as_json:
        _print_json(plan, png)
        return
    console = Console()
    console.print(plan.mask_text or "a plan without text", style="bold", markup=False, highlight=False)
    console.print(_table(plan))
    if draw:
        _draw(console, plan, pattern)
    if png is not None:
        console.print(f"wrote {png}", markup=False, highlight=False, soft_wrap=True)


def _load(path: str, given: dict[str, Any]) -> Plan:
    from stof.errors import ArgumentError
    from stof.plans import Plan

    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ArgumentError(f"a plan file has its own lengths and layout; leave out {named}")
    try:
        return Plan.load(path)
    except FileNotFoundError as error:
        raise ArgumentError(f"{error}; write one with stof.plan(...).save(path)") from None


def _compile(text: str, given: dict[str, Any]) -> Plan:
    import stof

    mask = stof.masks.parse(text)
    q_len = given.get("q_len", Q_LEN)
    order = _row_order(given["row_order"], q_len) if "row_order" in given else None
    return stof.plan(
        mask,
        q_len,
        given.get("kv_len", q_len),
        batch=given.get("batch", mask.batch),
        heads=given.get("heads", mask.heads),
        device="cpu",
        config=_config(given),
        row_order=order,
    )


def _config(given: dict[str, Any]) -> LayoutConfig | None:
    """Block sizes where some were given; None leaves the choice to the planner."""
    import dataclasses

    import torch

    from stof.errors import ArgumentError
    from stof.selection import default_config

    chosen: dict[str, Any] = {name: given[name] for name in ("block_m", "block_n") if name in given}
    slab = given.get("slab")
    if slab is not None:
        if slab != "none" and not slab.isdecimal():
            raise ArgumentError(f"--slab is 1, 8, 16 or none, got {slab!r}")
        chosen["slab"] = None if slab == "none" else int(slab)
    return dataclasses.replace(default_config(torch.device("cpu")), **chosen) if chosen else None


def _row_order(text: str, q_len: int) -> Tensor:
    """`remainder:STRIDE` or `patch:HEIGHTxWIDTH:ROWSxCOLUMNS` as a permutation of `q_len` rows."""
    import re

    from stof.errors import ArgumentError
    from stof.layout import orders

    if found := re.fullmatch(r"remainder:(\d+)", text):
        return orders.by_remainder(q_len, int(found[1]))
    if found := re.fullmatch(r"patch:(\d+)x(\d+):(\d+)x(\d+)", text):
        height, width, rows, columns = (int(number) for number in found.groups())
        if height * width != q_len:
            raise ArgumentError(f"a grid of {height}x{width} has {height * width} rows, --q-len is {q_len}")
        return orders.by_patch(height, width, rows, columns)
    raise ArgumentError(
        f"--row-order is remainder:STRIDE or patch:HEIGHTxWIDTH:ROWSxCOLUMNS (e.g. patch:64x64:8x8), got {text!r}"
    )


def _write_png(plan: Plan, path: Path, pattern: int) -> None:
    from stof.drawing import draw_picture
    from stof.errors import ArgumentError

    try:
        draw_picture(plan, path, pattern=pattern)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror or error}") from None


def _print_json(plan: Plan, png: Path | None) -> None:
    import dataclasses
    import json

    layout = plan.layout
    report = {
        "mask": plan.mask_text,
        "q_len": plan.q_len,
        "kv_len": plan.kv_len,
        "mask_batch": plan.mask_batch,
        "mask_heads": plan.mask_heads,
        **dataclasses.asdict(layout.config),
        "permuted_rows": plan.permuted_rows,
        "statistics": plan.statistics().as_dict(),
        "png": None if png is None else str(png),
    }
    typer.echo(json.dumps(report, indent=2))


def _table(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in _lines(plan.layout, plan.statistics()):
        table.add_row(name, value)
    return table


def _lines(layout: Layout, found: LayoutStatistics) -> list[tuple[str, str]]:
    config = layout.config
    order = "permuted" if layout.row_order is not None else "in the queries' order"
    columns = {None: "contiguous", 1: "gathered singly"}.get(config.slab, f"gathered by {config.slab}")
    return [
        ("queries x keys", f"{layout.q_len} x {layout.kv_len}"),
        ("batch x heads of the mask", f"{layout.mask_batch} x {layout.mask_heads}, {found.patterns} distinct"),
        ("density", f"{100 * found.density:.3g} % ({found.needed:,} scores kept)"),
        ("computed / needed", f"{found.computed_over_needed:.3f} ({found.computed:,} scores computed)"),
        ("tiles", f"{config.block_m} x {config.block_n}, columns {columns}"),
        ("  full, partial", f"{found.full_tiles:,}, {found.partial_tiles:,}"),
        ("  contiguous, gathered", f"{found.contiguous_tiles:,}, {found.gathered_tiles:,}"),
        ("row blocks", f"{found.row_blocks:,}, {found.empty_row_blocks:,} empty, rows {order}"),
        ("  heaviest, mean", f"{found.heaviest_row_block:,} tiles, {found.mean_row_block:.1f} tiles"),
        ("distinct bitmaps", f"{found.distinct_bitmaps:,}"),
        ("memory", _memory(found.bytes)),
    ]


def _memory(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 2**10:.1f} KiB" if size < 2**20 else f"{size / 2**20:.1f} MiB"


def _draw(console: Console, plan: Plan, pattern: int) -> None:
    from stof.drawing import draw_text

    style: DrawStyle = "colour"
    if console.options.ascii_only:
        style = "ascii"
    elif console.color_system is None or console.no_color:
        style = "shades"
    width = min(console.width, WIDEST_DRAWING)
    console.print(draw_text(plan, width, style=style, pattern=pattern), soft_wrap=True)
