"""RMSNorms folded into the GEMMs after them: weights, matches, lowering, and whole models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import stof
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.measure import segment_timer
from stof.fusion.planner.match import find_matches
from stof.fusion.records.report import FusionReport
from stof.fusion.templates import folded_weights, reference
from stof.fusion.templates.folded_weights import folded
from stof.fusion.templates.registry import KernelPolicy
from tests.fusion.graphs import RMSNorm, calls, capture, fuse

K, N = 24, 16
REFERENCE = KernelPolicy.REFERENCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_folded_once(dtype: torch.dtype, transposed: bool) -> None:
    weight, scale = torch.randn(N, K).to(dtype), (torch.randn(K) + 1).to(dtype)
    if transposed:
        weight = weight.t().contiguous().t()
    before = weight.clone()
    made = folded(weight, scale)
    assert made is not None
    assert torch.equal(made, (weight.double() * scale.double()).to(dtype))
    assert made.stride() == weight.stride()
    assert folded(weight, scale) is made
    assert torch.equal(weight, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_is_noticed(mode: Any) -> None:
    """New values are in the same memory: CUDA graphs read it."""
    weight, scale = nn.Parameter(torch.randn(N, K)), nn.Parameter(torch.ones(K))
    with mode():
        first = folded(weight, scale)
    assert first is not None
    before = first.clone()
    with torch.no_grad():
        scale.mul_(3)
    second = folded(weight, scale)
    assert second is first
    assert torch.equal(second, 3 * before)
    with torch.no_grad():
        weight.zero_()
    third = folded(weight, scale)
    assert third is not None
    assert not third.any()


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "a slice": lambda layer: layer.weight[1:].zero_(),
    "detached": lambda layer: layer.weight.detach().mul_(2),
    "wrapped anew": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.mul_(2).data, False)),
    "wrapped anew, then written": lambda layer: (
        setattr(layer, "weight", nn.Parameter(layer.weight.data, False)), layer.weight.mul_(2)
    ),
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "other data at the same address": lambda layer: [
        setattr(layer.weight, "data", layer.weight.data * 2) for _ in range(4)
    ],
    "through data": lambda layer: layer.weight.data.mul_(2),
    "through numpy": lambda layer: layer.weight.data.numpy().fill(3),
    "through other memory of its own": lambda layer: torch.empty(0).set_(layer.weight.untyped_storage()).fill_(2),
    "loaded": lambda layer: layer.load_state_dict({"weight": torch.randn(N, K)}),
    "vector": lambda layer: nn.utils.vector_to_parameters(torch.randn(N * K), layer.parameters()),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("version", [0, 2])
def test_no_write_leaves_an_old_product(write: str, version: int) -> None:
    """On a CPU. What a GPU can notice of these is in `tests/gpu/test_fusion.py`."""
    layer, norm = nn.Linear(K, N, bias=False), torch.rand(K) + 0.5
    with torch.no_grad():
        layer.weight = nn.Parameter(torch.randn(N, K), requires_grad=False)
        for _ in range(version):
            layer.weight.add_(1)
        folded(layer.weight, norm)
        WRITES[write](layer)
        made = folded(layer.weight, norm)
        assert made is not None
        assert torch.equal(made, layer.weight * norm)


def test_a_product_is_kept_for_the_same_tensors_alone() -> None:
    """The rule on a GPU, whose memory nobody reads again to compare it."""
    weight, norm = nn.Parameter(torch.randn(N, K)), torch.ones(K)
    folded(weight, norm)
    (entry,) = [one for one in folded_weights._entries.values() if one.sources[0]() is weight]
    assert entry.is_of((weight, norm))
    assert not entry.is_of((nn.Parameter(weight.data), norm))
    assert not entry.is_of((weight, norm.clone()))
    assert not entry.is_of((weight, weight, norm))
    with torch.no_grad():
        weight.mul_(1)
    assert not entry.is_of((weight, norm))


def test_packed_weights_count_writes_to_each_of_their_parts() -> None:
    memory = torch.randn(2 * N, K)
    parts = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    for part, rows in zip(parts, memory.split(N), strict=True):
        part.data = rows
    norm = torch.ones(K)

    def packed() -> Tensor:
        view = parts[0].detach().as_strided((2 * N, K), (K, 1))
        folded_weights.note_sources(view, parts)
        return view

    folded(packed(), norm)
    (entry,) = [one for one in folded_weights._entries.values() if one.sources[0]() is parts[0]]
    assert entry.is_of((*parts, norm))
    with torch.no_grad():
        parts[1].mul_(1)
    assert not entry.is_of((*parts, norm))
    assert torch.equal(folded(packed(), norm), memory)  # type: ignore[arg-type]


def test_what_was_folded_goes_with_its_weight() -> None:
    folded_weights._entries.clear()
    folded(torch.randn(N, K), torch.ones(K))
    gc.collect()
    folded(weight := torch.randn(N, K), scale := torch.ones(K))
    assert len(folded_weights._entries) == 1
    assert folded(weight, scale) is not None


@pytest.mark.parametrize("size", [1e5, 1e-6])
def test_products_out_of_range_are_not_folded(size: float) -> None:
    """float16 ends at 65504, and below 6e-5 it loses digits."""
    weight, scale = torch.full((N, K), 0.7).half(), torch.ones(K).half()
    scale[3:] = 1e-3 if size < 1 else 6e4
    weight *= size if size < 1 else 2
    with pytest.warns(UserWarning, match="does not fit into torch.float16; it is not folded"):
        assert folded(weight, scale) is None
    assert folded(weight, scale) is None  # known now, and no second warning
    assert folded(weight.bfloat16(), scale.bfloat16()) is not None


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        weight, scale = torch.randn(N, K), torch.ones(K)
        assert folded(weight, scale) is folded(weight, scale)


class Block(nn.Module):
    def __init__(self, forward: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.pair = RMSNorm(K), nn.Linear(K, N), nn.Linear(K, 2 * N, bias=False)
        self.square = nn.Linear(K, K)
        self.given = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self, x)


def gated(m: Block, x: Tensor) -> Tensor:
    gate, up = m.pair(m.norm(x)).chunk(2, -1)
    return F.silu(gate) * up


BODIES: dict[str, tuple[Callable[[Block, Tensor], Tensor], list[str]]] = {
    "linear": (lambda m, x: m.up(m.norm(x)).sin(), ["rms_linear"]),
    "activation": (lambda m, x: F.gelu(m.up(m.norm(x))), ["rms_linear"]),
    "gate": (gated, ["rms_gated_linear"]),
    "plain": (lambda m, x: m.up(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), ["rms_linear"]),
    "builtin": (lambda m, x: m.up(F.rms_norm(x, (K,), m.norm.weight, 1e-6)), ["rms_linear"]),
    # The sum is written anyway, so that the norm may stay with what comes after.
    "after a sum": (lambda m, x: x.sin() + m.square(m.norm(x.sin() + x)), ["rms_linear"]),
    "shared": (lambda m, x: m.up(n := m.norm(x)).sum() + n, []),
    "view": (lambda m, x: m.norm(x) @ m.square.weight, ["norm_linear"]),
    "rows": (lambda m, x: F.linear(m.norm(x), m.square.weight[:8]), ["norm_linear"]),
    "layer norm": (lambda m, x: m.up(F.layer_norm(x, (K,))), ["norm_linear"]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_what_is_folded(name: str, dynamic: bool) -> None:
    body, expected = BODIES[name]
    model, x = Block(body).eval(), torch.randn(3, 5, K)
    called: list[str] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        assert fuse(gm, fold=True).notes == []
        called.extend(calls(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, backend=backend, dynamic=dynamic)(x)
        torch.testing.assert_close(out, model(x), atol=1e-5, rtol=1e-5)
    assert called == expected


def test_without_the_option_nothing_is_folded_and_the_report_names_it() -> None:
    gm = capture(Block(gated).eval(), torch.randn(2, K))
    report = fuse(gm)
    assert calls(gm) == ["norm_linear"]
    assert any("not folded into the GEMM's (option fold)" in reason for reason in refusals(gated))
    assert report.fused == 1


def refusals(body: Callable[[Block, Tensor], Tensor]) -> list[str]:
    return [
        str(reason)
        for reason in find_matches(
            recognize_operators(capture(Block(body).eval(), torch.randn(2, K)).graph), REFERENCE
        )[1]
    ]


def test_a_folded_segment_alone_is_what_its_twin_computes() -> None:
    for name in ("activation", "plain", "gate"):
        gm = capture(Block(BODIES[name][0]).eval(), torch.randn(2, 3, K))
        operators = [replace(one, foldable=True) for one in recognize_operators(gm.graph)]
        match = next(c for c in find_matches(operators, REFERENCE)[0] if c.template.name.startswith("rms"))
        inputs = segment_timer.random_inputs(match)
        with torch.no_grad():
            (out,) = segment_timer.segment_graph(match, inputs)(*inputs.values())
        torch.testing.assert_close(out.double(), segment_timer.exact(match, inputs)[0], atol=1e-5, rtol=1e-5)
        timer = segment_timer.SegmentTimer(rounds=1)
        (taken,) = timer(match, [""])
        assert timer.failures == {}
        assert taken < float("inf")


def test_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from stof.integrations.torch import compile as torch_compile
    from tests.integrations import models

    monkeypatch.setattr(torch_compile, "_inductor", lambda gm, inputs, options, digest: gm.forward)
    model, ids = models.llama(), torch.randint(1, models.VOCABULARY, (2, 11))
    model.config.use_cache = False
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        expected = model(ids)[0]
        reports: list[FusionReport] = []
        torch._dynamo.reset()
        out = stof.optimize(model, fold=True, references=True, report=reports.append)(ids)[0]
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)
    assert "rms_linear" in {row.template for row in reports[-1].segments}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_row_factors_are_those_of_the_norm() -> None:
    x = torch.randn(4, K, dtype=torch.float64)
    rows = reference.row_factors(x, 1e-6).unsqueeze(-1) * x
    torch.testing.assert_close(rows, F.rms_norm(x, (K,), eps=1e-6))
