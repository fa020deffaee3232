"""Dropout of `stof.attention`: reproducible, consistent between passes under each way to call it, refused elsewhere."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import stof
from stof import masks
from stof.errors import ArgumentError, UnsupportedError
from stof.kernels.dropout import Dropout, dense_kept_weights, draw_seed
from stof.kernels.implementation import Gradients
from stof.kernels.torch.reference import reference_attention, reference_backward
from stof.operators import dropout_attention_backward_op, dropout_attention_op
from stof.selection import IMPLEMENTATIONS
from tests.interpreter import IN_INTERPRETER
from tests.kernels.gradients import assert_gradients

Q_LEN, KV_LEN, HEADS = 40, 56, 4
MASK = masks.sliding_window(5, 9) | masks.sink_tokens(2)
CPU = torch.device("cpu")
P = 0.3


def inputs(dtype: torch.dtype = torch.float64, value_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((HEADS, Q_LEN, 16), (2, KV_LEN, 16), (2, KV_LEN, value_dim))
    q, k, v = (torch.randn(2, *size, dtype=dtype, generator=generator).requires_grad_() for size in sizes)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, seed: int = 0, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    return stof.attention(q, k, v, MASK, dropout_p=P, **options)


def seed_of(seed: int = 0) -> Tensor:
    """What a call draws after `torch.manual_seed`."""
    torch.manual_seed(seed)
    return draw_seed(CPU)


def expected(d_out: Tensor, seed: Tensor, scale: float = 1.0, **options: Any) -> tuple[Tensor, Gradients]:
    """Output and gradients of the definition, of queries times `scale`."""
    q, k, v = (x.detach() for x in inputs())
    call = {"keep": MASK.to_dense(Q_LEN, KV_LEN), "scale": 0.25 * scale, "dropout": Dropout(P, seed), **options}
    gradients = reference_backward(q, k, v, d_out, **call)
    return reference_attention(q, k, v, **call)[0], gradients


def test_output_and_gradients_are_those_of_the_definition() -> None:
    q, k, v = inputs()
    bias = torch.randn(1, HEADS, Q_LEN, KV_LEN, dtype=torch.float64).requires_grad_()
    sinks = torch.randn(HEADS, dtype=torch.float64).requires_grad_()
    d_out = torch.randn(2, HEADS, Q_LEN, 16, dtype=torch.float64)
    for implementation in (None, "reference"):
        out = attend(q, k, v, bias=bias, sinks=sinks, softcap=3.0, implementation=implementation)
        actual = torch.autograd.grad(out, (q, k, v, bias, sinks), d_out)
        wanted, gradients = expected(d_out, seed_of(), bias=bias.detach(), sinks=sinks.detach(), softcap=3.0)
        torch.testing.assert_close(out, wanted)
        for one, other in zip(actual, gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"bias": True, "sinks": True}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    q, k, v = (x.detach()[:1, :, :9].requires_grad_() for x in inputs())
    more = {"bias": torch.randn(1, HEADS, 1, 9, dtype=torch.float64), "sinks": torch.randn(HEADS, dtype=torch.float64)}
    chosen = {name: more[name].requires_grad_() if value is True else value for name, value in options.items()}
    names = [name for name, value in options.items() if value is True]

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        more = chosen | dict(zip(names, others, strict=True))
        return stof.attention(q, k, v, MASK, return_lse=True, dropout_p=P, **more)

    torch.autograd.gradcheck(call, (q, k, v, *[chosen[name] for name in names]), fast_mode=True)


def test_seeds_repeat_calls() -> None:
    """With gradients, without, and from the bound call that a plan has stored; lse is without dropout."""
    q, k, v = inputs()
    first = attend(q, k, v, 5)
    second = stof.attention(q, k, v, MASK, dropout_p=P)
    assert not torch.equal(first, second)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(attend(q, k, v, 5), first)
            assert torch.equal(stof.attention(q, k, v, MASK, dropout_p=P), second)
        torch.manual_seed(5)
        assert not torch.equal(stof.attention(q, k, v, MASK, dropout_p=0.4), first)
        out, lse = stof.attention(q, k, v, MASK, return_lse=True)
        dropped, same = stof.attention(q, k, v, MASK, return_lse=True, dropout_p=P)
    # PyTorch's fused operator computes the one without dropout.
    torch.testing.assert_close(lse, same)
    assert not torch.equal(out, dropped)


@pytest.mark.parametrize("zero", [0.0, 0])
def test_no_dropout_is_as_without_the_argument(zero: float) -> None:
    """Equal bits, and nothing is drawn."""
    q, k, v = inputs(torch.float32)
    state = torch.get_rng_state()
    plain = stof.attention(q, k, v, MASK)
    zeroed = stof.attention(q, k, v, MASK, dropout_p=zero)
    assert torch.equal(plain, zeroed)
    some, others = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (plain, zeroed))
    assert all(map(torch.equal, some, others))
    with torch.no_grad():
        assert torch.equal(stof.attention(q, k, v, MASK, dropout_p=zero), plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_activation_checkpointing(kind: str) -> None:
    """The forward pass that is repeated drops the same weights."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q * 1.5, k, v, MASK, dropout_p=P)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "dropout_attention" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    q, k, v = inputs()
    seed = seed_of(4)
    torch.manual_seed(4)
    out = checkpoint(call, q, k, v, **options)
    assert isinstance(out, Tensor)
    torch.randn(7)
    out.sum().backward()
    wanted, gradients = expected(torch.ones_like(out), seed, scale=1.5)
    torch.testing.assert_close(out, wanted)
    for x, gradient in zip((q, k, v), gradients, strict=False):
        torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize("split", ["policy", "random state", ""])
def test_recomputation_with_another_seed_is_refused(split: str) -> None:
    """The second call draws what the first drew if a policy saves the first draw alone."""
    calls = 0

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(stof.attention(q * 1.5, k, v, MASK, dropout_p=P), k, v, MASK, dropout_p=P)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal calls
        calls += "randint" in str(operator)
        saved = "randint" in str(operator) and (calls == 1 or not split)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"preserve_rng_state": split != "random state"}
    if split != "random state":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    q, k, v = inputs()
    torch.manual_seed(4)
    out = checkpoint(layers, q, k, v, use_reentrant=False, **options)
    assert isinstance(out, Tensor)
    if split:
        with pytest.raises(UnsupportedError, match="another dropout seed"):
            out.sum().backward()
        return
    torch.manual_seed(4)
    wanted = torch.autograd.grad(layers(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), wanted)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str, planned: bool) -> None:
    """Forward and backward drop the same weights, other ones in each call; values of 1 in their places show which."""
    q, k, _ = inputs()
    v = torch.eye(KV_LEN, dtype=torch.float64).expand(2, 2, KV_LEN, KV_LEN).clone().requires_grad_()
    mask = stof.plan(MASK, Q_LEN, KV_LEN) if planned else MASK
    keep = MASK.to_dense(Q_LEN, KV_LEN)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q * 1.5, k, v, mask, dropout_p=P)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    drawn = []
    for _ in range(2):
        out = compiled(q, k, v)
        assert bool((out != 0).any())
        drawn.append(kept := (out != 0).detach())
        assert abs(float(kept.sum() / keep.expand(kept.shape).sum()) - 1 + P) < 0.05
        d_out = torch.randn_like(out)
        actual = torch.autograd.grad(out, (q, k, v), d_out)

        def formula(q: Tensor, k: Tensor, v: Tensor, kept: Tensor = kept) -> Tensor:
            scores = (q * 1.5 @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(~keep, -torch.inf)
            return (torch.softmax(scores, -1) * kept / (1 - P)) @ v.repeat_interleave(2, 1)

        torch.testing.assert_close(out, formula(q, k, v))
        for one, other in zip(actual, torch.autograd.grad(formula(q, k, v), (q, k, v), d_out), strict=True):
            torch.testing.assert_close(one, other)
    assert not torch.equal(*drawn)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by PyTorch 2.15's check
def test_operators_contract() -> None:
    """Schemas, fakes and autograd, with a seed."""
    q, k, v = inputs(torch.float32)
    rest = (MASK.key, None, None, 0.25, 0.0, "", P, torch.tensor([1, 2]))
    torch.library.opcheck(dropout_attention_op, (q, k, v, *rest))
    out, lse = (x.detach() for x in dropout_attention_op(q, k, v, *rest))
    q, k, v = (x.detach() for x in (q, k, v))
    arguments = (out, None, q, k, v, out, lse, MASK.key, None, None, 0.25, 0.0, 0, None, [True, True, False, False])
    torch.library.opcheck(
        dropout_attention_backward_op,
        (*arguments, P, torch.tensor([1, 2])),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("sizes", [(0, 4, 8, 8), (2, 4, 0, 8), (2, 4, 8, 0)], ids=str)
def test_empty_calls(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = sizes
    q, k, v = (torch.ones(batch, heads, n, 8).requires_grad_() for n in (q_len, kv_len, kv_len))
    stof.attention(q, k, v, dropout_p=P).sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))


def test_refusals() -> None:
    q, k, v = inputs()
    for bad in (-0.1, 1.0, 1.5, float("nan"), "0.1", None):
        with pytest.raises(ArgumentError, match="from 0 to below 1"):
            stof.attention(q, k, v, MASK, dropout_p=bad)  # type: ignore[call-overload]
    for name in ("batched", "row_wise", "hopper"):
        with pytest.raises(ArgumentError, match="no dropout"):
            stof.attention(q, k, v, MASK, dropout_p=P, implementation=name)
    narrow, scales = zip(*[stof.quantise_heads(x.detach().float()) for x in (q, k, v)], strict=True)
    with pytest.raises(UnsupportedError, match="8-bit tensors have no gradients"):
        stof.attention(*narrow, MASK, scales=scales, dropout_p=P)


def test_explained() -> None:
    """One declaration decides what runs, and says what does not."""
    q, k, v = inputs()
    refusals = {one.name: one.refusals for one in stof.explain(q, k, v, MASK, dropout_p=P)}
    for name, implementation in IMPLEMENTATIONS.items():
        assert ("no dropout" in refusals[name]) != implementation.capabilities.dropout
        backward = implementation.backward
        assert backward is None or backward.capabilities.dropout == implementation.capabilities.dropout
    with pytest.raises(ArgumentError, match="from 0 to below 1"):
        stof.explain(q, k, v, MASK, dropout_p=2.0)


@IN_INTERPRETER
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("unaligned", [False, True])
def test_triton_kernels_of_plans(unaligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the public operator to the kernels and back, in the interpreter, also where they read copies."""
    triton = IMPLEMENTATIONS["block_wise"]
    assert triton.backward is not None
    backward = replace(triton.backward, capabilities=replace(triton.backward.capabilities, devices=()))
    capabilities = replace(triton.capabilities, devices=())
    chosen = replace(triton, capabilities=capabilities, backward=backward)
    monkeypatch.setitem(IMPLEMENTATIONS, "row_block", chosen)
    stof.plan_cache.clear()
    mask = masks.sliding_window(6 + unaligned, 9) | masks.sink_tokens(2)  # of no other test: equal plans are one
    q, k, v = (x.detach().half() for x in inputs())
    if unaligned:
        k, v = (torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias, sinks = torch.randn(1, 1, Q_LEN, KV_LEN).half().requires_grad_(), torch.randn(HEADS).requires_grad_()
    try:
        for seed in (2, 3):  # the second from the bound call
            torch.manual_seed(seed)
            out = stof.attention(q, k, v, mask, dropout_p=P, bias=bias, sinks=sinks)
            gradients = torch.autograd.grad(out, (q, k, v, bias, sinks), torch.ones_like(out))
            call = {"q": q, "k": k, "v": v, "d_out": torch.ones_like(out), "bias": bias, "sinks": sinks}
            call = {name: x.detach() for name, x in call.items()} | {"keep": mask.to_dense(Q_LEN, KV_LEN)}
            assert_gradients(Gradients(*gradients), call | {"scale": 0.25, "dropout": Dropout(P, seed_of(seed))})
    finally:
        stof.plan_cache.clear()


def test_masks_of_calls_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, batch entries, rows and calls drop weights of their own: those of the call's draw."""
    seeds: list[Tensor] = []
    module = importlib.import_module("stof.attention")
    monkeypatch.setattr(module, "draw_seed", lambda device: seeds.append(draw_seed(device)) or seeds[-1])  # type: ignore[func-returns-value]
    q, k = (torch.zeros(2, 3, 64, 8) for _ in range(2))
    v = torch.eye(64).expand(2, 3, 64, 64)
    kept = torch.stack([stof.attention(q, k, v, dropout_p=0.5) != 0 for _ in range(2)])
    for one, seed in zip(kept, seeds, strict=True):
        assert torch.equal(one, dense_kept_weights(Dropout(0.5, seed), 2, 3, 64, 64))
    for dim in range(4):
        assert not torch.equal(kept.select(dim, 0), kept.select(dim, 1))
    assert abs(float(kept.float().mean()) - 0.5) < 0.02
