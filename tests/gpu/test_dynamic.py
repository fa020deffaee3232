"""Masks made at run time on a real GPU: captured in a CUDA graph, replayed with other numbers. `pytest -m gpu`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.errors import MaskError
from stof.kernels.implementation import Gradients
from stof.layout import bitmaps as bits
from stof.masks import Mask
from stof.masks.tensors import dense_view
from stof.testing import assert_attention, make_inputs
from tests.gpu.test_triton import random_inputs
from tests.kernels.gradients import assert_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH, HEADS = 1003, 4


def numbers(kind: str, seed: int) -> tuple[Tensor, ...]:
    """The tensors of a mask of each kind."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(count: int) -> Tensor:
        rows = [torch.randperm(LENGTH, generator=generator)[:count].sort().values for _ in range(HEADS)]
        return torch.stack(rows).int().cuda()

    match kind:
        case "vertical_slash":
            slash = chosen(150)
            slash[1] = torch.arange(150)  # a band, which makes full tiles
            return chosen(90), slash
        case "block_topk":
            return (torch.randn(HEADS, 16, 16, generator=generator).cuda(),)
    keep = (torch.rand(HEADS, LENGTH, LENGTH, generator=generator) < 0.02).cuda()
    keep[0, :, 100:400] = True
    return (bits.pack(keep),) if kind == "bits" else (keep,)


def mask_of(kind: str, tensors: tuple[Tensor, ...]) -> Mask:
    match kind:
        case "vertical_slash":
            return masks.vertical_slash(*tensors)
        case "block_topk":
            return masks.block_topk(tensors[0], 5, causal=True)
        case "bits":
            return masks.from_bits(tensors[0], LENGTH)
    return dense_view(tensors[0])


def check(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> None:
    keep = mask.to_dense(LENGTH, device="cuda")
    assert_attention(out, lse, q, k, v, keep, **options)


@pytest.mark.parametrize("kind", ["vertical_slash", "block_topk", "dense", "bits"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_replayed_with_other_numbers(kind: str, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(dtype, kv_heads=2, head_dim=128)
    tensors = numbers(kind, 0)
    mask = mask_of(kind, tensors)
    plan = stof.dynamic_plan(mask, LENGTH, batch=2, heads=HEADS)
    out, lse = stof.attention(q, k, v, plan, return_lse=True)
    check(out, lse, q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(mask)
        out, lse = stof.attention(q, k, v, plan, return_lse=True)
    for seed in (1, 2):
        for old, new in zip(tensors, numbers(kind, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(out, lse, q, k, v, mask_of(kind, tensors))
    plan.check()


def test_bad_numbers_are_nan_and_reported_under_a_graph() -> None:
    q, k, v = random_inputs(batch=1)
    vertical, slash = numbers("vertical_slash", 0)
    mask = masks.vertical_slash(vertical, slash)
    plan = stof.dynamic_plan(mask, LENGTH, heads=HEADS)
    stof.attention(q, k, v, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(mask)
        out = stof.attention(q, k, v, plan)
    vertical[2, 5] = LENGTH
    graph.replay()
    with pytest.raises(MaskError, match="batch entry 0, head 2: indices out of range"):
        plan.check()
    lost = out.isnan().flatten(2)
    assert lost.all(-1).tolist() == [[False, False, True, False]]
    assert lost.any(-1).tolist() == [[False, False, True, False]]
    vertical.copy_(numbers("vertical_slash", 1)[0])
    graph.replay()
    plan.check()
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("kind", ["vertical_slash", "block_topk", "dense"])
def test_updates_and_calls_on_streams_that_nobody_orders(kind: str) -> None:
    """Either may be late: a call waits for the update before it, an update for the calls before it."""
    q, k, v = random_inputs(torch.float16, kv_heads=2, head_dim=128)
    given = [mask_of(kind, numbers(kind, seed)) for seed in range(6)]
    expected = [mask.to_dense(LENGTH, device="cuda") for mask in given]
    plan = stof.dynamic_plan(given[0], LENGTH, batch=2, heads=HEADS)
    stof.attention(q, k, v, plan)  # compiled and loaded
    updates, *calls = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for number, mask in enumerate(given):
        late = updates if number % 2 else calls[number // 2 % 2]
        with torch.cuda.stream(late):
            torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(updates):
            plan.update(mask)
        for stream in calls:
            with torch.cuda.stream(stream):
                found.append(stof.attention(q, k, v, plan, return_lse=True))
    torch.cuda.synchronize()
    for number, (out, lse) in enumerate(found):
        assert_attention(out, lse, q, k, v, expected[number // 2])
    plan.check()


@pytest.mark.parametrize("kind", ["vertical_slash", "block_topk", "dense"])
def test_update_on_another_stream(kind: str) -> None:
    """Attention waits for it, and it waits for the attention before it; eagerly and as a fork in a graph."""
    q, k, v = random_inputs(torch.float16, kv_heads=2, head_dim=128)
    side = torch.cuda.Stream()
    tensors = numbers(kind, 0)
    mask = mask_of(kind, tensors)
    plan = stof.dynamic_plan(mask, LENGTH, batch=2, heads=HEADS)
    weight = torch.randn(128, 128, device="cuda", dtype=torch.float16) / 128**0.5

    def step(mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        plan.update(mask, stream=side)
        projected = q @ weight
        return projected, *stof.attention(projected, k, v, plan, return_lse=True)

    for seed in range(4):
        other = mask_of(kind, numbers(kind, seed))
        projected, out, lse = step(other)
        keep = other.to_dense(LENGTH, device="cuda")
        del other
        assert_attention(out, lse, projected, k, v, keep)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        projected, out, lse = step(mask)
    for seed in (1, 2):
        for old, new in zip(tensors, numbers(kind, seed), strict=True):
            old.copy_(new)
        graph.replay()
        check(out, lse, projected, k, v, mask_of(kind, tensors))
    plan.check()


def test_rows_without_room() -> None:
    q, k, v = random_inputs(batch=1)
    keep = numbers("dense", 0)[0]
    plan = stof.dynamic_plan(keep, LENGTH, heads=HEADS, density=0.5)
    out, lse = stof.attention(q, k, v, plan, return_lse=True)
    with pytest.raises(MaskError, match="more tiles than there is room for"):
        plan.check()
    lost = out.isnan().any(-1)
    assert torch.equal(lost, lse.isnan())
    assert bool(lost.any())
    assert not bool(lost.all())


def test_a_chunk_of_prefill() -> None:
    """Queries that start in the middle of the cache."""
    inputs = make_inputs(heads=HEADS, q_len=200, kv_len=LENGTH, head_dim=64, dtype=torch.float16, device="cuda")
    q, k, v = inputs.qkv
    mask = masks.vertical_slash(*numbers("vertical_slash", 3)).with_query_offset(LENGTH - 200)
    plan = stof.dynamic_plan(mask, 200, LENGTH, heads=HEADS)
    out, lse = stof.attention(q, k, v, plan, return_lse=True)
    assert_attention(out, lse, q, k, v, mask.to_dense(200, LENGTH, device="cuda"))
    plan.check()


@pytest.mark.parametrize("kind", ["vertical_slash", "block_topk", "dense", "bits"])
def test_copies_have_lists_of_their_own(kind: str) -> None:
    q, k, v = random_inputs(torch.float16, kv_heads=2, head_dim=128)
    first, second = (mask_of(kind, numbers(kind, seed)) for seed in range(2))
    plan = stof.dynamic_plan(first, LENGTH, batch=2, heads=HEADS)
    stof.attention(q, k, v, plan)
    others = [copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))]
    plan.update(second)
    check(*stof.attention(q, k, v, plan, return_lse=True), q, k, v, second)
    del plan
    for other in others:
        check(*stof.attention(q, k, v, other, return_lse=True), q, k, v, first)


@pytest.mark.parametrize("kind", ["block_topk", "dense", "bits"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 64)])
def test_gradients_are_replayed_with_other_numbers(kind: str, dtype: torch.dtype, head_dim: int) -> None:
    """Both passes behind an update, captured in one CUDA graph."""
    tensors = numbers(kind, 0)
    mask = mask_of(kind, tensors)
    plan = stof.dynamic_plan(mask, LENGTH, batch=2, heads=HEADS)
    q, k, v = (x.requires_grad_() for x in random_inputs(dtype, kv_heads=2, head_dim=head_dim))
    d_out = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        plan.update(mask)
        return torch.autograd.grad(stof.attention(q, k, v, plan), (q, k, v), d_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    for seed in (0, 1, 2):
        for old, new in zip(tensors, numbers(kind, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        keep = mask.to_dense(LENGTH, device="cuda").cpu()
        call = {"q": q, "k": k, "v": v, "d_out": d_out, "scale": head_dim**-0.5}
        call = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
        call["keep"] = keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape))
        assert_gradients(Gradients(*(x.cpu() for x in gradients), None, None), call)
        first = [x.clone() for x in gradients]
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(first, gradients, strict=True)), "equal calls give equal bits"
    plan.check()
