"""The Hopper kernel on awkward memory, in graphs, on streams and in compiled code. `pytest -m gpu` on sm_90."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.masks import Mask
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


def unaligned(x: Tensor) -> Tensor:
    """A slice of a fused projection that does not start at a multiple of 16 bytes."""
    batch, heads, length, width = x.shape
    buffer = x.new_full((batch * length * 3 * heads * width + 3,), torch.nan)
    packed = buffer[3:].view(batch, length, 3, heads, width)[:, :, 1]
    return packed.copy_(x.transpose(1, 2)).transpose(1, 2)


def wide_rows(x: Tensor) -> Tensor:
    """Rows at a distance that is no multiple of 16 bytes."""
    return torch.nn.functional.pad(x, (0, 1), value=torch.nan)[..., :-1]


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


def split_call(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Row blocks certainly split, whatever the selector would do."""
    call = bound(layout_of(HEAVY, q, k, 8), q, k, v, split_tiles=3)
    return lambda: call(q, k, v, None, None)[0]


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


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    call()  # compiled and loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("memory", ["bhsd", "packed", "transposed"])
def test_graphs_replay_with_new_inputs(memory: str) -> None:
    sizes = {"kv_len": 3000, "memory": memory}
    q, k, v = random_inputs(**sizes)
    plan = stof.plan(HEAVY, 1003, 3000, device="cuda")
    graph, out = captured(lambda: stof.attention(q, k, v, plan, implementation="hopper"))
    for seed in range(3):
        fresh = random_inputs(**sizes, seed=seed)
        for held, new in zip((q, k, v), fresh, strict=True):
            held.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, stof.attention(*fresh, plan, implementation="hopper"))


def test_graphs_on_two_streams_at_once() -> None:
    """Each graph counts finished chunks in memory of its own; so does eager work on a third stream."""
    inputs = [random_inputs(q_len=2049, seed=seed) for seed in range(3)]
    calls = [split_call(*qkv) for qkv in inputs]
    expected = [call() for call in calls]
    graphs = [captured(call) for call in calls[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for round_ in range(30):
        for _, out in graphs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        eager = []
        for _ in range(5):
            for stream, (graph, _) in zip(streams, graphs, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(streams[2]):
                eager.append(calls[2]())
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for (_, out), want in zip(graphs, expected, strict=False)), round_
        assert all(torch.equal(out, expected[2]) for out in eager), round_


def test_threads_on_streams_share_a_plan() -> None:
    plan = stof.plan(HEAVY, 2049, device="cuda")
    inputs = [random_inputs(q_len=2049, seed=seed) for seed in range(2)]
    keep = HEAVY.to_dense(2049, device="cuda")
    wrong: list[str] = []
    barrier = threading.Barrier(2)
    torch.cuda.synchronize()

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()  # the first call of both plans, chooses and compiles
                outs = [stof.attention(*inputs[number], plan, implementation="hopper") for _ in range(100)]
                torch.cuda.current_stream().synchronize()
            assert_attention(outs[0], None, *inputs[number], keep)
            wrong.extend(f"{number}: call {n}" for n, out in enumerate(outs) if not torch.equal(out, outs[0]))
        except BaseException as error:
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_ready_plan_never_synchronises() -> None:
    q, k, v = random_inputs(kv_len=4000)
    sinks = torch.randn(4, device="cuda")
    plan = stof.plan(HEAVY, 1003, 4000, device="cuda")
    expected = stof.attention(q, k, v, plan, implementation="hopper", sinks=sinks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [stof.attention(q, k, v, plan, implementation="hopper", sinks=sinks) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, expected) for out in outs)


def test_compiled() -> None:
    torch.compiler.reset()  # compiled variants of one function are bounded
    q, k, v = random_inputs(q_len=300, kv_len=600)
    mask: Mask = masks.longformer(64, 30)
    plan = stof.plan(mask, 300, 600, device="cuda")
    expected = stof.attention(q, k, v, plan, implementation="hopper") * 2
    for argument in (plan, mask):

        def model(q: Tensor, k: Tensor, v: Tensor, m: Any = argument) -> Tensor:
            return stof.attention(q, k, v, m, implementation="hopper") * 2

        compiled = torch.compile(model, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(q, k, v), expected)


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


def test_more_than_31_bits_of_elements() -> None:
    """Tensors of 2.2e9 elements each (4.4 GB); the last head and rows are checked."""
    heads, length, width, reach = 130, 131_072, 128, 40
    q, k, v = (torch.randn(1, heads, length, width, device="cuda", dtype=torch.float16) for _ in range(3))
    out = stof.attention(q, k, v, masks.sliding_window(reach), implementation="hopper")
    rows, keys = slice(length - 200, length), slice(length - 300, length)
    keep = masks.sliding_window(reach).to_dense(300, device="cuda")[:, :, 100:]
    for one in (slice(0, 1), slice(heads - 1, heads)):
        assert_attention(out[:, one, rows], None, q[:, one, rows], k[:, one, keys], v[:, one, keys], keep)
