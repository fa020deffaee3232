"""Block top-k made at run time, on the Hopper kernel. `pytest -m gpu` on sm_90."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from stof import masks
from stof.dynamic.block_topk.buffers import BlockBuffers
from stof.dynamic.block_topk.one_pass import OnePassLists
from stof.dynamic.plan import DynamicPlan
from stof.errors import KernelError, MaskError
from stof.kernels.implementation import Gradients
from stof.masks import Mask
from stof.selection import CallSpec, KernelChoice
from stof.selection.select import failures
from stof.testing import assert_attention
from tests.gpu.test_calls import captured
from tests.gpu.test_hopper import HALVES, HOPPER, random_inputs
from tests.kernels.gradients import assert_gradients, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]


def scores_of(seed: int, heads: int, q_len: int, kv_len: int, size: int, batch: int = 1) -> Tensor:
    """Many of them equal, many of them -inf; some rows of blocks see nothing."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(batch, heads, -(-q_len // size), -(-kv_len // size), generator=generator) * 1.5).round()
    return scores.masked_fill(scores.abs() > 2, -torch.inf).cuda()


def check(q: Tensor, k: Tensor, v: Tensor, plan: DynamicPlan, mask: Mask, **options: Any) -> None:
    out, lse = stof.attention(q, k, v, plan, return_lse=True, implementation="hopper", **options)
    assert_attention(out, lse, q, k, v, mask.to_dense(q.shape[2], k.shape[2], device="cuda"), **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "head_dim"), [(64, 64), (128, 64), (64, 128), (128, 96)])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_other_scores_in_every_step(dtype: torch.dtype, size: int, head_dim: int, causal: bool) -> None:
    """Eagerly, with masks of their own for heads, and one for all batch entries."""
    for q_len, kv_len in ((1003, 1003), (512, 700)):
        q, k, v = random_inputs(dtype=dtype, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        plan = None
        for seed in range(3):
            mask = masks.block_topk(scores_of(seed, 4, q_len, kv_len, size), 3, block_size=size, causal=causal)
            plan = plan or stof.dynamic_plan(mask, q_len, kv_len, batch=2, heads=4)
            plan.update(mask)
            check(q, k, v, plan, mask)
            check(q, k, v, plan, mask, softcap=5.0, sinks=torch.arange(4.0, device="cuda"))
        assert plan is not None
        plan.check()


@pytest.mark.parametrize("split_tiles", [0, 1, 3])
@pytest.mark.parametrize(
    ("size", "tile"), [(64, (64, 64)), (64, (64, 128)), (128, (64, 64)), (128, (64, 128)), (128, (128, 128))]
)
def test_every_shape_of_tiles(size: int, tile: tuple[int, int], split_tiles: int) -> None:
    q, k, v = random_inputs(head_dim=64, q_len=2050, kv_len=2050)
    scores = scores_of(0, 4, 2050, 2050, size, batch=2)
    mask = masks.block_topk(scores, 7, block_size=size, causal=True)
    plan = stof.dynamic_plan(mask, 2050, batch=2, heads=4)
    offered = [
        candidate.choice
        for candidate in stof.explain(q, k, v, plan)
        if candidate.name == "hopper" and not candidate.refusals
    ]
    shapes = {(c.layout.block_m, c.layout.block_n) for c in offered if c is not None and c.layout is not None}
    assert tile in shapes
    choice = next(c for c in offered if c and c.layout and (c.layout.block_m, c.layout.block_n) == tile)
    assert choice.kernel is not None
    fixed_to(plan, choice, split_tiles)
    for seed in range(3):
        scores.copy_(scores_of(seed, 4, 2050, 2050, size, batch=2))
        plan.update(mask)
        check(q, k, v, plan, mask)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 4), (128, 4), (72, 4), (64, 2), (128, 1)])
def test_gradients(head_dim: int, kv_heads: int, causal: bool) -> None:
    """By the one-pass kernel, in every step; what no score reaches holds NaN, and equal calls give equal bits."""
    size = 128
    for q_len, kv_len in ((1003, 1003), (1024, 700)):
        plan = None
        for seed in range(3):
            mask = masks.block_topk(scores_of(seed, 4, q_len, kv_len, size), 3, block_size=size, causal=causal)
            keep = mask.to_dense(q_len, kv_len, device="cuda").cpu()
            q, k, v = random_inputs(
                dtype=torch.bfloat16, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, device="cpu"
            )
            call: dict[str, Any] = {"q": q, "k": k, "v": v, "d_out": torch.randn_like(q), "scale": head_dim**-0.5}
            call["keep"] = keep
            poison(call, (2, 4, q_len, kv_len))
            inputs = [call[name].cuda().requires_grad_() for name in ("q", "k", "v")]
            d_out = call["d_out"].cuda()
            plan = plan or stof.dynamic_plan(mask, q_len, kv_len, batch=2, heads=4)
            plan.update(mask)
            first = torch.autograd.grad(stof.attention(*inputs, plan), inputs, d_out)
            assert_gradients(Gradients(*(x.cpu() for x in first), None, None), call)
            for _ in range(5):
                again = torch.autograd.grad(stof.attention(*inputs, plan), inputs, d_out)
                assert all(map(torch.equal, again, first))
        assert plan is not None
        plan.check()
        assert plan._buffers is not None
        assert [type(lists) for lists in plan._buffers.backward.values()] == [OnePassLists]


@pytest.mark.parametrize(("size", "head_dim"), [(64, 128), (64, 64), (128, 128)])
def test_gradients_are_replayed_with_other_scores(size: int, head_dim: int) -> None:
    """An update and both passes in one CUDA graph; scores that are NaN make all gradients of a head NaN."""
    q, k, v = (x.requires_grad_() for x in random_inputs(kv_heads=4, head_dim=head_dim))
    d_out = torch.randn_like(q)
    scores = scores_of(0, 4, 1003, 1003, size)
    mask = masks.block_topk(scores, 5, block_size=size, causal=True)
    plan = stof.dynamic_plan(mask, 1003, batch=2, heads=4)

    def step() -> tuple[Tensor, ...]:
        plan.update(mask)
        return torch.autograd.grad(stof.attention(q, k, v, plan), (q, k, v), d_out)

    graph, gradients = captured(step)
    for seed in range(1, 4):
        scores.copy_(scores_of(seed, 4, 1003, 1003, size))
        graph.replay()
        torch.cuda.synchronize()
        call: dict[str, Any] = {"q": q, "k": k, "v": v, "d_out": d_out, "keep": mask.to_dense(1003, device="cuda")}
        call = {name: x.detach().cpu() for name, x in call.items()} | {"scale": head_dim**-0.5}
        assert_gradients(Gradients(*(x.cpu() for x in gradients), None, None), call)
    plan.check()
    scores[0, 2, 3, 1] = torch.nan
    graph.replay()
    for x in gradients:
        assert x.isnan().flatten(2).all(-1).tolist() == [[False, False, True, False]] * 2
        assert not bool(x[:, [0, 1, 3]].isnan().any())
    with pytest.raises(MaskError, match="batch entry 0, head 2: scores that are NaN"):
        plan.check()


def fixed_to(plan: DynamicPlan, choice: KernelChoice, split_tiles: int) -> None:
    """Let all of a plan's calls run by this choice."""
    from dataclasses import replace

    assert choice.kernel is not None
    only = replace(choice, kernel=replace(choice.kernel, split_tiles=split_tiles))

    def choose(call: CallSpec, implementation: str | None = None) -> KernelChoice:
        del call, implementation
        return only

    plan.choice = choose  # type: ignore[method-assign]


def test_replayed_with_other_scores() -> None:
    q, k, v = random_inputs(head_dim=128)
    scores = scores_of(0, 4, 1003, 1003, 64)
    mask = masks.block_topk(scores, 5, causal=True)
    plan = stof.dynamic_plan(mask, 1003, batch=2, heads=4)

    def step() -> Tensor:
        plan.update(mask)
        return stof.attention(q, k, v, plan, implementation="hopper")

    graph, out = captured(step)
    for seed in range(1, 4):
        scores.copy_(scores_of(seed, 4, 1003, 1003, 64))
        graph.replay()
        assert_attention(out, None, q, k, v, mask.to_dense(1003, device="cuda"))
    plan.check()
    scores[0, 2, 3, 1] = torch.nan
    graph.replay()
    with pytest.raises(MaskError, match="batch entry 0, head 2: scores that are NaN"):
        plan.check()
    assert out.isnan().flatten(2).all(-1).tolist() == [[False, False, True, False]] * 2
    assert out.isnan().flatten(2).any(-1).tolist() == [[False, False, True, False]] * 2
    scores.copy_(scores_of(1, 4, 1003, 1003, 64))
    graph.replay()
    assert_attention(out, None, q, k, v, mask.to_dense(1003, device="cuda"))
    plan.check()


def test_updates_on_another_stream() -> None:
    q, k, v = random_inputs(head_dim=128)
    side = torch.cuda.Stream()
    plan = stof.dynamic_plan(masks.block_topk(scores_of(9, 4, 1003, 1003, 64), 5, causal=True), 1003, heads=4, batch=2)
    weight = torch.randn(128, 128, device="cuda", dtype=torch.float16) / 128**0.5
    for seed in range(4):
        mask = masks.block_topk(scores_of(seed, 4, 1003, 1003, 64), 5, causal=True)
        plan.update(mask, stream=side)
        check(q @ weight, k, v, plan, mask)


def test_lists_first_used_after_a_captured_update() -> None:
    """Replays of the update know nothing of them, so each call fills them."""
    q, k, v = random_inputs(head_dim=128)
    scores = scores_of(0, 4, 1003, 1003, 64)
    mask = masks.block_topk(scores, 5, causal=True)
    plan = stof.dynamic_plan(mask, 1003, batch=2, heads=4)
    stof.attention(q, k, v, plan, implementation="block_wise")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(mask)
        out = stof.attention(q, k, v, plan, implementation="block_wise")
    for seed in range(3):
        scores.copy_(scores_of(seed, 4, 1003, 1003, 64))
        graph.replay()
        assert_attention(out, None, q, k, v, mask.to_dense(1003, device="cuda"))
        check(q, k, v, plan, mask)
    assert isinstance(plan._buffers, BlockBuffers)
    assert len(plan._buffers.captured_fills) == 1


def test_a_first_call_inside_a_capture() -> None:
    """Jobs cannot be dealt out there: the block-wise kernel serves, whatever pays."""
    q, k, v = random_inputs(head_dim=128)
    scores = scores_of(0, 4, 1003, 1003, 64)
    mask = masks.block_topk(scores, 5, causal=True)
    for implementation in ("block_wise", "hopper"):  # compiled and loaded before
        stof.attention(q, k, v, stof.dynamic_plan(mask, 1003, batch=2, heads=4), implementation=implementation)
    plan = stof.dynamic_plan(mask, 1003, batch=2, heads=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(mask)
        out = stof.attention(q, k, v, plan)
    for seed in range(3):
        scores.copy_(scores_of(seed, 4, 1003, 1003, 64))
        graph.replay()
        assert_attention(out, None, q, k, v, mask.to_dense(1003, device="cuda"))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What failed in a test is tried again in others."""
    yield
    failures.clear()


@pytest.mark.usefixtures("forgotten")
def test_a_choice_that_fails_is_left_out() -> None:
    q, k, v = random_inputs(head_dim=128)
    mask = masks.block_topk(scores_of(0, 4, 1003, 1003, 64), 5, causal=True)
    plan = stof.dynamic_plan(mask, 1003, batch=2, heads=4)
    call = CallSpec(
        "cuda", q.dtype, 128, 128, 4, 2, batch=2, q_len=1003, kv_len=1003, mask_heads=4, compute_capability=(9, 0)
    )
    first = plan.choice(call, "hopper")
    with pytest.warns(RuntimeWarning, match="is left out from now on"):
        plan.reject(first, call, KernelError("no"))
    assert all(candidate.choice != first or candidate.refusals for candidate in plan.candidates(call))
    out, lse = stof.attention(q, k, v, plan, return_lse=True)
    assert_attention(out, lse, q, k, v, mask.to_dense(1003, device="cuda"))


def lists_of(seed: int, heads: int, count: int, limit: int, band: int = 0) -> Tensor:
    """Distinct indices below `limit`, ascending, the first `band` of them neighbours; -1 in some places at the end."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(limit - band, generator=generator)[:count] + band for _ in range(heads)])
    rows[:, -3:] = -1
    rows[:, :-3] = rows[:, :-3].sort().values
    rows[:, :band] = torch.arange(band)
    rows[:, : count - 3] = rows[:, : count - 3].sort().values
    return rows.int().cuda()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("q_len", "offset"), [(1024, 0), (256, 700)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_vertical_slash(dtype: torch.dtype, head_dim: int, q_len: int, offset: int) -> None:
    """Lists of their own for query heads, and one for all, whose keys are compacted by key head."""
    kv_len = q_len + offset
    q, k, v = random_inputs(dtype=dtype, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
    for heads in (4, 1):
        plan = None
        for seed in range(3):
            vertical, slash = lists_of(seed, heads, 90, kv_len), lists_of(seed, heads, 150, kv_len, band=40 * seed)
            mask = masks.vertical_slash(vertical, slash).with_query_offset(offset)
            plan = plan or stof.dynamic_plan(mask, q_len, kv_len, batch=2, heads=4)
            plan.update(mask)
            check(q, k, v, plan, mask)
            check(q, k, v, plan, mask, softcap=5.0, sinks=torch.arange(4.0, device="cuda"))
        assert plan is not None
        plan.check()


@pytest.mark.parametrize("split_tiles", [0, 1, 4])
def test_vertical_slash_replayed(split_tiles: int) -> None:
    q, k, v = random_inputs(head_dim=128, q_len=1024, kv_len=1024, batch=1)
    vertical, slash = lists_of(0, 4, 90, 1024), lists_of(0, 4, 70, 1024, band=20)
    mask = masks.vertical_slash(vertical, slash)
    plan = stof.dynamic_plan(mask, 1024, heads=4)
    offered = [c.choice for c in stof.explain(q, k, v, plan) if c.name == "hopper" and not c.refusals]
    assert offered
    assert offered[0] is not None
    fixed_to(plan, offered[0], split_tiles)

    def step() -> Tensor:
        plan.update(mask)
        return stof.attention(q, k, v, plan, implementation="hopper")

    graph, out = captured(step)
    for seed in range(1, 4):
        vertical.copy_(lists_of(seed, 4, 90, 1024))
        slash.copy_(lists_of(seed, 4, 70, 1024, band=20 * seed))
        graph.replay()
        assert_attention(out, None, q, k, v, mask.to_dense(1024, device="cuda"))
    plan.check()
    vertical[1, 3] = 1024
    graph.replay()
    with pytest.raises(MaskError, match="batch entry 0, head 1: indices out of range"):
        plan.check()
    assert out.isnan().flatten(2).all(-1).tolist() == [[False, True, False, False]]
    assert out.isnan().flatten(2).any(-1).tolist() == [[False, True, False, False]]


def test_long_sequences_run_on_hopper() -> None:
    """Where there is enough to do, the cost model prefers it, and `explain` says so."""
    q, k, v = random_inputs(batch=1, heads=8, kv_heads=8, q_len=8192, kv_len=8192, head_dim=128)
    mask = masks.block_topk(torch.randn(8, 128, 128, device="cuda"), 16, causal=True)
    plan = stof.dynamic_plan(mask, 8192, heads=8)
    assert stof.explain(q, k, v, plan)[0].name == "hopper"
    refused = {c.name: c.refusals for c in stof.explain(q.float(), k.float(), v.float(), plan)}
    assert refused["block_wise"] == ()
    assert any("torch.float32" in reason for reason in refused["hopper"])
    out, lse = stof.attention(q, k, v, plan, return_lse=True)
    for head in (0, 7):
        one = slice(head, head + 1)
        keep = masks.block_topk(mask.scores[one], 16, causal=True).to_dense(8192, device="cuda")  # type: ignore[attr-defined]
        assert_attention(out[:, one], lse[:, one], q[:, one], k[:, one], v[:, one], keep)
