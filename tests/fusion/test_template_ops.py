"""The templates as operators: schemas and fakes, references on a CPU, errors, configurations as text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.planner.match_rotary import COLUMNS, HEAD_DIMS
from stof.fusion.templates import registry
from stof.fusion.templates.candidates import configs
from stof.fusion.templates.gemm_config import KINDS, GemmConfig, GemmShape, config_problems, default, kind_in
from stof.fusion.templates.operators import (
    gated_linear,
    linear,
    linear_norm,
    norm_linear,
    rms_gated_linear,
    rms_linear,
)

# Kinds of earlier versions: stores, choices and locks may name them.
GONE = ("cublas", "128x128x64,8w,4s,persistent", "128x256x64,8w,3s,persistent,halves", "128x256x64,5s,together")
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def arguments(op: Any) -> tuple[Any, ...]:
    x, weight, bias, residual = drawn(2, 5, 12), drawn(8, 12), drawn(8), drawn(2, 5, 8)
    return {
        linear: (x, weight, bias, residual, "gelu", ""),
        norm_linear: (x, drawn(12), drawn(12), weight, bias, "layer", 1e-5, "relu", ""),
        gated_linear: (x, drawn(16, 12), drawn(16), "silu", ""),
        linear_norm: (x, weight, bias, residual, drawn(8), None, "rms", 1e-6, ""),
        rms_linear: (x, drawn(2, 5).square(), drawn(12), weight, bias, "gelu", ""),
        rms_gated_linear: (x, drawn(2, 5).square(), None, drawn(16, 12), drawn(16), "silu", ""),
    }[op]


OPS = (linear, norm_linear, gated_linear, linear_norm, rms_linear, rms_gated_linear)


@pytest.mark.parametrize("op", OPS)
def test_schema_and_fake(op: Any) -> None:
    torch.library.opcheck(op, arguments(op), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", OPS)
def test_compiled_equals_eager(op: Any) -> None:
    given = arguments(op)
    compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), op(*given))


def test_meaning() -> None:
    """Against the definitions, written out."""
    x, weight, bias, residual, _, _ = arguments(linear)
    plain = x @ weight.T + bias
    torch.testing.assert_close(linear(x, weight, bias, residual, "silu", ""), plain * torch.sigmoid(plain) + residual)
    torch.testing.assert_close(linear(x, weight, None, None, "relu", ""), (x @ weight.T).clamp_min(0))
    exact = 0.5 * plain * (1 + torch.erf(plain / 2**0.5))
    torch.testing.assert_close(linear(x, weight, bias, None, "gelu", ""), exact)
    tanh = 0.5 * plain * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (plain + 0.044715 * plain**3)))
    torch.testing.assert_close(linear(x, weight, bias, None, "gelu_tanh", ""), tanh)

    scale, shift = drawn(12), drawn(12)
    centred = x - x.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale + shift
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    out = norm_linear(x, scale, shift, weight, bias, "layer", 1e-5, "none", "")
    torch.testing.assert_close(out, layer @ weight.T + bias)
    out = norm_linear(x, scale, None, weight, None, "rms", 1e-5, "none", "")
    torch.testing.assert_close(out, (rms * scale) @ weight.T)

    factors = rms[..., :1] / x[..., :1]
    out = rms_linear(x, factors.squeeze(-1), scale, weight, bias, "relu", "")
    torch.testing.assert_close(out, ((rms * scale) @ weight.T + bias).clamp_min(0))

    both = drawn(16, 12)
    normed = rms * scale
    out = rms_gated_linear(x, factors.squeeze(-1), scale, both, None, "silu", "")
    torch.testing.assert_close(out, F.silu(normed @ both[:8].T) * (normed @ both[8:].T))
    gate, up = x @ both[:8].T, x @ both[8:].T
    torch.testing.assert_close(gated_linear(x, both, None, "silu", ""), F.silu(gate) * up)

    h, normed = linear_norm(x, weight, bias, residual, None, None, "rms", 1e-5, "")
    torch.testing.assert_close(h, plain + residual)
    torch.testing.assert_close(normed, h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt())


@pytest.mark.parametrize("n", [8, 0])
@pytest.mark.parametrize("shape", [(0, 12), (3, 0, 12), (12,), (3, 2, 0), (0, 0), (0,)])
def test_any_leading_dimensions_and_empty_tensors(shape: tuple[int, ...], n: int) -> None:
    x, weight, bias, residual = drawn(*shape), drawn(n, shape[-1]), drawn(n), drawn(*shape[:-1], n)
    plain = F.linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias, residual, "none", "64x64x64,4w,4s,tile"), plain + residual)
    assert torch.equal(gated_linear(x, weight, bias, "relu", ""), plain[..., : n // 2].relu() * plain[..., n // 2 :])
    h, normed = linear_norm(x, weight, bias, residual, None, None, "layer", 1e-5, "")
    assert torch.equal(h, plain + residual)
    torch.testing.assert_close(normed, F.layer_norm(h, (n,)))
    before = F.layer_norm(x, x.shape[-1:])
    torch.testing.assert_close(
        norm_linear(x, None, None, weight, bias, "layer", 1e-5, "gelu", ""), F.gelu(F.linear(before, weight, bias))
    )
    factors = torch.ones(x.shape[:-1], dtype=x.dtype)
    assert torch.equal(rms_linear(x, factors, None, weight, bias, "none", ""), plain)


def test_refusals() -> None:
    x, weight, bias, residual, _, _ = arguments(linear)
    with pytest.raises(ArgumentError, match="activation is one of"):
        linear(x, weight, bias, residual, "swish", "")
    with pytest.raises(ArgumentError, match="norm is 'rms' or 'layer'"):
        norm_linear(x, None, None, weight, bias, "batch", 1e-5, "none", "")
    with pytest.raises(ArgumentError, match="is no configuration"):
        linear(x, weight, bias, residual, "none", "128x128,fast")
    with pytest.raises(ArgumentError, match="equally many rows"):
        gated_linear(x, drawn(7, 12), None, "silu", "")
    with pytest.raises(ArgumentError, match="equally many rows"):
        rms_gated_linear(x, drawn(2, 5), None, drawn(7, 12), None, "silu", "")


powers = st.sampled_from([16, 32, 64, 128, 256])
shapes = st.builds(
    GemmShape,
    template=st.sampled_from([template.name for template in registry.TEMPLATES]),
    m=st.integers(1, 20000),
    n=st.integers(1, 9000),
    k=st.integers(1, 9000),
    activation=st.sampled_from(["none", "gelu", "gelu_tanh"]),
    norm=st.sampled_from(["rms", "layer"]),
    scaled=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    transposed=st.booleans(),
    aligned=st.booleans(),
)


@given(
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(powers, powers, powers),
    warps=st.sampled_from([1, 4, 8]),
    stages=st.integers(1, 8),
    split=st.integers(1, 9),
    group=st.integers(0, 9),
)
def test_text_round_trip(
    kind: str, sizes: tuple[int, int, int], warps: int, stages: int, split: int, group: int
) -> None:
    warps = warps if kind in ("tile", "tilelang") else 4
    config = GemmConfig(kind, *sizes, warps=warps, stages=stages, split=split, group=group)
    assert GemmConfig.parse(str(config)) == config


@pytest.mark.parametrize("text", ["", "64x64x64", "64x64x64,4w,3s,tile,split", "a", *GONE])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="is no configuration"):
        GemmConfig.parse(text)


def test_recorded_kinds() -> None:
    assert [kind_in(text) for text in GONE] == ["cublas", "persistent", "persistent", "together"]
    assert kind_in("") == ""
    for kind in KINDS:
        assert kind_in(str(GemmConfig(kind, 64, 64, 64, split=2, group=4))) == kind


@pytest.mark.parametrize(
    ("n", "k", "config", "rows"),
    [
        # A weight of 67 MB: 16.8 MB of rows stay in the L2 while it passes.
        (8192, 2048, "128x256x64,5s,cooperative", 32),
        (8192, 2048, "256x128x64,6s,cooperative", 16),
        (8192, 2048, "128x128x64,5s,pingpong,group4", 4),
        (14336, 4096, "128x128x64,5s,pingpong", 16),
        (14336, 16384, "128x128x64,5s,pingpong", 8),
        # It stays there itself, or the kernel is for GPUs that may keep less.
        (2048, 2048, "128x128x64,5s,pingpong", 8),
        (8192, 2048, "128x128x64,8w,3s,tile", 8),
    ],
)
def test_rows_of_tiles_side_by_side(n: int, k: int, config: str, rows: int) -> None:
    assert GemmConfig.parse(config).tile_group_rows(GemmShape("gated_linear", 4096, n, k), 2) == rows


@given(shape=shapes, capability=st.sampled_from(CAPABILITIES), dtype=st.sampled_from([torch.float16, torch.float32]))
def test_candidates_and_defaults_fit(shape: GemmShape, capability: tuple[int, int], dtype: torch.dtype) -> None:
    for config in configs(shape, dtype, capability):
        assert config_problems(config, shape, dtype, capability) == []
    chosen = default(shape, dtype, capability, 132)
    if dtype == torch.float32:
        assert chosen is None
    else:
        assert chosen is not None
        assert config_problems(chosen, shape, dtype, capability) == []
        assert configs(shape, dtype, capability), "there is always something to measure"


def test_recorded_defaults_are_listed_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    shape = GemmShape("linear", 8192, 768, 3072, bias=True, residual=True, transposed=True)
    template, problem = (
        next(t for t in registry.TEMPLATES if t.name == "linear"),
        registry.GemmProblem(shape, torch.float16, torch.device("cuda", 0)),
    )
    listed = template.configs(problem, registry.KernelPolicy.KERNELS)
    assert template.as_candidate(problem, "128x128x64,6s,pingpong") == "" == listed[0]
    assert "128x128x64,6s,pingpong" not in listed
    assert template.as_recorded(problem, "") == "128x128x64,6s,pingpong"
    for config in listed[1:]:
        assert template.as_candidate(problem, config) == template.as_recorded(problem, config) == config
    on_cpu = registry.GemmProblem(shape, torch.float16, torch.device("cpu"))
    assert template.as_candidate(on_cpu, "128x128x64,6s,pingpong") == "128x128x64,6s,pingpong"
    assert template.as_recorded(on_cpu, "") == ""


@given(
    capability=st.sampled_from(CAPABILITIES),
    head_dim=st.sampled_from(HEAD_DIMS),
    columns=st.tuples(st.integers(1, 40), st.integers(0, 300)),
    m=st.integers(1, 20000),
    k=st.integers(1, 9000),
)
def test_heads_that_are_claimed_have_a_kernel(
    capability: tuple[int, int], head_dim: int, columns: tuple[int, int], m: int, k: int
) -> None:
    turned = columns[0] * COLUMNS
    shape = GemmShape("rotary_linear", m, turned + columns[1], k, norm="rms", head_dim=head_dim, turned=turned)
    chosen = default(shape, torch.bfloat16, capability, 132)
    assert chosen is not None
    assert config_problems(chosen, shape, torch.bfloat16, capability) == []
    assert turned % chosen.block_n == chosen.block_n % head_dim == 0
    assert all(config.kind in ("tile", "pingpong") for config in configs(shape, torch.bfloat16, capability))


def test_reasons() -> None:
    """Each rule refuses what it is about, and says so."""
    shape = GemmShape("linear", 4096, 3072, 768, activation="gelu", bias=True)

    def why(text: str, capability: tuple[int, int] = (9, 0), **changes: Any) -> str:
        given = GemmShape(**{**vars(shape), **changes})
        return "; ".join(config_problems(GemmConfig.parse(text), given, torch.float16, capability))

    assert why("128x128x64,5s,pingpong") == ""
    assert "compute capability 9.0" in why("128x128x64,5s,pingpong", (10, 0))
    assert "16 bytes" in why("128x128x64,5s,pingpong", aligned=False)
    assert why("128x128x64,6s,pingpong") == "", "the result leaves in pieces"
    assert "shared memory" in why("128x128x64,7s,pingpong")
    assert "shared memory" in why("256x128x64,7s,cooperative")
    assert "128 rows" in why("256x128x64,2s,pingpong")
    assert why("128x192x64,5s,cooperative") == ""
    assert why("192x128x64,5s,cooperative") == ""
    assert "powers of two" in why("192x128x64,3s,pingpong")
    assert "no columns on the side" in why("192x192x64,3s,cooperative")
    assert "powers of two" in why("128x192x64,5s,pingpong")
    assert "number of columns is 192" in why("128x160x64,4s,cooperative")
    assert "64 or 128 rows" in why("256x192x64,2s,cooperative"), "more products than a consumer's registers hold"
    assert "powers of two wide" in why("128x192x64,5s,cooperative", template="gated_linear")
    assert "shared memory" in why("128x192x64,6s,cooperative")
    assert "64 deep" in why("128x128x32,4s,pingpong")
    assert "next step" in why("128x128x64,1s,pingpong")
    assert "64 columns" in why("128x32x64,4s,pingpong")
    assert "64 columns" in why("128x64x64,4s,pingpong", template="gated_linear")
    assert "8.0 and up" in why("64x64x64,4w,3s,tile", (7, 5))
    assert "below each other" in why("128x128x64,4s,pingpong", template="gated_linear", transposed=True)
    assert "does not rotate" in why("128x128x64,7s,cooperative", head_dim=64, turned=128)
    assert "whole heads" in why("128x64x64,5s,pingpong", head_dim=128, turned=128)
    assert "whole heads" in why("128x128x64,5s,pingpong", head_dim=64, turned=192)
    rows = {"template": "rms_linear", "norm": "rms", "activation": "none"}
    assert "does not scale rows" in why("128x128x64,8w,4s,tilelang", **rows)
    assert "powers of two" in why("96x128x64,8w,3s,tile")
    assert "more splits" in why("64x64x64,4w,3s,tile,split16")
