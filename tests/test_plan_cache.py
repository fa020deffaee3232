"""The plan cache: what it keeps, for whom, and how much; calls that graphs replay outlive it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import stof
from stof import masks
from stof.errors import MaskError, ShapeError, UnsupportedError
from stof.kernels.config import KernelConfig
from stof.kernels.implementation import tensors_of
from stof.layout import LayoutConfig, build_layout
from stof.plans import make as plans
from stof.plans import plan as plan_module
from stof.plans.backward import gradients_of
from stof.plans.cache import PlanCache
from stof.plans.plan import Plan
from stof.selection.backward_tilings import BackwardTiling
from stof.selection.kernel_choice import KernelChoice
from stof.testing import assert_attention, make_inputs

KEEP = torch.ones(64, 64, dtype=torch.bool).tril()


def cache_of(entries: int, size: int, monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    cache = PlanCache(max_entries=entries, max_bytes=size)
    monkeypatch.setattr("stof.plans.make.plan_cache", cache)
    return cache


@pytest.mark.parametrize("cached", [True, False])
def test_graphs_keep_what_they_read(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Calls that were captured live on when the cache drops their plan, or the plan drops them: replays use them."""
    capturing = False
    monkeypatch.setattr(plan_module, "capturing", lambda device: capturing)
    monkeypatch.setattr(plans, "_IN_GRAPHS", set())
    cache_of(8, 2**20, monkeypatch)
    q, k, v = make_inputs(q_len=40, kv_len=40, head_dim=16).qkv
    mask = masks.causal()
    layout = build_layout(mask, 40, 40, LayoutConfig(16, 16))
    plan = stof.plan(mask, 40) if cached else Plan.of_layout(layout, "causal()")
    stof.attention(q, k, v, plan)
    (eager,) = map(weakref.ref, plan._calls.values())
    capturing = True
    stof.attention(q, k, v, plan)
    stof.attention(q, k, v, plan, scale=0.5)
    capturing = False
    stof.attention(q, k, v, plan, scale=0.25)
    calls = [weakref.ref(call) for call in plan._calls.values()]
    assert calls[0] == eager
    monkeypatch.setattr(plan_module, "_MOST_CALLS", 1)
    stof.attention(q, k, v, plan, scale=0.125)  # all others are dropped
    assert [call() is not None for call in calls] == [True, True, False]
    plans.plan_cache.clear()
    del plan
    assert [call() is not None for call in calls] == [cached, cached, False]


def test_first_calls_in_a_capture_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is chosen or built: lists are made on the host. Calls that were made before run."""
    cache_of(8, 2**20, monkeypatch)
    state = [True]
    monkeypatch.setattr("stof.runtime.memory.capturing", lambda device: state[0])
    chosen: list[Any] = []
    own = Plan.choice

    def choice(*args: Any) -> KernelChoice:
        chosen.append(args)
        return own(*args)

    monkeypatch.setattr(Plan, "choice", choice)
    q, k, v = make_inputs(q_len=40, kv_len=40, head_dim=16).qkv
    mask = masks.causal()
    for given in (mask, "causal"):
        with pytest.raises(UnsupportedError, match="once before the capture"):
            stof.attention(q, k, v, given)
    state[0] = False
    plan = stof.plan(mask, 40)
    state[0] = True
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        stof.attention(q, k, v, plan)
    assert chosen == []
    state[0] = False
    expected = stof.attention(q, k, v, plan)
    state[0] = True
    for given in (mask, plan):
        assert torch.equal(stof.attention(q, k, v, given), expected)
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        stof.attention(q[:, :1], k[:, :1], v[:, :1], plan)


def test_cache_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(8, 2**20, monkeypatch)
    first = stof.plan(masks.causal(), 40)
    assert stof.plan(masks.causal(), 40) is first
    assert stof.plan(masks.parse("causal"), 40, batch=7, heads=3) is first  # sizes do not matter to this mask
    assert (cache.info().hits, cache.info().misses, cache.info().entries) == (2, 1, 1)
    others = [
        stof.plan(masks.causal(), 41),
        stof.plan(masks.causal(), 40, 41),
        stof.plan(masks.causal(), 40, config=stof.LayoutConfig(32, 32)),
        stof.plan(~masks.causal(), 40),
        stof.plan(masks.causal().with_query_offset(1), 40),
    ]
    assert len({id(plan) for plan in [first, *others]}) == 6
    cache.clear()
    assert cache.info() == type(cache.info())(0, 0, 0, 0)
    assert stof.plan(masks.causal(), 40) is not first


def test_calls_find_their_plans_by_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call under a mask is looked up by the mask and the sizes alone, and only where these were checked before."""
    cache = cache_of(2, 2**20, monkeypatch)
    mask = masks.padding([3, 5])
    for heads in (1, 2, 1, 2):
        q, k, v = make_inputs(batch=2, heads=heads, q_len=6, kv_len=6, head_dim=4).qkv
        assert_attention(stof.attention(q, k, v, mask), None, q, k, v, mask.to_dense(6))
        with pytest.raises(ShapeError, match="batch size of 2"):
            stof.attention(q[:1], k[:1], v[:1], mask)
    assert cache.info().entries == 1
    for n in range(4):  # the plan is dropped
        other = masks.sliding_window(n)
        assert_attention(stof.attention(q, k, v, other), None, q, k, v, other.to_dense(6))
    assert_attention(stof.attention(q, k, v, mask), None, q, k, v, mask.to_dense(6))


def test_cache_of_functions_knows_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of(8, 2**20, monkeypatch)
    by_head = masks.from_function(lambda b, h, i, j: i - j < h)
    two, three = (stof.plan(by_head, 9, heads=n) for n in (2, 3))
    assert (two.mask_heads, three.mask_heads) == (2, 3)
    assert stof.plan(by_head, 9, heads=2) is two


def test_cache_is_bounded_by_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(3, 2**20, monkeypatch)
    plans = [stof.plan(masks.sliding_window(n), 20) for n in range(3)]
    assert stof.plan(masks.sliding_window(0), 20) is plans[0]  # now the latest used
    stof.plan(masks.sliding_window(9), 20)
    assert cache.info().entries == 3
    assert stof.plan(masks.sliding_window(0), 20) is plans[0]
    assert stof.plan(masks.sliding_window(2), 20) is plans[2]
    assert stof.plan(masks.sliding_window(1), 20) is not plans[1]


def test_cache_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = stof.plan(masks.sliding_window(0), 100).bytes()
    cache = cache_of(100, 3 * size, monkeypatch)
    for n in range(10):
        stof.plan(masks.sliding_window(n), 100)
        assert cache.info().bytes <= 3 * size
    assert 1 <= cache.info().entries <= 3
    large = stof.plan(masks.sliding_window(3), 3000)  # alone above the bound: nothing else is kept
    assert stof.plan(masks.sliding_window(3), 3000) is large
    assert cache.info().entries == 1
    stof.plan(masks.sliding_window(0), 100)
    assert cache.info().bytes == size


def test_cache_counts_what_masks_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server makes new bool tensors in every step."""
    cache = cache_of(100, 10 * 256 * 256, monkeypatch)
    x = torch.randn(1, 1, 256, 8)
    copies = []
    for n in range(40):
        keep = (torch.arange(256)[:, None] - torch.arange(256)).abs() <= n
        stof.attention(x, x, x, keep)
        plan = next(reversed(cache._plans.values()))
        assert plan.mask is not None
        copies.append(weakref.ref(plan.mask.copies()[0]))
    del plan
    gc.collect()
    assert sum(copy() is not None for copy in copies) < 10
    assert cache.info().bytes <= 10 * 256 * 256


def test_cache_counts_what_plans_grow_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another implementation prepares tensors of its own after the plan was cached."""
    cache = cache_of(100, 60_000, monkeypatch)
    grown = stof.plan(masks.causal(), 200)
    before = cache.info().bytes
    grown.prepared("reference")
    assert cache.info().bytes >= before + 200 * 200
    for n in range(30):
        stof.plan(masks.sliding_window(n), 64)
        assert 0 <= cache.info().bytes <= 60_000
    assert cache.info().bytes == sum(plan.bytes() for plan in cache._plans.values())


def test_cache_measures_only_plans_that_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(100, 2**20, monkeypatch)
    measured: list[str] = []
    count = Plan.bytes
    monkeypatch.setattr(Plan, "bytes", lambda plan: measured.append(plan.mask_text) or count(plan))
    plans = [stof.plan(masks.sliding_window(n), 64) for n in range(20)]
    assert len(measured) == 20
    plans[3].prepared("reference")
    gradients_of(plans[7]).prepared("reference", BackwardTiling())
    measured.clear()
    last = stof.plan(masks.sliding_window(20), 64)
    assert sorted(measured) == sorted(plan.mask_text for plan in (plans[3], plans[7], last))
    assert cache.info().bytes == sum(map(count, [*plans, last]))
    assert copy.copy(plans[3]).when_grown is None


def test_tensors_are_read_in_every_call_and_masks_of_them_keep_their_values() -> None:
    keep = KEEP.clone()
    mask = masks.from_dense(keep)
    inputs = make_inputs().qkv
    snapshots = [mask, mask & masks.full(), ~~mask, stof.plan(keep, 64)]
    writes: list[Callable[[], object]] = [
        lambda: keep.fill_(True),
        lambda: keep[:, 0].fill_(False),
        lambda: keep.numpy().__setitem__((slice(None), 5), False),
        lambda: setattr(keep, "data", KEEP.flip(0).clone()),
        lambda: keep.data.logical_not_(),
    ]
    for write in writes:
        write()
        out, lse = stof.attention(*inputs, keep, return_lse=True)
        assert_attention(out, lse, *inputs, keep)
        for given in snapshots:
            torch.testing.assert_close(stof.attention(*inputs, given), stof.attention(*inputs, masks.causal()))


def test_unchanged_dense_masks_are_cached() -> None:
    keep = KEEP.clone()
    assert stof.plan(keep, 64) is stof.plan(keep, 64)
    assert stof.plan(keep.clone(), 64) is not stof.plan(keep, 64)


def test_masks_of_inference_tensors() -> None:
    """They have no version counter."""
    with torch.inference_mode():
        keep = torch.ones(64, 64, dtype=torch.bool)
        inputs = make_inputs().qkv
        before = stof.attention(*inputs, keep)
        keep.tril_()
        after = stof.attention(*inputs, keep)
    torch.testing.assert_close(after, stof.attention(*inputs, masks.causal()))
    assert not torch.equal(before, after)


def test_permuted_plans_are_not_cached() -> None:
    order = torch.arange(8).flip(0)
    assert stof.plan(masks.causal(), 8, row_order=order) is not stof.plan(masks.causal(), 8, row_order=order)
    assert stof.plan_cache.info().entries == 0


def test_dead_tensors_do_not_lend_their_plans() -> None:
    """A new tensor at a dead one's address is another mask."""
    inputs = make_inputs().qkv
    for n in range(20):
        keep = torch.zeros(64, 64, dtype=torch.bool)
        keep[:, n] = True
        out = stof.attention(*inputs, keep)
        torch.testing.assert_close(out, inputs[2][:, :, n : n + 1].expand_as(out))
        del keep


def test_a_plan_that_was_called_is_pickled_and_copied() -> None:
    """As part of a module that is saved: what calls have kept stays behind, and compiled code tells the two apart."""
    q, k, v = make_inputs(q_len=40).qkv
    plan = stof.plan(masks.sliding_window(7), 40)
    expected = stof.attention(q, k, v, plan)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert torch.equal(stof.attention(q, k, v, other), expected)
        assert other.number != plan.number
        assert Plan.by_number(other.number) is other
    assert Plan.by_number(plan.number) is plan


@pytest.mark.parametrize(
    ("implementation", "layout", "kernel"),
    [
        ("hopper", LayoutConfig(64, 64, 16), KernelConfig(4, 3, split_tiles=4)),
        ("hopper", LayoutConfig(128, 128, None), KernelConfig(8, 2)),
        ("hopper", LayoutConfig(64, 64, None), KernelConfig(4, 5, paired=True)),
        ("block_wise", LayoutConfig(64, 64, 1), KernelConfig(4, 2, split_tiles=2)),
    ],
    ids=str,
)
def test_lists_of_jobs_are_made_on_the_host(implementation: str, layout: LayoutConfig, kernel: KernelConfig) -> None:
    """Also where another device is the default one, as `torch.set_default_device("cuda")` makes it."""
    built = build_layout(masks.longformer(80, 3), 1000, 1000, layout)
    choice = KernelChoice(implementation, None, None, kernel)
    expected = Plan.of_layout(built, "").prepared(choice)
    with torch.device("meta"):
        found = Plan.of_layout(built, "").prepared(choice)
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(found), tensors_of(expected), strict=True))


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_hit_runs_no_operators() -> None:
    mask = masks.sliding_window(9) | masks.sink_tokens(2)
    first = stof.plan(mask, 64)
    with Operators() as seen:
        assert stof.plan(mask, 64, device="cpu") is first
        assert seen.names == []
        assert stof.plan(mask, 64) is first
    assert len(seen.names) <= 1  # asks for the default device


@pytest.mark.parametrize("sizes", [{}, {"batch": 1, "heads": 1}], ids=["unsized", "sized"])
def test_plans_need_values(sizes: dict[str, int]) -> None:
    """Those that were made before are found under modes without values, too."""
    function = masks.from_function(lambda b, h, q, kv: q + h >= kv)
    ready = stof.plan(masks.causal(), 17)
    with FakeTensorMode():
        assert stof.plan(masks.causal(), 17) is ready
        with pytest.raises(MaskError, match="before FakeTensorMode"):
            stof.plan(function, 17, **sizes)
        with pytest.raises(MaskError, match="before FakeTensorMode"):
            stof.plan(masks.causal(), 18, **sizes)


@pytest.mark.parametrize("lengths", [(64.0, 64), (64, 64.0), (True, 64)], ids=str)
def test_hits_check_lengths(lengths: tuple[Any, Any]) -> None:
    """Numbers that equal the lengths of a cached plan are no lengths."""
    stof.plan(masks.causal(), 64, 64)
    stof.plan(masks.causal(), 1, 64)
    with pytest.raises(ShapeError, match="is an int"):
        stof.plan(masks.causal(), *lengths)


def test_few_plans_with_filled_lists_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(100, 2**20, monkeypatch)
    others = [stof.plan(masks.sliding_window(n, 1), 64) for n in range(5)]
    monkeypatch.setattr("stof.plans.cache._MOST_FILLED", 16)
    for n in range(30):
        stof.plan(masks.sliding_window(n), 64).is_filled = True
    assert len(cache._plans) == 5 + 17  # the latest was not known to be filled when it was stored
    assert all(stof.plan(masks.sliding_window(n, 1), 64) is one for n, one in enumerate(others))
    newest = stof.plan(masks.sliding_window(29), 64)
    assert stof.plan(masks.sliding_window(29), 64) is newest
    assert cache.info().bytes == sum(plan.bytes() for plan in cache._plans.values())
    assert not cache._grown
