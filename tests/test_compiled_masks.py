"""Masks that compiled code makes of tensors and functions: values as they are at each call, or an error."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import stof
from stof import masks
from stof.errors import MaskError, ShapeError, UnsupportedError
from stof.testing import assert_attention, make_inputs


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attend(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return stof.attention(q, k, v, self.mask, return_lse=True)


def drawn(seed: int) -> Tensor:
    return torch.rand(40, 40, generator=torch.Generator().manual_seed(seed)) < 0.3


@pytest.mark.parametrize(
    "backend",
    [pytest.param("eager", marks=pytest.mark.slow), "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_tensors_have_the_values_of_the_call(backend: str) -> None:
    """An attribute written in place, then replaced; collected in between, as a mask of the trace would be."""
    inputs, attend = make_inputs(q_len=40).qkv, Attend(drawn(0))
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for step in range(4):
        if step == 2:
            attend.mask.copy_(drawn(1))
        if step == 3:
            attend.mask = drawn(2)
        gc.collect()
        assert_attention(*compiled(*inputs), *inputs, attend.mask)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensors_that_are_arguments_and_locals(backend: str) -> None:
    inputs = make_inputs(q_len=40).qkv

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return stof.attention(q, k, v, ~keep, return_lse=True)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for seed in range(3):
        gc.collect()
        assert_attention(*compiled(*inputs, drawn(seed)), *inputs, ~drawn(seed))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", ["function", "block mask"])
def test_functions_become_masks_outside(kind: str, fullgraph: bool) -> None:
    """A mask made within the trace would be gone at the call, so the graph breaks there."""

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() < 5

    given = near if kind == "function" else create_block_mask(near, 1, 1, 40, 40, device="cpu")
    inputs = make_inputs(q_len=40).qkv
    attend = torch.compile(Attend(given), backend="aot_eager", fullgraph=fullgraph)
    mask = masks.from_function(near) if kind == "function" else masks.from_block_mask(given)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of compiled code"):
            attend(*inputs)
    else:
        assert_attention(*attend(*inputs), *inputs, mask.to_dense(40))
    torch._dynamo.reset()
    made = torch.compile(Attend(mask), backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        gc.collect()
        assert_attention(*made(*inputs), *inputs, mask.to_dense(40))


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def attend_documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return stof.attention(q, k, v, masks.causal() & masks.documents(ids), return_lse=True)


def drawn_ids(seed: int, *rows: int, length: int = 40, ordered: bool = False) -> Tensor:
    """Some negative; where not ordered, documents have several parts."""
    ids = torch.randint(-1, 4, (*rows, length), generator=torch.Generator().manual_seed(seed))
    return ids.sort(-1).values if ordered else ids


def differentiable(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in inputs]


def gradients(out: Tensor, inputs: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out), **options)


def assert_gradients(actual: tuple[Tensor, ...], inputs: list[Tensor], keep: Tensor) -> None:
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = gradients(torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=keep).nan_to_num(), wide)
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference.nan_to_num(), atol=1e-5, rtol=1e-4)


def seen(ids: Tensor, length: int = 40) -> Tensor:
    return (masks.causal() & masks.documents(ids)).to_dense(length)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("rows", [(), (1,), (2,)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_whose_ids_are_a_tensor(backend: str, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    """One graph for all ids; the backward pass has those of the call, whatever is written to the tensor since."""
    inputs, counter = make_inputs(batch=2, q_len=40).qkv, CompileCounterWithBackend(backend)
    compiled = torch.compile(attend_documents, backend=counter, fullgraph=True)
    for step in range(4):
        ids = drawn_ids(step, *rows, ordered=step % 2 == 0).to(dtype)
        keep = seen(ids)
        with torch.no_grad():
            assert_attention(*compiled(*inputs, ids), *inputs, keep)
        qkv = differentiable(inputs)
        out, _ = compiled(*qkv, ids)
        ids.data.fill_(0)
        assert_gradients(gradients(out, qkv), qkv, keep)
    assert counter.frame_count == 2  # with gradients, and without


@pytest.mark.parametrize(
    "options",
    [{}, {"aggressive_recomputation": True}, {"activation_memory_budget": 0.5}],
    ids=lambda options: [*options],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_under_several_ids_before_their_backward_passes(backend: str, options: dict[str, Any]) -> None:
    inputs = make_inputs(batch=2, q_len=40).qkv
    with torch._functorch.config.patch(**options):
        compiled = torch.compile(
            lambda q, k, v, ids: (attend_documents(q, k, v, ids + 0)[0], attend_documents(k, v, q, ids.flip(0))[0]),
            backend=backend,
            fullgraph=True,
        )
        calls = []
        for step in range(12):  # more than are kept
            ids, qkv = drawn_ids(step, 2), differentiable(inputs)
            keeps = seen(ids), seen(ids.flip(0))
            outs = compiled(*qkv, ids)
            ids.data.fill_(0)
            calls.append((qkv, outs, keeps))
        for qkv, outs, keeps in (*calls, *reversed(calls)):
            q, k, v = qkv
            assert_gradients(gradients(outs[0], qkv, retain_graph=True), qkv, keeps[0])
            other = [k, v, q]
            assert_gradients(gradients(outs[1], other, retain_graph=True), other, keeps[1])


@pytest.mark.parametrize("policy", [None, "save", "recompute"])
@pytest.mark.parametrize("inside", [False, True])
def test_documents_and_activation_checkpointing(inside: bool, policy: str | None) -> None:
    """Layers share the mask, made inside of what is computed again or outside of it."""
    inputs = make_inputs(batch=2, q_len=40).qkv
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        saved = [torch.ops.stof.ids_on_host.default, torch.ops.stof.varying_attention.default]
        listed = saved if policy == "save" else [torch.ops.aten.mul.Tensor]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, listed)

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        shared = None if inside else masks.documents(ids) & masks.causal()

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = masks.documents(ids) & masks.causal() if shared is None else shared
            return stof.attention(q, k, v, mask)

        return checkpoint(layer, checkpoint(layer, q, k, v, **options), k, v, **options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for step in range(3):
        ids, qkv = drawn_ids(step, 2), differentiable(inputs)
        out = compiled(*qkv, ids)
        if not inside:
            ids.data.fill_(0)
        other = differentiable(inputs)
        for actual, expected in zip(
            gradients(out, qkv), gradients(attend(*other, drawn_ids(step, 2)), other), strict=True
        ):
            torch.testing.assert_close(actual, expected)


def test_documents_with_dropout() -> None:
    inputs = make_inputs(batch=2, q_len=40).qkv

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return stof.attention(q, k, v, masks.documents(ids), dropout_p=0.3)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for step in range(3):
        leaves, others = differentiable(inputs), differentiable(inputs)
        ids = drawn_ids(step, 2)
        torch.manual_seed(step)
        out = compiled(*leaves, ids)
        torch.manual_seed(step)
        torch.testing.assert_close(out, expected := attend(*others, ids))
        for gradient, other in zip(gradients(out, leaves), gradients(expected, others), strict=True):
            torch.testing.assert_close(gradient, other)


def test_documents_in_calls_of_several_sizes_and_threads() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend_documents, backend=counter, fullgraph=True, dynamic=True)
    sizes = [(3, 40), (5, 52), (4, 33), (3, 64)]

    def run(seed: int) -> None:
        for step in range(8):
            batch, length = sizes[(seed + step) % len(sizes)]
            inputs, ids = make_inputs(batch=batch, q_len=length).qkv, drawn_ids(100 * seed + step, batch, length=length)
            assert_attention(*compiled(*inputs, ids), *inputs, seen(ids, length))

    run(0)
    # dynamic=True changes this setting during a call; threads may then leave it changed.
    with torch._dynamo.config.patch(assume_static_by_default=True), ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(1, 5)))
    assert sum("varying_attention" in graph.code for graph in counter.graphs) == 1


def test_documents_and_masks_with_numbers() -> None:
    """A mask that differs from call to call is one more input of the graph."""
    inputs, counter = make_inputs(batch=2, q_len=40).qkv, CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        return stof.attention(q, k, v, mask & masks.documents(ids) & masks.sliding_window(9), return_lse=True)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for step in range(5):
        mask, ids = masks.from_dense(drawn(step)) if step % 2 else masks.padding([30 + step, 9]), drawn_ids(step, 2)
        keep = (mask & masks.documents(ids) & masks.sliding_window(9)).to_dense(40)
        assert_attention(*compiled(*inputs, ids, mask), *inputs, keep)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (drawn_ids(0, 2, length=39), ShapeError, "cover 39 tokens"),
        (drawn_ids(0, 3), ShapeError, "batch size of 3"),
        (drawn_ids(0).float(), MaskError, "integer tensor"),
        (drawn_ids(0) > 0, MaskError, "integer tensor"),
        (drawn_ids(0, 1, 2), MaskError, "1-D or 2-D"),
        (drawn_ids(0) + 2**32, MaskError, "ids is between"),
    ],
)
def test_ids_that_do_not_fit(ids: Tensor, error: type[Exception], match: str) -> None:
    compiled = torch.compile(attend_documents, backend="aot_eager", fullgraph=True)
    with pytest.raises(error, match=match):
        compiled(*make_inputs(batch=2, q_len=40).qkv, ids)


def test_what_compiled_code_cannot_say_of_a_tensor_of_ids() -> None:
    """Other masks are refused; the graph breaks at cumulative lengths, which are read outside."""
    inputs, ends, ids = make_inputs(q_len=40).qkv, torch.tensor([0, 9, 40]), drawn_ids(1)
    for make, value, match in (
        (lambda ends: masks.documents(cu_seqlens=ends), ends, "searchsorted"),
        (lambda ids: masks.documents(ids) | masks.sliding_window(3), ids, "by & alone"),
        (lambda ids: masks.sliding_window(3) | masks.documents(ids), ids, "by & alone"),
        (lambda ids: masks.documents(ids) & masks.documents(ids + 1), ids, "number the pairs"),
    ):
        torch._dynamo.reset()

        def attend(q: Tensor, k: Tensor, v: Tensor, value: Tensor, make: Any = make) -> tuple[Tensor, Tensor]:
            return stof.attention(q, k, v, make(value), return_lse=True)

        with pytest.raises(torch._dynamo.exc.Unsupported, match=match):
            torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs, value)
        compiled = torch.compile(attend, backend="aot_eager")
        if value is ends:
            assert_attention(*compiled(*inputs, ends), *inputs, make(ends).to_dense(40))
        else:
            with pytest.raises(UnsupportedError, match=match):
                compiled(*inputs, ids)


def test_ids_are_not_read_in_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(attend_documents, backend="aot_eager", fullgraph=True)
    inputs = make_inputs(q_len=40).qkv
    compiled(*inputs, drawn_ids(1))
    monkeypatch.setattr("stof.runtime.memory.in_capture", lambda: True)
    with pytest.raises(UnsupportedError, match="before the capture"):
        compiled(*inputs, drawn_ids(1))


def test_frozen_functions_are_differentiated() -> None:
    """What the error names for functions that read what may change."""
    inputs, scores, counter = make_inputs(q_len=40).qkv, torch.randn(40, 40), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, mask: stof.attention(q, k, v, mask), backend=counter, fullgraph=True)
    mask = masks.from_function(lambda b, h, i, j: scores[i, j] > 0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"mask\.frozen\(\)"):
        compiled(*differentiable(inputs), mask)
    for _ in range(4):
        scores.data.copy_(torch.randn(40, 40))
        keep, qkv = scores > 0, differentiable(inputs)
        out = compiled(*qkv, mask.frozen())
        scores.data.fill_(1.0)
        assert_gradients(gradients(out, qkv), qkv, keep)
    assert counter.frame_count == 2
