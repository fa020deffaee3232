"""Calls in whose tensors or operators something else of PyTorch takes part: tracers, modes, transforms, tangents."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import stof
from stof import masks
from stof.errors import MaskError, UnsupportedError
from stof.runtime.private import is_intercepted, is_plain
from stof.testing import make_inputs

Q, K, V = make_inputs(heads=2, q_len=32, head_dim=16).qkv
TANGENT = torch.ones_like(Q)


class FunctionMode(TorchFunctionMode):
    """Sees functions, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class DispatchMode(TorchDispatchMode):
    """Sees operators, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class Subclass(Tensor):
    """PyTorch's own tensor by another name."""


class Attention(nn.Module):
    """Attention as a module."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor) -> Tensor:
        return stof.attention(q, K, V, self.mask)


class Model(nn.Module):
    """A module that calls one with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(masks.causal())

    def forward(self, q: Tensor) -> Tensor:
        return self.attention(q + 1)


def asked_within(run: Callable[[Callable[[Tensor], Tensor]], Any]) -> list[bool]:
    """What `is_plain` says within a function that `run` calls in its own way."""
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(is_plain(K))  # of a tensor that nothing wraps
        return x + 1

    run(function)
    return answers


@pytest.mark.parametrize(
    "run",
    [
        lambda f: torch.jit.trace(f, (Q,), check_trace=False),  # it runs f once more, eagerly
        lambda f: make_fx(f)(Q),
        lambda f: make_fx(f, pre_dispatch=True)(Q),
        lambda f: torch.vmap(f)(Q),
        lambda f: torch.func.functionalize(f)(Q),
        lambda f: torch.func.grad(lambda x: f(x).sum())(Q),
        lambda f: torch.func.jvp(f, (Q,), (TANGENT,)),
    ],
    ids=["jit", "make_fx", "pre_dispatch", "vmap", "functionalize", "grad", "jvp"],
)
def test_traced_and_transformed_calls_take_the_operator(run: Callable[[Any], Any]) -> None:
    answers = asked_within(run)
    assert answers
    assert not any(answers)


@pytest.mark.parametrize("context", [FunctionMode, DispatchMode, forward_ad.dual_level])
def test_modes_take_the_operator(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Also of two at once, and again not when they are over."""
    for _ in range(2):
        with context():
            assert is_intercepted()
            assert not is_plain(Q, K, V)
            if context is not forward_ad.dual_level:
                with context():
                    assert not is_plain(Q, K, V)
        assert not is_intercepted()
        assert is_plain(Q, K, V, None)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")  # of profilers
@pytest.mark.parametrize("how", ["function", "mask", "tensor"])
@pytest.mark.parametrize("wrap", [lambda x: x.as_subclass(Subclass), lambda x: TwoTensor(x, x)])
def test_gradients_of_subclasses_are_under_the_mask_of_the_call(wrap: Callable[[Tensor], Tensor], how: str) -> None:
    keep = masks.sliding_window(3, 0).to_dense(32)[0, 0]

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return keep[q, kv]

    results = []
    for mask in ({"function": fn, "mask": masks.from_function(fn), "tensor": keep}[how], masks.sliding_window(3, 0)):
        q, k, v = (wrap(x.clone()).requires_grad_() for x in (Q, K, V))
        out = stof.attention(q, k, v, mask)
        if mask is not keep:
            del mask
        keep.data.fill_(True)
        results.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    for one, other in zip(*results, strict=True):
        assert bool(torch.isclose(one, other).all())


def test_graphs_of_make_fx_read_bool_tensors() -> None:
    graph = make_fx(lambda q, keep: stof.attention(q, K, V, keep))(Q, torch.ones(32, 32).tril().bool())
    for keep in (torch.ones(32, 32).triu().bool(), torch.eye(32).bool()):
        assert torch.equal(graph(Q, keep), stof.attention(Q, K, V, keep))


def test_masks_that_wrap_other_tensors_are_refused() -> None:
    keep = torch.ones(32, 32).bool()
    with pytest.raises(MaskError, match="got a TwoTensor one"):
        stof.attention(Q, K, V, TwoTensor(keep, keep))


def test_what_changes_no_operator_is_plain() -> None:
    with torch.no_grad():
        assert is_plain(Q)
    with torch.inference_mode():
        assert is_plain(Q, torch.ones(3))
    with torch.autocast("cpu"):
        assert is_plain(Q)
    with torch.device("meta"), torch.device("cpu"):
        assert is_plain(Q)
        with FunctionMode():
            assert not is_plain(Q)
    with torch.profiler.profile(acc_events=True):  # PyTorch 2.11 warns otherwise
        assert is_plain(Q)
    assert is_plain(nn.Parameter(Q, requires_grad=False))


def test_a_mode_sees_the_operator() -> None:
    with DispatchMode() as mode:
        stof.attention(Q, K, V, masks.causal())
    assert mode.seen == ["stof.masked_attention.default"]


@pytest.mark.parametrize("context", [DispatchMode, FunctionMode, forward_ad.dual_level])
def test_masks_of_one_call_serve_the_operator(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """The operator finds a mask by its number; nobody but the call holds these."""
    wanted = stof.attention(Q, K, V, masks.causal())
    with context():
        for mask in (torch.ones(32, 32, dtype=torch.bool).tril(), lambda b, h, q, kv: q >= kv):
            torch.testing.assert_close(stof.attention(Q, K, V, mask), wanted)


@pytest.mark.parametrize("mask", [masks.causal(), stof.plan(masks.causal(), 32)], ids=["mask", "plan"])
@pytest.mark.parametrize("ready", [False, True])
def test_torch_jit_trace_is_refused(mask: Any, ready: bool) -> None:
    """Also where the plan has a call for these shapes: its steps would become those of the traced program."""
    if ready:
        stof.attention(Q, K, V, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace.*torch\.export"):
            torch.jit.trace(Attention(mask), (Q,))


def test_plans_under_torch_jit_trace_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace.*torch\.export"):
            torch.jit.trace(lambda q: stof.attention(q, K, V, stof.plan(masks.causal(), q.shape[2])), (Q,))


def test_torch_fx_symbolic_trace_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.fx\.symbolic_trace.*is_leaf_module"):
        torch.fx.symbolic_trace(Model())


def test_torch_fx_traces_modules_with_attention_as_leaves() -> None:
    """What the refusal says to use."""

    class Tracer(torch.fx.Tracer):
        """Attention is one node of its graphs."""

        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, Attention) or super().is_leaf_module(module, name)

    model = Model()
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(traced(Q), model(Q))


@pytest.mark.parametrize("dual", ["q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("mask", [masks.causal(), stof.plan(masks.causal(), 32)], ids=["mask", "plan"])
def test_tangents_are_refused(mask: Any, dual: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": K, "v": V, "bias": torch.zeros(32, 32), "sinks": torch.zeros(2)}
    stof.attention(mask_or_plan=mask, **given)
    with forward_ad.dual_level():
        given[dual] = forward_ad.make_dual(given[dual], torch.ones_like(given[dual]))
        with pytest.raises(UnsupportedError, match="forward_ad"):
            stof.attention(mask_or_plan=mask, **given)
        with torch.no_grad(), pytest.raises(UnsupportedError, match="forward_ad"):
            stof.attention(mask_or_plan=mask, **given)


def test_tangents_are_refused_in_compiled_code() -> None:
    compiled = torch.compile(Attention(masks.causal()), backend="aot_eager", fullgraph=True)
    compiled(Q)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward_ad"):
        compiled(forward_ad.make_dual(Q, TANGENT))


def test_without_tangents_a_dual_level_changes_nothing() -> None:
    plan = stof.plan(masks.causal(), 32)
    wanted = stof.attention(Q, K, V, plan)
    with forward_ad.dual_level():
        torch.testing.assert_close(stof.attention(Q, K, V, plan), wanted)


def test_gradients_around_other_transforms_are_refused() -> None:
    def of_mapped(q: Tensor) -> Tensor:
        return torch.vmap(lambda x: stof.attention(x, K, V, "causal"))(torch.stack([q, q])).sum()

    with pytest.raises(UnsupportedError, match="first order in reverse mode"):
        torch.func.grad(of_mapped)(Q)
