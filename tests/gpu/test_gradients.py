"""Gradients of stof.attention on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import stof
from stof import masks
from stof.kernels.implementation import Gradients
from stof.testing import make_inputs
from tests.kernels.gradients import assert_gradients, expected_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GENERATOR = torch.Generator().manual_seed(0)
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.sliding_window(40, 20),
    "longformer": masks.longformer(40, 9),
    "strided": masks.strided(20, 30, 4),
    "per head": masks.per_head([masks.causal(), masks.full(), masks.sliding_window(9), masks.strided(5, 9)]),
    "random": masks.from_dense(torch.rand(300, 300, generator=GENERATOR) < 0.1),
}


def gradients_of(call: dict[str, Any], mask: masks.Mask) -> Gradients:
    """Gradients by autograd, on the CPU."""
    leaves = {name: call[name].cuda().requires_grad_() for name in ("q", "k", "v", "bias", "sinks") if name in call}
    options = {name: call[name] for name in ("scale", "softcap") if name in call}
    out = stof.attention(
        *(leaves[n] for n in "qkv"), mask, bias=leaves.get("bias"), sinks=leaves.get("sinks"), **options
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), call["d_out"].cuda())
    return Gradients(**dict.fromkeys(Gradients._fields) | {n: g.cpu() for n, g in zip(leaves, gradients, strict=True)})


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
def test_against_float64(name: str, head_dim: int, dtype: torch.dtype, options: bool) -> None:
    """The tiles that plans choose."""
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=300, head_dim=head_dim, dtype=dtype)
    call: dict[str, Any] = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "d_out": torch.randn(2, 4, 300, head_dim).to(dtype),
    }
    call |= {"scale": head_dim**-0.5, "keep": MASKS[name].to_dense(300, 300, heads=4)}
    if options:
        call |= {"bias": torch.randn(1, 4, 300, 300).to(dtype), "sinks": torch.randn(4), "softcap": 20.0}
    assert_gradients(gradients_of(call, MASKS[name]), call)


def test_equal_calls_give_equal_bits() -> None:
    q, k, v, d_out = (torch.randn(2, 4, 500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = stof.attention(*leaves, masks.longformer(30, 9))
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(1000):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(map(torch.equal, first, again))


def test_a_training_step_in_a_cuda_graph() -> None:
    """Forward, backward and the optimiser's step, replayed with new inputs."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 3 * 64, device="cuda")
    plan = stof.plan(masks.sliding_window(20), 200, 200, batch=2, heads=1, device="cuda")

    def loss_of(x: Tensor) -> Tensor:
        q, k, v = layer(x)[:, None].chunk(3, -1)
        return stof.attention(q, k, v, plan).square().mean()

    def step(x: Tensor) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(x)
        loss.backward()
        optimiser.step()
        return loss.detach()

    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    batches = torch.randn(6, 2, 200, 64, device="cuda")
    start = {name: x.clone() for name, x in layer.state_dict().items()}
    expected = [step(x).item() for x in batches]
    layer.load_state_dict(start)
    held, side = batches[0].clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(held)
    layer.load_state_dict(start)
    replayed = []
    for x in batches:
        held.copy_(x)
        graph.replay()
        replayed.append(loss.item())
    assert replayed == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # of Inductor and what it imports
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(mode: str) -> None:
    """AOTAutograd and Inductor, forward and backward in one graph each; CUDA graphs are replayed with new inputs."""
    torch.manual_seed(0)
    mask = masks.causal() & masks.sliding_window(30)

    def f(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 100, 3, 4, 32).permute(2, 0, 3, 1, 4).unbind()
        return stof.attention(q, k, v, mask).transpose(1, 2).flatten(2)

    compiled = torch.compile(f, fullgraph=True, mode=mode)
    w = (torch.randn(128, 384, device="cuda", dtype=torch.bfloat16) / 11).requires_grad_()
    for _ in range(4):
        x, d_out = torch.randn(2, 2, 100, 128, device="cuda", dtype=torch.bfloat16)
        (expected,) = torch.autograd.grad(f(x, w), w, d_out)
        (gradient,) = torch.autograd.grad(compiled(x, w), w, d_out)
        torch.testing.assert_close(gradient, expected, rtol=3e-2, atol=3e-2)


def test_keys_that_no_query_sees_hold_nan() -> None:
    inputs = make_inputs(batch=1, heads=2, q_len=200, head_dim=64, dtype=torch.bfloat16)
    keep = masks.sliding_window(30).to_dense(200, 200).clone()
    keep[..., 50:60] = False
    call: dict[str, Any] = {"q": inputs.q, "k": inputs.k.clone(), "v": inputs.v.clone(), "scale": 0.125}
    call |= {"d_out": torch.randn(1, 2, 200, 64).bfloat16(), "keep": keep}
    call["k"][:, :, 50:60] = call["v"][:, :, 50:60] = torch.nan
    assert expected_gradients(call).k is not None
    assert_gradients(gradients_of(call, masks.from_dense(keep)), call)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_is_that_of_the_cpu(head_dim: int) -> None:
    """The same seed drops the same weights, in the output and in all gradients."""
    mask = masks.sliding_window(40)
    inputs = make_inputs(batch=2, heads=4, kv_heads=2, q_len=200, head_dim=head_dim, dtype=torch.float32)
    d_out, seed = torch.randn(2, 4, 200, head_dim), torch.tensor([12, 34])
    results = []
    for device in ("cpu", "cuda"):
        with mock.patch.object(importlib.import_module("stof.attention"), "draw_seed", seed.to):
            leaves = [x.to(device).requires_grad_() for x in inputs.qkv]
            out = stof.attention(*leaves, mask, dropout_p=0.3)
            results.append([x.cpu() for x in (out, *torch.autograd.grad(out, leaves, d_out.to(device)))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("same_seed", [True, False])
def test_recomputation_with_another_seed_gives_nan(same_seed: bool) -> None:
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", requires_grad=True) for _ in range(3))
    out = checkpoint(
        lambda *x: stof.attention(*x, masks.causal(), dropout_p=0.5),
        q, k, v, use_reentrant=False, preserve_rng_state=same_seed,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        # Dropout may leave none of the few weights that the last keys have.
        assert gradient.isfinite().all() if same_seed else gradient[:, :, :50].isnan().all()


def test_dropout_in_a_cuda_graph() -> None:
    """Each replay drops other weights, and its gradients are those of its output."""
    plan = stof.plan(masks.causal(), 100, 100, batch=1, heads=2, device="cuda")
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", requires_grad=True) for _ in range(3))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step() -> tuple[Tensor, Tensor]:
        out = stof.attention(q, k, v, plan, dropout_p=0.5)
        return out, torch.autograd.grad(out, v, v)[0]

    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, of_v = step()
    seen = []
    for _ in range(3):
        graph.replay()
        # out = W v and of_v = W^T v, so <out, v> = <v, of_v>.
        torch.testing.assert_close((out * v).sum(), (v * of_v).sum(), rtol=1e-3, atol=1e-2)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
