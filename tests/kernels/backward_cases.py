"""Backward kernels to compile for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch

from stof.dynamic.gradients import KERNEL as DYNAMIC
from stof.dynamic.gradients import tile_size
from stof.kernels.config import KernelConfig
from stof.kernels.hopper import backward as hopper_backward
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK, LAYOUTS, make_backward_lists
from stof.kernels.implementation import NeedsGrad, Options
from stof.kernels.triton import arguments, backward
from stof.kernels.triton.backward_tiles import prepare_backward
from stof.layout import LayoutConfig, build_layout
from stof.masks.tensors import as_mask
from stof.selection import CallSpec
from stof.selection.backward_tilings import _FLOAT32, _TILES
from tests.kernels.assemble import ARCHS, Compiled, Recorded, assemble

Q_LEN, KV_LEN, HEADS = 384, 640, 4


@dataclass(frozen=True)
class BackwardCase:
    """The kernels of one backward call.

    Attributes:
        group: of `test_compile.SPILLS`.
        dtype, head_dim, value_dim, kv_heads: of the call.
        dq, dkv: tile and configuration of the two kernels.
        slab: None for contiguous tiles.
        options: with bias, softcap and sinks.
        dropout: with dropout.
        dynamic: with tiles made at run time.
        archs: for which GPUs.
    """

    group: str
    dtype: torch.dtype
    head_dim: int
    dq: tuple[int, int, KernelConfig]
    dkv: tuple[int, int, KernelConfig]
    value_dim: int = 0
    kv_heads: int = HEADS
    slab: int | None = None
    options: bool = False
    dropout: bool = False
    dynamic: bool = False
    archs: tuple[int, ...] = (80, 90)

    def launches(self) -> list[Recorded]:
        """What the launching code would launch, in order."""
        value_dim = self.value_dim or self.head_dim
        q = torch.empty(1, HEADS, Q_LEN, self.head_dim, dtype=self.dtype)
        k = torch.empty(1, self.kv_heads, KV_LEN, self.head_dim, dtype=self.dtype)
        v = torch.empty(1, self.kv_heads, KV_LEN, value_dim, dtype=self.dtype)
        out = torch.empty(1, HEADS, Q_LEN, value_dim, dtype=self.dtype)
        lse = torch.empty(1, HEADS, Q_LEN)
        bias = torch.empty(1, HEADS, Q_LEN, KV_LEN, dtype=self.dtype) if self.options else None
        sinks = torch.empty(HEADS) if self.options else None
        d_lse = lse if self.options else None
        # Causal, so that there are partial and full tiles; without every fourth key where columns are gathered.
        rows, columns = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
        keep = (columns <= rows + KV_LEN - Q_LEN) & ((columns % 4 != 3) | (self.slab is None))
        built = [
            build_layout(as_mask(mask), *mask.shape, LayoutConfig(*config[:2], self.slab))
            for mask, config in ((keep, self.dq), (keep.T, self.dkv))
        ]
        prepared = prepare_backward(*built, self.dq[2], self.dkv[2])
        if self.dynamic:
            dq, dkv = (replace(tiles, has_nan=True, full_contiguous=True) for tiles in (prepared.dq, prepared.dkv))
            prepared = replace(prepared, dq=dq, dkv=dkv)
        seed = torch.zeros(2, dtype=torch.int64) if self.dropout else None
        options = Options(0.1, 30.0 if self.options else 0.0, bias, sinks, dropout_p=0.1 * self.dropout, seed=seed)
        needs = NeedsGrad(bias=self.options, sinks=self.options)
        record = Recorded()
        with mock.patch.object(arguments, "Launch", record.make), mock.patch.dict(backward._bound_by_shape, clear=True):
            bound = backward.bind_backward(q, k, v, out, out, d_lse, prepared, options, needs)
            bound(q, k, v, out, lse, out, d_lse, bias, sinks, seed)
        return record.made

    def name(self, kernel: str) -> str:
        block_m, block_n, config = self.dq if kernel == "dq_kernel" else self.dkv
        widths = f"{self.head_dim}" if not self.value_dim else f"{self.head_dim}/{self.value_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        how = " gathered" * (self.slab is not None) + " split" * (config.split_tiles > 0) + " options" * self.options
        how += " dropout" * self.dropout + " dynamic" * self.dynamic
        return f"{kernel} {dtype} D {widths} {block_m}x{block_n} {config.num_warps}w{config.num_stages}s{how}"


def compile_backward(case: BackwardCase, launch: Recorded, arch: int) -> Compiled:
    """Compile one kernel of a case for one GPU."""
    kernel, options = launch.given[0].__name__, launch.options
    chosen = {"num_warps": options["num_warps"], "num_stages": options["num_stages"]}
    if options.get("max_registers"):
        chosen["maxnreg"] = options["max_registers"]
    made = assemble(launch.source(arch), arch, chosen)
    warnings: list[Any] = made.stalls + made.confused
    products = kernel in ("dq_kernel", "dkv_kernel")
    return Compiled(
        group=case.group if products or kernel == "bias_gradient_kernel" else "backward sums",
        name=case.name(kernel),
        arch=arch,
        registers=made.registers,
        spilled=made.spilled,
        shared=made.shared,
        estimated=0,
        wgmma=made.wgmma,
        block_m=(case.dq if kernel == "dq_kernel" else case.dkv)[0] if products else 0,
        resident=1,
        itemsize=case.dtype.itemsize,
        narrow=made.narrow,
        kept=made.kept,
        warnings=warnings,
        seconds=made.seconds,
    )  # fmt: skip


def backward_cases() -> Iterator[BackwardCase]:
    """Every tile size that plans choose; gathered and split; with every option."""
    half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
    for name, head_dim, dtype, tables in (
        ("backward D 64", 64, bfloat, (_TILES["dq"], _TILES["dkv"])),
        ("backward D 128", 128, bfloat, (_TILES["dq"], _TILES["dkv"])),
        ("backward D 256", 256, half, (_TILES["dq"], _TILES["dkv"])),
        ("backward fp32", 64, single, (_FLOAT32, _FLOAT32)),
        ("backward fp32", 128, single, (_FLOAT32, _FLOAT32)),
    ):
        dq, dkv = ([_sizes(tile) for tile in table[head_dim]] for table in tables)
        for place, (one, other) in enumerate(zip_longest(dq, dkv)):
            fits_everywhere = place == 0 and (head_dim == 64 or dtype == single)
            archs = ARCHS if fits_everywhere else (90,)
            yield BackwardCase(name, dtype, head_dim, one or dq[0], other or dkv[0], archs=archs)
    not_hopper = tuple(arch for arch in ARCHS if arch != 90)
    for name, head_dim in (("backward D 128", 128), ("backward D 256", 256)):
        yield BackwardCase(
            name,
            half,
            head_dim,
            _sizes(_TILES["dq"][head_dim][-1]),
            _sizes(_TILES["dkv"][head_dim][0]),
            archs=not_hopper,
        )
    for head_dim, dtype in ((64, bfloat), (128, bfloat), (256, bfloat), (128, single), (256, single)):
        size = tile_size(CallSpec("cuda", dtype, head_dim, head_dim, HEADS, HEADS))
        tile, group = (size, size, DYNAMIC), "fp32" if dtype == single else f"D {head_dim}"
        yield BackwardCase(f"backward {group}", dtype, head_dim, tile, tile, dynamic=True)
    dq, dkv = ([_sizes(tile, split=2) for tile in table[64]] for table in (_TILES["dq"], _TILES["dkv"]))
    yield BackwardCase("backward D 64", bfloat, 40, dq[0], dkv[0], kv_heads=2, slab=1)
    yield BackwardCase("backward options", bfloat, 64, dq[1], dkv[1], options=True, slab=8)
    yield BackwardCase("backward dropout", bfloat, 64, dq[1], dkv[1], slab=8, options=True, dropout=True)
    dq, dkv = ([_sizes(tile, split=2) for tile in table[128]] for table in (_TILES["dq"], _TILES["dkv"]))
    yield BackwardCase("backward D 128", half, 80, dq[1], dkv[1], value_dim=72, slab=8)
    yield BackwardCase("backward options", half, 128, dq[2], dkv[0], options=True, slab=8)
    yield BackwardCase("backward dropout", bfloat, 128, dq[0], dkv[0], dropout=True)


def _sizes(tile: Any, split: int = 0) -> tuple[int, int, KernelConfig]:
    return tile.rows, tile.columns, KernelConfig(tile.num_warps, tile.num_stages, split_tiles=split)


def hopper_backward_launches() -> Iterator[tuple[str, Recorded]]:
    """Name and launch of each form of the one-pass kernel: both tile sizes, a padded head dimension, softcaps."""
    bfloat, half = torch.bfloat16, torch.float16
    forms = (
        (128, bfloat, 0.0),
        (128, half, 0.0),
        (80, bfloat, 0.0),
        (64, half, 0.0),
        (128, bfloat, 5.0),
        (64, half, 5.0),
    )
    for head_dim, dtype, softcap in forms:
        layout = LAYOUTS[64 if head_dim <= 64 else 128]
        rows, columns = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
        keep = columns <= rows + KV_LEN - Q_LEN
        lists = make_backward_lists(build_layout(as_mask(keep.T), KV_LEN, Q_LEN, layout))
        q, out = (torch.empty(1, HEADS, Q_LEN, head_dim, dtype=dtype) for _ in range(2))
        k = torch.empty(1, HEADS // 2, KV_LEN, head_dim, dtype=dtype)
        lse, record = torch.empty(1, HEADS, Q_LEN), Recorded()
        sinks = torch.empty(HEADS) if head_dim == 64 else None
        options, needs = Options(0.1, softcap, sinks=sinks), NeedsGrad(sinks=sinks is not None)
        with mock.patch.object(hopper_backward, "Launch", record.make):
            bound = hopper_backward.bind_backward(q, k, k, out, out, None, lists, options, needs)
            bound(q, k, k, out, lse, out, None, None, sinks)
        name = f"{str(dtype).removeprefix('torch.')} D {head_dim} {layout.block_m}x{layout.block_n}"
        name += " softcap" if softcap else ""
        yield from ((f"{launch.given[0].__name__} {name}", launch) for launch in record.made)


def compile_hopper_backward(name: str, launch: Recorded) -> Compiled:
    """Compile one of them for sm_90."""
    made = assemble(launch.source(90), 90, {"num_warps": launch.options["num_warps"]})
    is_main = name.startswith("backward_kernel")
    return Compiled(
        group="hopper backward", name=name, arch=90, registers=made.registers, spilled=made.spilled,
        shared=made.shared, estimated=0, wgmma=made.wgmma, block_m=KEYS_OF_BLOCK if is_main else 0, resident=1,
        itemsize=2, narrow=made.narrow, kept=made.kept, warnings=made.losses if is_main else [], seconds=made.seconds,
    )  # fmt: skip
