"""Tensors without sequences, heads, queries or keys: zeros, as PyTorch's attention returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import ShapeError
from stof.kernels.quantization import FP8
from stof.operators import masked_attention_op
from stof.selection import IMPLEMENTATIONS
from stof.testing import make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = {
    "batch": {"batch": 0},
    "heads": {"heads": 0},
    "query heads": {"heads": 0, "kv_heads": 2},
    "queries": {"q_len": 0, "kv_len": 5},
    "keys": {"q_len": 5, "kv_len": 0},
    "keys of groups": {"heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 0, "value_dim": 8},
    "both lengths": {"q_len": 0, "kv_len": 0},
    "all": {"batch": 0, "heads": 0, "q_len": 0, "kv_len": 0},
}
FUNCTION = masks.from_function(lambda b, h, i, j: i >= j)
MASKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda q, k: None,
    "causal": lambda q, k: masks.causal(),
    "text": lambda q, k: "sliding_window(3)",
    "padding": lambda q, k: masks.padding([min(2, k.shape[2])] * q.shape[0]) if q.shape[0] else None,
    "function": lambda q, k: FUNCTION,
    "dense": lambda q, k: torch.ones(q.shape[0], 1, q.shape[2], k.shape[2]).bool(),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs_of(sizes: str, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(**{"batch": 2, "heads": 2, "q_len": 5, "memory": "bshd", **SIZES[sizes], **more}).qkv


def check(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = found
    # Not from PyTorch's attention: on CPUs, that of 2.11 divides by sizes that are 0 here, which ends the process.
    expected = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    assert (out.shape, out.dtype, out.device) == (expected.shape, expected.dtype, expected.device)
    assert (lse.shape, lse.device) == (out.shape[:-1], out.device)
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert torch.equal(out, expected)
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_as_plain_attention(sizes: str, mask: str) -> None:
    for dtype in (torch.float16, torch.float64):
        q, k, v = inputs_of(sizes, dtype=dtype)
        check(stof.attention(q, k, v, MASKS[mask](q, k), return_lse=True), q, k, v)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options(implementation: str) -> None:
    q, k, v = inputs_of("keys")
    options = {"bias": torch.ones(1, 5, 0), "sinks": torch.ones(2), "softcap": 2.0, "scale": -1.0}
    check(stof.attention(q, k, v, implementation=implementation, return_lse=True, **options), q, k, v)


def test_a_plan_of_any_batch() -> None:
    plan = stof.plan(masks.causal(), 5)
    full = inputs_of("batch", batch=2)
    expected = stof.attention(*full, plan)
    q, k, v = inputs_of("batch")
    check(stof.attention(q, k, v, plan, return_lse=True), q, k, v)
    assert torch.equal(stof.attention(*full, plan), expected)


def test_a_mask_of_other_sizes_is_refused() -> None:
    for mask in (masks.per_head([masks.causal()] * 3), masks.padding([1, 2, 3])):
        with pytest.raises(ShapeError, match="of 3, the inputs have 2"):
            stof.attention(*inputs_of("queries", batch=2), mask)


def test_eight_bits() -> None:
    q, k, v = (x.to(FP8) for x in inputs_of("keys"))
    scale = torch.ones(2, 2)
    out, lse = stof.attention(q, k, v, scales=(scale, scale, scale), return_lse=True)
    assert torch.equal(out, torch.zeros(2, 2, 5, 16, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((2, 2, 5), -torch.inf))


@pytest.mark.parametrize("sizes", SIZES)
def test_meta(sizes: str) -> None:
    q, k, v = inputs_of(sizes)
    out, lse = stof.attention(*(x.to("meta") for x in (q, k, v)), masks.causal(), return_lse=True)
    expected, expected_lse = stof.attention(q, k, v, masks.causal(), return_lse=True)
    for fake, real in ((out, expected), (lse, expected_lse)):
        assert fake.is_meta
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("sizes", [name for name in SIZES if name != "all"])  # PyTorch's own check fails there
def test_operator(sizes: str) -> None:
    torch.library.opcheck(masked_attention_op, (*inputs_of(sizes), "causal()", None, None, 0.25, 0.0, ""))


@pytest.mark.parametrize("mask", ["none", "function", "dense"])
def test_compiled(mask: str) -> None:
    """With sizes that the compiler takes for constants, and with some that it does not."""
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q, k, v, m: stof.attention(q, k, v, m, return_lse=True), backend="aot_eager", dynamic=dynamic
        )
        for sizes in ("keys", "queries"):
            q, k, v = inputs_of(sizes)
            check(compiled(q, k, v, MASKS[mask](q, k)), q, k, v)


def test_compiled_by_inductor() -> None:
    q, k, v = inputs_of("keys")
    check(torch.compile(lambda *x: stof.attention(*x, return_lse=True), fullgraph=True)(q, k, v), q, k, v)


def test_exported_for_lengths_that_may_be_zero() -> None:
    """The program's operator is the first to see the size."""

    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return stof.attention(q, k, v, masks.causal(), return_lse=True)

    length = torch.export.Dim("length", min=0, max=64)
    q, k, v = inputs_of("batch", batch=2)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=({2: length}, None, None), strict=False).module()
    q, k, v = inputs_of("queries")
    check(program(q, k, v), q, k, v)
