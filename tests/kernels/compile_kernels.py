"""Compile kernels for GPUs that are not there, and print what each one takes of them.

    PYTHONPATH=.venv/triton-3.6 python -m tests.kernels.compile_kernels [--json] [--only TEXT] [--covering] [--arch 90]

Runs under whichever Triton is imported first. What is compiled is what would be launched: choices come from the
selector's tables, arguments from the kernels' own launching code, specialised as Triton does for aligned tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton

import stof
from stof.kernels.hopper import forward as hopper
from stof.kernels.hopper.config import blocks_per_sm
from stof.kernels.hopper.fp8 import forward as fp8_forward
from stof.kernels.hopper.paired_tile_lists import make_paired_lists
from stof.kernels.hopper.prepare import PreparedTiles, prepare_fp8
from stof.kernels.hopper.tile_lists import TILE_RANGE, make_tile_lists
from stof.kernels.implementation import Options, attend_once
from stof.kernels.quantization import FP8
from stof.kernels.triton import arguments, row_wise
from stof.kernels.triton import block_wise as triton_attention
from stof.kernels.triton.row_lists import prepare as prepare_rows
from stof.kernels.triton.work_list import PreparedWork, make_work
from stof.layout import Layout, LayoutConfig, build_layout
from stof.layout.orders.named import named_order
from stof.layout.survey import Survey
from stof.masks.tensors import as_mask
from stof.selection import CallSpec, KernelChoice
from stof.selection.gpu_candidates import runtime_choice
from stof.selection.gpu_choices import gpu_choices
from stof.selection.implementations import gpu_of
from stof.selection.resources import head_dim_class
from tests.kernels.assemble import ARCHS, Compiled, Recorded, assemble, report
from tests.kernels.backward_cases import (
    backward_cases,
    compile_backward,
    compile_hopper_backward,
    hopper_backward_launches,
)
from tests.kernels.covering import KINDS, covering
from tests.kernels.device_kernels import compiled_for_device, fill_kernels, layout_kernels

# The first ends the name of cases whose work the device makes; the third is in that of those whose tiles come from two
# places.
AT_RUN_TIME, ONE_EACH, COMPACTED_TOO, FEW_KEYS = KINDS
# The bias's rows begin at multiples of 8 values, not of 16; or at none at all; or at neighbouring odd values.
LONGER_ROWS, ODD_ROWS, UNEVEN_ROWS = "in longer rows", "in odd rows", "in uneven rows"
FAMILIES = ("hopper", "others")
# Lengths at which every tile size has partial and full tiles, and row blocks long enough to be split.
Q_LEN, KV_LEN = 768, 1600
# Shared memory of a program on an sm_90.
LIMIT = 232_448


@dataclass(frozen=True)
class Case:
    """One kernel to compile.

    Attributes:
        group: kernels that share a bound on spills, see `test_compile.py`.
        name: what is printed.
        call: the call it serves.
        choice: how.
        archs: for which GPUs.
    """

    group: str
    name: str
    call: CallSpec
    choice: KernelChoice
    archs: tuple[int, ...]


class Open:
    """A plan that can take any layout."""

    fixed: LayoutConfig | None = None
    row_orders: tuple[str, ...] = ("remainder 2",)

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        raise NotImplementedError


def call_of(dtype: torch.dtype, head_dim: int, **changes: Any) -> CallSpec:
    plain = CallSpec("cuda", dtype, head_dim, head_dim, 4, 4, q_len=Q_LEN, kv_len=KV_LEN, compute_capability=(8, 0))
    return replace(plain, **changes)


def cases() -> Iterator[Case]:
    """Every tile size of the selector, every kind of kernel, the ones most used for every GPU."""
    half, single = torch.float16, torch.float32
    yield from _tile_sizes("D 64", call_of(half, 64), "block_wise", ARCHS)
    yield from _tile_sizes("D 128", call_of(half, 128), "block_wise", ARCHS)
    yield from _tile_sizes("D 256", call_of(half, 256), "block_wise", (80, 120))
    # Head dimensions in between are padded to the next power of two.
    yield from _kinds("D 128", call_of(torch.bfloat16, 80), ("contiguous",), (90,))
    yield from _kinds("D 256", call_of(half, 192, value_dim=128), ("gathered split",), (90,))
    # Rows that are no multiples of 16 bytes, or of 16 elements.
    for head_dim, value_dim in ((1, 5), (31, 5), (72, 40)):
        yield from _kinds(
            "D 64" if head_dim < 64 else "D 128", call_of(half, head_dim, value_dim=value_dim), ("contiguous",), (90,)
        )
    yield from _kinds("fp32 D 64", call_of(single, 64), ("gathered split",), (80, 90))
    yield from _kinds("fp32", call_of(single, 128), ("gathered split",), (90, 120))
    yield from _kinds("fp32", call_of(single, 256), ("gathered split",), (90,))
    for group, head_dim in (("D 64", 64), ("D 128", 128)):
        call = call_of(half, head_dim)
        choice = runtime_choice("block_wise", call, LayoutConfig(64, 64, 1), LIMIT)
        for tiles in ("tiles", "shared tiles", "contiguous tiles"):
            yield Case(group, f"block_wise D{head_dim} {tiles} {AT_RUN_TIME}", call, choice, (80, 90))
    options = {"has_bias": True, "has_softcap": True, "has_sinks": True}
    yield from _kinds("options D 64", call_of(half, 64, **options), ("gathered split",), (80, 90))
    yield from _kinds("options D 128", call_of(half, 128, **options), ("gathered split", "contiguous"), (90,))
    for head_dim in (64, 128):
        yield from _kinds("dropout", call_of(half, head_dim, has_dropout=True), ("gathered split",), (80, 90))
    for head_dim, itemsize in itertools.product((64, 128), (2, 4)):
        call = call_of(half, head_dim, has_bias=True, bias_itemsize=itemsize)
        yield from _kinds("bias", call, ("contiguous",), (80, 90))
    call = call_of(half, 64, has_bias=True)
    case = _case("bias", call, "contiguous", gpu_choices(call, Open(), "block_wise"), (80, 90))
    for rows in (LONGER_ROWS, ODD_ROWS):
        yield replace(case, name=f"{case.name} {rows}")
    # Fewer key heads, and so no stride or ratio of 1 but that of the bias's columns.
    yield replace(case, name=f"{case.name} {UNEVEN_ROWS}", call=replace(call, heads=6, kv_heads=2))
    packed = call_of(half, 128, q_len=1, heads=32, kv_heads=8)
    yield from _tile_sizes("decode", packed, "decode", ARCHS)
    yield from _kinds("decode", replace(packed, q_len=16), ("gathered split",), (90,), "decode")
    yield from _kinds("decode", call_of(half, 64, q_len=1), ("contiguous split",), (80,), "decode")
    yield from _kinds("decode", call_of(half, 256, q_len=4, heads=8), ("gathered split",), (90,), "decode")
    yield from _hopper()
    yield from _fp8()
    yield from _row_wise(call_of(half, 64), ARCHS)
    yield from _row_wise(call_of(half, 256), (90,))
    yield from _row_wise(call_of(single, 128), (80,))


def _hopper() -> Iterator[Case]:
    """Every tile and every way to copy it, with and without splitting and options.

    192 columns are padded to 256, 96 to 128, 40 to 64.
    """
    half, bfloat = torch.float16, torch.bfloat16
    options = {"has_softcap": True, "has_sinks": True}
    square, unqueued = (128, 128), set()
    for group, call, tile, kinds in (
        ("hopper D 64", call_of(half, 64), square, ("contiguous split", "slabs of 16", "evenly spaced", "compacted")),
        ("hopper D 64", call_of(bfloat, 64), square, ("slabs of 8 split",)),
        ("hopper 64 rows", call_of(half, 64), (64, 128), ("contiguous split",)),
        ("hopper 64 rows", call_of(bfloat, 64), (64, 64), ("slabs of 8 split",)),
        ("hopper 64 rows", call_of(half, 64), (64, 64), ("contiguous", "evenly spaced", "compacted split")),
        ("hopper 64 rows", call_of(half, 128), (64, 64), ("compacted",)),
        ("hopper 64 rows", call_of(bfloat, 40), (64, 128), ("compacted",)),
        ("hopper 64 rows", call_of(half, 64, **options), (64, 64), ("slabs of 16 split",)),
        ("hopper 64 rows", call_of(half, 128), (64, 64), ("contiguous",)),
        ("hopper 64 rows", call_of(bfloat, 96, **options), (64, 64), ("slabs of 8 split",)),
        ("hopper 192 rows", call_of(half, 64), (192, 128), ("contiguous", "slabs of 16 split")),
        ("hopper 192 rows", call_of(bfloat, 64), (192, 128), ("evenly spaced", "compacted split")),
        ("hopper 192 rows", call_of(bfloat, 40, **options), (192, 128), ("contiguous split",)),
        ("hopper D 128", call_of(half, 128), square, ("contiguous", "slabs of 8", "evenly spaced split", "compacted")),
        ("hopper D 128", call_of(bfloat, 96), square, ("slabs of 16 split",)),
        ("hopper pairs", call_of(half, 128), (64, 64), ("contiguous in pairs", "slabs of 16 in pairs")),
        ("hopper pairs", call_of(bfloat, 96, has_sinks=True), (64, 64), ("slabs of 16 in pairs",)),
        ("hopper D 256", call_of(half, 256), (128, 64), ("contiguous", "slabs of 16 split", "evenly spaced")),
        ("hopper D 256", call_of(bfloat, 192), (128, 64), ("contiguous split", "slabs of 8")),
        ("hopper D 256", call_of(half, 256), (64, 64), ("contiguous", "slabs of 8 split")),
        ("hopper D 256", call_of(bfloat, 192, **options), (64, 64), ("contiguous split",)),
        ("hopper D 256", call_of(half, 256, **options), (128, 64), ("contiguous split",)),
        ("hopper options", call_of(half, 64, **options), square, ("slabs of 8 split",)),
        ("hopper bias", call_of(half, 64, has_bias=True), square, ("contiguous", "contiguous split")),
        ("hopper bias", call_of(bfloat, 64, has_bias=True), (192, 64), ("contiguous",)),
        ("hopper bias", call_of(half, 64, has_bias=True), (64, 64), ("contiguous split",)),
        ("hopper bias", call_of(bfloat, 128, has_bias=True), (128, 64), ("contiguous split",)),
        ("hopper bias", call_of(half, 96, has_bias=True, **options), (64, 64), ("contiguous",)),
        ("hopper bias", call_of(half, 256, has_bias=True), (64, 64), ("contiguous",)),
        ("hopper bias", call_of(half, 64, has_bias=True, **options), square, ("contiguous split",)),
        ("hopper options", call_of(bfloat, 128, **options), square, ("contiguous split",)),
    ):
        call = replace(call, compute_capability=(9, 0))
        choices = gpu_choices(call, Open(), "hopper")
        choices = [c for c in choices if c.layout and (c.layout.block_m, c.layout.block_n) == tile]
        for kind in kinds:
            yield (case := _case(group, call, kind, choices, (90,)))
        # Without a queue there is less of everything: once for each shape of a thread block.
        shape = (tile[0], head_dim_class(call.head_dim, call.value_dim), call.has_bias and tile == square)
        if call.dtype == half and shape not in unqueued:
            unqueued.add(shape)
            yield replace(case, name=f"{case.name} {ONE_EACH}")
    for group, call, tile, kind in (
        ("hopper D 64", call_of(half, 64), square, "contiguous split"),
        ("hopper 64 rows", call_of(bfloat, 64), (64, 64), "contiguous split"),
        ("hopper 64 rows", call_of(half, 64, **options), (64, 128), "contiguous"),
        ("hopper 64 rows", call_of(half, 128), (64, 64), "contiguous"),
        ("hopper 64 rows", call_of(bfloat, 128, **options), (64, 64), "contiguous split"),
        ("hopper D 128", call_of(half, 128), square, "contiguous split"),
        ("hopper D 256", call_of(half, 256), (128, 64), "contiguous split"),
        ("hopper D 256", call_of(half, 256), (64, 64), "contiguous split"),
    ):
        call = replace(call, compute_capability=(9, 0))
        choices = [c for c in gpu_choices(call, Open(), "hopper") if c.layout and c.layout.block_m == tile[0]]
        choices = [c for c in choices if c.layout and c.layout.block_n == tile[1]]
        case = _case(group, call, kind, choices, (90,))
        yield replace(case, name=f"{case.name} {AT_RUN_TIME}")
        if tile == (64, 64):
            yield replace(case, name=f"{case.name} {COMPACTED_TOO} {AT_RUN_TIME}")
    for group, call, tile in (
        ("hopper D 64", call_of(half, 64), square),
        ("hopper 64 rows", call_of(half, 64), (64, 64)),
        ("hopper 64 rows", call_of(bfloat, 64), (64, 128)),
        ("hopper 192 rows", call_of(half, 64), (192, 128)),
        ("hopper D 128", call_of(half, 128), square),
    ):
        call = replace(call, compute_capability=(9, 0))
        choices = [c for c in gpu_choices(call, Open(), "hopper") if c.layout and c.layout.block_m == tile[0]]
        choices = [c for c in choices if c.layout and c.layout.block_n == tile[1]]
        case = _case(group, call, "contiguous", choices, (90,))
        yield replace(case, name=f"{case.name} {FEW_KEYS}")


def _fp8() -> Iterator[Case]:
    """Operands of 8 bits: both ways to copy them, with and without splitting and options."""
    plain = call_of(FP8, 128, compute_capability=(9, 0))
    for call, kinds in (
        (plain, ("contiguous", "contiguous split", "compacted")),
        (replace(plain, has_softcap=True, has_sinks=True), ("compacted split",)),
    ):
        for kind in kinds:
            case = _case("hopper fp8", call, kind, gpu_choices(call, Open(), "hopper_fp8"), (90,))
            yield case
            if kind == "contiguous split":
                yield replace(case, name=f"{case.name} {ONE_EACH}")


def _row_wise(call: CallSpec, archs: tuple[int, ...]) -> Iterator[Case]:
    yield Case("row-wise", f"row_wise {_short(call)}", call, KernelChoice("row_wise", LayoutConfig(64, 64, 1)), archs)


def _tile_sizes(group: str, call: CallSpec, implementation: str, archs: tuple[int, ...]) -> Iterator[Case]:
    """Every tile size for sm_90, and the first one in every kind; the first one for the other GPUs too."""
    by_tile: dict[tuple[int, ...], list[KernelChoice]] = {}
    for choice in gpu_choices(call, Open(), implementation):
        layout, kernel = choice.layout, choice.kernel
        assert layout is not None
        assert kernel is not None
        tile = (layout.block_m, layout.block_n, kernel.num_warps, kernel.num_stages, kernel.max_registers)
        by_tile.setdefault(tile, []).append(choice)
    for number, choices in enumerate(by_tile.values()):
        yield _case(group, call, "gathered split", choices, tuple(sorted({90, *archs})) if number == 0 else (90,))
        if number == 0:
            yield _case(group, call, "contiguous", choices, (80, 90))


def _kinds(
    group: str, call: CallSpec, kinds: tuple[str, ...], archs: tuple[int, ...], implementation: str = "block_wise"
) -> Iterator[Case]:
    choices = gpu_choices(call, Open(), implementation)
    for kind in kinds:
        yield _case(group, call, kind, choices, archs)


def _case(group: str, call: CallSpec, kind: str, choices: list[KernelChoice], archs: tuple[int, ...]) -> Case:
    """The first choice of a kind: how columns are gathered, split or not."""
    slabs = {
        "contiguous": (None,),
        "gathered": (1, 8, 16),
        "slabs of 16": (16,),
        "slabs of 8": (8,),
        "evenly spaced": (1,),
        "compacted": (1,),
    }
    for choice in choices:
        assert choice.layout is not None
        assert choice.kernel is not None
        how = kind.removesuffix(" split").removesuffix(" in pairs")
        if choice.kernel.paired != kind.endswith(" in pairs"):
            continue
        gathered = choice.layout.slab in slabs[how] and choice.layout.compact_columns == (how == "compacted")
        if gathered and (choice.kernel.split_tiles > 0) == kind.endswith(" split"):
            layout, kernel = choice.layout, choice.kernel
            settings = f"{kernel.num_warps}w{kernel.num_stages}s{kernel.max_registers}r"
            options = (
                (" bias" + " in fp32" * (call.bias_itemsize == 4)) * call.has_bias
                + " softcap sinks" * call.has_softcap
                + " dropout" * call.has_dropout
            )
            name = (
                f"{choice.implementation} {_short(call)} {layout.block_m}x{layout.block_n} {settings} {kind}{options}"
            )
            return Case(group, name, call, choice, archs)
    raise AssertionError(f"the selector has no choice that is {kind}")


def _short(call: CallSpec) -> str:
    widths = f"{call.head_dim}" if call.value_dim == call.head_dim else f"{call.head_dim}/{call.value_dim}"
    rows = f" rows {call.q_len}x{call.heads // call.kv_heads}" if call.q_len <= 16 else ""
    return f"{str(call.dtype).removeprefix('torch.')} D {widths}{rows}"


def layout_of(call: CallSpec, choice: KernelChoice) -> Layout:
    """A layout of the choice's kind, with partial and full tiles."""
    # Causal, so that there are partial tiles.
    rows, columns = torch.arange(call.q_len)[:, None], torch.arange(call.kv_len)[None, :]
    keep = columns <= rows + call.kv_len - call.q_len
    slab = 1 if choice.layout is None else choice.layout.slab
    if choice.row_order is not None:
        keep = keep & ((columns - rows) % 2 == 0)
    elif choice.layout is not None and choice.layout.compact_columns:
        keep = keep & ((columns + 128 > rows + call.kv_len - call.q_len) | (columns % 32 < 3) | (rows == 0))
    elif choice.implementation == "hopper" and slab is not None:
        # Some columns follow each other, others in slabs. Tiles of slabs of 8 are all partial here.
        keep = keep & ((columns < 608) | (columns // slab % 3 != 1)) & ((slab != 8) | (columns % 8 != rows % 8))
    elif slab is not None:
        # Without every fourth key, so that gathered full tiles have gaps.
        keep = keep & (columns % 4 != 3)
    order = None if choice.row_order is None else named_order(choice.row_order, call.q_len)
    return build_layout(as_mask(keep), call.q_len, call.kv_len, choice.layout, row_order=order)


def recorded(case: Case) -> Recorded:
    """What the launching code passes on for this case."""
    call, choice = case.call, case.choice
    layout = layout_of(call, choice)
    # More jobs than thread blocks at once, so that they queue.
    batch = 1 if choice.implementation not in _HOPPER or ONE_EACH in case.name else 400
    q = torch.empty(batch, call.heads, call.q_len, call.head_dim, dtype=call.dtype)
    k = torch.empty(batch, call.kv_heads, call.kv_len, call.head_dim, dtype=call.dtype)
    v = torch.empty(batch, call.kv_heads, call.kv_len, call.value_dim, dtype=call.dtype)
    narrow = torch.bfloat16 if call.dtype == FP8 else call.dtype
    spare = 3 if UNEVEN_ROWS in case.name else 8 if LONGER_ROWS in case.name or ODD_ROWS in case.name else 0
    bias_dtype = torch.float32 if call.bias_itemsize == 4 else call.dtype
    bias = torch.empty(1, call.heads, call.q_len, call.kv_len + spare, dtype=bias_dtype)
    bias = bias[..., ODD_ROWS in case.name :][..., : call.kv_len]
    options = Options(
        scale=0.1,
        softcap=30.0 if call.has_softcap else 0.0,
        bias=bias if call.has_bias else None,
        sinks=torch.empty(call.heads, dtype=narrow) if call.has_sinks else None,
        dropout_p=0.1 * call.has_dropout,
        seed=torch.zeros(2, dtype=torch.int64) if call.has_dropout else None,
    )
    record = Recorded()
    with contextlib.ExitStack() as patched:
        for module in (arguments, row_wise, hopper, fp8_forward):
            patched.enter_context(mock.patch.object(module, "Launch", record.make))
        patched.enter_context(mock.patch.dict(hopper._bound_by_shape, clear=True))
        if choice.kernel is None:
            attend_once(row_wise.bind, q, k, v, prepare_rows(layout), options)
        elif choice.implementation == "hopper":
            split_tiles = choice.kernel.split_tiles
            lists = make_paired_lists(layout) if choice.kernel.paired else make_tile_lists(layout, split_tiles)
            slabs = layout.config.slab in (8, 16) or layout.config.compact_columns
            assert bool(lists.slab) == slabs, "the layout has no slabs"
            if case.name.endswith(AT_RUN_TIME):
                lists = replace(lists, ranges=torch.zeros(len(lists.items), len(TILE_RANGE), dtype=torch.int32))
            if case.name.endswith(FEW_KEYS):
                lists = replace(lists, exact_tiles=2, has_full=0)
            if COMPACTED_TOO in case.name:
                compacted = torch.zeros(1, call.heads, lists.block_n, dtype=torch.int32)
                lists = replace(lists, compacted_keys=compacted, slab=lists.block_n, has_full=0)
            attend_once(hopper.bind, q, k, v, PreparedTiles(lists, choice.kernel), options)
        elif choice.implementation == "hopper_fp8":
            scales = tuple(torch.empty(1, heads) for heads in (call.heads, call.kv_heads, call.kv_heads))
            prepared = prepare_fp8(layout, choice.kernel)
            attend_once(fp8_forward.bind, q, k, v, prepared, options._replace(bias=None, scales=scales))
        else:
            work = make_work(layout, choice.kernel.split_tiles)
            if case.name.endswith(AT_RUN_TIME):
                kind = {"shared": int("shared" in case.name), "contiguous_tiles": int("contiguous" in case.name)}
                work = replace(work, has_full=1, full_runs=0, has_nan_items=1, **kind)
            attend_once(triton_attention.bind, q, k, v, PreparedWork(work, choice.kernel), options)
    return record.made[-1]  # behind what brings its jobs up to date


# Implementations whose kernels are Hopper's alone.
_HOPPER = ("hopper", "hopper_fp8")


def compiled(case: Case, record: Recorded, arch: int) -> Compiled:
    """Compile for one GPU."""
    options = {"num_warps": record.options["num_warps"], "num_stages": record.options["num_stages"]}
    if record.options.get("max_registers"):
        options["maxnreg"] = record.options["max_registers"]
    made = assemble(record.source(arch), arch, options)
    choice, estimated, blocks = case.choice, 0, 1
    if choice.kernel is not None and choice.layout is not None:
        estimated = gpu_of(choice).shared_memory(choice, case.call)
        if choice.implementation == "hopper":
            width = head_dim_class(case.call.head_dim, case.call.value_dim)
            blocks = blocks_per_sm(choice.layout.block_m * (1 + choice.kernel.paired), choice.layout.block_n, width)
    return Compiled(
        group=case.group,
        name=case.name,
        arch=arch,
        registers=made.registers,
        spilled=made.spilled,
        shared=made.shared,
        estimated=estimated,
        wgmma=made.wgmma,
        block_m=choice.layout.block_m if choice.kernel is not None and choice.layout is not None else 0,
        resident=blocks,
        itemsize=case.call.dtype.itemsize,
        narrow=made.narrow,
        kept=made.kept,
        warnings=made.losses if choice.implementation in _HOPPER else made.stalls + made.confused,
        seconds=made.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--family", choices=FAMILIES, help="kernels written for Hopper, or the others")
    parser.add_argument("--covering", action="store_true", help="of Hopper's, those that have what none before has")
    parser.add_argument("--arch", type=int, help="for this GPU alone")
    given = parser.parse_args()
    archs = set(ARCHS) if given.arch is None else {given.arch}
    assert "TRITON_INTERPRET" not in os.environ, "kernels must be compiled, not interpreted"
    if not given.json:
        print(f"triton {triton.__version__}, stof {stof.__version__}")
        print("  sm  registers  spilled   shared  estimate  wgmma  seconds  kernel")
    for family in FAMILIES if given.family is None else (given.family,):
        chosen = (case for case in cases() if (case.choice.implementation in _HOPPER) == (family == "hopper"))
        for case in covering(chosen) if given.covering and family == "hopper" else chosen:
            if given.only in case.name:
                record = recorded(case)
                for arch in sorted(archs.intersection(case.archs)):
                    report(compiled(case, record, arch), given.json)
    for case in backward_cases() if given.family != "hopper" else ():
        for launch in case.launches():
            for arch in sorted(archs.intersection(case.archs)):
                if given.only in case.name(launch.given[0].__name__):
                    report(compile_backward(case, launch, arch), given.json)
    for name, launch in hopper_backward_launches() if given.family != "others" and 90 in archs else ():
        if given.only in name:
            report(compile_hopper_backward(name, launch), given.json)
    for group, kernels in (("fill", fill_kernels()), ("layout", layout_kernels())):
        for kernel, values, options in kernels:
            if given.only in kernel.__name__ and given.family != "hopper":
                for arch in sorted(archs & {80, 90}):
                    report(compiled_for_device(group, kernel, values, options, arch), given.json)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
    sys.exit(0)
