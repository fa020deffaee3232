"""Activation checkpointing and PyTorch's partitioner compute again what a backward pass needs: under the same mask."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as partitioner
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import stof
from stof import masks
from stof.plans.make import plan_cache

S, HEADS, DIM = 24, 2, 8
Block = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


class Operators(TorchDispatchMode):
    """Which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, S, DIM)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


def _documents(n: int) -> masks.Mask:
    return masks.causal() & masks.documents(cu_seqlens=[0, 3 + n, 11 + n, S])


def _table(n: int) -> Tensor:
    return (torch.arange(S) + n) // 7


def _of_table(table: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (table[i] == table[j]) & (j <= i)


# How a block says its mask in step `n`, and the mask as a bool tensor.
GIVEN: dict[str, Callable[[int], Any]] = {
    "documents": _documents,
    "bool tensor": lambda n: _documents(n).to_dense(S)[0, 0],
    "function": lambda n: _of_table(_table(n)),
    "plan made inside": _documents,
    "mask made inside": lambda n: _documents(n).to_dense(S)[0, 0],
}


def _block(name: str) -> Block:
    def block(q: Tensor, k: Tensor, v: Tensor, given: Any) -> Tensor:
        if name == "plan made inside":
            given = stof.plan(given, S)
        elif name == "mask made inside":
            given = masks.from_dense(given)
        out = stof.attention(q, k, v, given)
        scale = 1 / out.detach().abs().max()
        return (out * scale).tanh() * out.sum(-1, keepdim=True).sigmoid()

    return block


def _gradients(function: Callable[..., Tensor], given: Any, **options: Any) -> tuple[Tensor, ...]:
    q, k, v = _tensors()
    out = checkpoint(function, q, k, v, given, use_reentrant=False, **options) if options else function(q, k, v, given)
    return torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.mark.parametrize("name", GIVEN)
def test_random_selective_policies_save_the_callers_operators(name: str) -> None:
    block, rng = _block(name), random.Random(name)
    for step in range(6):
        given = GIVEN[name](step)
        plan_cache.clear()
        with Operators() as operators:
            expected = _gradients(block, given)
        plan_cache.clear()
        saved = {op for op in set(operators.seen) if rng.random() < 0.5}

        def policy(context: Any, op: Any, *args: Any, saved: set[Any] = saved, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        for again in range(2):  # with and without a plan in the cache
            for found, wanted in zip(_gradients(block, given, context_fn=contexts), expected, strict=True):
                torch.testing.assert_close(found, wanted, msg=f"step {step}, call {again}, saved {saved}")


@pytest.mark.parametrize("name", GIVEN)
def test_first_and_later_calls_run_the_same_operators(name: str) -> None:
    block, given = _block(name), GIVEN[name](0)
    seen = []
    plan_cache.clear()
    for _ in range(2):
        with Operators() as operators:
            _gradients(block, given)
        seen.append(operators.seen)
    assert seen[0] == seen[1]


# Under these, PyTorch's partitioner computes again what it saves as a rule.
SETTINGS = [{}, {"activation_memory_budget": 0.5}, {"aggressive_recomputation": True}]


def _compiled(function: Callable[..., Tensor], settings: dict[str, Any], *args: Any) -> Tensor:
    torch._dynamo.reset()
    with partitioner.patch(settings):
        out: Tensor = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)(*args)
    return out


def _assert_same_gradients(out: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, inputs, weight) for x in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_compiled_backward_reads_the_seed_of_the_forward_pass(settings: dict[str, Any]) -> None:
    q, k, _ = _tensors()
    v = torch.eye(S, dtype=torch.float64).expand(1, HEADS, S, S).clone().requires_grad_()  # `out` is the weights
    mask = masks.sliding_window(7)
    out = _compiled(lambda q, k, v: stof.attention(q, k, v, mask, dropout_p=0.5), settings, q, k, v)
    weights = torch.softmax((q @ k.mT * DIM**-0.5).masked_fill(~mask.to_dense(S), -torch.inf), -1)
    _assert_same_gradients(out, (weights * (out.detach() != 0) / 0.5) @ v, (q, k, v))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_compiled_backward_reads_the_mask_of_the_forward_pass(settings: dict[str, Any]) -> None:
    q, k, v = _tensors()
    keep = _documents(2).to_dense(S)[0, 0].clone()
    weights = torch.softmax((q @ k.mT * DIM**-0.5).masked_fill(~keep, -torch.inf), -1)
    out = _compiled(stof.attention, settings, q, k, v, keep)
    keep.data.fill_(True)  # a write that PyTorch does not count
    _assert_same_gradients(out, weights @ v, (q, k, v))


def test_a_memory_budget_of_nothing_warns_of_dropout() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q, k, v, dropout_p=0.5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _compiled(call, {"activation_memory_budget": 0.0}, *_tensors())
    assert any("draw random numbers again" in str(warning.message) for warning in caught)
