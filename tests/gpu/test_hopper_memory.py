"""The Hopper kernel on awkward memory. Run with `pytest -m gpu` on compute capability 9.0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.testing import MEMORY_LAYOUTS, assert_attention
from tests.gpu.test_hopper import (
    HEAVY,
    HOPPER,
    SCATTERED,
    STAGES,
    bound,
    check,
    check_layout,
    layout_of,
    random_inputs,
)
from tests.kernels.test_hopper_launch import unaligned, wide_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_memory(head_dim: int, memory: str) -> None:
    q, k, v = random_inputs(q_len=300, kv_len=444, head_dim=head_dim, memory=memory)
    out = stof.attention(q, k, v, SCATTERED, implementation="hopper")
    assert out.stride() == torch.empty_like(q).stride()
    for slab in (None, 8):
        for tile in STAGES[64 if head_dim <= 64 else 128]:
            check_layout(layout_of(SCATTERED, q, k, slab, tile=tile), q, k, v)


def shared_heads(x: Tensor) -> Tensor:
    """Stride 0 along heads, and along the batch."""
    return x[:1, :1].transpose(1, 2).contiguous().transpose(1, 2).expand(x.shape)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("change", [unaligned, wide_rows, shared_heads])
def test_memory_of_each_tensor(change: Callable[[Tensor], Tensor]) -> None:
    plan = stof.plan(SCATTERED, 300, 444, device="cuda")
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        q, k, v = (change(x) if number in which else x for number, x in enumerate(random_inputs(q_len=300, kv_len=444)))
        for _ in range(2):  # the second call is a bound one
            out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation="hopper")
            assert_attention(out, lse, q, k, v, plan.to_dense())


@pytest.mark.usefixtures("poisoned_memory")
def test_single_rows_of_odd_strides() -> None:
    """The strides of dimensions of size 1 may be anything."""
    q, k, v = random_inputs(batch=1, heads=1, kv_heads=1, q_len=3, kv_len=3)
    q, k, v = (wide_rows(x)[:, :, 1:2] for x in (q, k, v))
    assert q.stride(2) == 65
    check(q, k, v, masks.full())


def test_unaligned_tensors_after_aligned_ones() -> None:
    plan = stof.plan(SCATTERED, 300, 444, device="cuda")
    q, k, v = random_inputs(q_len=300, kv_len=444, memory="packed")
    odd = (unaligned(q), unaligned(k), unaligned(v))
    assert [x.stride() for x in odd] == [x.stride() for x in (q, k, v)]
    expected = stof.attention(q, k, v, plan, implementation="hopper")
    for _ in range(2):
        assert torch.equal(stof.attention(*odd, plan, implementation="hopper"), expected)
        assert torch.equal(stof.attention(q, k, v, plan, implementation="hopper"), expected)


@pytest.mark.parametrize("slab", [None, 8])
@pytest.mark.parametrize("tile", STAGES[64], ids=str)
def test_equal_calls_give_equal_bits(tile: tuple[int, int], slab: int | None) -> None:
    """200 times, with row blocks split and merged by whichever thread block comes last."""
    q, k, v = random_inputs(q_len=2049)
    layout = layout_of(HEAVY, q, k, slab, tile=tile)
    call = bound(layout, q, k, v, split_tiles=3)
    out, lse = call(q, k, v, None, None)
    assert_attention(out, lse, q, k, v, layout.to_dense())
    for _ in range(200):
        again = call(q, k, v, None, None)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def test_rows_far_apart() -> None:
    """Offsets past 2^31 elements inside one head: 40 keys, 2^26 elements from one to the next (5.4 GB)."""
    stride, length, heads = 2**26 + 64, 40, 2
    buffer = torch.empty(length * stride, dtype=torch.float16, device="cuda")
    k = buffer.as_strided((1, heads, length, 64), (0, 64, stride, 1))
    v = buffer.as_strided((1, heads, length, 64), (0, 64, stride, 1), 1024)
    q, fresh_k, fresh_v = random_inputs(batch=1, heads=heads, kv_heads=heads, q_len=16, kv_len=length)
    k.copy_(fresh_k)
    v.copy_(fresh_v)
    for slab in (None, 8):
        check_layout(layout_of(masks.full() if slab is None else masks.strided(0, 16, 8), q, k, slab), q, k, v)
