"""Row statistics: sums of squares that a product leaves for the RMSNorm folded into the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import stof
from stof.errors import ArgumentError
from stof.fusion import rules
from stof.fusion.choices import Tuned
from stof.fusion.claims import claims
from stof.fusion.lower import Choice, GraphOrder, handed_on
from stof.fusion.normalise import normalise
from stof.fusion.operators import NORMS, Operator
from stof.fusion.report import FusionReport
from stof.fusion.rules import next_joined, suggested
from stof.fusion.templates import (
    GemmConfig,
    linear,
    linear_squares,
    rms_gated_linear,
    rms_linear,
    rotary_linear,
    run,
    twins,
)
from stof.fusion.templates.config import PART
from stof.fusion.templates.folding import folded
from stof.fusion.templates.norms import Norm
from stof.fusion.templates.registry import Serving
from tests.fusion.graphs import RMSNorm, calls, capture, fuse
from tests.fusion.test_templates import DEVICE, HALVES, ON_GPU, check, tensors

K, N = 24, 16
TILES = ("32x128x16,4w,2s,tile", "16x256x16,4w,2s,tile,split2")
HOPPER = (
    "128x128x64,6s,pingpong", "128x128x64,4s,pingpong", "64x128x64,7s,pingpong", "256x128x64,6s,together",
    "128x256x64,5s,together", "192x128x64,5s,together",
)  # fmt: skip
PERSISTENT = ("32x128x32,4w,2s,persistent", "16x256x16,4w,2s,persistent,group2,halves")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# ---- operators


@pytest.mark.parametrize("width", [1, PART, PART + 72, 3 * PART])
def test_meaning(width: int) -> None:
    x, weight, bias, residual = drawn(2, 5, 12), drawn(width, 12), drawn(width), drawn(2, 5, width)
    given = (x, weight, bias, residual, "gelu", "")
    out, squares = linear_squares(*given)
    torch.testing.assert_close(out, linear(*given))
    assert squares.shape == (-(-width // PART), 2, 5)
    torch.testing.assert_close(squares.sum(0), out.square().sum(-1))
    torch.testing.assert_close(squares[0], out[..., :PART].square().sum(-1))
    torch.testing.assert_close(twins.factors_of(squares, width, 1e-6), twins.row_factors(out, 1e-6))


def after(op: Any, rstd: Tensor | None, squares: Tensor | None) -> tuple[Any, ...]:
    """Arguments of an operator with an RMSNorm of rows of 12."""
    generator = torch.Generator().manual_seed(0)
    x, scale, weight, pair, angles = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 5, 12), (12,), (8, 12), (16, 12), (2, 5, 4))
    )
    if op is rotary_linear:
        return x, rstd, scale, weight, None, angles.cos(), angles.sin(), 4, 4, "", squares, 1e-6
    return x, rstd, scale, weight if op is rms_linear else pair, None, "silu", "", squares, 1e-6


@pytest.mark.parametrize("op", [rms_linear, rms_gated_linear, rotary_linear])
def test_factors_may_come_as_squares(op: Any) -> None:
    x = after(op, None, None)[0]
    squares = torch.stack([x[..., :7].square().sum(-1), x[..., 7:].square().sum(-1)])
    made = op(*after(op, None, squares))
    torch.testing.assert_close(made, op(*after(op, twins.row_factors(x, 1e-6), None)))
    if op is not rotary_linear:
        for rstd, given in ((None, None), (squares[0], squares)):
            with pytest.raises(ArgumentError, match="give one of them"):
                op(*after(op, rstd, given))


@pytest.mark.parametrize("op", [linear_squares, rms_linear, rms_gated_linear, rotary_linear])
def test_schema_and_fake(op: Any) -> None:
    given = (
        (drawn(2, 5, 12), drawn(200, 12), None, drawn(2, 5, 200), "none", "")
        if op is linear_squares
        else after(op, None, drawn(2, 2, 5).square())
    )
    torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), op(*given))


def test_which_configurations_add_squares_up() -> None:
    for text in (*TILES, *PERSISTENT, "128x128x64,6s,pingpong", "128x256x64,5s,together", "192x128x64,5s,together"):
        assert GemmConfig.parse(text).sums_squares
    for text in ("64x64x64,4w,4s,tile", "64x256x64,4s,pingpong", "128x192x64,5s,together", "cublas",
                 "128x128x64,4w,3s,persistent,halves", "128x128x64,8w,4s,tilelang"):  # fmt: skip
        assert not GemmConfig.parse(text).sums_squares


# ---- kernels


def check_squares(text: str, t: dict[str, Tensor], activation: str, bias: bool, residual: bool) -> None:
    """The result against float64, the sums against the result as it was rounded, and once more the same bits."""
    b, r = t["bias"] if bias else None, t["residual"] if residual else None
    product = run.product("linear", t["x"], t["weight"], b, r, activation)
    width = product.shape.n
    squares = torch.full((-(-width // PART), product.shape.m), torch.nan, device=DEVICE)

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        vectors = [None if v is None else f(v) for v in (b, r)]
        return twins.linear(f(t["x"]), f(t["weight"]), vectors[0], vectors[1], activation)

    out = check(product, text, twin, squares)
    expected = twins.row_squares(out.double())
    torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=1e-30)
    again = torch.full_like(squares, torch.nan)
    run.compute(product, GemmConfig.parse(text), again)
    assert torch.equal(squares, again)


@settings(max_examples=12)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 300),
    k=st.integers(32, 60),
    dtype=st.sampled_from([*HALVES, torch.float32]),
    transposed=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    text=st.sampled_from(TILES),
)
def test_tiles(
    m: int, n: int, k: int, dtype: torch.dtype, transposed: bool, bias: bool, residual: bool, text: str
) -> None:
    check_squares(text, tensors(m, n, k, dtype, transposed=transposed), "relu", bias, residual)


@settings(max_examples=8)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 40),
    k=st.integers(1, 8),
    dtype=st.sampled_from(HALVES),
    residual=st.booleans(),
    text=st.sampled_from(PERSISTENT),
)
def test_persistent_programs(m: int, n: int, k: int, dtype: torch.dtype, residual: bool, text: str) -> None:
    check_squares(text, tensors(m, 8 * n, 8 * k, dtype), "none", True, residual)


@settings(max_examples=10)
@given(
    m=st.integers(1, 50),
    n=st.integers(1, 40),
    k=st.integers(48, 300),
    dtype=st.sampled_from(HALVES),
    gated=st.booleans(),
    split=st.booleans(),
    size=st.sampled_from([1e-2, 1.0, 300.0]),
)
def test_products_compute_factors_from_squares(
    m: int, n: int, k: int, dtype: torch.dtype, gated: bool, split: bool, size: float
) -> None:
    t = tensors(m, n, k, dtype, gated=gated)
    t["x"] *= size
    name, twin_of = ("rms_gated_linear", twins.gated_linear) if gated else ("rms_linear", _linear)
    whole = folded(t["weight"], t["scale"])
    assert whole is not None
    squares, norm = twins.row_squares(t["x"]), Norm("rms", None, None, 1e-5)
    product = run.product(name, t["x"], whole, t["bias"], None, "silu", norm, squares, parts=squares.shape[0])

    def twin(f: Callable[[Tensor], Tensor]) -> Tensor:
        normed = twins.normalised(f(t["x"]), f(t["scale"]), None, "rms", 1e-5)
        return twin_of(normed, f(t["weight"]), f(t["bias"]), "silu")

    check(product, "16x32x16,4w,2s,tile,split3" if split else "32x32x16,4w,2s,tile", twin)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    return twins.linear(x, weight, bias, None, activation)


@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="Gluon kernels run on Hopper")
@pytest.mark.parametrize("text", HOPPER)
def test_hopper(text: str) -> None:
    for m, n, k, dtype in ((4096, 2048, 512, HALVES[0]), (1000, 392, 200, HALVES[1]), (1, 8, 64, HALVES[0])):
        check_squares(text, tensors(m, n, k, dtype), "none", False, True)
        check_squares(text, tensors(m, n, k, dtype), "silu", True, False)
        t = tensors(m, n, k, dtype)
        product = run.product(
            "rms_linear", t["x"], t["weight"], None, None, "none", Norm("rms", None, None, 1e-5),
            twins.row_squares(t["x"]), parts=-(-k // PART),
        )  # fmt: skip
        check(
            product, text, lambda f, t=t: F.linear(twins.normalised(f(t["x"]), None, None, "rms", 1e-5), f(t["weight"]))
        )


# ---- graphs


class Block(nn.Module):
    def __init__(self, forward: Callable[[Block, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.square, self.up = RMSNorm(K), nn.Linear(K, K), nn.Linear(K, N)
        self.pair = nn.Linear(K, 2 * N, bias=False)
        self.given = forward

    def forward(self, x: Tensor) -> Any:
        return self.given(self, x)


def gated(m: Block, h: Tensor) -> Tensor:
    gate, up = m.pair(m.norm(h)).chunk(2, -1)
    return F.silu(gate) * up


def written(m: Block, x: Tensor) -> Tensor:
    h = x + m.square(x)
    h.mul_(2)
    return m.up(m.norm(h)).sin()


def shared_norm(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    n = m.norm(x + m.square(x))
    return m.up(n).sin(), n


BODIES: dict[str, tuple[Callable[[Block, Tensor], Any], list[str], int]] = {
    "product": (lambda m, x: m.up(m.norm(x + m.square(x))).sin(), ["linear_squares", "rms_linear"], 1),
    "gate": (lambda m, x: gated(m, x + m.square(x)), ["linear_squares", "rms_gated_linear"], 1),
    "sum read again": (lambda m, x: (h := x + m.square(x)) + m.square(m.norm(h)), ["linear_squares", "rms_linear"], 1),
    "dropout": (lambda m, x: m.up(m.norm(F.dropout(x + m.square(x), 0.1, False))).sin(),
                ["linear_squares", "rms_linear"], 1),
    "activation": (lambda m, x: m.up(m.norm(F.gelu(m.square(x)))).sin(), ["linear_squares", "rms_linear"], 1),
    "no product before": (lambda m, x: m.up(m.norm(x + x.sin())).sin(), ["rms_linear"], 0),
    "written to": (written, ["rms_linear"], 0),
    "norm read elsewhere": (shared_norm, [], 0),
    "layer norm": (lambda m, x: m.up(F.layer_norm(x + m.square(x), (K,))).sin(), [], 0),
}  # fmt: skip


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are better off with the norm in their own template; here as where rows are many."""
    monkeypatch.setattr(rules, "pays", lambda claim, following=None: claim.template.name != "linear_norm")


@pytest.mark.usefixtures("as_if_large")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_what_is_handed_on(name: str, dynamic: bool) -> None:
    body, expected, count = BODIES[name]
    model, x = Block(body).eval(), torch.randn(3, 5, K)
    called: list[str] = []
    given: list[int] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report = fuse(gm, fold=True)
        called.extend(calls(gm))
        given.append(sum(row.squares for row in report.segments))
        # What is handed on is the only statistics there are; a LayerNorm is one node of PyTorch's.
        alone = count == 0 and name != "layer norm"
        assert any("rsqrt" in str(node.target) for node in gm.graph.nodes) == alone
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, backend=backend, dynamic=dynamic)(x.clone())
        torch.testing.assert_close(out, model(x.clone()), atol=1e-5, rtol=1e-5)
    if expected:
        assert [one for one in called if one != "linear"] == expected
    assert ("linear_squares" in called) == bool(count)
    assert given == [count]


@pytest.mark.usefixtures("as_if_large")
def test_the_report_names_it() -> None:
    gm = capture(Block(BODIES["gate"][0]).eval(), torch.randn(2, K))
    rows = [row for row in fuse(gm, fold=True).segments if row.template]
    assert [row.by for row in rows] == ["linear with row statistics (default)", "rms_gated_linear (default)"]


@pytest.mark.usefixtures("as_if_large")
def test_without_folding_nothing_is_handed_on() -> None:
    gm = capture(Block(BODIES["gate"][0]).eval(), torch.randn(2, K))
    report = fuse(gm)
    assert "linear_squares" not in calls(gm)
    assert not any(row.squares for row in report.segments)


def llama_part(foldable: bool, depth: int = 2048) -> tuple[list[Operator], GraphOrder]:
    """LLaMA-1B's output (or down-) projection, sum, norm, gate and up, 4096 tokens, float16."""
    sizes = ((4096, depth), (2048, depth), (4096, 2048), (2048,), (16384, 2048))
    given = [torch.empty(size, dtype=torch.float16, device="meta") for size in sizes]

    def part(x: Tensor, w: Tensor, r: Tensor, scale: Tensor, pair: Tensor) -> Tensor:
        h = r + F.linear(x, w)
        gate, up = F.linear(F.rms_norm(h, (2048,), scale, 1e-6), pair).chunk(2, -1)
        return F.silu(gate) * up + h.sum()

    from dataclasses import replace

    gm = capture(part, *given)
    operators = [replace(o, foldable=foldable) if o.kind in NORMS else o for o in normalise(gm.graph)]
    return operators, GraphOrder(gm.graph)


@pytest.mark.parametrize("foldable", [False, True])
def test_a_sum_whose_squares_are_handed_on_is_no_work_for_inductor(foldable: bool) -> None:
    """Unless the norm is folded: Inductor adds the residual in its kernel, and the product's sum saves a pass less."""
    operators, order = llama_part(foldable)
    claim = next(c for c in claims(operators[:2], Serving.TWINS)[0] if c.template.name == "linear")
    joined = next_joined(claim, "", operators, range(2, len(operators)), order, Serving.TWINS)
    assert (joined is None) == foldable
    # Measured 2 us faster alone; the pass that the norm's kernel would save takes 4.
    known = {"linear 4096x2048x2048 residual float16 twins": Tuned("", 50.0, 52.0)}.get
    chosen = suggested(operators, order, Serving.TWINS, known)
    assert (0 in chosen) == foldable
    assert len(handed_on(chosen.values(), order)) == foldable
    # Where the norm lies outside what is decided on, nothing is known of it; nor is anything chosen unmeasured.
    assert 0 not in suggested(operators, order, Serving.TWINS, known, within=[range(2)])
    assert 0 not in suggested(operators, order, Serving.TWINS)


def test_a_configuration_without_whole_parts_hands_nothing_on() -> None:
    operators, order = llama_part(True)
    first = next(c for c in claims(operators[:2], Serving.TWINS)[0] if c.template.name == "linear")
    second = next(c for c in claims(operators[2:5], Serving.TWINS)[0] if c.template.name == "rms_gated_linear")
    assert handed_on([Choice(first), Choice(second)], order) == {second: first}
    assert handed_on([Choice(second)], order) == {}


@pytest.mark.usefixtures("as_if_large")
def test_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of LLaMA's sums all but the last are handed on; the first norm has no product before it."""
    pytest.importorskip("transformers")
    from stof.integrations import torch_compile
    from tests.integrations import models

    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any, options: Any, digest: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    monkeypatch.setattr(torch_compile, "_inductor", keep)
    model, ids = models.llama(), torch.randint(1, models.VOCABULARY, (2, 11))
    model.config.use_cache = False
    layers = model.config.num_hidden_layers
    with torch.inference_mode():
        expected = model(ids)[0]
        reports: list[FusionReport] = []
        torch._dynamo.reset()
        out = stof.optimize(model, fold=True, twins=True, report=reports.append)(ids)[0]
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)
    assert sum(row.squares for row in reports[-1].segments) == 2 * layers - 1
    assert calls(graphs[-1]).count("linear_squares") == 2 * layers - 1
    # The first norm and the last are the only ones that anything else computes.
    assert sum("rsqrt" in str(node.target) for node in graphs[-1].graph.nodes) == 2
