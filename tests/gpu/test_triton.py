"""The Triton implementations on a real GPU, through the public operator. Run with `pytest -m gpu` on a GPU machine."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import DeviceError, KernelError
from stof.selection import failures
from stof.testing import assert_attention, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# The oracle's matrix products under PyTorch's deterministic mode, which poisons memory.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

NAMES = ("block_wise", "decode", "row_wise")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASKS = {
    "full": masks.full(),
    "longformer": masks.longformer(64, 30),
    "strided": masks.strided(64, 64, 8),
    "dilated": masks.dilated_window(500, dilation=16),
    "heads": masks.per_head([masks.causal(), masks.full(), masks.causal(), masks.sliding_window(9)]),
    "padding": masks.padding([1000, 0]) & masks.causal(),
    "empty": ~masks.full(),
}
# The heavy first rows are split, so partial results are merged through memory.
HEAVY = masks.longformer(32, 64)


@pytest.fixture(autouse=True)
def _no_failures() -> Iterator[None]:
    failures.clear()
    yield
    failures.clear()


def random_inputs(dtype: torch.dtype = torch.float16, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    plain: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 4, "q_len": 1003, "head_dim": 64, "device": "cuda"}
    return make_inputs(**plain | sizes, dtype=dtype).qkv


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, implementation: str | None, keep: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    out, lse = stof.attention(q, k, v, mask, return_lse=True, implementation=implementation, **options)
    if keep is None:
        keep = mask.to_dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], device="cuda")
    # Float32 products are three TF32 ones, and exponentials are the hardware's approximate ones.
    assert_attention(out, lse, q, k, v, keep, factor=4.0 if q.dtype == torch.float32 else 2.0, **options)
    return out, lse


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("implementation", ["block_wise", "row_wise"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, dtype: torch.dtype, implementation: str) -> None:
    check(*random_inputs(dtype), MASKS[mask], implementation)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("implementation", ["block_wise", "row_wise"])
@pytest.mark.parametrize("head_dim", [16, 20, 72, 80, 96, 128, 192, 256])
def test_sizes_and_options(head_dim: int, implementation: str) -> None:
    """Odd lengths, grouped heads, a value width of its own, every option."""
    mask = masks.longformer(64, 30) | masks.strided(16, 64, 8)
    sizes = {"heads": 6, "kv_heads": 2, "q_len": 777, "kv_len": 1531, "head_dim": head_dim, "memory": "bshd"}
    q, k, v = random_inputs(**sizes, value_dim=48)
    options = {"bias": torch.randn(6, 1, 1531, device="cuda"), "sinks": torch.randn(6, device="cuda"), "softcap": 20.0}
    check(q, k, v, mask, implementation)
    check(q, k, v, mask, implementation, scale=0.1, **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("q_len", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (12, 2), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode(q_len: int, heads: int, kv_heads: int, head_dim: int) -> None:
    sizes = {"batch": 3, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": 9001, "head_dim": head_dim}
    mask = masks.padding([9001, 1, 4444]) & (~masks.sliding_window(50) | masks.sink_tokens(5))
    for dtype in DTYPES:
        check(*random_inputs(dtype, **sizes), mask, "decode", sinks=torch.randn(heads, device="cuda"))


def test_chosen_freely() -> None:
    for mask in MASKS.values():
        check(*random_inputs(), mask, None)


@pytest.mark.parametrize("implementation", NAMES)
def test_equal_calls_give_equal_bits(implementation: str) -> None:
    """200 times, with row blocks split and merged by whichever program comes last."""
    q_len, kv_len = (8, 20_000) if implementation == "decode" else (3001, 3001)
    mask = masks.full() if implementation == "decode" else HEAVY
    q, k, v = random_inputs(q_len=q_len, kv_len=kv_len, batch=1)
    plan = stof.plan(mask, q_len, kv_len, device="cuda")
    first = stof.attention(q, k, v, plan, return_lse=True, implementation=implementation)
    for _ in range(200):
        again = stof.attention(q, k, v, plan, return_lse=True, implementation=implementation)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_out_of_memory_is_torchs_own_error_and_passes() -> None:
    mask = masks.sliding_window(64)
    q, k, v = (torch.randn(1, 16, 65_536, 128, device="cuda", dtype=torch.float16) for _ in range(3))  # 256 MiB each
    plan = stof.plan(mask, 65_536, device="cuda")
    expected = stof.attention(q, k, v, plan)
    entries = stof.plan_cache.info().entries
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken = []
    try:
        # What earlier tests left in the allocator's hands would do.
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty_like(q))
        with pytest.raises(torch.OutOfMemoryError):
            stof.attention(q, k, v, plan)
        with pytest.raises(torch.OutOfMemoryError):
            stof.attention(q, k, v, mask | masks.sink_tokens(3))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        taken.clear()
    assert stof.plan_cache.info().entries >= entries
    assert stof.plan(mask, 65_536, device="cuda") is plan
    assert torch.equal(stof.attention(q, k, v, plan), expected)
    assert stof.attention(q, k, v, mask | masks.sink_tokens(3)).isfinite().all()
    assert not [c for c in stof.explain(q, k, v, plan) if "emory" in str(c) and "shared memory" not in str(c)]


def test_a_plan_on_another_device_is_refused() -> None:
    q, k, v = random_inputs()
    for implementation in (None, *NAMES):
        with pytest.raises(DeviceError, match=r"plan\.to"):
            stof.attention(q, k, v, stof.plan(masks.causal(), 1003, device="cpu"), implementation=implementation)


@pytest.mark.parametrize("implementation", ["block_wise", "row_wise", "decode"])
def test_rows_far_apart(implementation: str) -> None:
    """Offsets past 2^31 elements inside one head: 40 keys, 2^26 elements from one to the next (5.4 GB)."""
    stride, length, heads = 2**26 + 64, 40, 2
    buffer = torch.empty(length * stride, dtype=torch.float16, device="cuda")
    k = buffer.as_strided((1, heads, length, 64), (0, 64, stride, 1))
    v = buffer.as_strided((1, heads, length, 64), (0, 64, stride, 1), 1024)
    q, fresh_k, fresh_v = random_inputs(batch=1, heads=heads, kv_heads=heads, q_len=16, kv_len=length)
    k.copy_(fresh_k)
    v.copy_(fresh_v)
    for mask in (masks.full(), masks.causal() | masks.strided(0, 3, 1)):
        check(q, k, v, mask, implementation)


@pytest.mark.parametrize("implementation", NAMES)
def test_unaligned_tensors_after_aligned_ones(implementation: str) -> None:
    """A plan keeps what was compiled for tensors at multiples of 16 bytes; slices need not be."""
    plan = stof.plan(masks.causal(), 16, 400, device="cuda")
    q, k, v = random_inputs(q_len=16, kv_len=400)
    for _ in range(2):
        aligned = stof.attention(q, k, v, plan, implementation=implementation)
        odd = random_inputs(q_len=16, kv_len=400, memory="offset")
        assert any(x.data_ptr() % 16 for x in odd)
        torch.testing.assert_close(stof.attention(*odd, plan, implementation=implementation), aligned)


def test_explain_estimates() -> None:
    q, k, v = random_inputs()
    found = stof.explain(q, k, v, masks.longformer(64, 30))
    estimated = [c for c in found if c.estimate_us is not None]
    assert found[: len(estimated)] == estimated
    hopper = {"hopper"} if torch.cuda.get_device_capability() == (9, 0) else set()
    assert {c.name for c in estimated} == {"block_wise", "row_wise"} | hopper
    assert all(0 < c.estimate_us < 1e6 for c in estimated if c.estimate_us is not None)
    assert "us estimated" in str(found[0])
    assert any(c.name == "decode" and "takes 16 query rows at most" in str(c) for c in found)


def fail_launches(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The first launches of Triton kernels fail as on a GPU that lacks something."""
    from stof.runtime.launch import Launch

    real, left = Launch.__call__, [times]

    def call(self: Launch, *tensors: Tensor, bases: tuple[Tensor, ...] = ()) -> None:
        if left[0]:
            left[0] -= 1
            raise KernelError("out of shared memory")
        real(self, *tensors, bases=bases)

    monkeypatch.setattr(Launch, "__call__", call)


def test_a_kernel_that_fails_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_inputs(q_len=500)
    first = stof.explain(q, k, v, masks.causal())[0].choice
    fail_launches(monkeypatch, 1)
    with pytest.warns(RuntimeWarning, match="failed and is left out from now on: out of shared memory") as warned:
        check(q, k, v, masks.causal(), None)
    assert len(warned) == 1
    assert str(first) in str(warned[0].message)
    found = stof.explain(q, k, v, masks.causal())
    assert found[0].choice != first
    assert [c.refusals for c in found if c.choice == first] == [("out of shared memory",)]
    check(q, k, v, masks.causal(), None)  # warnings are errors: silent from now on


def test_when_every_kernel_fails_plain_pytorch_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_inputs(q_len=500)
    fail_launches(monkeypatch, 10_000)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        check(q, k, v, masks.causal(), None)
    texts = [str(warning.message) for warning in warned]
    assert len(set(texts)) == len(texts) > 1
    assert stof.explain(q, k, v, masks.causal())[0].name == "batched"
    check(q, k, v, masks.causal(), None)
