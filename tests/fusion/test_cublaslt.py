"""What cuBLASLt is asked to compute, played out by a library of the same interface; on a GPU see tests/gpu."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stof.fusion.templates import GemmConfig, GemmShape, cublaslt, run
from stof.fusion.templates.config import default, unfit
from stof.fusion.templates.registry import TEMPLATES, Problem

TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8
HALF, FLOAT32, SUMS_IN_FLOAT32 = 2, 0, 68


class Library:
    """cuBLASLt's functions for float16 in host memory; matrices are column by column, handles numbers."""

    def __init__(self) -> None:
        self.made: dict[int, dict[int, int]] = {}
        self.layouts: dict[int, tuple[int, int, int]] = {}
        self.asked = 0
        self.status = 0
        self.found = 1

        self.cublasLtMatmul = self.matmul
        self.cublasLtMatmulAlgoGetHeuristic = self.matmul_algo_get_heuristic
        self.cublasLtMatrixLayoutCreate = self.matrix_layout_create
        self.cublasLtMatmulDescCreate = self.matmul_desc_create
        self.cublasLtMatmulPreferenceCreate = self.matmul_preference_create
        self.cublasLtMatmulDescSetAttribute = self.cublasLtMatmulPreferenceSetAttribute = self.set_attribute
        self.cublasLtMatmulDescDestroy = self.cublasLtMatmulPreferenceDestroy = self.destroy

    def _new(self, to: Any) -> int:
        number = 1 + len(self.layouts) + len(self.made)
        while number in self.made or number in self.layouts:
            number += 1
        ctypes.cast(to, ctypes.POINTER(c_void_p))[0] = number
        return number

    def matmul_desc_create(self, to: Any, compute: c_int, scale: c_int) -> int:
        assert (compute.value, scale.value) == (SUMS_IN_FLOAT32, FLOAT32)
        self.made[self._new(to)] = {TRANSPOSE_A: 0, EPILOGUE: 1, BIAS_POINTER: 0}
        return 0

    def matmul_preference_create(self, to: Any) -> int:
        self.made[self._new(to)] = {}
        return 0

    def set_attribute(self, of: c_void_p, name: c_int, value: Any, size: Any) -> int:
        self.made[of.value or 0][name.value] = int.from_bytes(ctypes.string_at(value, size.value), "little")
        return 0

    def destroy(self, of: c_void_p) -> int:
        del self.made[of.value or 0]
        return 0

    def matrix_layout_create(self, to: Any, dtype: c_int, rows: c_uint64, columns: c_uint64, stride: c_int64) -> int:
        assert dtype.value == HALF
        assert stride.value >= rows.value
        self.layouts[self._new(to)] = (rows.value, columns.value, stride.value)
        return 0

    def matmul_algo_get_heuristic(self, *arguments: Any) -> int:
        self.asked += 1
        ctypes.cast(arguments[9], ctypes.POINTER(c_int))[0] = self.found
        return self.status

    def matmul(
        self, handle: Any, of: c_void_p, alpha: Any, a: Any, of_a: Any, b: Any, of_b: Any, beta: Any,
        c: Any, of_c: Any, d: Any, of_d: Any, *rest: Any,
    ) -> int:  # fmt: skip
        options = self.made[of.value or 0]
        left, right, added = (self.matrix(*pair).astype(np.float32) for pair in ((a, of_a), (b, of_b), (c, of_c)))
        out = (left.T if options[TRANSPOSE_A] else left) @ right + added
        if options[EPILOGUE] == 4:
            out += np.frombuffer(ctypes.string_at(options[BIAS_POINTER], 2 * len(out)), np.float16)[:, None]
        self.matrix(d, of_d)[:] = out
        return self.status

    def matrix(self, at: c_void_p, layout: c_void_p) -> Any:
        rows, columns, stride = self.layouts[layout.value or 0]
        values = (ctypes.c_uint16 * (stride * (columns - 1) + rows)).from_address(at.value or 0)
        flat = np.frombuffer(values, np.float16)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (2, 2 * stride))


class _Anything:
    """Stands for CUDA's device and stream where there is none."""

    cuda_stream = 7

    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def install(patch: pytest.MonkeyPatch) -> Library:
    made = Library()
    patch.setattr(cublaslt, "library", lambda: made)
    patch.setattr(torch.cuda, "device", _Anything)
    patch.setattr(torch.cuda, "current_stream", _Anything)
    patch.setattr(torch.cuda, "current_blas_handle", lambda: 5)
    cublaslt._plan.cache_clear()
    return made


def rows_of(generator: torch.Generator, rows: int, columns: int, wider: int) -> Tensor:
    """Rows that lie further apart than they are long."""
    return torch.randn(rows, columns + wider, generator=generator).half()[:, :columns]


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 3),
    wider=st.tuples(*[st.integers(0, 3)] * 3),
    transposed=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_product_and_its_sum(
    sizes: tuple[int, int, int], wider: tuple[int, int, int], transposed: bool, biased: bool, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        library = install(patch)
        (m, n, k), generator = sizes, torch.Generator().manual_seed(seed)
        x, residual = rows_of(generator, m, k, wider[0]), rows_of(generator, m, n, wider[1])
        weight = rows_of(generator, k, n, wider[2]).t() if transposed else rows_of(generator, n, k, wider[2])
        bias = torch.randn(n, generator=generator).half() if biased else None
        expected = x.double() @ weight.double().t() + residual.double() + (0 if bias is None else bias.double())
        before = residual.clone()
        for _ in range(2):
            out = torch.full((m, n), torch.nan, dtype=torch.float16)
            cublaslt.add_product(x, weight, bias, residual, out)
            torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=2e-3)
            assert library.made == {}  # descriptions are destroyed
        assert torch.equal(residual, before)


def test_equal_calls_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch)
    x, weight, residual = torch.ones(4, 8).half(), torch.ones(6, 8).half(), torch.ones(4, 6).half()
    out = torch.empty_like(residual)
    for _ in range(3):
        cublaslt.add_product(x, weight, None, residual, out)
    assert (library.asked, len(library.layouts)) == (1, 4)
    cublaslt.add_product(x[:3], weight, None, residual[:3], out[:3])
    assert library.asked == 2


@pytest.mark.parametrize(("status", "found", "words"), [(15, 1, "status 15"), (0, 0, "found nothing")])
def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch, status: int, found: int, words: str) -> None:
    library = install(monkeypatch)
    library.status, library.found = status, found
    residual = torch.ones(4, 6).half()
    with pytest.raises(cublaslt.CublasLtError, match=words):
        cublaslt.add_product(torch.ones(4, 8).half(), torch.ones(6, 8).half(), None, residual, residual.clone())
    assert library.made == {}


def test_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GemmShape("linear", 4096, 2048, 8192, residual=True)
    config = GemmConfig.parse("cublaslt")
    assert str(config) == "cublaslt"

    def why(shape: GemmShape, dtype: torch.dtype = torch.float16) -> str:
        return "; ".join(unfit(config, shape, dtype, (9, 0)))

    monkeypatch.setattr(cublaslt, "library", lambda: None)
    assert "no cuBLASLt" in why(shape)
    assert str(default(shape, torch.float16, (9, 0), 132)) == "128x128x64,6s,pingpong"
    install(monkeypatch)
    assert why(shape) == ""
    assert default(shape, torch.float16, (8, 0), 108) == config
    assert why(GemmShape("linear_norm", 4096, 2048, 8192, norm="layer", residual=True)) == ""
    for other in (
        GemmShape("linear", 4096, 2048, 8192),
        GemmShape("linear", 4096, 2048, 8192, "relu", residual=True),
        GemmShape("gated_linear", 4096, 2048, 8192, residual=True),
        GemmShape("rms_linear", 4096, 2048, 8192, norm="rms"),
        GemmShape("linear", 4096, 2048, 8191, residual=True, aligned=False),
    ):
        assert why(other)
        assert default(other, torch.float16, (9, 0), 132) != config
    assert why(shape, torch.float32)
    # Few rows are our kernels'.
    assert default(GemmShape("linear", 64, 2048, 8192, residual=True), torch.float16, (9, 0), 132) != config


def test_by_rule_it_is_as_fast_as_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    linear = next(template for template in TEMPLATES if template.name == "linear")
    problem = Problem(GemmShape("linear", 4096, 2048, 8192, residual=True), torch.float16, torch.device("cuda"))
    properties = type("Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert linear.speed(problem) == 1.0
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    assert linear.speed(problem) == linear.share < 1.0


def test_the_operator_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    x, weight, residual = torch.ones(2, 16, 8).half(), torch.ones(24, 8).half(), torch.ones(2, 16, 24).half()
    product = run.product("linear", x, weight, None, residual, "none")
    out = run.compute(product, GemmConfig.parse("cublaslt"))
    assert out.shape == (2, 16, 24)
    assert bool((out == 9).all())
