"""Compile one kernel for a GPU that is not there, and read what the assembler says of it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from stof.kernels.quantization import FP8
from stof.runtime.cache_keys import COMPILE_OPTIONS
from stof.runtime.launch import TensorMap

ARCHS = (80, 89, 90, 100, 120)
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_TYPES[FP8] = "fp8e4nv"


@dataclass
class Recorded:
    """Stands in for `Launch`: keeps what a kernel would be launched with."""

    made: list[Recorded] = field(default_factory=list)
    given: tuple[Any, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    maps: tuple[TensorMap | None, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, *given: Any, **options: Any) -> Recorded:
        one = Recorded(given=given, options=options)
        self.made.append(one)
        return one

    def with_tensors(self, tensors: tuple[Any, ...]) -> Recorded:
        """As `Launch.with_tensors`; nothing is launched with them."""
        del tensors
        return self

    def __call__(self, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> None:
        windows = self.options.get("windows", ())
        self.tensors, self.maps = tensors, tuple(w and w.at(base) for w, base in zip(windows, bases, strict=True))

    def source(self, arch: int) -> ASTSource:
        """Specialised as Triton does: 1 is a constant, multiples of 16 are known to be, pointers are aligned."""
        kernel, _grid, static, numbers, constants = self.given
        values = (*self.maps, *self.tensors, *static, *numbers)
        signature: dict[str, Any] = {}
        fixed: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}

        def specialise(value: Any, path: tuple[int, ...]) -> Any:
            if isinstance(value, tuple) and not isinstance(value, TensorMap):
                return type(value)(*[specialise(field, (*path, place)) for place, field in enumerate(value)])
            if path[0] >= len(values) or value is None or (type(value) is int and value == 1):
                fixed[path] = value
                return "constexpr"
            number = value.data_ptr() if isinstance(value, Tensor) else value
            if type(number) is int and number % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            if isinstance(value, TensorMap):
                return f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
            if isinstance(value, Tensor):
                return "*" + _TYPES[value.dtype]
            return "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"

        for place, (name, value) in enumerate(zip(kernel.arg_names, (*values, *constants), strict=True)):
            # On the CPU where this runs, kernels take no turns.
            value = arch >= 90 if name in ("USE_PDL", "CHAINED") else value
            signature[name] = specialise(value, (place,))
        return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, fixed, attributes)


@dataclass(frozen=True)
class Assembled:
    """What a kernel takes: registers and spilled bytes of a thread, shared memory of a program.

    Kernels have no arrays of their own, so the stack is what was spilled. `losses` is what the assembler says of losses
    of speed, such as wgmma instructions that wait for each other, and barriers of the hardware that are taken twice;
    `stalls` are loops that lost their pipeline; `confused` are matrix descriptors that the assembler may take for each
    other; `narrow` counts reads of 2 bytes, and copies of less than 16 to shared memory; `kept` the predicates that are
    moved to registers, of kernels whose warps trade these.
    """

    registers: int
    spilled: int
    shared: int
    wgmma: bool
    losses: list[str]
    stalls: list[str]
    confused: list[str]
    narrow: int
    kept: int
    seconds: float


def assemble(source: ASTSource, arch: int, options: dict[str, Any]) -> Assembled:
    """Compile anew, whatever the cache holds: the log of the one run of the assembler tells all, and is not kept."""
    log = io.StringIO()
    start = time.perf_counter()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options | COMPILE_OPTIONS)
    seconds = time.perf_counter() - start
    said, ptx = log.getvalue(), kernel.asm["ptx"]
    used, stack = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes stack frame", said)
    assert used is not None, said
    assert stack is not None, said
    return Assembled(
        registers=int(used[1]),
        spilled=int(stack[1]),
        shared=kernel.metadata.shared,
        wgmma="wgmma.mma_async" in ptx,
        losses=[line for line in said.splitlines() if "(C75" in line] + _clashes(ptx),
        stalls=_stalls(kernel.asm["ttgir"], kernel.metadata.num_stages),
        confused=_confused(ptx),
        narrow=len(re.findall(r"\bld\.global(?:\.\w+|::\w+)*\.[bu]16\b", ptx)) + _narrow_copies(ptx),
        kept=kernel.asm["sass"].count("P2R ") if "setmaxnreg" in ptx else 0,
        seconds=round(seconds, 2),
    )


def _stalls(ttgir: str, num_stages: int) -> list[str]:
    """Loops of three stages that wait for copies as soon as they have started them: Triton could not pipeline them."""
    stalls = num_stages > 2 and re.search(r"async_wait %.*num = 0", ttgir)
    return ["a loop is not pipelined"] * bool(stalls)


def _confused(ptx: str) -> list[str]:
    """Operands of wgmma at one shared memory address with different descriptors: ptxas 12.8 may confuse them."""
    made = {
        name: (base, (int(constant) & (2**64 - 1)) >> 32)
        for name, base, constant in re.findall(r"\b(?:or|add)\.[bs]64\s+(%rd\d+), (%rd\d+), (-?\d+);", ptx)
    }
    used = set(re.findall(r"%rd\d+", " ".join(re.findall(r"wgmma\.mma_async[^\n]*", ptx))))
    kinds: dict[str, set[int]] = {}
    for base, kind in (made[name] for name in used & made.keys()):
        kinds.setdefault(base, set()).add(kind)
    return ["descriptors of operands at one address differ"] * any(len(found) > 1 for found in kinds.values())


def _narrow_copies(ptx: str) -> int:
    sizes = re.findall(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]*\s+\[[^]]*\], \[[^]]*\], (\w+)", ptx)
    return sum(int(size, 0) < 16 for size in sizes)


def _clashes(ptx: str) -> list[str]:
    """Barriers where now these, now those threads meet: Triton's are for 128, the kernel's own for 256."""
    threads: dict[str, set[str]] = {}
    meeting = r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red\.\w+\.\w+\s+%?\w+,)\s+(\d+)(?:,\s*(\d+))?"
    for number, count in re.findall(meeting, ptx):
        threads.setdefault(number, set()).add(count)
    return [f"barrier {number} is for {sorted(found)} threads" for number, found in threads.items() if len(found) > 1]


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes: registers and spilled bytes of a thread, shared memory of a program.

    `estimated` is the selector's figure for the shared memory, 0 where it has none; `block_m` are the rows of a tile,
    `resident` the Hopper kernel's thread blocks that a multiprocessor has to hold at once; `narrow` and `kept` are as
    above; `warnings` are loops that lost their pipeline, and for kernels that place wgmma and barriers by hand what the
    assembler says of its own losses of speed, and barriers of the hardware that are taken twice.
    """

    group: str
    name: str
    arch: int
    registers: int
    spilled: int
    shared: int
    estimated: int
    wgmma: bool
    block_m: int
    resident: int
    itemsize: int
    narrow: int
    kept: int
    warnings: list[str]
    seconds: float


def report(one: Compiled, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"triton": triton.__version__, **asdict(one)}), flush=True)
        return
    print(
        f"{one.arch:>4}  {one.registers:>9}  {one.spilled:>7}  {one.shared:>7}  {one.estimated:>8}  "
        f"{'yes' if one.wgmma else 'no':>5}  {one.seconds:>7.1f}  [{one.group}] {one.name}",
        *one.warnings,
        sep="\n",
        flush=True,
    )
