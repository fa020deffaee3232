"""The template kernels against float64: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof.fusion.templates import launch, reference
from stof.fusion.templates.folded_weights import folded
from stof.fusion.templates.gemm_config import ACTIVATIONS, GemmConfig, config_problems
from stof.fusion.templates.norms import Norm, normalise
from stof.testing.oracle import error_budget
from tests.examples import examples

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALVES = DTYPES[:2]
TILE, SPLIT = "32x32x16,4w,2s,tile", "16x32x16,4w,2s,tile,split3"

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # NumPy warns of activations that saturate; wrong results fail anyway.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


def tensors(
    m: int, n: int, k: int, dtype: torch.dtype, *, gated: bool = False, transposed: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """x, weight, bias, residual and a norm's vectors, standard normal but for the weight's scale."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * n if gated else n
    shapes = {"x": (m, k), "weight": (rows, k), "bias": (rows,), "residual": (m, n), "scale": (k,), "shift": (k,)}
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    made["weight"] /= k**0.5
    made = {name: t.to(DEVICE, dtype) for name, t in made.items()}
    if transposed:
        made["weight"] = made["weight"].t().contiguous().t()
    return made


def check(product: launch.GemmCall, text: str, twin: Callable[..., Any]) -> Tensor:
    """Compute, and compare with the float64 reference; the bound is the error of the reference in the same dtype."""
    config = GemmConfig.parse(text)
    capability = torch.cuda.get_device_capability() if ON_GPU else (9, 0)
    assert not config_problems(config, product.shape, product.x.dtype, capability)
    out = launch.compute(product, config)
    dtype = product.x.dtype
    expected = twin(lambda t: t.double())
    budget = error_budget(twin(lambda t: t), expected, dtype)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert out.is_contiguous()
    error = float((out.double() - expected).abs().nan_to_num(torch.inf).max())
    assert error <= budget.allowed, f"off by {error:.2e}, allowed {budget.allowed:.2e}, PyTorch {budget.plain:.2e}"
    return out


def check_linear(
    text: str, t: dict[str, Tensor], activation: str = "none", bias: bool = True, residual: bool = False
) -> Tensor:
    b, r = t["bias"] if bias else None, t["residual"] if residual else None
    product = launch.gemm_call("linear", t["x"], t["weight"], b, r, activation)

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        return reference.linear(
            f(t["x"]), f(t["weight"]), None if b is None else f(b), None if r is None else f(r), activation
        )

    return check(product, text, twin)


def check_gated(text: str, t: dict[str, Tensor], activation: str = "silu", bias: bool = False) -> Tensor:
    b = t["bias"] if bias else None
    product = launch.gemm_call("gated_linear", t["x"], t["weight"], b, None, activation)

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        return reference.gated_linear(f(t["x"]), f(t["weight"]), None if b is None else f(b), activation)

    return check(product, text, twin)


def check_normed(text: str, t: dict[str, Tensor], kind: str, scaled: bool, activation: str = "none") -> Tensor:
    norm = Norm(kind, t["scale"] if scaled else None, t["shift"] if scaled and kind == "layer" else None, 1e-5)
    product = launch.gemm_call("norm_linear", t["x"], t["weight"], t["bias"], None, activation, norm)

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        scale, shift = None if norm.weight is None else f(norm.weight), None if norm.bias is None else f(norm.bias)
        return reference.norm_linear(f(t["x"]), scale, shift, f(t["weight"]), f(t["bias"]), kind, 1e-5, activation)

    return check(product, text, twin)


def check_folded(text: str, t: dict[str, Tensor], gated: bool, activation: str = "silu") -> Tensor:
    """An RMSNorm and a GEMM, folded, against both apart; bounded by the error of both apart."""
    name, twin_of = ("rms_gated_linear", reference.gated_linear) if gated else ("rms_linear", _linear)
    whole = folded(t["weight"], t["scale"])
    assert whole is not None
    rstd = launch.row_factors(t["x"], 1e-5)
    product = launch.gemm_call(name, t["x"], whole, t["bias"], None, activation, Norm("rms", None, None, 0.0), rstd)

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        normed = reference.normalised(f(t["x"]), f(t["scale"]), None, "rms", 1e-5)
        return twin_of(normed, f(t["weight"]), f(t["bias"]), activation)

    return check(product, text, twin)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    return reference.linear(x, weight, bias, None, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    check_linear(TILE, tensors(37, 41, 50, dtype), activation, residual=True)


@examples(25)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    split=st.booleans(),
)
def test_tiles_of_any_shape(
    m: int, n: int, k: int, dtype: torch.dtype, transposed: bool, bias: bool, residual: bool, split: bool
) -> None:
    t = tensors(m, n, k, dtype, transposed=transposed)
    check_linear(SPLIT if split and k >= 48 else TILE, t, "gelu", bias, residual)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("text", [TILE, SPLIT])
def test_tiles_without_a_rest(text: str, transposed: bool) -> None:
    """Columns and depth are multiples of a tile's: nothing is clamped or masked."""
    check_linear(text, tensors(20, 64, 96, torch.float16, transposed=transposed), residual=True)
    check_gated(text, tensors(20, 64, 96, torch.float16, gated=True, transposed=transposed))
    check_normed(text, tensors(20, 64, 96, torch.float16, transposed=transposed), "layer", True)


@pytest.mark.parametrize("text", ["32x64x16,4w,2s,tile", "16x32x16,4w,2s,tile,split2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gated(text: str, transposed: bool) -> None:
    check_gated(text, tensors(45, 40, 72, torch.float16, gated=True, transposed=transposed), bias=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("text", [TILE, SPLIT])
def test_norm_before(kind: str, scaled: bool, text: str) -> None:
    for dtype in DTYPES:
        check_normed(text, tensors(33, 40, 72, dtype), kind, scaled, "relu")


@examples(12)
@given(
    m=st.integers(1, 50),
    n=st.integers(1, 40),
    k=st.integers(48, 90),
    dtype=st.sampled_from(HALVES),
    gated=st.booleans(),
    transposed=st.booleans(),
    text=st.sampled_from([TILE, SPLIT]),
    size=st.sampled_from([1e-2, 1.0, 300.0]),
)
def test_folded_norms(
    m: int, n: int, k: int, dtype: torch.dtype, gated: bool, transposed: bool, text: str, size: float
) -> None:
    """Rows of any size: GEMMs of rows that are not normalized yet go up to what float32 holds."""
    t = tensors(m, n, k, dtype, gated=gated, transposed=transposed)
    t["x"] *= size
    check_folded(text, t, gated)


def check_rotary(text: str, t: dict[str, Tensor], head_dim: int, turned: int, positions: int, normed: bool) -> Tensor:
    """A GEMM and the rotation of its heads, with a folded norm before it or not, against all of them apart."""
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(positions, head_dim, generator=generator, dtype=torch.float64)
    cos, sin = (table.to(DEVICE, t["x"].dtype) for table in (angles.cos(), angles.sin()))
    whole = folded(t["weight"], t["scale"]) if normed else t["weight"]
    assert whole is not None
    rstd = launch.row_factors(t["x"], 1e-5) if normed else None
    norm = Norm("rms", None, None, 0.0) if normed else None
    product = launch.gemm_call(
        "rotary_linear", t["x"], whole, t["bias"], None, "none", norm, rstd, launch.Rotary(cos, sin, turned, head_dim)
    )

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        x = f(t["x"])
        return reference.rotary_linear(
            x, reference.row_factors(x, 1e-5) if normed else None, f(t["scale"]) if normed else None, f(t["weight"]),
            f(t["bias"]), f(cos), f(sin), turned, head_dim,
        )  # fmt: skip

    return check(product, text, twin)


@examples(12)
@given(
    m=st.integers(1, 50),
    heads=st.integers(1, 4),
    rest=st.integers(0, 3),
    positions=st.integers(1, 60),
    dtype=st.sampled_from(HALVES),
    head_dim=st.sampled_from([16, 32]),
    text=st.sampled_from([TILE, "16x32x16,4w,2s,tile,split3"]),
    normed=st.booleans(),
)
def test_rotated_heads(
    m: int, heads: int, rest: int, positions: int, dtype: torch.dtype, head_dim: int, text: str, normed: bool
) -> None:
    t = tensors(m, 32 * heads + 8 * rest, 72, dtype)
    check_rotary(text, t, head_dim, 32 * heads, positions, normed)


def test_norm_of_rows_far_from_zero() -> None:
    """The variance is of differences from the mean, not a difference of squares."""
    t = tensors(9, 16, 64, torch.float32)
    t["x"] += 1000.0
    check_normed(TILE, t, "layer", True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_normalise(kind: str, dtype: torch.dtype) -> None:
    t = tensors(7, 1, 300, dtype)
    for scale, shift in ((None, None), (t["scale"], t["shift"])):
        out = normalise(t["x"], Norm(kind, scale, shift, 1e-5))
        wide = [None if v is None else v.double() for v in (scale, shift)]
        expected = reference.normalised(t["x"].double(), *wide, kind, 1e-5)
        budget = error_budget(reference.normalised(t["x"], scale, shift, kind, 1e-5), expected, dtype)
        assert float((out.double() - expected).abs().nan_to_num(torch.inf).max()) <= budget.allowed


@examples(20)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(48, 100),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["rms", "layer"]),
    scaled=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    text=st.sampled_from([TILE, SPLIT, "16x16x16,4w,2s,tile,split2"]),
)
def test_norm_after(
    m: int, n: int, k: int, dtype: torch.dtype, kind: str, scaled: bool, bias: bool, residual: bool, text: str
) -> None:
    t = tensors(m, n, k, dtype)
    b, r = t["bias"] if bias else None, t["residual"] if residual else None
    vectors = (t["bias"], t["residual"][0]) if scaled else (None, None)
    product = launch.gemm_call("linear_norm", t["x"], t["weight"], b, r, "none")
    found = launch.compute_normed(product, GemmConfig.parse(text), Norm(kind, *vectors, 1e-5))
    given = [t["x"], t["weight"], b, r, *vectors]
    plain = reference.linear_norm(*given, kind, 1e-5)
    exact = reference.linear_norm(*(None if one is None else one.double() for one in given), kind, 1e-5)
    # The norm of the sum as it was rounded; a row of few values may have a small deviation, which magnifies rounding.
    wide = [None if v is None else v.double() for v in vectors]
    exact = exact[0], reference.normalised(found[0].double(), *wide, kind, 1e-5)
    again = plain[0], reference.normalised(found[0], *vectors, kind, 1e-5)
    for out, usual, expected in zip(found, again, exact, strict=True):
        assert out.dtype == dtype
        assert out.is_contiguous()
        error = float((out.double() - expected).abs().nan_to_num(torch.inf).max())
        assert error <= error_budget(usual, expected, dtype).allowed


def test_partial_sums_of_strided_rows() -> None:
    """A residual whose rows are further apart than they are long, three dimensions."""
    t = tensors(24, 40, 64, torch.float16)
    residual = torch.full((2, 12, 80), torch.nan, device=DEVICE, dtype=torch.float16)[..., :40]
    residual.copy_(t["residual"].view(2, 12, 40))
    norm = Norm("layer", None, None, 1e-5)
    product = launch.gemm_call("linear_norm", t["x"].view(2, 12, 64), t["weight"], t["bias"], residual, "none")
    for text in (TILE, SPLIT):
        h, normed = launch.compute_normed(product, GemmConfig.parse(text), norm)
        expected = reference.linear_norm(product.x, t["weight"], t["bias"], t["residual"], None, None, "layer", 1e-5)
        torch.testing.assert_close(h, expected[0].view(2, 12, 40), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(normed, expected[1].view(2, 12, 40), atol=4e-3, rtol=4e-3)


def test_strides() -> None:
    """Rows further apart than they are long, three dimensions, and columns apart."""
    t = tensors(24, 40, 64, torch.float16)
    wide = torch.full((24, 80), torch.nan, device=DEVICE, dtype=torch.float16)
    wide[:, :64] = t["x"]
    plain = check_linear(TILE, t, residual=True)
    for x in (wide[:, :64], wide[:, :64].view(2, 12, 64), t["x"].t().contiguous().t()):
        lead = x.shape[:-1]
        residual = t["residual"].t().contiguous().t().view(*lead, 40)
        for text in (TILE, SPLIT):
            product = launch.gemm_call("linear", x, t["weight"], t["bias"], residual, "none")
            out = launch.compute(product, GemmConfig.parse(text))
            assert out.shape == (*lead, 40)
            torch.testing.assert_close(out.view(24, 40), plain, atol=2e-3, rtol=2e-3)


def test_equal_calls_give_equal_bits() -> None:
    t = tensors(40, 33, 96, torch.float16)
    assert torch.equal(check_linear(SPLIT, t), check_linear(SPLIT, t))
