"""The GPU implementations through the public operator, under Triton's interpreter: prepared, bound, kept, recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.kernels.torch.reference import reference_backward
from stof.layout import orders
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention, make_inputs

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAMES = ("block_wise", "decode", "row_wise")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # As in tests/kernels: Triton 3.6's interpreter under NumPy 2, and lanes whose result is dropped.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _also_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        impl = IMPLEMENTATIONS[name]
        wider = replace(impl.capabilities, devices=("cuda", "cpu"), compute_capability=(0, 0))
        monkeypatch.setitem(IMPLEMENTATIONS, name, replace(impl, capabilities=wider))


def inputs_of(seed: int = 0, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    plain = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 5, "kv_len": 20, "head_dim": 16}
    return make_inputs(**{**plain, **sizes}, seed=seed, device=DEVICE).qkv  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_masks_and_options(name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs_of(dtype=dtype, value_dim=20, batch=2)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(2, 1, 20, generator=generator).to(DEVICE)
    sinks = torch.randn(2, generator=generator).to(DEVICE)
    mask = masks.sliding_window(5) | masks.padding([14, 2])
    keep = mask.to_dense(5, 20, batch=2, device=DEVICE)
    options: dict[str, Any]
    for options in ({}, {"bias": bias, "sinks": sinks, "softcap": 5.0, "scale": 0.3}):
        out, lse = stof.attention(q, k, v, mask, return_lse=True, implementation=name, **options)
        assert_attention(out, lse, q, k, v, keep, **options)


@pytest.mark.parametrize("name", NAMES)
def test_ready_plans_give_what_fresh_ones_give(name: str) -> None:
    """A kept call must not be taken for a call that differs in any way that matters."""
    plan = stof.plan(masks.causal() | masks.sink_tokens(3), 5, 20, device=DEVICE)
    keep = plan.to_dense()
    bias, sinks = torch.randn(1, 2, 5, 20, device=DEVICE), torch.randn(2, device=DEVICE)
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"seed": 1}, {}),
        ({}, {"scale": 0.3}),
        ({}, {"scale": -0.3}),
        ({}, {"softcap": 2.0}),
        ({}, {"bias": bias}),
        ({}, {"bias": bias + 1}),
        ({}, {"bias": bias[:, :, :1]}),
        ({}, {"bias": bias[0]}),
        ({}, {"bias": bias[0, 0, 0]}),
        ({}, {"sinks": sinks}),
        ({}, {"sinks": sinks.double()}),
        ({}, {"bias": bias, "sinks": sinks}),
        ({"dtype": torch.float16}, {}),
        ({"batch": 2}, {}),
        ({"heads": 4}, {}),
        ({"heads": 3, "kv_heads": 3}, {}),
        ({"head_dim": 24}, {}),
        ({"value_dim": 24}, {}),
        ({"memory": "bshd"}, {}),
        ({"memory": "transposed"}, {}),
        ({"memory": "offset"}, {}),
    ]
    for _ in range(2):
        for sizes, options in variants:
            q, k, v = inputs_of(**sizes)
            out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation=name, **options)
            assert_attention(out, lse, q, k, v, keep, **options)
            assert out.stride() == torch.empty_like(q).stride() or v.shape[3] != q.shape[3]


@pytest.mark.parametrize("name", NAMES)
def test_kept_calls_still_check_who_is_asking(name: str) -> None:
    """Gradients are computed, and autocast casts, also after the call was kept."""
    q, k, v = inputs_of()
    plan = stof.plan(masks.causal(), 5, 20, device=DEVICE)
    for _ in range(2):
        stof.attention(q, k, v, plan, implementation=name)
    out = stof.attention(q.requires_grad_(), k, v, plan, implementation=name)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    keep, ones = plan.to_dense(), torch.ones_like(out)
    expected = reference_backward(q.detach(), k, v, ones, keep, scale=q.shape[3] ** -0.5).q
    torch.testing.assert_close(gradient, expected)
    q.requires_grad_(False)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert stof.attention(q, k, v, plan, implementation=name).dtype == torch.bfloat16
    with torch.no_grad():
        out = stof.attention(q.requires_grad_(), k, v, plan, implementation=name)
    assert_attention(out, None, q.detach(), k, v, plan.to_dense())


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_fresh(name: str) -> None:
    """Two calls of a kept call do not share memory."""
    q, k, v = inputs_of()
    plan = stof.plan(masks.causal(), 5, 20, device=DEVICE)
    stof.attention(q, k, v, plan, implementation=name)
    first = stof.attention(q, k, v, plan, implementation=name)
    kept = first.clone()
    second = stof.attention(2 * q, k, v, plan, implementation=name)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


@pytest.mark.parametrize("name", NAMES)
def test_permuted_rows(name: str) -> None:
    q, k, v = inputs_of(q_len=16, kv_len=24)
    mask = masks.dilated_window(16, dilation=4)
    order = orders.by_remainder(16, 4).to(DEVICE)
    plan = stof.plan(mask, 16, 24, device=DEVICE, row_order=order)
    out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation=name)
    assert_attention(out, lse, q, k, v, mask.to_dense(16, 24, device=DEVICE))


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_operator(name: str) -> None:
    """What compilers see: same result through `torch.library`, and fakes of the right shapes."""
    q, k, v = inputs_of(value_dim=24)
    out, lse = torch.ops.stof.masked_attention(q, k, v, "causal()", None, None, 0.25, 0.0, name)
    assert_attention(out, lse, q, k, v, masks.causal().to_dense(5, 20, device=DEVICE), scale=0.25)
