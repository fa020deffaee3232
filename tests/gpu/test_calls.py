"""Every implementation in graphs, on streams and threads, in compiled code, with large tensors: `pytest -m gpu`."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import LayoutConfig, masks
from stof.errors import UnsupportedError
from stof.layout import build_layout
from stof.masks import Mask
from stof.testing import assert_attention
from tests.gpu import test_hopper
from tests.gpu.test_triton import HEAVY, NAMES, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEEDS_HOPPER = pytest.mark.skipif(not test_hopper.HOPPER, reason="needs a GPU of compute capability 9.0")
ON_HOPPER = pytest.param("hopper", marks=NEEDS_HOPPER)
EVERY = (None, *NAMES, ON_HOPPER)


def split_call(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Row blocks certainly split, whatever the selector would do."""
    if implementation == "hopper":
        bound = test_hopper.bound(test_hopper.layout_of(HEAVY, q, k, 8), q, k, v, split_tiles=3)
        return lambda: bound(q, k, v, None, None)[0]
    from stof.kernels.config import KernelConfig
    from stof.kernels.implementation import Options, attend_once
    from stof.kernels.triton.block_wise import bind
    from stof.kernels.triton.work_list import prepare

    layout = build_layout(HEAVY, q.shape[2], k.shape[2], LayoutConfig(64, 64, 1), device="cuda")
    prepared = prepare(layout, KernelConfig(4, 2, split_tiles=3))
    assert prepared.work.splits >= 1
    return lambda: attend_once(bind, q, k, v, prepared, Options(0.125))[0]


@pytest.mark.parametrize("implementation", ["block_wise", ON_HOPPER])
def test_split_calls_give_equal_bits(implementation: str) -> None:
    q, k, v = random_inputs(q_len=2049)
    call = split_call(implementation, q, k, v)
    first = call()
    assert_attention(first, None, q, k, v, HEAVY.to_dense(2049, device="cuda"))
    assert all(torch.equal(first, call()) for _ in range(200))


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    call()  # compiled and loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("memory", ["bhsd", "packed", "transposed"])
@pytest.mark.parametrize("implementation", EVERY)
def test_graphs_replay_with_new_inputs(implementation: str | None, memory: str) -> None:
    q_len = 4 if implementation == "decode" else 1003
    sizes: dict[str, Any] = {"q_len": q_len, "kv_len": 3000, "memory": memory}
    q, k, v = random_inputs(**sizes)
    plan = stof.plan(HEAVY, q_len, 3000, device="cuda")
    graph, out = captured(lambda: stof.attention(q, k, v, plan, implementation=implementation))
    for seed in range(3):
        fresh = random_inputs(**sizes, seed=seed)
        for held, new in zip((q, k, v), fresh, strict=True):
            held.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, stof.attention(*fresh, plan, implementation=implementation))


@pytest.mark.parametrize("implementation", EVERY)
def test_first_calls_in_a_capture_are_refused(implementation: str | None) -> None:
    """With nothing launched: the capture goes on, and the call can be made after it."""
    q_len = 4 if implementation == "decode" else 1003
    q, k, v = random_inputs(q_len=q_len, kv_len=3000)
    mask = HEAVY | masks.sliding_window(70)  # a mask that no other test has met
    plan = stof.plan(mask, q_len, 3000, device="cuda")
    stof.plan_cache.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in (mask, plan):
            with pytest.raises(UnsupportedError, match="once before the capture"):
                stof.attention(q, k, v, given, implementation=implementation)
        ones = torch.ones(8, device="cuda")
    ones.zero_()
    graph.replay()
    assert bool(ones.all())
    expected, lse = stof.attention(q, k, v, plan, implementation=implementation, return_lse=True)
    assert_attention(expected, lse, q, k, v, mask.to_dense(q_len, 3000, device="cuda"))
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        out = stof.attention(q, k, v, plan, implementation=implementation)
    out.fill_(torch.nan)
    second.replay()
    assert torch.equal(out, expected)


@NEEDS_HOPPER
def test_a_first_call_of_unaligned_tensors_in_a_capture_is_refused() -> None:
    """TMA reads no such addresses: the Hopper kernel copies them, and lists jobs anew for the copies."""
    q, k, v = random_inputs(torch.float16, q_len=1003, kv_len=3000)
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    plan = stof.plan(HEAVY, 1003, 3000, device="cuda")
    stof.attention(*(x.contiguous() for x in (q, k, v)), plan, implementation="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(8, device="cuda")  # PyTorch warns of a graph that is empty
        with pytest.raises(UnsupportedError, match="once before the capture"):
            stof.attention(*shifted, plan, implementation="hopper")
    expected = stof.attention(*shifted, plan, implementation="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stof.attention(*shifted, plan, implementation="hopper")
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("planned", [False, True])
def test_reduce_overhead_may_leave_attention_out_of_its_graphs(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that change are no input of a graph, or each would have one recorded and kept."""
    q, k, v = random_inputs(batch=1, q_len=512)
    recorded = 0
    begin = torch.cuda.CUDAGraph.capture_begin

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        recorded += 1
        return begin(*args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", counted)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, m: torch.tanh(stof.attention(torch.sin(q), k, v, m)) * 2, mode="reduce-overhead", fullgraph=True
    )

    def run(length: int) -> None:
        mask: Any = masks.padding([length])
        kept = mask.to_dense(512, device="cuda")
        out = compiled(q, k, v, stof.plan(mask, 512, device="cuda") if planned else mask).clone()
        want = torch.tanh(stof.attention(torch.sin(q), k, v, masks.from_dense(kept), implementation="reference")) * 2
        assert_close = torch.testing.assert_close
        assert_close(out, want, atol=4e-3, rtol=4e-3)

    with torch.inference_mode():
        for length in (512, 500, 490, 480, 470):
            run(length)
        before = recorded
        assert before > 0, "what is around attention is recorded"
        for length in range(300, 400, 10):
            run(length)
    assert recorded == before


@pytest.mark.parametrize("implementation", ["block_wise", ON_HOPPER])
def test_graphs_on_two_streams_at_once(implementation: str) -> None:
    """Each graph counts finished chunks in memory of its own; so does eager work on a third stream."""
    inputs = [random_inputs(q_len=2049, seed=seed) for seed in range(3)]
    calls = [split_call(implementation, *qkv) for qkv in inputs]
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


@pytest.mark.parametrize("implementation", [None, "block_wise", ON_HOPPER])
def test_threads_on_streams_share_a_plan(implementation: str | None) -> None:
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
                outs = [stof.attention(*inputs[number], plan, implementation=implementation) for _ in range(100)]
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


@pytest.mark.parametrize("implementation", EVERY)
def test_a_dropped_plan_is_read_to_the_end(implementation: str | None) -> None:
    """Its memory is not the next owner's while a kernel on another stream still waits to read it."""
    q_len = 4 if implementation == "decode" else 2049
    q, k, v = random_inputs(q_len=q_len, kv_len=3000, seed=0)
    wanted = stof.attention(q, k, v, stof.plan(HEAVY, q_len, 3000, device="cuda"), implementation=implementation)
    plan = stof.plan(HEAVY, q_len, 3000, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        stof.attention(q, k, v, plan, implementation=implementation)  # made and compiled, which synchronises
        torch.cuda._sleep(10**9)
        out = stof.attention(q, k, v, plan, implementation=implementation)
    gone = weakref.ref(plan)
    del plan
    stof.plan_cache.clear()
    gc.collect()
    assert gone() is None
    litter = [torch.full((size,), -1, dtype=torch.int32, device="cuda") for size in (2**7, 2**10, 2**13, 2**16) * 64]
    torch.cuda.synchronize()
    assert len(litter) == 4 * 64
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("implementation", EVERY)
def test_a_ready_plan_never_synchronises(implementation: str | None, options: bool) -> None:
    q, k, v = random_inputs(q_len=16, kv_len=4000)
    given: dict[str, Any] = {}
    if options:
        given = {"bias": torch.randn(4, 1, 4000, device="cuda", dtype=q.dtype), "sinks": torch.randn(4, device="cuda")}
    plan = stof.plan(masks.longformer(64, 30), 16, 4000, device="cuda")
    expected = stof.attention(q, k, v, plan, implementation=implementation, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [stof.attention(q, k, v, plan, implementation=implementation, **given) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("implementation", EVERY)
def test_compiled(implementation: str | None) -> None:
    torch.compiler.reset()  # compiled variants of one function are bounded
    q, k, v = random_inputs(q_len=16, kv_len=600)
    mask: Mask = masks.longformer(64, 30)
    plan = stof.plan(mask, 16, 600, device="cuda")
    expected = stof.attention(q, k, v, plan, implementation=implementation) * 2
    for argument in (plan, mask):

        def model(q: Tensor, k: Tensor, v: Tensor, m: Any = argument) -> Tensor:
            return stof.attention(q, k, v, m, implementation=implementation) * 2

        compiled = torch.compile(model, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(q, k, v), expected)


@pytest.mark.parametrize("implementation", ["block_wise", "row_wise", ON_HOPPER])
def test_more_than_31_bits_of_elements(implementation: str) -> None:
    """Tensors of 2.2e9 elements each (4.4 GB); the last head and rows are checked."""
    heads, length, width, reach = 130, 131_072, 128, 40
    q, k, v = (torch.randn(1, heads, length, width, device="cuda", dtype=torch.float16) for _ in range(3))
    out = stof.attention(q, k, v, masks.sliding_window(reach), implementation=implementation)
    rows, keys = slice(length - 200, length), slice(length - 300, length)
    keep = masks.sliding_window(reach).to_dense(300, device="cuda")[:, :, 100:]
    for one in (slice(0, 1), slice(heads - 1, heads)):
        assert_attention(out[:, one, rows], None, q[:, one, rows], k[:, one, keys], v[:, one, keys], keep)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("default", ["cuda", "cpu"])
def test_the_default_device_does_not_matter(default: str, compiled: bool) -> None:
    """`torch.set_default_device("cuda")`: what is made on the host stays there."""
    q, k, v = random_inputs(q_len=1152)
    heads = q.shape[1]
    for mask in (
        masks.longformer(80, 3),
        masks.dilated_window(50, dilation=4),
        masks.causal() & masks.documents([0] * 500 + [1] * 652),
        masks.block_topk(torch.randn(heads, 18, 18, device="cuda"), 5, causal=True),
        masks.vertical_slash(torch.arange(90).expand(heads, -1).cuda(), torch.arange(150).expand(heads, -1).cuda()),
    ):

        def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> tuple[Tensor, Tensor]:
            return stof.attention(q, k, v, mask, return_lse=True)

        with torch.device(default):
            out, lse = (torch.compile(call) if compiled else call)(q, k, v)
        assert_attention(out, lse, q, k, v, mask.to_dense(1152, device="cuda"))
