"""The benchmark's kernel of two chained GEMMs, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.fusion.chained_gemm import CONFIGS, chain
from stof.fusion.templates import reference
from stof.fusion.templates.gemm_config import GemmConfig
from stof.testing.oracle import error_budget
from tests.examples import examples
from tests.fusion.conftest import _as_on_a_gpu

__all__ = ["_as_on_a_gpu"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Operands = list[Tensor | None]


def plain(operands: Operands, activation: str) -> Tensor:
    x, down, down_bias, up, up_bias, residual = operands
    assert x is not None
    assert down is not None
    assert up is not None
    between = reference.linear(x, down, down_bias, None, activation)
    return reference.linear(between, up, up_bias, residual, "none")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
@examples(20)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 50),
    inner=st.integers(1, 40),
    n=st.integers(1, 100),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    activation=st.sampled_from(["none", "gelu", "relu"]),
    biases=st.tuples(st.booleans(), st.booleans()),
    residual=st.booleans(),
    text=st.sampled_from(["16x32x16,4w,2s,tile", "32x16x32,4w,2s,tile,split3"]),
)
def test_kernel(
    m: int, k: int, inner: int, n: int, dtype: torch.dtype, activation: str, biases: tuple[bool, bool], residual: bool,
    text: str,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    sizes = (m, k), (inner, k), (inner,), (n, inner), (n,), (m, n)
    x, down, down_bias, up, up_bias, added = (torch.randn(size, generator=generator) for size in sizes)
    x, down, down_bias, up, up_bias, added = (
        tensor.to(DEVICE, dtype) for tensor in (x, down / k**0.5, down_bias, up / inner**0.5, up_bias, added)
    )
    wide = torch.full((m, 2 * n), torch.nan, dtype=dtype, device=DEVICE)[:, :n].copy_(added)  # rows further apart
    out = chain(
        x, down, down_bias if biases[0] else None, up, up_bias if biases[1] else None, wide if residual else None,
        activation, GemmConfig.parse(text),
    )  # fmt: skip
    operands: Operands = [x, down, down_bias if biases[0] else None, up, up_bias if biases[1] else None,
                          added if residual else None]  # fmt: skip
    expected = plain([None if one is None else one.double() for one in operands], activation)
    budget = error_budget(plain(operands, activation), expected, dtype)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert float((out.double() - expected).abs().nan_to_num(torch.inf).max()) <= budget.allowed


def test_configurations_can_be_read() -> None:
    assert {GemmConfig.parse(text).kind for text in CONFIGS} == {"tile"}
