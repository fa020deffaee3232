"""The variant in TileLang, which is not installed here: its program is played out by a stand-in for the language."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stof.fusion.measure.parallel_compile import compile_candidates
from stof.fusion.templates import gemm_config, launch, reference, tilelang_gemm
from stof.fusion.templates.candidates import configs
from stof.fusion.templates.gemm_config import ACTIVATIONS, GemmConfig, GemmShape, config_problems
from tests.fusion.test_segment_timer import segment

TEXT = "16x16x16,4w,2s,tilelang"


class Operand:
    """A tensor of the program's: single values, zero where there are none, and places that tiles are copied from."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, at: Any) -> Any:
        return Place(self.tensor, at if isinstance(at, tuple) else (at,))


class Place:
    """An element, or the corner of a tile."""

    def __init__(self, tensor: Tensor, at: tuple[int, ...]) -> None:
        self.tensor, self.at = tensor, at

    def __radd__(self, other: float) -> float:
        inside = all(i < size for i, size in zip(self.at, self.tensor.shape, strict=True))
        return other + (float(self.tensor[self.at]) if inside else 0.0)

    def part(self, shape: torch.Size) -> Tensor:
        return self.tensor[tuple(slice(i, i + size) for i, size in zip(self.at, shape, strict=True))]


def copy(source: Any, target: Any) -> None:
    """Into a tile, with zeros beyond the operand; or out of one, as far as there is room."""
    if isinstance(target, Tensor):
        part = source.part(target.shape)
        target.zero_()[: part.shape[0], : part.shape[1]] = part
    else:
        part = target.part(source.shape)
        part.copy_(source[: part.shape[0], : part.shape[1]])


class Language:
    """What the program uses of `tilelang.language`, one tile after the other in float32."""

    def __init__(self) -> None:
        self.place, self.tiles = (0, 0), (1, 1)
        self.rows, self.threads = 0, 0

    def dynamic(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name)

    def Tensor(self, shape: Any, dtype: str) -> None:  # noqa: N802 (TileLang's names)
        """An annotation."""

    def ceildiv(self, a: Any, b: int) -> int:
        return -(-(self.rows if isinstance(a, SimpleNamespace) else a) // b)

    def prim_func(self, function: Callable[..., None]) -> Callable[..., None]:
        def each(*tensors: Tensor) -> None:
            self.rows, self.tiles = tensors[0].shape[0], (1, 1)
            self.place = (0, 0)
            function(*map(Operand, tensors))  # tells how many tiles there are
            for place in itertools.product(*map(range, self.tiles)):
                self.place = place
                function(*map(Operand, tensors))

        return each

    @contextmanager
    def Kernel(self, *tiles: int, threads: int) -> Iterator[tuple[int, int]]:  # noqa: N802
        self.tiles, self.threads = tiles, threads
        yield self.place

    def alloc_shared(self, shape: tuple[int, int], dtype: str) -> Tensor:
        return torch.full(shape, torch.nan, dtype=getattr(torch, dtype))

    def alloc_fragment(self, shape: tuple[int, int], dtype: str) -> Tensor:
        return torch.full(shape, torch.nan, dtype=getattr(torch, dtype))

    def use_swizzle(self, panel_size: int) -> None:
        """An order of tiles."""

    def clear(self, tile: Tensor) -> None:
        tile.zero_()

    def Pipelined(self, steps: int, num_stages: int) -> range:  # noqa: N802
        return range(steps)

    def Parallel(self, *sizes: int) -> Iterator[tuple[int, ...]]:  # noqa: N802
        return itertools.product(*map(range, sizes))

    def copy(self, source: Any, target: Any) -> None:
        copy(source, target)

    def gemm(self, a: Tensor, b: Tensor, acc: Tensor, transpose_B: bool) -> None:  # noqa: N803
        assert transpose_B
        acc += a.float() @ b.float().T

    def erf(self, x: Tensor) -> Tensor:
        return torch.erf(x)

    def exp2(self, x: Tensor) -> Tensor:
        return torch.exp2(x)

    def if_then_else(self, condition: bool, a: Any, b: Any) -> Any:
        return a if condition else b


@pytest.fixture
def tilelang(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A TileLang whose programs run in PyTorch; what was compiled, in order."""
    compiled: list[Any] = []
    module: Any = ModuleType("tilelang")
    module.language = Language()

    def compile(function: Callable[..., None], target: str) -> Callable[..., None]:
        assert target == "cuda"
        compiled.append(function)
        return function

    module.compile = compile
    monkeypatch.setitem(sys.modules, "tilelang", module)
    monkeypatch.setitem(sys.modules, "tilelang.language", module.language)
    monkeypatch.setattr(gemm_config, "tilelang_installed", lambda: True)
    tilelang_gemm._compiled.cache_clear()
    return compiled


def product(m: int, n: int, k: int, activation: str, bias: bool, residual: bool) -> launch.GemmCall:
    generator = torch.Generator().manual_seed(0)
    x, weight, b, r = (
        torch.randn(size, generator=generator).half() for size in ((m, 2 * k), (n, k), (n,), (m, n))
    )  # fmt: skip
    return launch.gemm_call("linear", x[:, :k], weight, b if bias else None, r if residual else None, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("bias", "residual"), [(True, True), (False, False)])
def test_program(activation: str, bias: bool, residual: bool, tilelang: list[Any]) -> None:
    call = product(21, 40, 40, activation, bias, residual)
    out = launch.compute(call, GemmConfig.parse(TEXT))
    expected = reference.linear(call.x, call.weight, call.bias, call.residual, activation)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    launch.compute(call, GemmConfig.parse(TEXT))
    assert len(tilelang) == 1, "compiled once"


def test_nan_passes_a_relu(tilelang: list[Any]) -> None:
    call = product(3, 8, 8, "relu", False, False)
    call.x[1, 2] = math.nan
    out = launch.compute(call, GemmConfig.parse(TEXT))
    assert out.isnan().any(1).tolist() == [False, True, False]


def test_candidates_where_it_is_installed(tilelang: list[Any]) -> None:
    shape = GemmShape("linear", 4096, 3072, 768, activation="gelu", bias=True)
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert any(one.kind == "tilelang" for one in configs(shape, torch.float16, capability))
        assert not any(one.kind == "tilelang" for one in configs(shape, torch.float32, capability))
    for other in (
        GemmShape("linear", 4096, 3072, 768, transposed=True),
        GemmShape("linear", 4096, 3072, 770, aligned=False),
        GemmShape("gated_linear", 4096, 3072, 768),
        GemmShape("rms_linear", 4096, 3072, 768, norm="rms"),
    ):
        assert not any(one.kind == "tilelang" for one in configs(other, torch.float16, (9, 0)))


def test_without_it() -> None:
    shape = GemmShape("linear", 4096, 3072, 768)
    assert not any(one.kind == "tilelang" for one in configs(shape, torch.float16, (9, 0)))
    (why,) = config_problems(GemmConfig.parse("128x128x64,8w,4s,tilelang"), shape, torch.float16, (9, 0))
    assert "pip install tilelang" in why


def test_its_kernels_are_not_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "stof.fusion.measure.parallel_compile.bound_call", lambda match, inputs, config: lambda: asked.append(config)
    )
    monkeypatch.setattr("stof.fusion.measure.parallel_compile.random_inputs", lambda match: {})
    match = segment(slice(0, 2))
    match = replace(match, problem=replace(match.problem, device=torch.device("cuda", 0)))
    compile_candidates([(match, [TEXT, "64x64x64,4w,3s,tile"])])
    assert asked == ["64x64x64,4w,3s,tile"]
