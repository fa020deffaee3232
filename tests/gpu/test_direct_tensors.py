"""Bool tensors given to a call are read in every call, whoever wrote to them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import UnsupportedError
from stof.testing import assert_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH, HEADS = 200, 3


def inputs(dtype: torch.dtype = torch.float16, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, HEADS, LENGTH, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to("cuda", dtype) for _ in range(3))
    return q, k, v


def drawn(seed: int, shape: tuple[int, ...] = (LENGTH, LENGTH), share: float = 0.2) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).cuda()


def check(keep: Tensor) -> None:
    q, k, v = inputs()
    out, lse = stof.attention(q, k, v, keep, return_lse=True)
    every = keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape)).expand(-1, -1, LENGTH, -1)
    assert_attention(out, lse, q, k, v, every)


@pytest.mark.parametrize(
    "shape",
    [(LENGTH, LENGTH), (HEADS, LENGTH, LENGTH), (2, 1, LENGTH, LENGTH), (2, HEADS, LENGTH, LENGTH), (2, 1, 1, LENGTH)],
)
def test_every_write_is_seen(shape: tuple[int, ...]) -> None:
    keep = drawn(0, shape)
    other = drawn(1, shape)
    writes: list[Callable[[], object]] = [
        lambda: None,
        lambda: keep.logical_not_(),
        lambda: keep.data.copy_(other),
        lambda: setattr(keep, "data", ~other),
        lambda: keep.fill_(False),
        lambda: keep.data.fill_(True),
    ]
    for write in writes:
        write()
        check(keep)
    check(other)
    check(keep.mT.contiguous().mT)


def test_replays_of_a_graph_that_makes_the_mask() -> None:
    keep, scores = drawn(0), torch.rand(LENGTH, LENGTH, device="cuda")
    check(keep)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.gt(scores, 0.7, out=keep)
    for seed in range(3):
        scores.copy_(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        check(keep)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_masks_of_compiled_code_that_reuses_its_memory() -> None:
    make = torch.compile(lambda scores: scores > 0.7, mode="reduce-overhead")
    for seed in range(6):
        scores = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)).cuda()
        keep = make(scores)
        q, k, v = inputs()
        assert_attention(stof.attention(q, k, v, keep), None, q, k, v, scores > 0.7)


def test_threads_and_streams_share_plans() -> None:
    q, k, v = inputs()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(10):
                    keep = drawn(seed * 100 + step)
                    out = stof.attention(q, k, v, keep)
                    torch.cuda.current_stream().synchronize()
                    assert_attention(out, None, q, k, v, keep[None, None])
        except BaseException as error:
            failed.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_captures_are_refused() -> None:
    q, k, v = inputs()
    keep = drawn(0)
    stof.attention(q, k, v, keep)
    with pytest.raises(UnsupportedError, match="dynamic_plan"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stof.attention(q, k, v, keep)
    check(keep)


def test_snapshots_keep_their_values() -> None:
    keep = drawn(0)
    before = keep.clone()
    q, k, v = inputs()
    mask, plan = masks.from_dense(keep), stof.plan(keep, LENGTH, device="cuda")
    keep.data.logical_not_()
    for given in (mask, plan):
        assert_attention(stof.attention(q, k, v, given), None, q, k, v, before[None, None])
    assert torch.equal(stof.plan(keep, LENGTH, device="cuda").to_dense()[0, 0], keep)


def test_functions_follow_tensors_on_the_gpu() -> None:
    table = drawn(0)
    q, k, v = inputs()
    fn = masks.from_function(lambda b, h, i, j: table[i, j])
    for seed in range(3):
        table.data.copy_(drawn(seed))
        assert_attention(stof.attention(q, k, v, fn), None, q, k, v, table[None, None])
    assert_attention(stof.attention(q, k, v, stof.plan(fn, LENGTH, device="cuda")), None, q, k, v, table[None, None])
    stof.plan_cache.clear()
    plan = stof.plan(fn, LENGTH, device="cuda", batch=2, heads=HEADS)  # its layouts are built by the first call
    table.data.logical_not_()
    with pytest.raises(stof.errors.MaskError, match="was changed after"):
        stof.attention(q, k, v, plan)
