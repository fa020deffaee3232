"""What tests of backward kernels share: gradients of a dense formula by autograd, random calls, and the error bound."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from stof.kernels.implementation import Gradients
from stof.kernels.torch.reference import reference_backward
from stof.testing import MEMORY_LAYOUTS, make_inputs, spread
from tests.strategies import dense_masks


def autograd_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    keep: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    d_lse: Tensor | None = None,
) -> Gradients:
    """Gradients of dense attention in float64 by torch.autograd; arguments as for `reference_backward`."""
    given = [x if x is None else x.detach().double().requires_grad_() for x in (q, k, v, bias, sinks)]
    q, k, v, bias, sinks = given
    heads = q.shape[1]
    keys, values = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    finite = (scores > -torch.inf) & keep
    some = finite.any(-1, keepdim=True)
    scores = torch.where(finite | ~some, scores, -torch.inf)  # rows that keep nothing: any scores, dropped below
    scores = torch.where(some, scores, 0.0)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.view(1, heads, 1, 1))
    out = torch.where(some, torch.exp(scores - total) @ values, 0.0)
    loss = (out * torch.where(some, d_out.double(), 0.0)).sum()
    if d_lse is not None:
        loss = loss + (torch.where(some[..., 0], lse[..., 0] * d_lse.double(), 0.0)).sum()
    wanted = [x for x in given if x is not None]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return Gradients(*[None if x is None else _or_zeros(next(found), x) for x in given])


def _or_zeros(gradient: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if gradient is None else gradient


@st.composite
def backward_calls(
    draw: st.DrawFn,
    dtype: torch.dtype,
    q_lens: list[int],
    kv_lens: list[int],
    head_dims: list[int],
    memory: tuple[str, ...] = MEMORY_LAYOUTS,
) -> dict[str, Any]:
    """Arguments of `reference_backward`: random masks, shapes, strides and options.

    Rows that keep nothing hold NaN in q and d_out, keys that no query sees hold NaN in k and v.
    """
    batch, (kv_heads, group) = (
        draw(st.integers(1, 2)),
        draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])),
    )
    heads, head_dim = kv_heads * group, draw(st.sampled_from(head_dims))
    q_len, kv_len = draw(st.sampled_from(q_lens)), draw(st.sampled_from(kv_lens))
    value_dim = draw(st.sampled_from([head_dim, head_dim, 24]))
    seed, how = draw(st.integers(0, 99)), draw(st.sampled_from(memory))
    inputs = make_inputs(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        value_dim=value_dim, dtype=dtype, memory=how, seed=seed,
    )  # fmt: skip
    every = (batch, heads, q_len, kv_len)
    keep = draw(dense_masks(q_len, kv_len, draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads]))))
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    d_out = spread(drawn(batch, heads, q_len, value_dim).to(dtype), draw(st.sampled_from(memory)))
    if draw(st.booleans()):
        d_out = torch.ones((), dtype=dtype).expand(d_out.shape)  # as `out.sum().backward()` gives
    call: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "d_out": d_out, "keep": keep}
    if how != "expanded" and draw(st.booleans()):
        _poison(call, every)
    call["scale"] = draw(st.sampled_from([1.0, 1.0, 0.0, -2.0])) * head_dim**-0.5
    call["softcap"] = draw(st.sampled_from([0.0, 0.0, 0.5, 20.0]))
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in every]
        call["bias"] = drawn(*shape).to(draw(st.sampled_from([dtype, torch.promote_types(dtype, torch.float32)])))
        if draw(st.booleans()):
            call["bias"] = call["bias"].masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf)
    if draw(st.sampled_from([False, False, True])):
        call["sinks"] = drawn(heads).float()
        if draw(st.booleans()):
            call["sinks"][0] = draw(st.sampled_from([-torch.inf, 200.0]))
    if draw(st.sampled_from([False, False, True])):
        call["d_lse"] = drawn(batch, heads, q_len).to(torch.promote_types(dtype, torch.float32))
    return call


def _poison(call: dict[str, Any], every: tuple[int, ...]) -> None:
    """NaN in queries (and their gradients) that see no key, and in keys and values that no query sees."""
    keep = call["keep"].expand(every)
    unseen = ~keep.any(2).unflatten(1, (call["k"].shape[1], -1)).any(2)
    empty = ~keep.any(3)
    for name, where in (("q", empty), ("d_out", empty), ("k", unseen), ("v", unseen)):
        if 0 not in call[name].stride():  # each element has memory of its own
            call[name][where] = torch.nan


def expected_gradients(call: dict[str, Any]) -> Gradients:
    """`reference_backward` in float64."""
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    return reference_backward(**wide)


def assert_gradients(actual: Gradients, call: dict[str, Any], factor: float = 2.0) -> None:
    """Assert that gradients are within `factor` of the error of the dense formula in the inputs' dtype.

    A few roundings of the largest gradient are granted on top, as few values may be exact by luck.
    """
    expected = expected_gradients(call)
    plain = plain_gradients(call)
    keep = call["keep"].expand(*call["q"].shape[:3], call["k"].shape[2])
    for name, got, want, other in zip(Gradients._fields, actual, expected, plain, strict=True):
        assert (got is None) == (want is None), name
        if got is None or want is None or other is None:
            continue
        assert got.shape == want.shape, name
        assert bool(got.isfinite().all()), f"{name} has values that are not finite"
        eps = torch.finfo(got.dtype).eps
        # Float64 has no wider dtype in which the dense formula's error could be measured.
        roundings = 256 if got.dtype == torch.float64 else 8
        allowed = factor * (other.double() - want).abs().max() + roundings * eps * want.abs().max().clamp(min=1.0)
        error = (got.double() - want).abs().max()
        assert error <= allowed, f"{name} is off by {error:.3e}, allowed {allowed:.3e}"
    if actual.q is not None:
        assert bool((actual.q[~keep.any(3)] == 0).all()), "rows that keep nothing"
    unseen = ~keep.any(2).unflatten(1, (call["k"].shape[1], -1)).any(2)
    for x in (actual.k, actual.v):
        assert x is None or bool((x[unseen] == 0).all()), "keys that no query sees"


def plain_gradients(call: dict[str, Any]) -> Gradients:
    """The dense formula with every result rounded to the inputs' dtype."""
    return reference_backward(**call, compute_dtype=call["q"].dtype)
