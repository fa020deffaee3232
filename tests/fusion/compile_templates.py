"""Compile the template kernels for GPUs that are not there, and print what each one takes of them.

    PYTHONPATH=.venv/triton-3.6 python -m tests.fusion.compile_templates [--json] [--all] [--only TEXT] [--arch 90]

Runs under whichever Triton is imported first. Arguments are those of the templates' own launching code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from stof.fusion.templates import launch
from stof.fusion.templates.candidates import configs
from stof.fusion.templates.gemm_config import ROW_SCALED, GemmConfig, GemmShape
from stof.fusion.templates.hopper import cooperative, pingpong
from stof.fusion.templates.launch import GemmCall, Rotary
from stof.fusion.templates.norms import Norm
from stof.fusion.templates.triton import gemm, row_norm
from tests.kernels.assemble import ARCHS, assemble

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
_CAPABILITY = {80: (8, 0), 89: (8, 9), 90: (9, 0), 100: (10, 0), 120: (12, 0)}


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes: registers and spilled bytes of a thread, shared memory of a program."""

    kernel: str
    name: str
    config: str
    arch: int
    registers: int
    spilled: int
    shared: int
    estimated: int
    wgmma: bool
    warnings: list[str]


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *values: Any, **named: Any) -> None:
        self.given = values, named


@dataclass(frozen=True)
class Case:
    """One call of a template: its tensors are made by `product_of`."""

    name: str
    shape: GemmShape
    dtype: torch.dtype
    config: GemmConfig
    archs: tuple[int, ...]


_SOME = (
    "128x128x64,5s,pingpong",
    "64x256x64,4s,pingpong",
    "128x256x64,5s,cooperative",
    "256x128x64,6s,cooperative",
    "128x256x64,8w,3s,tile",
    "64x64x64,4w,4s,tile",
    "16x64x128,4w,4s,tile",
    "64x32x128,4w,4s,tile",
)


def cases(every: bool) -> Iterator[Case]:
    """Configurations of every kind for sm_90, all variations in some of them, portable kernels for every GPU.

    Args:
        every: all candidates of a plain and a gated GEMM as well.
    """
    half, bfloat = torch.float16, torch.bfloat16
    plain = GemmShape("linear", 4096, 3072, 768, activation="gelu", bias=True)
    gated = GemmShape("gated_linear", 4096, 8192, 2048, activation="silu")
    added = GemmShape("linear", 4096, 768, 3072, bias=True, residual=True)
    turned = GemmShape("linear", 4096, 3072, 768, activation="gelu_tanh", bias=True, transposed=True)
    after = GemmShape("linear_norm", 128, 768, 3072, norm="layer", scaled=True, bias=True, residual=True)
    normed = GemmShape("norm_linear", 4096, 3072, 2048, norm="rms")
    folded = GemmShape("rms_gated_linear", 4096, 8192, 2048, activation="silu", norm="rms")
    turning = GemmShape("rotary_linear", 4096, 3072, 2048, norm="rms", head_dim=64, turned=2560)
    layer = GemmShape("norm_linear", 100, 768, 768, norm="layer", scaled=True, bias=True)

    def case(name: str, shape: GemmShape, text: str, archs: tuple[int, ...] = (90,), dtype: torch.dtype = half) -> Case:
        return Case(name, shape, dtype, GemmConfig.parse(text), archs)

    for text in map(str, configs(plain, half, (9, 0))) if every else _SOME:
        yield case("gelu", plain, text)
    for text in map(str, configs(gated, half, (9, 0))) if every else (_SOME[0], _SOME[3], _SOME[4]):
        yield case("swiglu", gated, text)
    for text in (_SOME[0], _SOME[2]):
        yield case("residual", added, text, dtype=bfloat)
        yield case("transposed", turned, text)
    for shape, name in ((plain, "gelu"), (added, "residual"), (turned, "transposed")):
        yield case(name, shape, "128x192x64,5s,cooperative")
        yield case(name, shape, "192x128x64,5s,cooperative")
    yield case("row scale", normed, _SOME[0])
    for text in (_SOME[0], _SOME[1]):
        yield case("rotary", turning, text)
        yield case("rotary plain", replace(turning, norm="", head_dim=128), text, dtype=bfloat)
    yield case("rotary", turning, "64x64x64,4w,4s,tile,split4", ARCHS)
    yield case("rotary", replace(turning, head_dim=128), "128x128x64,8w,3s,tile", (80, 90))
    for text in (_SOME[0], _SOME[3], "128x256x64,5s,cooperative"):
        yield case("row scale swiglu", folded, text)
    yield case("row scale swiglu", folded, "64x64x64,4w,4s,tile", ARCHS)
    yield case("residual", added, "64x64x64,4w,4s,tile,split4", ARCHS, bfloat)
    for text in ("64x64x128,4w,3s,tile,split5", "64x64x64,4w,4s,tile"):
        yield case("norm after", after, text, ARCHS)
        yield case("bare norm after", replace(after, norm="rms", scaled=False, bias=False, residual=False), text)
    yield case("swiglu", gated, "64x64x64,4w,4s,tile,split4", (80, 90))
    yield case("transposed", turned, "64x64x64,4w,4s,tile,split4")
    yield case("transposed", replace(turned, m=128), "64x32x128,4w,4s,tile")
    yield case("layer norm", layer, "64x64x64,4w,2s,tile", (80, 90))
    yield case("gelu", plain, "64x64x32,4w,3s,tile", (80,), torch.float32)


def product_of(case: Case) -> GemmCall:
    """Tensors of the case's shape; nothing reads their values."""
    shape, dtype = case.shape, case.dtype
    rows = shape.n * (2 if shape.gated else 1)
    weight = (
        torch.empty(shape.k, rows, dtype=dtype).t() if shape.transposed else torch.empty(rows, shape.k, dtype=dtype)
    )
    norm = norm_of(case, shape.k) if shape.template == "norm_linear" else None
    norm = Norm("rms", None, None, 1e-5) if shape.template in ROW_SCALED and shape.norm else norm
    angles = torch.empty(shape.m, shape.head_dim, dtype=dtype)
    return launch.gemm_call(
        shape.template,
        torch.empty(shape.m, shape.k, dtype=dtype),
        weight,
        torch.empty(rows, dtype=dtype) if shape.bias else None,
        torch.empty(shape.m, shape.n, dtype=dtype) if shape.residual else None,
        shape.activation,
        norm,
        torch.empty(shape.m) if shape.template in ROW_SCALED and shape.norm else None,
        Rotary(angles, angles, shape.turned, shape.head_dim) if shape.head_dim else None,
    )


def norm_of(case: Case, width: int) -> Norm:
    """The norm next to a GEMM."""
    vector = torch.empty(width, dtype=case.dtype) if case.shape.scaled else None
    return Norm(case.shape.norm, vector, vector if case.shape.norm == "layer" else None, 1e-5)


def recorded(case: Case) -> list[Recorder]:
    """What the launching code passes on: a GEMM's kernel, and a norm's before it."""
    names = {
        gemm: ("tile_gemm_kernel",),
        row_norm: ("row_norm_kernel", "merged_norm_kernel", "row_statistics_kernel"),
        pingpong: ("pingpong_gemm_kernel",),
        cooperative: ("cooperative_gemm_kernel",),
    }
    recorders: list[Recorder] = []
    with contextlib.ExitStack() as patched:
        for module, kernels in names.items():
            for name in kernels:
                recorders.append(Recorder(getattr(module, name)))
                patched.enter_context(mock.patch.object(module, name, recorders[-1]))
        if case.shape.template == "linear_norm":
            launch.compute_normed(product_of(case), case.config, norm_of(case, case.shape.n))
        else:
            launch.compute(product_of(case), case.config)
    return [one for one in recorders if one.given is not None]


def source(record: Recorder, arch: int) -> tuple[ASTSource, dict[str, int]]:
    """Specialised as Triton does: 1 is a constant, multiples of 16 are known to be, pointers are aligned.

    But for what the kernel wants no specialisation on.
    """
    assert record.given is not None
    kernel = record.kernel
    values, named = record.given
    options = {name: named[name] for name in ("num_warps", "num_stages", "launch_pdl") if name in named}
    given = dict(zip(kernel.arg_names, values, strict=False))
    given |= {name: value for name, value in named.items() if name not in options}
    # On the CPU where this runs they are for the interpreter.
    given |= {"FAST": True} if "FAST" in given else {}
    given |= {"CHAINED": arch >= 90} if "CHAINED" in given else {}
    constants = {p.name for p in kernel.params if p.is_constexpr}
    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], fixed[place,] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
        else:
            layout = f",{value.layout!r}" if kernel.is_gluon() else ""
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
            continue
        plain = kernel.params[place].do_not_specialize
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not plain):
            attributes[place,] = [["tt.divisibility", 16]]
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    return make(kernel, signature, fixed, attributes), options


def compiled(case: Case, record: Recorder, arch: int) -> Compiled:
    """Compile for one GPU and read the resources off the binary."""
    made, options = source(record, arch)
    kernel = assemble(made, arch, options)
    product = record.kernel.__name__.endswith("gemm_kernel")
    return Compiled(
        kernel=record.kernel.__name__,
        name=f"{case.name} {str(case.dtype).removeprefix('torch.')}",
        config=str(case.config),
        arch=arch,
        registers=kernel.registers,
        spilled=kernel.spilled,
        shared=kernel.shared,
        estimated=case.config.shared_memory(case.shape, case.dtype.itemsize) if product else 0,
        wgmma=kernel.wgmma,
        warnings=kernel.losses if record.kernel.is_gluon() else kernel.confused,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--all", action="store_true", help="every candidate")
    parser.add_argument("--only", default="", help="kernels, names or configurations that contain this")
    parser.add_argument("--arch", type=int, help="for this GPU alone")
    given = parser.parse_args()
    assert "TRITON_INTERPRET" not in os.environ, "kernels must be compiled, not interpreted"
    for case in cases(given.all):
        for record in recorded(case):
            if given.only not in f"{record.kernel.__name__} {case.name} {case.config}":
                continue
            for arch in case.archs if given.arch is None else {given.arch} & {*case.archs}:
                one = compiled(case, record, arch)
                if given.json:
                    print(json.dumps({"triton": triton.__version__, **asdict(one)}), flush=True)
                else:
                    print(
                        f"sm_{arch:<3} {one.registers:>3} registers {one.spilled:>4} spilled {one.shared:>6} shared "
                        f"({one.estimated:>6} counted) {'wgmma' if one.wgmma else '-':>5}  {one.kernel} {one.name} "
                        f"{one.config}",
                        *one.warnings,
                        sep="\n",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
