"""The same answers on an NVIDIA GPU. Skipped without one; run with `pytest -m gpu` on a GPU machine."""

from __future__ import annotations

import warnings

import pytest
import torch

import stof
from stof import masks
from stof.errors import DeviceError
from stof.layout import LayoutConfig, build_layout, orders, statistics
from stof.masks import Mask
from stof.testing import assert_attention, make_inputs, oracle_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MASKS = {
    "longformer": masks.longformer(32, 16),
    "bigbird": masks.bigbird(32, 16),
    "strided": masks.strided(64, 64, 8),
    "dilated": masks.dilated_window(255, dilation=16),
    "heads": masks.per_head([masks.causal(), masks.full(), masks.causal(), masks.sliding_window(9)]),
    "padding": masks.padding([500, 0]) & masks.causal(),
    "empty": ~masks.full(),
}


@pytest.fixture(params=MASKS)
def mask(request: pytest.FixtureRequest) -> Mask:
    return MASKS[request.param]


@pytest.mark.parametrize("slab", [None, 1, 16])
def test_layout_equals_the_cpu_one(mask: Mask, slab: int | None) -> None:
    config = LayoutConfig(64, 64, slab)
    on_cpu = build_layout(mask, 500, 500, config, batch=2, heads=4)
    on_gpu = build_layout(mask, 500, 500, config, batch=2, heads=4, device="cuda")
    on_gpu.validate()
    for name, tensor in on_cpu.tensors().items():
        assert torch.equal(tensor, on_gpu.tensors()[name].cpu()), name
    assert statistics(on_gpu) == statistics(on_cpu)


@pytest.mark.parametrize("implementation", ["batched", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 20.0])  # with and without PyTorch's fused operator
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention(mask: Mask, dtype: torch.dtype, implementation: str, softcap: float | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 500, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, kv_heads, 500, 64, device="cuda", dtype=dtype) for _ in range(2))
    bias = torch.randn(4, 1, 500, device="cuda", dtype=dtype)
    sinks = torch.randn(4, device="cuda", dtype=dtype)
    out, lse = stof.attention(
        q, k, v, mask, bias=bias, softcap=softcap, sinks=sinks, return_lse=True, implementation=implementation
    )
    expected, expected_lse = oracle_attention(
        q, k, v, mask.to_dense(500, batch=2, heads=4, device="cuda"), bias=bias, softcap=softcap, sinks=sinks
    )
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 300), (2, 4, 200, 300), (4, 200, 1)])
def test_fused_options(bias_shape: tuple[int, ...] | None) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, length, 4, 40, device="cuda").transpose(1, 2) for length in (200, 300, 300))
    bias = None if bias_shape is None else torch.randn(bias_shape, device="cuda")
    mask = masks.from_dense(torch.rand(2, 4, 200, 300, device="cuda") < 0.02)
    out, lse = stof.attention(q, k, v, mask, bias=bias, return_lse=True)
    expected, expected_lse = oracle_attention(q, k, v, mask.to_dense(200, 300, device="cuda"), bias=bias)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_head_under_deterministic_algorithms(dtype: torch.dtype) -> None:
    """The head stride of a slice of a fused projection is not that of a contiguous tensor."""
    q, k, v = make_inputs(batch=3, heads=1, q_len=40, head_dim=64, dtype=dtype, memory="packed", device="cuda").qkv
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out, lse = stof.attention(q, k, v, masks.causal(), implementation="batched", return_lse=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_attention(out, lse, q, k, v, masks.causal().to_dense(40, device="cuda"))


def test_permuted_rows() -> None:
    q, k, v = (torch.randn(1, 2, 1000, 32, device="cuda") for _ in range(3))
    mask = masks.dilated_window(511, dilation=16)
    plan = stof.plan(mask, 1000, device="cuda", row_order=orders.by_remainder(1000, 16))
    torch.testing.assert_close(stof.attention(q, k, v, plan), stof.attention(q, k, v, mask), atol=1e-5, rtol=1e-4)


def test_plan_on_another_device_is_refused() -> None:
    q = torch.randn(1, 1, 64, 16, device="cuda")
    with pytest.raises(DeviceError, match=r"plan\.to"):
        stof.attention(q, q, q, stof.plan(masks.causal(), 64, device="cpu"))


def test_ready_plan_never_synchronises_and_can_be_captured() -> None:
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda") for _ in range(3))
    plan = stof.plan(masks.longformer(32, 16), 512, device="cuda")
    expected = stof.attention(q, k, v, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode(2)
    try:
        stof.attention(q, k, v, plan)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stof.attention(q, k, v, plan)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_compiled() -> None:
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda") for _ in range(3))
    mask = masks.bigbird(32, 16)
    plan = stof.plan(mask, 512, device="cuda")
    expected = stof.attention(q, k, v, plan) + 1
    for argument in (plan, mask):
        compiled = torch.compile(lambda q, k, v, m=argument: stof.attention(q, k, v, m) + 1, fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), expected)
