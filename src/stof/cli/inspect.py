"""`stof inspect`: what a mask compiles to, as figures and pictures."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stof.cli.common import must_be_replaceable, must_be_writable, picture_kind

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from stof.calibration.layout_alternatives import Alternative
    from stof.drawing import DrawStyle
    from stof.layout import Layout, LayoutConfig, LayoutStatistics
    from stof.masks import Mask
    from stof.plans.plan import Plan
    from stof.selection import TokenOrder
    from stof.testing.mask_grid import Shape

Q_LEN = 4096

# Wider drawings of square masks are higher than most terminals.
WIDEST_DRAWING = 80
# Alternatives shown in the terminal; JSON has all.
MOST_LISTED = 16


def inspect(
    mask: Annotated[
        str,
        typer.Argument(
            help="A mask, e.g. 'longformer(64, 64) & causal()', a plan file (*.safetensors), or module:name of a mask, "
            "a mask function (b, h, q_idx, kv_idx) or a function that returns a mask."
        ),
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
        typer.Option(
            help="Rows by remainder:16 (dilated masks), patch:64x64:8x8 (2-D neighbourhoods) or in their own order "
            "(own); default whatever computes least, also one found by looking at the mask."
        ),
    ] = None,
    pattern: Annotated[int, typer.Option(min=0, help="Which distinct (batch, head) mask to draw.")] = 0,
    alternatives: Annotated[
        bool, typer.Option("--alternatives", help="List the layouts a GPU could use, with estimated times.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the alternatives on this machine's GPU, or CPU if it has none.")
    ] = False,
    reorder: Annotated[
        bool, typer.Option("--reorder", help="Among them: q, k and v in another order, the passes over them counted.")
    ] = False,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Width of a head, for times.")] = 64,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the mask and its tiles here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    draw: Annotated[bool, typer.Option("--draw/--no-draw", help="Draw the mask in the terminal.")] = True,
) -> None:
    """Show what a mask compiles to: density, tiles by kind, cost, and pictures."""
    from rich.console import Console

    from stof.errors import ArgumentError

    must_be_writable(png)
    if png is not None:
        must_be_replaceable(png, picture_kind(png))
    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads, "block_m": block_m, "block_n": block_n}
    given = {
        name: value for name, value in (sizes | {"slab": slab, "row_order": row_order}).items() if value is not None
    }
    file = mask.endswith(".safetensors")
    times = alternatives or measure or reorder
    if file and times:
        raise ArgumentError("a plan file has no mask to lay out in other ways; leave out --alternatives and --measure")
    value = None if file else _mask(mask)
    plan = _load(mask, given) if value is None else _compile(value, given)
    is_ordered = plan.permuted_rows and value is not None
    before = _compile(value, given | {"row_order": "own"}).layout if is_ordered and value is not None else None
    if not pattern < plan.layout.patterns:
        raise ArgumentError(f"--pattern is between 0 and {plan.layout.patterns - 1} for this mask, got {pattern}")
    if png is not None:
        from stof.drawing import draw_picture

        draw_picture(plan, png, pattern=pattern, before=before)
    listed, token_order = [], None
    if value is not None:
        listed = _alternatives(value, plan, given, head_dim, measure=measure, reorder=reorder) if times else []
        token_order = _token_order(value, plan, given, head_dim)
    if as_json:
        _print_json(plan, png, before, listed, token_order)
        return
    from stof.masks.parse import readable

    console = Console()
    console.print(readable(plan.mask_text) or "a plan without text", style="bold", markup=False, highlight=False)
    console.print(_table(plan.layout, before))
    if token_order is not None:
        console.print(": ".join(map(str, token_order)), highlight=False, markup=False)
    for listing in listed:
        console.print(_times(listing))
    if draw:
        for layout in (plan.layout,) if before is None else (before, plan.layout):
            if before is not None:
                order = "their own order" if layout is before else "the layout's order"
                console.print(f"rows in {order}", style="bold", highlight=False)
            _draw(console, layout, pattern)
    if png is not None:
        console.print(f"wrote {png}", markup=False, highlight=False, soft_wrap=True)


def _load(path: str, given: dict[str, Any]) -> Plan:
    from stof.errors import ArgumentError
    from stof.plans.plan import Plan

    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ArgumentError(f"a plan file has its own lengths and layout; leave out {named}")
    try:
        return Plan.load(path)
    except FileNotFoundError as error:
        raise ArgumentError(f"{error}; write one with stof.plan(...).save(path)") from None


def _mask(text: str) -> Mask:
    """The mask of a text, or of what `module:name` names."""
    import inspect as signatures

    from stof.cli.common import imported
    from stof.errors import ArgumentError
    from stof.masks import Mask, from_function, parse

    if not re.fullmatch(r"[\w.]+:\w+", text):
        return parse(text)
    value = imported(text)
    if callable(value) and not isinstance(value, Mask):
        try:
            needed = [one for one in signatures.signature(value).parameters.values() if one.default is one.empty]
        except ValueError as error:
            raise ArgumentError(f"{text} has no signature: {error}") from error
        value = from_function(value) if len(needed) == 4 else value() if not needed else None
    if not isinstance(value, Mask):
        raise ArgumentError(
            f"{text} is no mask, no mask function (b, h, q_idx, kv_idx) and no function without arguments that returns "
            "a mask"
        )
    return value


def _compile(mask: Mask, given: dict[str, Any]) -> Plan:
    import torch

    import stof
    from stof.selection import default_config

    q_len = given.get("q_len", Q_LEN)
    named, config = given.get("row_order"), _config(given)
    unordered = named == "own"
    if unordered and config is None:
        config = default_config(torch.device("cpu"))  # without one the planner chooses the order
    return stof.plan(
        mask,
        q_len,
        given.get("kv_len", q_len),
        batch=given.get("batch", mask.batch),
        heads=given.get("heads", mask.heads),
        device="cpu",
        config=config,
        row_order=None if named is None or unordered else _row_order(named, q_len),
    )


def _config(given: dict[str, Any]) -> LayoutConfig | None:
    """Block sizes where some were given; None leaves the choice to the planner."""
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
    from stof.errors import ArgumentError
    from stof.layout import orders

    if match := re.fullmatch(r"remainder:(\d+)", text):
        return orders.by_remainder(q_len, int(match[1]))
    if match := re.fullmatch(r"patch:(\d+)x(\d+):(\d+)x(\d+)", text):
        height, width, rows, columns = (int(number) for number in match.groups())
        if height * width != q_len:
            raise ArgumentError(f"a grid of {height}x{width} has {height * width} rows, --q-len is {q_len}")
        return orders.by_patch(height, width, rows, columns)
    raise ArgumentError(
        f"--row-order is own, remainder:STRIDE or patch:HEIGHTxWIDTH:ROWSxCOLUMNS (e.g. patch:64x64:8x8), got {text!r}"
    )


def _call(plan: Plan, given: dict[str, Any], head_dim: int) -> tuple[Shape, torch.device, str]:
    """The call that times are for, the device here, and the GPU that estimates are for."""
    import torch

    from stof.calibration.layout_alternatives import DEFAULT_GPU
    from stof.testing.mask_grid import Shape

    batch, heads = given.get("batch", plan.mask_batch), given.get("heads", plan.mask_heads)
    shape = Shape(batch, heads, heads, head_dim, plan.q_len, plan.kv_len)
    if not torch.cuda.is_available():
        return shape, torch.device("cpu"), DEFAULT_GPU
    device = torch.device("cuda", torch.cuda.current_device())
    return shape, device, torch.cuda.get_device_name(device)


def _token_order(mask: Mask, plan: Plan, given: dict[str, Any], head_dim: int) -> tuple[str, TokenOrder] | None:
    """The call, and the order of the tokens in which it would compute less on a GPU; None if none is known."""
    import torch

    from stof.calibration.layout_alternatives import better_order

    shape, device, name = _call(plan, given, head_dim)
    order = better_order(mask, shape, torch.float16, name, device)
    return None if order is None else (f"{shape}, float16, {name}", order)


def _alternatives(
    mask: Mask, plan: Plan, given: dict[str, Any], head_dim: int, *, measure: bool, reorder: bool
) -> list[Times]:
    """What `--alternatives`, `--reorder` and `--measure` list, for a call of the mask's sizes or those given."""
    import torch

    from stof.calibration.layout_alternatives import estimated, estimated_reordered, measured
    from stof.selection.device_model import load_model
    from stof.tuning.machine import device_name

    shape, device, name = _call(plan, given, head_dim)
    gpu = device.type == "cuda"
    listed = []
    if not (measure and gpu) or reorder:
        alternatives = estimated(mask, shape, torch.float16, name)
        alternatives += estimated_reordered(mask, shape, torch.float16, name) if reorder else []
        alternatives.sort(key=lambda one: (one.estimate_us is None, one.estimate_us or 0.0))
        model = load_model(name)
        constants = f", estimated with the constants of {model.device}" if model.stands_in_for else ""
        listed.append(Times(f"{shape}, float16, {name}{constants}", alternatives))
    if measure:
        dtype = torch.float16 if gpu else torch.float32
        called = f"{shape}, {str(dtype).removeprefix('torch.')}, {device_name(device)}"
        listed.append(Times(called, measured(mask, shape, dtype, device)))
    return listed


@dataclass(frozen=True)
class Times:
    """Alternatives of one call on one device."""

    call: str
    alternatives: list[Alternative]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [{"call": self.call, **dataclasses.asdict(a), "choice": str(a.choice)} for a in self.alternatives]


def _times(times: Times) -> Table:
    from rich.table import Table

    table = Table(title=times.call, title_justify="left")
    table.add_column("implementation and tiles")
    table.add_column("rows")
    for name in ("computed / needed", "estimated", "measured"):
        table.add_column(name, justify="right")
    listed = times.alternatives[:MOST_LISTED]
    if not any(one.reordered for one in listed):  # asked for, so the best of them is shown wherever it stands
        listed += [one for one in times.alternatives[MOST_LISTED:] if one.reordered][:1]
    for one in listed:
        layout = one.choice.layout
        assert layout is not None
        table.add_row(
            f"{one.choice.implementation}, {layout.block_m} x {layout.block_n}, {layout.columns}",
            "reordered first" if one.reordered else one.choice.row_order or "own order",
            f"{one.computed_over_needed:.2f}",
            "" if one.estimate_us is None else f"{one.estimate_us:.1f} us",
            one.note or ("" if one.measured_us is None else f"{one.measured_us:.1f} us"),
        )
    return table


def _print_json(
    plan: Plan, png: Path | None, before: Layout | None, listed: list[Times], order: tuple[str, TokenOrder] | None
) -> None:
    import json

    from stof.layout import statistics

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
        "statistics_before": None if before is None else statistics(before).as_dict(),
        "alternatives": [line for times in listed for line in times.as_dicts()],
        "token_order": None if order is None else {"call": order[0], **dataclasses.asdict(order[1])},
        "png": None if png is None else str(png),
    }
    typer.echo(json.dumps(report, indent=2))


def _table(layout: Layout, before: Layout | None) -> Table:
    """Figures of a layout, and beside them those of the one before its rows were permuted."""
    from rich.table import Table

    from stof.layout import statistics

    layouts = [layout] if before is None else [before, layout]
    table = Table(show_header=before is not None)
    table.add_column("", style="dim")
    for name in ("rows in their own order", "as chosen")[-len(layouts) :]:
        table.add_column(name)
    figures = [_lines(each, statistics(each)) for each in layouts]
    for lines in zip(*figures, strict=True):
        table.add_row(lines[0][0], *(value for _, value in lines))
    return table


def _lines(layout: Layout, statistics: LayoutStatistics) -> list[tuple[str, str]]:
    config = layout.config
    order = "permuted" if layout.row_order is not None else "in the queries' order"
    return [
        ("queries x keys", f"{layout.q_len} x {layout.kv_len}"),
        ("batch x heads of the mask", f"{layout.mask_batch} x {layout.mask_heads}, {statistics.patterns} distinct"),
        ("density", f"{100 * statistics.density:.3g} % ({statistics.needed:,} scores kept)"),
        ("computed / needed", f"{statistics.computed_over_needed:.3f} ({statistics.computed:,} scores computed)"),
        ("tiles", f"{config.block_m} x {config.block_n}, {config.columns}"),
        ("  full, partial", f"{statistics.full_tiles:,}, {statistics.partial_tiles:,}"),
        ("  contiguous, gathered", f"{statistics.contiguous_tiles:,}, {statistics.gathered_tiles:,}"),
        ("row blocks", f"{statistics.row_blocks:,}, {statistics.empty_row_blocks:,} empty, rows {order}"),
        ("  heaviest, mean", f"{statistics.heaviest_row_block:,} tiles, {statistics.mean_row_block:.1f} tiles"),
        ("distinct bitmaps", f"{statistics.distinct_bitmaps:,}"),
        ("memory", _memory(statistics.bytes)),
    ]


def _memory(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 2**10:.1f} KiB" if size < 2**20 else f"{size / 2**20:.1f} MiB"


def _draw(console: Console, layout: Layout, pattern: int) -> None:
    from stof.drawing import draw_text

    style: DrawStyle = "colour"
    if console.options.ascii_only:
        style = "ascii"
    elif console.color_system is None or console.no_color:
        style = "shades"
    width = min(console.width, WIDEST_DRAWING)
    console.print(draw_text(layout, width, style=style, pattern=pattern), soft_wrap=True)
