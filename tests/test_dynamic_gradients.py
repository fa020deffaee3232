"""Gradients under masks made at run time: lists of fixed size, updates, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import stof
from stof import LayoutConfig, dispatch, masks
from stof.dynamic.backward_lists import TritonLists
from stof.dynamic.block_topk.buffers import BlockBuffers
from stof.dynamic.buffers import OVERFLOW, WorkBuffers
from stof.dynamic.gradients import DynamicGradients
from stof.dynamic.mask_buffers import fill_buffers
from stof.errors import PlanMismatchError, UnfitLayoutError, UnsupportedError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.backward_lists import LAYOUTS
from stof.kernels.implementation import Options
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.layout import bitmaps as bits
from stof.masks import Mask
from stof.masks.tensors import dense_view
from stof.selection.backward_tilings import BackwardTiling
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.kernels.gradients import assert_gradients, poison
from tests.kernels.test_backward import a_call, run
from tests.kernels.test_work import DEVICE
from tests.strategies import dense_masks
from tests.test_dynamic import buffers_of, run_as_on_a_gpu

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Triton 3.6's interpreter under NumPy 2.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
    # NumPy warns of lanes whose result is dropped; wrong results fail anyway.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

CONFIG = KernelConfig(num_warps=4, num_stages=2)
HEADS, KV_HEADS = 2, 1


def prepared(buffers: WorkBuffers, size: int = 16) -> PreparedBackward:
    """The lists in tiles of one size; the first call makes them."""
    key = "block_wise", LayoutConfig(size, size)
    if key not in buffers.backward:
        buffers.backward[key] = buffers.backward_lists(size)
    lists = buffers.backward[key]
    assert isinstance(lists, TritonLists)
    return PreparedBackward(lists.dq, CONFIG, lists.dkv, CONFIG)


def check(mask: Mask, q_len: int, kv_len: int, buffers: WorkBuffers, size: int = 16) -> None:
    """Gradients from the lists of a mask are right; what no score reaches holds NaN, and gets 0."""
    lists = prepared(buffers, size)
    fill_buffers(buffers, mask)
    assert not bool(buffers.flags.any())
    keep = mask.to_dense(q_len, kv_len, device=DEVICE).cpu()
    keep = keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape))
    call = a_call(keep, HEADS, KV_HEADS)
    poison(call, (keep.shape[0], HEADS, q_len, kv_len))
    assert_gradients(run(call, lists), call)


LEADING = [(), (HEADS,), (2, HEADS), (2, 1)]


@given(data=st.data())
@examples(20)
def test_block_topk(data: st.DataObject) -> None:
    """Blocks of one and of four tiles, ends of rows and columns, and blocks that are never taken."""
    block_size = data.draw(st.sampled_from([16, 32]))
    q_len, kv_len = (data.draw(st.sampled_from([1, 16, 33, 64, 90])) for _ in range(2))
    rows, columns = -(-q_len // block_size), -(-kv_len // block_size)
    leading = data.draw(st.sampled_from(LEADING))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    k, causal = data.draw(st.integers(1, columns)), data.draw(st.booleans())
    buffers = None
    for _ in range(2):  # nothing is left of the first mask
        scores = torch.randn(*leading, rows, columns, generator=generator)
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = -torch.inf
        mask = masks.block_topk(scores.to(DEVICE), k, block_size=block_size, causal=causal)
        buffers = buffers or buffers_of(mask, q_len, kv_len)
        check(mask, q_len, kv_len, buffers)


@given(data=st.data())
@examples(20)
def test_dense(data: st.DataObject) -> None:
    """Bool tensors and bits of them, in tiles as those of the forward pass and in others."""
    q_len, kv_len = (data.draw(st.sampled_from([1, 16, 33, 70])) for _ in range(2))
    batch, heads = data.draw(st.sampled_from([(1, 1), (1, HEADS), (2, HEADS), (2, 1)]))
    packed, size = data.draw(st.booleans()), data.draw(st.sampled_from([16, 32]))
    buffers = None
    for _ in range(2):
        keep = data.draw(dense_masks(q_len, kv_len, batch, heads)).to(DEVICE)
        mask = masks.from_bits(bits.pack(keep), kv_len) if packed else dense_view(keep)
        buffers = buffers or buffers_of(mask, q_len, kv_len)
        check(mask, q_len, kv_len, buffers, size)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_64(causal: bool) -> None:
    """The tiles that GPUs get, in blocks of one and of four; later lists beside earlier ones."""
    scores = torch.randn(HEADS, 2, 2).to(DEVICE)
    mask = masks.block_topk(scores, 1, block_size=128, causal=causal)
    buffers = buffers_of(mask, 200, 170, block=64)
    for size in (32, 64):
        check(mask, 200, 170, buffers, size)


def test_what_cannot_be_listed_has_nan() -> None:
    """Scores that are NaN, and masks that do not fit."""
    scores = torch.randn(HEADS, 2, 2)
    scores[1, 0, 0] = torch.nan
    mask = masks.block_topk(scores.to(DEVICE), 1, block_size=16)
    buffers = buffers_of(mask, 32, 32)
    lists = prepared(buffers)
    fill_buffers(buffers, mask)
    call = a_call(torch.ones(1, 1, 32, 32, dtype=torch.bool), HEADS, HEADS)
    computed = run(call, lists)
    for x in (computed.q, computed.k, computed.v):
        assert x is not None
        assert bool(x[:, 1].isnan().all())
        assert not bool(x[:, 0].isnan().any())
    keep = torch.zeros(1, 1, 64, 64, dtype=torch.bool)
    keep[..., :16, :16] = keep[..., 48:, 20:] = True
    small = buffers_of(dense_view(keep.to(DEVICE)), 64, 64, density=0.15)  # two tiles
    lists = prepared(small)
    fill_buffers(small, dense_view(keep.to(DEVICE)))
    assert bool((small.flags & OVERFLOW).all())
    computed = run(a_call(keep), lists)
    assert computed.q is not None
    assert computed.k is not None
    assert bool(computed.q[:, :, 48:].isnan().all())
    assert not bool(computed.q[:, :, :48].isnan().any())
    assert bool(computed.k[:, :, 48:].isnan().all())
    assert not bool(computed.k[:, :, :32].isnan().any())


def example(kind: str, seed: int = 0) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    if kind == "block_topk":
        return masks.block_topk(torch.randn(HEADS, 2, 2, generator=generator), 1, block_size=64, causal=True)
    keep = torch.rand(HEADS, 90, 90, generator=generator) < 0.1
    return masks.from_bits(bits.pack(keep), 90) if kind == "bits" else dense_view(keep)


KINDS = ["block_topk", "dense", "bits"]


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, HEADS, 90, 16, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]


def gradients(call: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(*tensors).pow(2).sum(), tensors)


def assert_equal_to_plan(plan: Any, mask: Mask, tensors: list[Tensor], **tolerance: float) -> None:
    expected = gradients(lambda q, k, v: stof.attention(q, k, v, stof.plan(mask, 90, heads=HEADS)), tensors)
    for got, want in zip(gradients(lambda q, k, v: stof.attention(q, k, v, plan), tensors), expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_plans(kind: str) -> None:
    """On the CPU: equal to a plan of the same mask, in every step; with dropout; and under checkpointing."""
    tensors = inputs()
    plan = stof.dynamic_plan(example(kind), 90, heads=HEADS)
    for seed in range(2):
        plan.update(example(kind, seed))
        assert_equal_to_plan(plan, example(kind, seed), tensors)
    fixed = stof.plan(example(kind, 1), 90, heads=HEADS)
    expected, got = (
        gradients(lambda q, k, v, of=of: torch.manual_seed(0) and stof.attention(q, k, v, of, dropout_p=0.3), tensors)
        for of in (fixed, plan)
    )
    torch.testing.assert_close(got, expected)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *x: stof.attention(*x, plan), q, k, v, use_reentrant=False)

    expected = gradients(lambda q, k, v: stof.attention(q, k, v, fixed), tensors)
    torch.testing.assert_close(gradients(checkpointed, tensors), expected)


@IN_INTERPRETER
@pytest.mark.parametrize("kind", KINDS)
def test_plans_as_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call with gradients makes the lists, updates fill them; the kernels in Triton's interpreter."""
    run_as_on_a_gpu(monkeypatch)
    tensors = inputs(torch.float32)
    plan = stof.dynamic_plan(example(kind), 90, heads=HEADS)
    plan._buffers = buffers_of(example(kind), 90, 90)
    fill_buffers(plan._buffers, plan.mask)
    plan.gradients = DynamicGradients(plan, plan._buffers)
    memory = plan.bytes()
    for seed in range(2):
        if seed:
            plan.update(example(kind, seed))
        assert_equal_to_plan(plan, example(kind, seed), tensors, atol=1e-4, rtol=1e-4)
    assert len(plan.gradients.calls) == 1
    assert plan.bytes() > memory
    monkeypatch.setattr(plan, "_captured", True)
    q, k, v = inputs(torch.float16)
    with pytest.raises(UnsupportedError, match="before an update or a call is captured"):
        stof.attention(q, k, v, plan)
    with pytest.raises(UnsupportedError, match="calls with a bias have no gradients"):
        stof.attention(q, k, v, plan, bias=torch.zeros(90, 90, dtype=q.dtype))


@IN_INTERPRETER
def test_lists_that_cannot_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call reads lists that are half filled; where one kernel cannot have lists, the others serve."""
    run_as_on_a_gpu(monkeypatch)
    tensors = inputs(torch.float32)
    plan = stof.dynamic_plan(example("block_topk"), 90, heads=HEADS)
    plan._buffers = buffers_of(example("block_topk"), 90, 90)
    fill_buffers(plan._buffers, plan.mask)
    plan.gradients = gradients_of = DynamicGradients(plan, plan._buffers)
    name, tiling = gradients_of.choices(dispatch.call_spec(plan, *tensors, Options(1.0)))[0]
    broken = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
    with monkeypatch.context() as patch:
        patch.setattr(BlockBuffers, "fill_lists", broken)
        for call in (lambda: stof.attention(*tensors, plan), lambda: plan.update(plan.mask)):
            with pytest.raises(torch.OutOfMemoryError):
                call()
            assert not gradients_of.has_lists(name, tiling)
            with pytest.raises(PlanMismatchError, match="update it again"), torch.no_grad():
                stof.attention(*tensors, plan)
    plan.update(plan.mask)
    one_pass = BackwardTiling(dkv_layout=(LAYOUTS[128], None))
    monkeypatch.setattr(DynamicGradients, "_one_pass", lambda self, call: ("hopper", one_pass, []))
    monkeypatch.setattr(BlockBuffers, "one_pass_lists", mock.Mock(side_effect=UnfitLayoutError("too many tiles")))
    assert_equal_to_plan(plan, plan.mask, tensors, atol=1e-4, rtol=1e-4)
    assert gradients_of.has_lists(name, tiling)
    assert not gradients_of.has_lists("hopper", one_pass)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_between_both_passes_are_refused(kind: str) -> None:
    q, k, v = inputs()
    plan = stof.dynamic_plan(example(kind), 90, heads=HEADS)
    out = stof.attention(q, k, v, plan)
    plan.update(example(kind))
    with pytest.raises(PlanMismatchError, match="updated between a call and its backward pass"):
        out.sum().backward()
    for use_reentrant in (False, True):
        out = checkpoint(stof.attention, q, k, v, plan, use_reentrant=use_reentrant)
        out.sum().backward()
        out = checkpoint(stof.attention, q, k, v, plan, use_reentrant=use_reentrant)
        plan.update(example(kind))
        stof.attention(q, k, v, plan)
        with pytest.raises(PlanMismatchError, match="updated between a call and"):
            out.sum().backward()


def test_updates_in_a_checkpointed_function_are_refused() -> None:
    q, k, v = inputs()
    plan = stof.dynamic_plan(example(KINDS[0]), 90, heads=HEADS)

    def run(*tensors: Tensor) -> Tensor:
        out = stof.attention(*(x.detach() for x in tensors), plan)
        plan.update(example(KINDS[0]))
        return (out + tensors[0]).sin()

    for use_reentrant in (False, True):
        with pytest.raises(PlanMismatchError, match=r"(?s)updated.*activation checkpointing"):
            checkpoint(run, q, k, v, use_reentrant=use_reentrant).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_change_between_both_passes(kind: str) -> None:
    """The backward pass is under the mask of the call."""
    tensors = inputs()
    mask, same = example(kind), example(kind)
    plan = stof.dynamic_plan(mask, 90, heads=HEADS)
    out = stof.attention(*tensors, plan)
    for x in (getattr(mask, name, None) for name in ("scores", "words", "keep")):
        if x is not None:
            x.data.zero_()
    computed = torch.autograd.grad(out.pow(2).sum(), tensors)
    expected = gradients(lambda q, k, v: stof.attention(q, k, v, stof.plan(same, 90, heads=HEADS)), tensors)
    torch.testing.assert_close(computed, expected)


def test_refusals() -> None:
    q, k, v = inputs()
    indices = torch.arange(2, dtype=torch.int32)
    plan = stof.dynamic_plan(masks.vertical_slash(indices, indices), 90, heads=HEADS)
    with pytest.raises(UnsupportedError, match="no gradients under a dynamic plan of vertical_slash"):
        stof.attention(q, k, v, plan)
    stof.attention(q.detach(), k.detach(), v.detach(), plan)
    plan = stof.dynamic_plan(example("dense"), 90, heads=HEADS)
    compiled = torch.compile(lambda q: stof.attention(q, k, v, plan), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="would not notice updates of a dynamic plan"):
        compiled(q)
    with torch.no_grad():
        compiled(q)


# Of a graph's inputs, Dynamo asks those that are no leaves as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_graphs_of_compiled_code_break() -> None:
    """Before a call that is differentiated, so that its backward pass notices an update."""
    torch.compiler.reset()
    tensors = inputs()
    plan = stof.dynamic_plan(example("dense"), 90, heads=HEADS)
    compiled = torch.compile(lambda q, k, v: stof.attention(q * 2, k, v, plan), backend="eager")
    got = gradients(compiled, tensors)
    torch.testing.assert_close(got, gradients(lambda q, k, v: stof.attention(q * 2, k, v, plan), tensors))
    out = compiled(*tensors)
    plan.update(example("dense", 1))
    with pytest.raises(PlanMismatchError, match="updated between"):
        out.sum().backward()


def test_traced_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not notice an update. Another thread that compiles is no reason."""
    from functorch.compile import aot_function, nop

    q, k, v = inputs()
    plan = stof.dynamic_plan(example("dense"), 90, heads=HEADS)
    traced = aot_function(lambda q, k, v: stof.attention(q, k, v, plan), nop)
    with pytest.raises(UnsupportedError, match="would not notice updates of a dynamic plan"):
        traced(q, k, v)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    stof.attention(q, k, v, plan).sum().backward()
