"""The operator as PyTorch sees it: schemas, compilers, inference mode, autocast and threads."""

from __future__ import annotations

import gc
import pickle
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import stof
from stof import masks
from stof.errors import DtypeError, MaskError
from stof.handles import NUMBERED
from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.masks.parse import mask_by_number
from stof.operators import masked_attention_op, varying_attention_op
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
    rest = (options.get("bias"), options.get("sinks"), 0.25, options.get("softcap", 0.0))

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
    mask, attend = masks.from_dense(keep), lambda q, k, v, given: stof.attention(q, k, v, given)
    inputs = make_inputs().qkv
    of_tensor, of_mask = (torch.compile(attend, backend="eager", fullgraph=True) for _ in range(2))
    causal = stof.attention(*inputs, masks.causal())
    torch.testing.assert_close(of_tensor(*inputs, keep), causal)
    torch.testing.assert_close(of_mask(*inputs, mask), causal)
    keep.data.fill_(True)
    torch.testing.assert_close(of_tensor(*inputs, keep), stof.attention(*inputs))
    torch.testing.assert_close(of_mask(*inputs, mask), causal)  # it keeps the values it was made of


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


VARYING: dict[str, Callable[[int], Any]] = {
    "padding": lambda n: masks.padding([64 - n, 30]),
    "causal and padding": lambda n: masks.causal() & ~masks.padding([n + 1, 30]),
    "documents": lambda n: masks.documents(cu_seqlens=[0, 10 + n, 64]),
    "prefix": lambda n: masks.prefix_lm([n + 1, 3]),
    "offset": lambda n: masks.sliding_window(9).with_query_offset(n + 1),
    "tensor": lambda n: masks.from_dense(torch.arange(64 * 64).view(64, 64) % (n + 2) == 0),
    "function": lambda n: masks.from_function(lambda b, h, q, kv: q >= kv - n),
    "plan": lambda n: stof.plan(masks.padding([64 - n, 30]), 64, batch=2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", ["eager", "inductor", "stof"])
@pytest.mark.parametrize("kind", VARYING)
def test_compiled_code_takes_masks_that_vary(kind: str, backend: str) -> None:
    """Without being compiled for each: after eight, Dynamo would give up."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x, mask: stof.attention(x, x, x, mask) * 2, backend=counter, fullgraph=True)
    x = torch.randn(2, 2, 64, 16)
    # Most come and go; the first comes back.
    given = [VARYING[kind](n) for n in range(2)]
    with torch.no_grad():
        for n in (*range(12), 0, 1):
            mask = given[n] if n < len(given) else VARYING[kind](n)
            torch.testing.assert_close(compiled(x, mask), stof.attention(x, x, x, mask) * 2)
    assert counter.frame_count == 2


def test_exported_programs_keep_their_masks() -> None:
    """By their text: numbers mean nothing to another process, or once the mask is gone."""
    x = torch.randn(2, 2, 64, 16)

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = masks.causal() & masks.padding([50, 64])

        def forward(self, x: Tensor) -> Tensor:
            return stof.attention(x, x, x, self.mask)

    expected = stof.attention(x, x, x, Masked().mask)
    for strict in (False, True):
        module = Masked()
        with torch.no_grad():
            exported = torch.export.export(module, (x,), strict=strict)
        del module
        stof.plan_cache.clear()
        gc.collect()
        torch.testing.assert_close(exported.module()(x), expected)


@pytest.mark.parametrize("kind", ["mask", "plan", "tensor", "function"])
def test_fake_and_meta_tensors(kind: str) -> None:
    """Shapes, dtypes and strides without data, as for PyTorch's operators."""
    given: Any = {"mask": MASK, "plan": stof.plan(MASK, 64), "tensor": KEEP, "function": FUNCTION}[kind]
    q, k, v = make_inputs(dtype=torch.float16, memory="bshd").qkv
    expected = stof.attention(q, k, v, given)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        out = stof.attention(*fakes, given)
    assert (out.shape, out.dtype, out.stride()) == (expected.shape, expected.dtype, expected.stride())
    if kind != "plan":
        out = stof.attention(*(x.to("meta") for x in (q, k, v)), given)
        assert out.is_meta
        assert (out.shape, out.stride()) == (expected.shape, expected.stride())


def test_numbers_are_those_of_values() -> None:
    """Of living masks that vary: no two of different values share one, even if their hashes do."""
    first, same = masks.padding([3, 4]), masks.padding([3, 4])
    assert first.number == same.number != 0
    assert masks.padding([4, 3]).number != first.number
    assert (masks.causal() | masks.sliding_window(3)).number == 0
    number = first.number
    del first
    gc.collect()
    assert mask_by_number(number) == same
    assert pickle.loads(pickle.dumps(same)).number == number
    with unittest.mock.patch("stof.runtime.registry._number_of", return_value=1):
        clashing = [masks.padding([n, 1]) for n in range(3, 6)]
    assert len({mask.number for mask in clashing}) == 3
    assert [mask_by_number(mask.number) for mask in clashing] == clashing


def test_masks_that_change_are_left_out_of_inductors_graphs() -> None:
    """It would record one for each. A mask or plan that stays the same is no reason, however it is told."""
    q, k, v = make_inputs(q_len=20, kv_len=20).qkv
    called: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        called.extend(node.target for node in graph.graph.nodes if "stof" in str(node.target))
        return graph.forward

    given: list[Any] = [masks.padding([n]) for n in (20, 13, 7)]
    stays, varies = torch.ops.stof.masked_attention.default, torch.ops.stof.varying_attention.default
    for args in (given, [stof.plan(mask, 20) for mask in given]):
        torch._dynamo.reset()
        called.clear()
        compiled = torch.compile(lambda q, k, v, m: stof.attention(q, k, v, m), backend=backend, fullgraph=True)
        for mask in (args[0], *args):
            torch.testing.assert_close(compiled(q, k, v, mask), stof.attention(q, k, v, mask))
        assert called == [stays, varies]
    assert torch.Tag.cudagraph_unsafe in varies.tags
    assert torch.Tag.cudagraph_unsafe not in stays.tags
    number = given[0].number
    torch.library.opcheck(
        varying_attention_op, (q, k, v, NUMBERED, None, None, 0.25, 0.0, "", None, None, None, number)
    )


def test_operator_called_with_the_number_of_a_dead_mask() -> None:
    number = masks.padding([6, 11]).number  # no other test holds an equal one
    gc.collect()
    stof.plan_cache.clear()
    with pytest.raises(MaskError, match=f"number {number} no longer exists"):
        masked_attention_op(*make_inputs().qkv, NUMBERED, None, None, 1.0, 0.0, "", number=number)


def test_operator_called_with_the_key_of_a_dead_mask() -> None:
    key = masks.from_dense(KEEP.clone()).key
    gc.collect()
    with pytest.raises(MaskError, match=r"outside of compiled code.* keep them"):
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

    def made(_: int) -> Mask:
        barrier.wait()
        return masks.from_dense(keep)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(made, range(8)))) == 1


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
