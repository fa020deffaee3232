"""`stof.nn.functional`: PyTorch's function, call by call, and masks beside its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof import masks
from stof.errors import ArgumentError, DtypeError, HeadCountError, ShapeError
from stof.nn.functional import scaled_dot_product_attention
from tests.examples import examples


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments that PyTorch's function takes."""
    lead = draw(st.sampled_from([(), (2,), (2, 3), (2, 1, 2)]))
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (3, 1)])) if lead else (3, 3)
    q_len, kv_len, head_dim, value_dim = (draw(st.integers(1, 12)) for _ in range(4))
    tensors = (
        drawn(*lead, heads, q_len, head_dim),
        drawn(*lead, kv_heads, kv_len, head_dim, seed=1),
        drawn(*lead, kv_heads, kv_len, value_dim, seed=2),
    )
    options: dict[str, Any] = {"enable_gqa": heads != kv_heads, "scale": draw(st.sampled_from([None, 0.3]))}
    full = (*lead, heads, q_len, kv_len)
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        kept = draw(st.integers(2, len(full)))
        shape = [size if draw(st.booleans()) else 1 for size in full[-kept:]]
        given_mask = drawn(*shape, seed=3)
        options["attn_mask"] = given_mask > -0.5 if kind == "bool" else given_mask
    return tensors, options


@given(calls())
@examples(80)
def test_results_and_gradients_are_those_of_pytorch(call: tuple[tuple[Tensor, ...], dict[str, Any]]) -> None:
    tensors, options = call
    leaves = [x.clone().requires_grad_() for x in tensors]
    others = [x.clone().requires_grad_() for x in tensors]
    out, expected = scaled_dot_product_attention(*leaves, **options), F.scaled_dot_product_attention(*others, **options)
    torch.testing.assert_close(out, expected)
    d_out = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(out, leaves, d_out), torch.autograd.grad(expected, others, d_out), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_a_mask_is_intersected_with_the_mask_of_the_call(kind: str) -> None:
    q, k, v = (drawn(2, 3, 20, 8, seed=n) for n in range(3))
    mask = masks.sliding_window(4, 3) | masks.global_tokens(2)
    keep = mask.to_dense(20)
    options: dict[str, Any] = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": drawn(2, 1, 20, 20) > -1},
        "float": {"attn_mask": drawn(20, 20)},
    }[kind]
    if kind == "float":
        expected = F.scaled_dot_product_attention(q, k, v, options["attn_mask"].masked_fill(~keep, -torch.inf))
    else:
        own = torch.ones(20, 20, dtype=torch.bool).tril() if kind == "causal" else options.get("attn_mask", True)
        expected = F.scaled_dot_product_attention(q, k, v, keep & own)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask=mask, **options), expected)


def test_gradients_of_an_additive_mask() -> None:
    q, k, v = (drawn(2, 3, 9, 8, seed=n) for n in range(3))
    gradients = []
    for attend in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        added = drawn(3, 9, 9).requires_grad_()
        gradients.append(torch.autograd.grad(attend(q, k, v, added).sum(), added)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mask", [None, masks.sliding_window(3)], ids=str)
def test_compiled(mask: masks.Mask | None) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    keep = torch.rand(2, 1, 1, 20) < 0.8

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, keep, mask=mask)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, keep), attend(q, k, v, keep))


def test_errors() -> None:
    q, k = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8)
    with pytest.raises(ArgumentError, match="not both"):
        scaled_dot_product_attention(q, q, q, torch.ones(6, 6, dtype=torch.bool), is_causal=True)
    with pytest.raises(HeadCountError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
    for shape in ((7, 6), (3, 6, 6), (1, 2, 4, 6, 6)):
        with pytest.raises(ShapeError, match=r"broadcasts to \[2, 4, 6, 6\]"):
            scaled_dot_product_attention(q, q, q, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(DtypeError, match="bool or floating point"):
        scaled_dot_product_attention(q, q, q, torch.ones(6, 6, dtype=torch.int64))
    with pytest.raises(ShapeError, match="same leading dimensions"):
        scaled_dot_product_attention(q, q[:1], q)
    with pytest.raises(ShapeError, match="three or more dimensions"):
        scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0])
    with pytest.raises(ArgumentError, match=r"stof\.masks"):
        scaled_dot_product_attention(q, q, q, is_causal=True, mask=lambda b, h, i, j: i >= j)
