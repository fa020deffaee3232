"""GEMMs with weights of 8-bit values and factors: recognized as plain PyTorch writes them, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stof.errors import ArgumentError
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.symbolic_shapes import size_hint
from stof.fusion.measure import segment_timer
from stof.fusion.planner.heuristics import is_profitable
from stof.fusion.planner.match import TemplateMatch, find_matches
from stof.fusion.templates import GemmConfig, GemmShape, config_problems, configs, scaled_linear
from stof.fusion.templates.gemm_config import default
from stof.fusion.templates.registry import KernelPolicy
from tests.fusion.graphs import capture, fuse

K, N = 192, 160
Body = Callable[..., Any]


def tensors(rows: int = 3, n: int = N, k: int = K, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """x `[2, rows, K]`, values, factors, a bias, and a residual."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    sizes = {"x": (2, rows, k), "s": (n,), "b": (n,), "r": (2, rows, n)}
    drawn = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    return {**drawn, "q": values, "s": drawn["s"] / 100}


def weight_first(x: Tensor, q: Tensor, s: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, q.to(x.dtype) * s[:, None], b)


def product_first(x: Tensor, q: Tensor, s: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, q.to(dtype=x.dtype)) * s + b


RECOGNISED: dict[str, Body] = {
    "weight_first": weight_first,
    "weight_first_unsqueezed": lambda x, q, s, b, r: F.linear(x, s.unsqueeze(1) * q.to(x.dtype)),
    "weight_first_promoted": lambda x, q, s, b, r: F.linear(x, q * s.view(-1, 1), b),
    "weight_first_wide": lambda x, q, s, b, r: F.linear(x, (q.double() * s.double()[:, None]).to(x.dtype)),
    "gelu": lambda x, q, s, b, r: F.gelu(weight_first(x, q, s, b, r)),
    "residual": lambda x, q, s, b, r: r + weight_first(x, q, s, b, r),
    "product_first": product_first,
    "product_first_plain": lambda x, q, s, b, r: s * F.linear(x, q.to(x.dtype)),
    "product_first_bias_left": lambda x, q, s, b, r: b + F.linear(x, q.to(x.dtype)) * s,
    "product_first_silu_residual": lambda x, q, s, b, r: F.silu(product_first(x, q, s, b, r)) + r,
}


def lowered(body: Body, t: dict[str, Tensor], dynamic: bool = False) -> tuple[list[str], Tensor, Tensor]:
    """Calls of templates in the lowered graph, its result, and the function's own."""
    gm = capture(body, **t, dynamic=dynamic)
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    args = [
        t[node.target.removeprefix("L_").removesuffix("_")]
        if isinstance(node.meta["example_value"], Tensor)
        else size_hint(node.meta["example_value"])
        for node in given
    ]
    report = fuse(gm)
    assert report.notes == []
    with torch.no_grad():
        out = gm(*args)
    called = [str(node.target).split(".")[1] for node in gm.graph.nodes if str(node.target).startswith("stof.")]
    return called, out[0] if isinstance(out, tuple) else out, body(**t)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", RECOGNISED)
def test_both_ways_of_writing_it(name: str, stored: torch.dtype) -> None:
    t = tensors()
    t["q"] = t["q"].to(stored)
    if stored != torch.int8 and name == "weight_first_promoted":
        pytest.skip("PyTorch does not promote float8")
    called, out, expected = lowered(RECOGNISED[name], t)
    assert called == ["scaled_linear"]
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


def tied(x: Tensor, q: Tensor, s: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    weight = q.to(x.dtype) * s[:, None]
    return F.linear(x, weight, b), weight.sum(0)


def biased_before(x: Tensor, q: Tensor, s: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, q.to(x.dtype), b) * s


def written(x: Tensor, q: Tensor, s: Tensor, b: Tensor, r: Tensor) -> Tensor:
    weight = q.to(x.dtype)
    q.add_(1)
    return F.linear(x, weight) * s


NOT_RECOGNISED: dict[str, Body] = {
    "tied": tied,
    "biased_before": biased_before,
    "written": written,
    "scaled_twice": lambda x, q, s, b, r: F.linear(x, q.to(x.dtype) * s[:, None]) * s,
    "rows_scaled": lambda x, q, s, b, r: F.linear(x, q.to(x.dtype)) * r[..., :1],
    "one_factor": lambda x, q, s, b, r: F.linear(x, q.to(x.dtype)) * s[0],
    "other_integers": lambda x, q, s, b, r: F.linear(x, q.to(torch.int16).to(x.dtype)) * s,
    "zero_points": lambda x, q, s, b, r: F.linear(x, (q.to(x.dtype) - 3) * s[:, None]),
    "inputs_scaled": lambda x, q, s, b, r: torch.addmm(x[0, 0], x[0, :, :N], q.to(x.dtype) * s[:, None]),
    "inputs_scaled_square": lambda x, q, s, b, r: torch.addmm(b, x[0, :, :N], q[:, :N].to(x.dtype) * s[:, None]),
    "wider_result": lambda x, q, s, b, r: F.linear(x, q.to(x.dtype)) * s.double(),
}


@pytest.mark.parametrize("name", NOT_RECOGNISED)
def test_anything_else_stays_right(name: str) -> None:
    """What only looks like it: other templates may take the GEMM, none the 8-bit values."""
    t = tensors()
    body = NOT_RECOGNISED[name]
    gm = capture(body, **{key: value.clone() for key, value in t.items()})
    order = [node.target.removeprefix("L_").removesuffix("_") for node in gm.graph.nodes if node.op == "placeholder"]
    fuse(gm)
    served = [node for node in gm.graph.nodes if "scaled_linear" in str(node.target)]
    assert len(served) == (name == "scaled_twice"), "the weight's own factors, not those of the result"
    with torch.no_grad():
        out = gm(*(t[key].clone() for key in order))
    expected = body(**{key: value.clone() for key, value in t.items()})
    for got, want in zip(out, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def claim_of(body: Body, **sizes: Any) -> list[TemplateMatch]:
    t = {name: value.to("meta") for name, value in tensors(**sizes).items()}
    return find_matches(recognize_operators(capture(body, **t).graph), KernelPolicy.REFERENCE)[0]


@pytest.mark.parametrize(("rows", "expected"), [(4, "scaled_linear"), (4096, "linear")])
def test_few_rows_read_the_values_by_rule_and_many_the_weight(rows: int, expected: str) -> None:
    """With a GELU, which many rows save a pass for."""
    found = claim_of(RECOGNISED["gelu"], rows=rows, n=3072, k=768, dtype=torch.float16)
    assert [match.template.name for match in found] == ["scaled_linear", "linear"]
    assert [match.template.name for match in found if is_profitable(match)] == [expected]


def test_few_columns_are_not_few_rows() -> None:
    """Copying takes longer than computing there too, but it is not the weight that is copied."""
    found = claim_of(product_first, rows=4096, n=16, k=768, dtype=torch.float16)
    assert [is_profitable(match) for match in found] == [False]


def test_many_rows_read_the_widened_weight() -> None:
    """Which stays where it was computed, for the GEMM's call reads it."""
    called, out, expected = lowered(RECOGNISED["gelu"], tensors(rows=200, n=900, k=900))
    assert called == ["linear"]
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


def test_a_scaled_result_is_no_other_templates() -> None:
    found = claim_of(product_first, rows=4096, n=3072, k=768, dtype=torch.float16)
    assert [match.template.name for match in found] == ["scaled_linear"]
    assert not is_profitable(found[0])


def test_what_is_measured_are_values_of_all_sizes() -> None:
    for body in (weight_first, product_first):
        gm = capture(body, **tensors())
        (match, *_) = find_matches(recognize_operators(gm.graph), KernelPolicy.REFERENCE)[0]
        inputs = segment_timer.random_inputs(match)
        values = next(tensor for tensor in inputs.values() if tensor.dtype == torch.int8)
        assert values.float().std() > 30
        (out,) = segment_timer.segment_graph(match, inputs)(*inputs.values())
        (expected,) = segment_timer.exact(match, inputs)
        torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("body", [weight_first, product_first])
def test_what_is_measured_is_of_the_order_of_one(body: Body, stored: torch.dtype) -> None:
    """In float16, where larger results would be infinite and every kernel as good as PyTorch."""
    t = tensors(rows=64, k=4096, dtype=torch.float16)
    match = find_matches(
        recognize_operators(capture(body, **t | {"q": t["q"].to(stored)}).graph), KernelPolicy.REFERENCE
    )[0][0]
    (expected,) = segment_timer.exact(match, segment_timer.random_inputs(match))
    assert 0.3 < expected.std() < 3


def test_infinite_results_check_nothing() -> None:
    t = tensors(dtype=torch.float16)
    match = find_matches(recognize_operators(capture(product_first, **t).graph), KernelPolicy.REFERENCE)[0][0]
    inputs = segment_timer.random_inputs(match)
    assert segment_timer._checked(match, inputs, "", segment_timer.exact(match, inputs))[0] == ""
    inputs[match.arguments["scale"]].fill_(6e4)
    assert segment_timer._checked(match, inputs, "", segment_timer.exact(match, inputs))[0].startswith(
        "wrong: off by inf"
    )


def test_sums_of_integers_have_room() -> None:
    """Beyond float16's largest number, 65504, before the factors bring them back."""
    t = tensors(dtype=torch.float16)
    x, q, s = t["x"].abs() + 100, t["q"].abs(), t["s"].abs() / 100
    exact = x.double() @ (q.double() * s.double()[:, None]).T
    torch.testing.assert_close(scaled_linear(x, q, s, None, None, "none", "").double(), exact, atol=1e-2, rtol=1e-3)


def test_any_number_of_rows() -> None:
    called, out, expected = lowered(product_first, tensors(rows=5), dynamic=True)
    assert called == ["scaled_linear"]
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


def test_equal_graphs_of_other_values_are_others() -> None:
    """Times of one are not taken for the other's."""
    t = tensors()
    keys = set()
    for stored in (torch.int8, torch.float8_e4m3fn):
        for body in (weight_first, product_first):
            (operator,) = recognize_operators(capture(body, **t | {"q": t["q"].to(stored)}).graph)
            keys.add(operator.signature())
            assert operator.label == f"{str(stored).removeprefix('torch.')} linear {K}>{N}"
    assert len(keys) == 4


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_configurations(stored: str, capability: tuple[int, int]) -> None:
    missing = stored != "int8" and capability == (8, 0)
    for m in (1, 16, 64, 4096):
        shape = GemmShape("scaled_linear", m, 2048, 2048, stored=stored)
        found = configs(shape, torch.float16, capability)
        assert (default(shape, torch.float16, capability, 132) is None) == missing
        assert bool(found) != missing
        assert {config.kind for config in found} <= {"tile"}
        assert config_problems(GemmConfig.parse("64x64x64,4s,pingpong"), shape, torch.float16, capability)
        assert config_problems(GemmConfig.parse("64x64x64,4w,3s,tile"), shape, torch.float32, capability)


def test_operator() -> None:
    t = tensors(dtype=torch.float64)
    given = (t["x"], t["q"], t["s"][:, None], t["b"], t["r"], "relu", "")
    torch.library.opcheck(scaled_linear, given, test_utils=("test_schema", "test_faketensor"))
    expected = F.relu(t["x"] @ (t["q"].double() * t["s"][:, None]).T + t["b"]) + t["r"]
    torch.testing.assert_close(scaled_linear(*given), expected)
    with pytest.raises(ArgumentError, match=r"is torch\.int8 or"):
        scaled_linear(t["x"], t["q"].to(torch.int16), *given[2:])
    with pytest.raises(ArgumentError, match="160 factors"):
        scaled_linear(*given[:2], t["s"][:5], *given[3:])
    with pytest.raises(ArgumentError, match="activation is one of"):
        scaled_linear(*given[:5], "swish", "")
