"""What tests of backward kernels share: gradients of a dense formula by autograd, random calls, and the error bound."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from stof.kernels.dropout import Dropout, dense_kept_weights
from stof.kernels.implementation import Gradients
from stof.kernels.torch.reference import reference_backward
from stof.testing import MEMORY_LAYOUTS, make_inputs, oracle_attention, spread
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
    dropout: Dropout | None = None,
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
    weights = torch.exp(scores - total)
    if dropout is not None:
        weights = weights * dense_kept_weights(dropout, *weights.shape) / (1 - dropout.p)
    out = torch.where(some, weights @ values, 0.0)
    loss = (out * torch.where(some, d_out.double(), 0.0)).sum()
    if d_lse is not None:
        loss = loss + (torch.where(some[..., 0], lse[..., 0] * d_lse.double(), 0.0)).sum()
    wanted = [x for x in given if x is not None]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return Gradients(*[None if x is None else _or_zeros(next(found), x) for x in given])


def _or_zeros(gradient: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if gradient is None else gradient


# 64-bit integers.
WORDS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def backward_calls(
    draw: st.DrawFn,
    dtype: torch.dtype,
    q_lens: list[int],
    kv_lens: list[int],
    head_dims: list[int],
    memory: tuple[str, ...] = MEMORY_LAYOUTS,
    dropout: bool = False,
) -> dict[str, Any]:
    """Arguments of `reference_backward`: random masks, shapes, strides and options, and `dropout` if it is asked for.

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
        poison(call, every)
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
    if dropout:
        call["dropout"] = Dropout(draw(st.sampled_from([1e-9, 0.1, 0.5, 0.9])), torch.tensor([seed - 50, draw(WORDS)]))
    return call


def poison(call: dict[str, Any], every: tuple[int, ...]) -> None:
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
    """Assert that gradients are within `factor` of the dense formula's error in the inputs' dtype, and rounding."""
    expected = expected_gradients(call)
    plain = plain_gradients(call)
    keep = call["keep"].expand(*call["q"].shape[:3], call["k"].shape[2])
    for name, got, want, other in zip(Gradients._fields, actual, expected, plain, strict=True):
        assert (got is None) == (want is None), name
        if got is None or want is None or other is None:
            continue
        assert got.shape == want.shape, name
        assert bool(got.isfinite().all()), f"{name} has values that are not finite"
        allowed = factor * (other.double() - want).abs().max() + _rounding(name, want, call)
        error = (got.double() - want).abs().max()
        assert error <= allowed, f"{name} is off by {error:.3e}, allowed {allowed:.3e}"
    if actual.q is not None:
        assert bool((actual.q[~keep.any(3)] == 0).all()), "rows that keep nothing"
    unseen = ~keep.any(2).unflatten(1, (call["k"].shape[1], -1)).any(2)
    for x in (actual.k, actual.v):
        assert x is None or bool((x[unseen] == 0).all()), "keys that no query sees"


def _rounding(name: str, want: Tensor, call: dict[str, Any]) -> Tensor:
    """What rounding alone may change in a gradient: the dense formula's error may be small by luck.

    In 32 and 64 bits each term of a sum is rounded relative to its own size, and terms cancel. A sum of n terms in any
    order is off by at most `n * eps / 2` times the sum of their absolute values (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2).
    """
    dtypes = (call["q"].dtype, call["bias"].dtype if name == "bias" else call["q"].dtype)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if call["q"].dtype.itemsize == 2:
        # Dropout multiplies the terms of a sum, which cancel, by 1 / (1 - p).
        kept = 1 - call["dropout"].p if call.get("dropout") is not None else 1.0
        bound = 8 * eps * want.abs().max().clamp(min=1.0 / kept)
        return bound + 4 * eps / math.sqrt(12) * _largest_norm(call) if name == "bias" else bound
    rows, kv_len = call["q"].shape[:3].numel(), call["k"].shape[2]
    return (8 + max(rows, kv_len) / 2) * eps * getattr(_absolute_terms(call), name).max()


def _largest_norm(call: dict[str, Any]) -> Tensor:
    """The largest norm of the products of `out` and `d_out` that go into one value of the bias's gradient.

    Each row subtracts their sum from the gradients of its weights. A rounded `out` has independent errors, of
    `eps / sqrt(12)` each, which stay when the rows are added up, even if the gradient is 0: a bias of one value for all
    keys changes no output.
    """
    options = {name: call.get(name) for name in ("scale", "bias", "sinks", "dropout")}
    q, k, v = (call[name].nan_to_num() for name in ("q", "k", "v"))  # NaN in keys that no query sees, and in empty rows
    out = oracle_attention(q, k, v, call["keep"], softcap=call.get("softcap") or None, **options)
    products = out[0] * call["d_out"].double().masked_fill(out[1].isneginf()[..., None], 0.0)
    every = (*products.shape[:3], call["k"].shape[2])
    of_rows = products.square().sum(-1, keepdim=True).expand(every)
    bias = call["bias"]
    # Keys share the errors of their row.
    shape = bias[(None,) * (4 - bias.ndim)].shape
    return (of_rows.sum_to_size(shape) / (every[3] if shape[3] == 1 else 1)).max().sqrt()


def _absolute_terms(call: dict[str, Any]) -> Gradients:
    """`reference_backward` with the absolute value of every term, in float64."""
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}
    q, k, v, d_out, keep = (wide[n] for n in ("q", "k", "v", "d_out", "keep"))
    keep = keep.expand(*q.shape[:3], k.shape[2])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).masked_fill(~keep.any(2)[..., None], 0.0) for x in (k, v))
    q, d_out = (x.masked_fill(~keep.any(3)[..., None], 0.0) for x in (q, d_out))
    scores = q @ k.mT * wide["scale"]
    cap, bias, sinks = wide.get("softcap", 0.0), wide.get("bias"), wide.get("sinks")
    scores = (cap * torch.tanh(scores / cap) if cap else scores) + (0.0 if bias is None else bias)
    weights = torch.softmax(scores.masked_fill(~keep, -torch.inf), -1).nan_to_num()
    of_scores = q.abs() @ k.abs().mT * abs(wide["scale"]) + (0.0 if bias is None else bias.abs())
    # The rounding of a score is a relative one of its weight.
    weights = weights * (1 + of_scores.nan_to_num(posinf=0.0))
    d_weights = d_out.abs() @ v.abs().mT
    seen = weights
    if (dropout := wide.get("dropout")) is not None:
        kept = dense_kept_weights(dropout, *weights.shape) / (1 - dropout.p)
        seen, d_weights = seen * kept, d_weights * kept
    delta = (weights * d_weights).sum(-1, keepdim=True)
    d_lse = wide.get("d_lse")
    d_scores = weights * (d_weights + delta + (0.0 if d_lse is None else d_lse.abs()[..., None].nan_to_num()))
    scale = abs(wide["scale"])

    def of_key_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2)

    return Gradients(
        q=d_scores @ k.abs() * scale,
        k=of_key_heads(d_scores.mT @ q.abs() * scale),
        v=of_key_heads(seen.mT @ d_out.abs()),
        bias=None if bias is None else d_scores.sum_to_size(bias[(None,) * (4 - bias.ndim)].shape),
        sinks=None if sinks is None else delta.sum((0, 2)),
    )


def plain_gradients(call: dict[str, Any]) -> Gradients:
    """The dense formula with every result rounded to the inputs' dtype.

    NaN stands where nothing is read, and is 0 here: bfloat16 products on CPUs with AMX carry it from a row to others
    for some inner sizes, such as 7 and 80.
    """
    filled = {
        name: x.masked_fill(x.isnan(), 0.0) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }
    return reference_backward(**filled, compute_dtype=call["q"].dtype)
