"""The definition of gradients against torch.autograd of a dense float64 formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from stof.kernels.implementation import Gradients
from stof.kernels.torch.reference import reference_attention, reference_backward
from tests.examples import examples
from tests.kernels.gradients import autograd_gradients, backward_calls

LENGTHS = [1, 2, 17, 33]


@given(call=backward_calls(torch.float64, LENGTHS, LENGTHS, [1, 7, 16]))
@examples(150)
def test_equals_autograd(call: dict[str, Any]) -> None:
    actual = reference_backward(**call)
    # Autograd would multiply NaN by weights of 0: it gets numbers there.
    clean = {n: x.nan_to_num() if isinstance(x, torch.Tensor) and n in "q k v d_out" else x for n, x in call.items()}
    expected = autograd_gradients(**clean)
    for name, got, want in zip(Gradients._fields, actual, expected, strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(
                got.double(), want, atol=1e-6 if got.dtype != torch.float64 else 1e-11, rtol=1e-6
            )
            assert bool(got.isfinite().all()), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_nobody_sees_has_no_gradient(bad: float) -> None:
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(4))
    keep = torch.rand(1, 2, 9, 9) < 0.4
    keep[:, :, 3] = False
    keep[:, 0, :, 5] = keep[:, :, :, 7] = False
    clean = reference_backward(q, k, v, d_out, keep, scale=0.5, softcap=1.0)
    q[:, :, 3] = d_out[:, :, 3] = bad
    k[:, 0, 5] = v[:, 0, 5] = k[:, :, 7] = v[:, :, 7] = bad
    d_lse = torch.zeros(1, 2, 9, dtype=torch.float64)
    d_lse[:, :, 3] = bad
    spoilt = reference_backward(q, k, v, d_out, keep, scale=0.5, softcap=1.0, d_lse=d_lse)
    for one, other in zip(clean[:3], spoilt[:3], strict=True):
        assert torch.equal(one, other)
    assert bool((spoilt.q[:, :, 3] == 0).all())
    assert bool((spoilt.k[:, :, 7] == 0).all())
    assert bool((spoilt.v[:, 0, 5] == 0).all())


def test_rows_of_minus_infinity() -> None:
    """Their scores are all -inf, by the bias or because q is infinite: gradients are 0."""
    q, k, v, d_out = (torch.rand(1, 1, 4, 4, dtype=torch.float64) + 0.1 for _ in range(4))
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    bias[:, :, 1] = -torch.inf
    q[:, :, 2] = -torch.inf
    found = reference_backward(q, k, v, d_out, scale=1.0, bias=bias, sinks=torch.zeros(1, dtype=torch.float64))
    assert all(bool(x.isfinite().all()) for x in found)
    assert bool((found.q[:, :, 1:3] == 0).all())
    assert bool((found.bias[:, :, 1:3] == 0).all())


@pytest.mark.parametrize("group", [1, 2])
def test_differences_of_the_forward(group: int) -> None:
    """Gradients of the reference itself, by finite differences of a loss of out and lse."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, 5, 3, dtype=torch.float64) for heads in (2, 2 // group, 2 // group))
    keep = torch.rand(1, 1, 5, 5) < 0.6
    keep[..., 0] = True
    options = {"bias": torch.randn(1, 1, 5, 5).double(), "sinks": torch.randn(2).double()}
    d_out, d_lse = torch.randn(1, 2, 5, 3).double(), torch.randn(1, 2, 5).double()
    inputs = {"q": q, "k": k, "v": v, **options}

    def loss() -> torch.Tensor:
        out, lse = reference_attention(**inputs, keep=keep, scale=0.7, softcap=1.5)
        return (out * d_out).sum() + (lse * d_lse).sum()

    found = reference_backward(**inputs, d_out=d_out, keep=keep, scale=0.7, softcap=1.5, d_lse=d_lse)
    for name, gradient in zip(inputs, found, strict=True):
        flat, step = inputs[name].view(-1), 1e-6
        for n in range(0, flat.numel(), 7):
            flat[n] += step
            above = loss()
            flat[n] -= 2 * step
            below = loss()
            flat[n] += step
            assert float(gradient.view(-1)[n]) == pytest.approx(float(above - below) / (2 * step), abs=1e-7)
