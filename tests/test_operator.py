"""The operator as PyTorch sees it: schemas, compilers, inference mode, autocast, threads, and the plan cache."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import stof
from stof import masks, plans
from stof.attention import masked_attention_op
from stof.errors import DtypeError, MaskError, UnsupportedError
from stof.layout import LayoutConfig, build_layout
from stof.ops import attention_op
from stof.plans import Plan, PlanCache
from stof.selection import IMPLEMENTATIONS
from stof.testing import assert_attention, make_inputs, spread

# The Triton kernels have tests of their own, in tests/kernels and tests/gpu.
IMPLS = tuple(name for name, impl in IMPLEMENTATIONS.items() if impl.capabilities.devices != ("cuda",))
MASK = masks.sliding_window(9) | masks.sink_tokens(2)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def samples() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        "plain": ({}, {}),
        "grouped heads, other lengths": ({"heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 70}, {}),
        "half, transposed heads": ({"dtype": torch.float16, "memory": "bshd"}, {"sinks": torch.ones(2)}),
        "double, other value width": ({"dtype": torch.float64, "value_dim": 5}, {"softcap": 3.0}),
        "bias": ({"batch": 2, "memory": "strided"}, {"bias": torch.ones(1, 2, 1, 20)}),
        "expanded": ({"batch": 2, "memory": "expanded"}, {}),
        "dense strides": ({"memory": "transposed"}, {}),
    }


@pytest.mark.parametrize("implementation", IMPLS)
@pytest.mark.parametrize("name", samples())
def test_opcheck(name: str, implementation: str) -> None:
    """Schema, fake tensors (strides too), autograd registration and AOT dispatch agree with what runs."""
    sizes, options = samples()[name]
    q, k, v = make_inputs(**{"q_len": 20, **sizes}).qkv
    ready = stof.plan(MASK, q.shape[2], k.shape[2]).prepared(implementation)
    rest = (options.get("bias"), options.get("sinks"), 0.25, options.get("softcap", 0.0))
    torch.library.opcheck(attention_op, (q, k, v, ready.tensors, ready.sizes, *rest, implementation))
    torch.library.opcheck(masked_attention_op, (q, k, v, MASK.key, *rest, implementation))


def test_masked_operator_by_default_implementation() -> None:
    q, k, v = make_inputs().qkv
    torch.library.opcheck(masked_attention_op, (q, k, v, "causal()", None, None, 0.25, 0.0, ""))


KEEP = torch.ones(64, 64, dtype=torch.bool).tril()
DENSE = masks.from_dense(KEEP)
FUNCTION = masks.from_function(lambda b, h, i, j: i >= j)
PLAN = stof.plan(masks.causal(), 64)

COMPILED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plan": lambda q, k, v: stof.attention(q, k, v, PLAN),
    "mask": lambda q, k, v: stof.attention(q, k, v, masks.causal()),
    "mask built inside": lambda q, k, v: stof.attention(
        q, k, v, masks.sliding_window(9) & masks.full() | masks.causal()
    ),
    "dense mask": lambda q, k, v: stof.attention(q, k, v, DENSE),
    "function mask": lambda q, k, v: stof.attention(q, k, v, FUNCTION),
    "amid other work": lambda q, k, v: stof.attention(q * 2 / 2, k + 0, v, masks.causal()).transpose(1, 2) * 1,
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile_in_one_graph(name: str) -> None:
    fn = COMPILED[name]
    inputs = make_inputs(memory="bshd").qkv
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), fn(*inputs))


@pytest.mark.parametrize("implementation", IMPLS)
def test_compile_with_inductor(implementation: str) -> None:
    """Inductor trusts the strides that the fake promises."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out = stof.attention(q, k, v, MASK, sinks=sinks, implementation=implementation)
        return out.transpose(1, 2).flatten(2) + 1

    inputs = make_inputs(memory="bshd").qkv
    with torch.no_grad():
        compiled = torch.compile(fn, fullgraph=True)(*inputs, torch.ones(2))
        torch.testing.assert_close(compiled, fn(*inputs, torch.ones(2)))


def test_compile_with_dynamic_shapes() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: stof.attention(q, k, v, masks.causal()), backend=counter, fullgraph=True, dynamic=True
    )
    for length in (40, 33, 70, 41):
        inputs = make_inputs(q_len=length).qkv
        torch.testing.assert_close(compiled(*inputs), stof.attention(*inputs, masks.causal()))
    assert counter.frame_count == 1


def test_compile_once_for_equal_masks_and_again_for_others() -> None:
    counter = CompileCounter()
    compiled = torch.compile(lambda q, k, v, m: stof.attention(q, k, v, m), backend=counter, fullgraph=True)
    inputs = make_inputs().qkv
    for n, (mask, graphs) in enumerate(
        [
            (masks.causal(), 1),
            (masks.causal(), 1),
            (masks.sliding_window(3), 2),
            (masks.sliding_window(3) | masks.sink_tokens(1), 3),
            (masks.sliding_window(4), 4),
            (masks.causal(), 4),
        ]
    ):
        torch.testing.assert_close(compiled(*inputs, mask), stof.attention(*inputs, mask))
        assert counter.frame_count == graphs, n


def test_compile_with_other_plans() -> None:
    compiled = torch.compile(lambda q, k, v, m: stof.attention(q, k, v, m), backend="eager", fullgraph=True)
    inputs = make_inputs().qkv
    for mask in (masks.causal(), masks.sliding_window(3), masks.causal()):
        plan = stof.plan(mask, 64)
        torch.testing.assert_close(compiled(*inputs, plan), stof.attention(*inputs, mask))


def test_compile_with_changing_scalars() -> None:
    compiled = torch.compile(
        lambda q, k, v, s: stof.attention(q, k, v, masks.causal(), scale=s, softcap=9 * s),
        backend="aot_eager",
        fullgraph=True,
    )
    inputs = make_inputs().qkv
    for scale in (0.5, 0.25, 0.75):
        expected = stof.attention(*inputs, masks.causal(), scale=scale, softcap=9 * scale)
        torch.testing.assert_close(compiled(*inputs, scale), expected)


BREAKS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: KEEP,
    "text": lambda: "causal",
    "function": lambda: FUNCTION.fn,  # type: ignore[attr-defined]
    "inverted inside": lambda: ~~masks.causal(),
}


@pytest.mark.parametrize("name", BREAKS)
def test_compile_with_what_is_no_mask_yet(name: str) -> None:
    """Python outside the graph makes it one: a graph break, and the right result."""
    make = BREAKS[name]
    inputs = make_inputs().qkv
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, make()), backend="eager")
    torch.testing.assert_close(compiled(*inputs), stof.attention(*inputs, masks.causal()))


def test_compiled_code_sees_changes_of_a_dense_mask() -> None:
    keep = KEEP.clone()
    mask = masks.from_dense(keep)
    inputs = make_inputs().qkv
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), stof.attention(*inputs, masks.causal()))
    keep.fill_(True)
    torch.testing.assert_close(compiled(*inputs), stof.attention(*inputs))


def test_compiled_code_survives_equal_masks_that_come_and_go() -> None:
    keep = KEEP.clone()
    mask = masks.from_dense(keep)
    inputs = make_inputs().qkv
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, mask), backend="eager", fullgraph=True)
    expected = stof.attention(*inputs, masks.causal())
    torch.testing.assert_close(compiled(*inputs), expected)
    stof.attention(*inputs, keep)  # makes an equal mask and drops it
    gc.collect()
    stof.plan_cache.clear()
    torch.testing.assert_close(compiled(*inputs), expected)


def test_operator_called_with_the_key_of_a_dead_mask() -> None:
    key = masks.from_dense(KEEP.clone()).key
    gc.collect()
    with pytest.raises(MaskError, match="keep a reference"):
        masked_attention_op(*make_inputs().qkv, key, None, None, 1.0, 0.0, "")


def test_compiled_errors_are_ours() -> None:
    q, k, v = make_inputs().qkv
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v.half(), masks.causal()), backend="eager")
    with pytest.raises(DtypeError, match="share one dtype"):
        compiled(q, k, v)


@pytest.mark.parametrize("planned", ["inside", "outside"])
def test_inference_mode(planned: str) -> None:
    q, k, v = make_inputs().qkv
    expected = stof.attention(q, k, v, MASK)
    stof.plan_cache.clear()
    with torch.inference_mode():
        plan = stof.plan(MASK, 64) if planned == "inside" else None
        torch.testing.assert_close(stof.attention(q, k, v, plan or MASK), expected)
    # plans made in inference mode serve outside it, also under autograd and compilers
    result = stof.attention(q.clone().requires_grad_(), k, v, plan or MASK)
    torch.testing.assert_close(result.detach(), expected)
    compiled = torch.compile(lambda q, k, v, m: stof.attention(q, k, v, m), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, plan or MASK), expected)


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("name", ["row_block", "batched", "reference"])
def test_autocast(compile_it: bool, name: str) -> None:
    q, k, v = make_inputs().qkv
    fn: Any = lambda q, k, v: stof.attention(q, k, v, MASK, return_lse=True, implementation=name)  # noqa: E731 (compiled below)
    if compile_it:
        fn = torch.compile(fn, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = fn(q, k, v)
        mixed = stof.attention(q, k.bfloat16(), v.bfloat16(), MASK, implementation=name)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(mixed, out)
    assert_attention(out, lse, q.bfloat16(), k.bfloat16(), v.bfloat16(), MASK.to_dense(64))


def test_autocast_leaves_float64_and_refuses_integers() -> None:
    q, k, v = make_inputs(dtype=torch.float64).qkv
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stof.attention(q, k, v), stof.attention(q, k, v))
        assert stof.attention(q, k, v).dtype == torch.float64
        with pytest.raises(DtypeError, match="share one dtype"):
            stof.attention(q.float(), k, v)
        with pytest.raises(DtypeError, match=r"got torch.int64"):
            stof.attention(q.long(), k.long(), v.long())
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert stof.attention(q.float(), k.float(), v.float()).dtype == torch.float32


@pytest.mark.parametrize("compile_it", [False, True])
def test_backward_raises(compile_it: bool) -> None:
    q, k, v = make_inputs().qkv
    fn: Any = lambda q, k, v: stof.attention(q, k, v, MASK)  # noqa: E731 (compiled below)
    if compile_it:
        fn = torch.compile(fn, backend="aot_eager")
    for n in range(3):
        args = [x.clone().requires_grad_(n == m) for m, x in enumerate((q, k, v))]
        with pytest.raises(Exception, match="forward passes only") as caught:
            fn(*args).sum().backward()
        # compilers wrap what the backward raises while they trace it
        assert compile_it or isinstance(caught.value, UnsupportedError)


def test_forward_under_grad_mode_gives_the_result() -> None:
    q, k, v = make_inputs().qkv
    result = stof.attention(q.requires_grad_(), k, v, MASK)
    assert result.requires_grad
    torch.testing.assert_close(result.detach(), stof.attention(q.detach(), k, v, MASK))


def test_threads() -> None:
    """Several threads planning and running the same and different masks at once."""
    shared = masks.causal()
    jobs = [(n, shared if n % 2 else masks.sliding_window(n)) for n in range(24)]
    inputs = {n: make_inputs(heads=4, kv_heads=2, q_len=70, seed=n).qkv for n, _ in jobs}
    expected = {n: stof.attention(*inputs[n], mask) for n, mask in jobs}
    stof.plan_cache.clear()
    barrier = threading.Barrier(4)

    def work(offset: int) -> dict[tuple[int, str], Tensor]:
        barrier.wait()
        return {
            (n, name): stof.attention(*inputs[n], mask, implementation=name)
            for n, mask in jobs[offset:] + jobs[:offset]
            for name in IMPLS
        }

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, (0, 6, 12, 18)):
            for (n, _), result in results.items():
                torch.testing.assert_close(result, expected[n])
    assert stof.plan_cache.info().entries == 13


def test_threads_name_one_tensor_alike() -> None:
    keep = KEEP.clone()
    barrier = threading.Barrier(8)

    def key(_: int) -> str:
        barrier.wait()
        return masks.from_dense(keep).key

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(key, range(8)))) == 1


def cache_of(entries: int, size: int, monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    cache = PlanCache(max_entries=entries, max_bytes=size)
    monkeypatch.setattr("stof.plans.plan_cache", cache)
    return cache


@pytest.mark.parametrize("cached", [True, False])
def test_graphs_keep_what_they_read(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """Calls that were captured live on when the cache drops their plan, or the plan drops them: replays use them."""
    capturing = False
    monkeypatch.setattr(plans, "_capturing", lambda device: capturing)
    monkeypatch.setattr(plans, "_IN_GRAPHS", set())
    cache_of(8, 2**20, monkeypatch)
    q, k, v = make_inputs(q_len=40, kv_len=40, head_dim=16).qkv
    mask = masks.causal()
    layout = build_layout(mask, 40, 40, LayoutConfig(16, 16))
    plan = stof.plan(mask, 40) if cached else Plan.of_layout(layout, "causal()")
    stof.attention(q, k, v, plan)
    (eager,) = map(weakref.ref, plan._bound.values())
    capturing = True
    stof.attention(q, k, v, plan)
    stof.attention(q, k, v, plan, scale=0.5)
    capturing = False
    stof.attention(q, k, v, plan, scale=0.25)
    calls = [weakref.ref(call) for call in plan._bound.values()]
    assert calls[0] == eager
    monkeypatch.setattr(plans, "_MOST_BOUND", 1)
    stof.attention(q, k, v, plan, scale=0.125)  # all others are dropped
    assert [call() is not None for call in calls] == [True, True, False]
    plans.plan_cache.clear()
    del plan
    assert [call() is not None for call in calls] == [cached, cached, False]


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
    before = cache.info()
    stof.plan(masks.sliding_window(3), 3000)  # alone above the bound: not kept, and pushes nothing out
    assert cache.info().entries == before.entries


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


def test_a_changed_dense_mask_is_noticed() -> None:
    keep = KEEP.clone()
    mask = masks.from_dense(keep)
    inputs = make_inputs().qkv
    for given in (keep, mask, mask & masks.full(), ~~mask):
        keep.copy_(KEEP)
        torch.testing.assert_close(stof.attention(*inputs, given), stof.attention(*inputs, masks.causal()))
        keep.fill_(True)
        torch.testing.assert_close(stof.attention(*inputs, given), stof.attention(*inputs))
        keep[:, 0] = False  # through a view
        out, lse = stof.attention(*inputs, given, return_lse=True)
        assert_attention(out, lse, *inputs, keep)


def test_unchanged_dense_masks_are_cached() -> None:
    keep = KEEP.clone()
    assert stof.plan(keep, 64) is stof.plan(keep, 64)
    assert stof.plan(keep.clone(), 64) is not stof.plan(keep, 64)


def test_masks_of_inference_tensors_are_not_cached() -> None:
    """They have no version counter: a change could not be seen."""
    with torch.inference_mode():
        keep = torch.ones(64, 64, dtype=torch.bool)
        inputs = make_inputs().qkv
        before = stof.attention(*inputs, keep)
        keep.tril_()
        after = stof.attention(*inputs, keep)
    torch.testing.assert_close(after, stof.attention(*inputs, masks.causal()))
    assert not torch.equal(before, after)
    assert stof.plan_cache.info().entries == 1  # causal()
    assert (masks.from_dense(keep) & masks.causal()).versions is None


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


def test_output_keeps_the_memory_order_of_q() -> None:
    for memory in ("bhsd", "bshd"):
        q, k, v = make_inputs(memory=memory).qkv
        for implementation in IMPLS:
            assert stof.attention(q, k, v, implementation=implementation).stride() == q.stride()
    q = spread(make_inputs().q, "strided")
    assert not stof.attention(q, q, q).isnan().any()


def test_planner_halves_row_blocks_where_columns_are_contiguous_and_wasted() -> None:
    """A measured choice: windows gain, gathered and causal masks do not; a given config is kept."""
    heights = {
        masks.sliding_window(511): 32,
        masks.causal(): 64,
        masks.longformer(64, 64): 64,
        masks.full(): 64,
        ~masks.full(): 64,
    }
    for mask, height in heights.items():
        assert stof.plan(mask, 2048).layout.config.block_m == height, mask
    given = LayoutConfig(64, 64, 1)
    assert stof.plan(masks.sliding_window(511), 2048, config=given).layout.config == given
