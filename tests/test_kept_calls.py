"""A plan keeps calls for repeated arguments: each serves arguments exactly like those it was made for.

Kernels on a GPU are bound to dtypes and strides. Here plain PyTorch reads tensors in the same way: through the strides
of the call it was bound for, whatever those of the given tensor are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import DtypeError
from stof.kernels.implementation import BoundCall, Options
from stof.kernels.quantization import FP8, widened
from stof.kernels.torch.reference import reference_attention
from stof.runtime.private import is_plain
from stof.selection import IMPLEMENTATIONS, Capabilities
from stof.testing import assert_attention, make_inputs, oracle_attention

MASK = masks.sliding_window(9, 3)
Q, K, V = make_inputs(batch=2, heads=4, kv_heads=2, q_len=30, seed=3).qkv
BIAS, SINKS = torch.randn(2, 4, 30, 30, generator=torch.Generator().manual_seed(4)), torch.linspace(-2, 2, 4)


def bind_to_strides(q: Tensor, k: Tensor, v: Tensor, prepared: Any, options: Options) -> BoundCall:
    def form(x: Tensor | None) -> Any:
        return None if x is None else (x.dtype, x.shape, x.stride())

    def read(x: Tensor | None, made_for: Any) -> Tensor | None:
        if x is None or made_for is None:
            assert x is made_for
            return None
        assert x.dtype == made_for[0]
        return x.as_strided(*made_for[1:])

    forms = [form(x) for x in (q, k, v, options.bias, options.sinks, *options.scales)]

    def call(*given: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, bias, sinks, *scales = (read(*pair) for pair in zip(given, forms, strict=True))
        dtype = q.dtype
        if scales:
            q, k, v = (widened(x, scale, torch.float32) for x, scale in zip((q, k, v), scales, strict=True))
            dtype = torch.bfloat16
        out, lse = reference_attention(
            q, k, v, prepared, scale=options.scale, softcap=options.softcap, bias=bias, sinks=sinks
        )
        return out.to(dtype), lse

    return call


@pytest.fixture(autouse=True)
def _bound_to_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = IMPLEMENTATIONS["reference"]
    narrow = Capabilities(devices=("cpu",), dtypes=(FP8,))
    monkeypatch.setitem(IMPLEMENTATIONS, "reference", replace(plain, bind=bind_to_strides))
    monkeypatch.setitem(IMPLEMENTATIONS, "hopper_fp8", replace(plain, capabilities=narrow, bind=bind_to_strides))


def other_strides(x: Tensor) -> Tensor:
    """The same values, last two dimensions swapped in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "other softcap": {"softcap": 0.5},
    "scale as large as a softcap": {"scale": 1.5},
    "implementation": {"implementation": "batched"},
    "q in other strides": {"q": other_strides(Q)},
    "k in other strides": {"k": other_strides(K)},
    "v in other strides": {"v": other_strides(V)},
    "float64": {"q": Q.double(), "k": K.double(), "v": V.double()},
    "bias": {"bias": BIAS},
    "bias of one row": {"bias": BIAS[:, :, :1]},
    "bias in other strides": {"bias": other_strides(BIAS)},
    "bias of float64": {"bias": BIAS.double()},
    "bias of fewer dimensions": {"bias": BIAS[0]},
    "sinks": {"sinks": SINKS},
    "sinks with gaps": {"sinks": torch.stack((SINKS, SINKS + 9), 1)[:, 0]},
    "sinks and scale": {"scale": 0.7, "sinks": SINKS},
}


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_one_plan_serves_calls_that_differ_in_one_thing(order: int) -> None:
    """Twice each, so that the second finds the kept call; in both orders, since the first of two decides."""
    plan = stof.plan(MASK, 30)
    keep = MASK.to_dense(30)
    for _ in range(2):
        for options in list(CALLS.values())[::order]:
            given = {"q": Q, "k": K, "v": V, "implementation": "reference", **options}
            out, lse = stof.attention(*(given.pop(n) for n in "qkv"), plan, return_lse=True, **given)
            inputs = [options.get(name, x) for name, x in (("q", Q), ("k", K), ("v", V))]
            del given["implementation"]
            assert_attention(out, lse, *inputs, keep, factor=6.0, **given)
    assert len(plan._calls) == len(CALLS)


@pytest.mark.parametrize("scales", [SINKS, [], ()])
def test_scales_that_mean_nothing_are_refused_of_kept_calls_too(scales: Any) -> None:
    plan = stof.plan(MASK, 30)
    for _ in range(2):
        with pytest.raises(DtypeError, match="scales belong to float8_e4m3fn"):
            stof.attention(Q, K, V, plan, scales=scales)
        stof.attention(Q, K, V, plan)


def test_tensors_marked_as_negated() -> None:
    """Kernels would read their memory, which holds the values before that."""
    plan = stof.plan(MASK, 30)
    negated = torch.complex(K, K).conj().imag
    assert negated.is_neg()
    assert not is_plain(Q, negated, V)
    for _ in range(2):
        assert torch.equal(stof.attention(Q, negated, V, plan), stof.attention(Q, negated.resolve_neg(), V, plan))


def test_a_named_implementation_runs() -> None:
    """Also where a call like it is kept for another."""
    ran: list[str] = []
    plan = stof.plan(MASK, 30)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("row_block", "batched", "reference"):

            def bind(*given: Any, name: str = name, plain: Any = IMPLEMENTATIONS[name].bind) -> BoundCall:
                call = plain(*given)

                def counted(*tensors: Any) -> tuple[Tensor, Tensor]:
                    ran.append(name)
                    return call(*tensors)  # type: ignore[no-any-return]

                return counted

            patch.setitem(IMPLEMENTATIONS, name, replace(IMPLEMENTATIONS[name], bind=bind))
        wanted = [None, "reference", "batched", "row_block", "batched", None, "reference"]
        for name in wanted:
            stof.attention(Q, K, V, plan, implementation=name)
    assert ran == [name or "row_block" for name in wanted]


def test_scales_in_other_strides() -> None:
    """Scales of 8-bit tensors: one for all sequences by expansion, columns of a larger tensor, and batch-innermost."""
    narrow = [x.to(FP8) for x in (Q, K, V)]
    numbers = [
        torch.rand(2, x.shape[1], generator=torch.Generator().manual_seed(n)) + 0.5 for n, x in enumerate(narrow)
    ]
    plan = stof.plan(MASK, 30)
    forms = (
        lambda s: s,
        lambda s: s.t().contiguous().t(),
        lambda s: torch.stack((s, s + 9), 2)[:, :, 0],
        lambda s: s[:1].expand(2, -1),
        lambda s: s[1:],
    )
    for changed in (None, 0, 1, 2):
        for form in forms:
            scales = tuple(form(s) if changed in (None, n) else s for n, s in enumerate(numbers))
            out, lse = stof.attention(*narrow, plan, scales=scales, return_lse=True, implementation="hopper_fp8")
            wide = [x.double() * s.double()[:, :, None, None] for x, s in zip(narrow, scales, strict=True)]
            expected, expected_lse = oracle_attention(*wide, MASK.to_dense(30))
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-8)
            torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
