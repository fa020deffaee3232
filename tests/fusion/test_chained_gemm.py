"""Two GEMMs in one kernel: right, matched only where asked for, and never by rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stof
from stof.errors import ArgumentError
from stof.fusion import pipeline
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.operators import Kind
from stof.fusion.measure import segment_timer
from stof.fusion.planner.heuristics import is_profitable
from stof.fusion.planner.lock_replay import Replay
from stof.fusion.planner.match import TemplateMatch, find_matches
from stof.fusion.records.lock_file import Lock
from stof.fusion.records.report import FusionReport
from stof.fusion.templates import GemmConfig, GemmShape, chain_linear, config_problems, configs, launch, reference
from stof.fusion.templates.gemm_config import default
from stof.fusion.templates.registry import KernelPolicy
from stof.testing.oracle import error_budget
from tests.examples import examples
from tests.fusion.graphs import calls, capture

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALVES = (torch.float16, torch.bfloat16)
K, R, N = 12, 4, 10
Body = Callable[..., Any]


def tensors(m: int, k: int, inner: int, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (m, k), "a": (inner, k), "s": (inner,), "b": (n, inner), "t": (n,), "r": (m, n)}
    made = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    made["a"] /= k**0.5
    made["b"] /= inner**0.5
    return {name: t.to(DEVICE, dtype) for name, t in made.items()}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
@examples(20)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 50),
    inner=st.integers(1, 40),
    n=st.integers(1, 100),
    dtype=st.sampled_from(HALVES),
    activation=st.sampled_from(["none", "gelu", "relu"]),
    biases=st.tuples(st.booleans(), st.booleans()),
    residual=st.booleans(),
    text=st.sampled_from(["16x32x16,4w,2s,tile", "32x16x32,4w,2s,tile,split3"]),
)
def test_kernel(
    m: int, k: int, inner: int, n: int, dtype: torch.dtype, activation: str, biases: tuple[bool, bool], residual: bool,
    text: str,
) -> None:  # fmt: skip
    """More programs than steps of columns are refused elsewhere; here they find nothing to do."""
    t = tensors(m, k, inner, n, dtype)
    wide = torch.full((m, 2 * n), torch.nan, dtype=dtype, device=DEVICE)[:, :n].copy_(t["r"])  # rows further apart
    given = [t["x"], t["a"], t["s"] if biases[0] else None, t["b"], t["t"] if biases[1] else None,
             wide if residual else None]  # fmt: skip
    out = launch.compute(launch.chain_call(*given, activation), GemmConfig.parse(text))
    expected = reference.chain_linear(*(None if one is None else one.double() for one in given), activation)
    budget = error_budget(reference.chain_linear(*given, activation), expected, dtype)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert float((out.double() - expected).abs().nan_to_num(torch.inf).max()) <= budget.allowed


def test_operator() -> None:
    t = {name: value.cpu() for name, value in tensors(6, K, R, N, torch.float64).items()}
    given = (t["x"].view(2, 3, K), t["a"], t["s"], t["b"], t["t"], t["r"].view(2, 3, N), "silu", "")
    torch.library.opcheck(chain_linear, given, test_utils=("test_schema", "test_faketensor"))
    h = t["x"] @ t["a"].T + t["s"]
    expected = (h * torch.sigmoid(h)) @ t["b"].T + t["t"] + t["r"]
    torch.testing.assert_close(chain_linear(*given), expected.view(2, 3, N))
    with pytest.raises(ArgumentError, match="reads 3 columns, the first one makes 4"):
        chain_linear(*given[:3], t["b"][:, :3], *given[4:])
    with pytest.raises(ArgumentError, match="activation is one of"):
        chain_linear(*given[:6], "swish", "")


def adapter(x: Tensor, a: Tensor, s: Tensor, b: Tensor, t: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(F.gelu(F.linear(x, a, s)), b, t)


def low_rank(x: Tensor, a: Tensor, s: Tensor, b: Tensor, t: Tensor, r: Tensor) -> Tensor:
    return F.linear(F.dropout(F.linear(x, a), 0.1, training=False), b) + r


def leaked(x: Tensor, a: Tensor, s: Tensor, b: Tensor, t: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    h = F.linear(x, a, s)
    return F.linear(h, b, t), h


def found(body: Body, chainable: bool = True, m: int = 6, inner: int = R) -> list[TemplateMatch]:
    graph = capture(body, **{n: v.cpu() for n, v in tensors(m, K, inner, N, torch.float32).items()}).graph
    operators = [replace(o, chainable=chainable) if o.kind is Kind.LINEAR else o for o in recognize_operators(graph)]
    return [
        match for match in find_matches(operators, KernelPolicy.REFERENCE)[0] if match.template.name == "chain_linear"
    ]


@pytest.mark.parametrize("body", [adapter, low_rank])
def test_claims_where_asked_for(body: Body) -> None:
    (match,) = found(body)
    assert not is_profitable(match)
    inputs = segment_timer.random_inputs(match)
    (out,) = segment_timer.segment_graph(match, inputs)(*inputs.values())
    torch.testing.assert_close(out.double(), segment_timer.exact(match, inputs)[0], atol=1e-5, rtol=1e-5)
    assert found(body, chainable=False) == []


def test_what_is_no_chain() -> None:
    assert found(leaked) == []
    assert found(low_rank, inner=257) == []
    assert found(low_rank, inner=0) == found(low_rank, m=0) == []
    assert found(lambda x, a, s, b, t, r: F.linear(F.linear(x, a), b).add(F.linear(x, b @ a))) == []


class Times:
    """Chains take half as long."""

    failures: dict[tuple[str, str], str] = {}  # noqa: RUF012 (nothing fails)

    def __call__(self, match: TemplateMatch, given: list[str | None]) -> list[float]:
        us = 10.0 * len(match.operators) * (0.5 if match.template.name == "chain_linear" else 2.0)
        return [10.0 * len(match.operators) if one is None else us for one in given]


@pytest.mark.parametrize(("experimental", "expected"), [(True, ["chain_linear"]), (False, [])])
def test_a_search_may_choose_it(experimental: bool, expected: list[str]) -> None:
    t = {name: value.cpu() for name, value in tensors(6, K, R, N, torch.float32).items()}
    gm = capture(adapter, **t)
    args = [t[n.target.removeprefix("L_").removesuffix("_")] for n in gm.graph.nodes if n.op == "placeholder"]
    report = pipeline.fuse(gm, pipeline.Search(Times(), 100.0), twins=True, experimental=experimental)
    assert calls(gm) == expected
    assert [row.template for row in report.segments if row.template] == expected
    torch.testing.assert_close(gm(*args)[0], adapter(**t))


@pytest.mark.parametrize("device", ["here", "elsewhere"])
def test_a_lock_has_it_again_without_the_option(device: str) -> None:
    t = {name: value.cpu() for name, value in tensors(6, K, R, N, torch.float32).items()}
    report = pipeline.fuse(capture(adapter, **t), pipeline.Search(Times(), 100.0), twins=True, experimental=True)
    lock = Lock("here")
    lock.add([report])
    gm = capture(adapter, **t)
    found = pipeline.fuse(gm, twins=True, replay=Replay(lock, device, segment_timer.check))
    assert ("chain_linear" in calls(gm)) == (device == "here")
    assert found.graph == report.graph


def test_option() -> None:
    reports: list[FusionReport] = []
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.GELU(), torch.nn.Linear(4, 16)).eval()
    fast = stof.optimize(model, experimental=True, twins=True, report=reports.append)
    with torch.inference_mode():
        fast(torch.randn(3, 16))
    assert [row.template for row in reports[0].segments] != ["chain_linear"], "never by rule"
    with pytest.raises(ArgumentError, match="experimental is True or False"):
        stof.optimize(model, experimental="yes")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_configurations(capability: tuple[int, int]) -> None:
    for m in (1, 128, 4096, 100000):
        for inner in (1, 16, 64, 256):
            shape = GemmShape("chain_linear", m, 768, 3072, inner=inner)
            usual = default(shape, torch.float16, capability, 132)
            assert usual is not None
            tried = configs(shape, torch.float16, capability)
            assert all(config_problems(one, shape, torch.float16, capability) == [] for one in (usual, *tried))
            assert all(one.kind == "tile" for one in tried)
            assert tried
    assert config_problems(GemmConfig.parse("64x64x64,4s,pingpong"), shape, torch.float16, capability)
    config, wide = GemmConfig.parse("16x64x64,4w,3s,tile"), replace(shape, inner=257)
    assert "257 columns" in config_problems(config, wide, torch.float16, capability)[0]
