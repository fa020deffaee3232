"""Operators are recognized by what they compute, whatever their spelling."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.graphs import RMSNorm, labels, operators

X = torch.randn(2, 3, 8)
W, B = torch.randn(8, 8), torch.randn(8)

PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W, B),
    "linear_no_bias": lambda x: F.linear(x, W),
    "bias_added": lambda x: F.linear(x, W) + B,
    "bias_added_first": lambda x: B + F.linear(x, W),
    "matmul": lambda x: x @ W,
    "matmul_bias": lambda x: torch.matmul(x, W) + B,
    "addmm_views": lambda x: torch.addmm(B, x.view(-1, 8), W).view(2, 3, 8),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    (operator,) = operators(PRODUCTS[name], X)
    assert operator.kind == "linear"
    assert operator.weight_size == (8, 8)
    assert operator.transposed == ("matmul" in name or "addmm" in name)
    assert (operator.bias is None) == (name in ("linear_no_bias", "matmul"))
    assert operator.inputs[0].op == "placeholder"  # views on either side belong to it


ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gelu": ("gelu", F.gelu),
    "module": ("gelu", nn.GELU()),
    "erf": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "erf_scaled": ("gelu", lambda x: 0.5 * x * (torch.erf(x * math.sqrt(0.5)) + 1)),
    "tanh": ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    "tanh_module": ("gelu_tanh", nn.GELU("tanh")),
    "tanh_spelled": (
        "gelu_tanh",
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    ),
    "relu": ("relu", torch.relu),
    "relu_method": ("relu", lambda x: x.relu()),
    "silu": ("silu", F.silu),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    expected, function = ACTIVATIONS[name]
    assert labels(function, X) == [expected]


NEARLY: dict[str, Callable[[Tensor], Tensor]] = {
    "other_constant": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "other_power": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 2.0)))),
    "two_inputs": lambda x: 0.5 * x.sin() * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "rms_wrong_dim": lambda x: B * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
    "rms_power": lambda x: B * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
    "rms_wide": lambda x: B * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6)),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_an_operator_is_none(name: str) -> None:
    assert not {"gelu", "gelu_tanh", "rms_norm"} & set(labels(NEARLY[name], X))


def _leaked(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return B * (x * scale), scale


def test_a_pattern_whose_inside_is_used_elsewhere_is_none() -> None:
    assert "rms_norm" not in labels(_leaked, X)


NORMS: dict[str, tuple[str, Callable[[Tensor], Tensor], bool]] = {
    "layer": ("layer_norm", nn.LayerNorm(8), True),
    "layer_plain": ("layer_norm", nn.LayerNorm(8, elementwise_affine=False), False),
    "hugging_face": ("rms_norm", RMSNorm(8), True),
    "functional": ("rms_norm", lambda x: F.rms_norm(x, (8,), B, 1e-6), True),
    "squares": ("rms_norm", lambda x: x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * B, True),
    "products": ("rms_norm", lambda x: B * (torch.rsqrt((x * x).mean(2, True) + 1e-6) * x), True),
    "weightless": ("rms_norm", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), False),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    expected, function, weighted = NORMS[name]
    (operator,) = operators(function, X)
    assert operator.kind == expected
    assert operator.inputs[0].op == "placeholder"
    assert (operator.weight is not None) == weighted
    assert operator.eps == pytest.approx(1e-6 if expected == "rms_norm" else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_inside_a_norm_belong_to_it(dtype: torch.dtype) -> None:
    (operator,) = operators(RMSNorm(8).to(dtype), X.to(dtype))
    assert operator.kind == "rms_norm"
    assert operator.value.dtype == dtype


def test_a_norm_that_changes_the_dtype_is_none() -> None:
    def wide(x: Tensor) -> Tensor:
        x = x.float()
        return B * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    assert "rms_norm" not in labels(wide, X.bfloat16())


def rotate(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def test_rotary_embedding() -> None:
    cos, sin = torch.randn(3, 8), torch.randn(3, 8)
    assert labels(lambda x: x * cos + rotate(x) * sin, X) == ["rotary"]
    assert labels(lambda x: sin * rotate(x) + cos * x, X) == ["rotary"]
    halves = labels(lambda x: x * cos + torch.cat((x[..., 4:], x[..., :4]), -1) * sin, X)
    assert "rotary" not in halves


def test_gates_with_two_products_or_one() -> None:
    gate, up, both = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 12)
    assert labels(lambda x: F.silu(gate(x)) * up(x), X) == ["linear", "linear", "silu gate"]
    assert labels(lambda x: up(x) * F.gelu(gate(x)), X) == ["linear", "linear", "gelu gate"]

    def chunked(x: Tensor) -> Tensor:
        a, b = both(x).chunk(2, dim=-1)
        return F.silu(a) * b

    assert labels(chunked, X) == ["linear", "silu gate"]
    assert labels(lambda x: x * F.silu(x), X) == ["silu", "other"]


def test_residuals_take_dropout_in() -> None:
    drop = nn.Dropout(0.5).eval()
    found = operators(lambda x: x + drop(F.linear(x, W)), X)
    assert [o.kind for o in found] == ["linear", "residual"]
    assert found[1].inputs[1] is found[0].root
    assert labels(lambda x: x + 1.0, X) == ["other"]
    assert labels(lambda x: x + B, X) == ["other"]


def test_dropout_in_training_stays() -> None:
    assert labels(lambda x: x + F.dropout(x, 0.5, True), X) == ["other", "residual"]


def test_attention_is_one_operator() -> None:
    q = torch.randn(1, 2, 5, 8)
    assert labels(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q) == ["attention"]


def test_index_arithmetic_is_no_operator() -> None:
    assert labels(lambda x: x[torch.arange(2) + 0], X) == []


def test_a_function_that_is_only_called_linear_is_another_thing() -> None:
    @torch.library.custom_op("stof_tests::linear", mutates_args=())
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return x.sin()

    linear.register_fake(lambda x, weight: torch.empty_like(x))
    assert labels(lambda x: linear(x, W), X) == ["other"]
