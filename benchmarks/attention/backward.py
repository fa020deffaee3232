"""`python -m benchmarks backward`: forward and backward passes, after a check of every gradient against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import stof
from benchmarks.attention.float64_check import errors_of
from benchmarks.peers.mask_formats import MaskMod, mask_mod
from benchmarks.peers.wheels import Attend, cudnn_flex_with_gradients, flash4_with_gradients
from stof.testing.attention_check import AttentionProblem
from stof.testing.mask_grid import GridMask, Shape
from stof.tuning.timing import time_calls


@dataclass(frozen=True)
class BackwardRow:
    """One implementation of one problem, in microseconds.

    Attributes:
        mask, shape, dtype, impl: the problem, and who computes it.
        passes: "forward", "backward" (the gradients of q, k and v) or "both".
        us: median GPU time, or wall time on a CPU; None where the implementation failed or a gradient is wrong.
        host_us: until the call returns; on a CPU the same as `us`.
        graphed: whether `us` is that of a CUDA graph's replay; else, on a GPU, it has the host's time in it.
        deterministic: whether two equal backward passes gave equal bits.
        note: why there is no time.
    """

    mask: str
    shape: str
    dtype: str
    impl: str
    passes: str
    us: float | None
    host_us: float | None = None
    graphed: bool = False
    deterministic: bool | None = None
    note: str = ""


def backward_rows(
    grid: Sequence[GridMask], shapes: Sequence[Shape], impls: Sequence[str], device: torch.device, dtype: torch.dtype,
    rounds: int,
) -> Iterator[BackwardRow]:  # fmt: skip
    """Check and time every implementation, all of one problem in turn."""
    # Autograd runs a backward pass on the forward's stream, and nothing can be captured on the default stream.
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
    with stream:
        for shape in shapes:
            for named in grid:
                yield from _cell(named, shape, impls, device, dtype, rounds)


def _cell(
    named: GridMask, shape: Shape, impls: Sequence[str], device: torch.device, dtype: torch.dtype, rounds: int
) -> Iterator[BackwardRow]:
    problem = AttentionProblem.draw(named, shape, device, dtype)
    d_out = torch.randn(problem.q.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    row = partial(BackwardRow, named.name, str(shape), str(dtype).removeprefix("torch."))
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    deterministic: dict[str, bool] = {}
    for impl in impls:
        way = WAYS[impl]
        # Each gets heads and sequence in the order that it takes, contiguous.
        *inputs, grad = (
            x.transpose(1, 2).contiguous() if way.sequence_major else x
            for x in (problem.q, problem.k, problem.v, d_out)
        )
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        try:
            attend = way.prepare(problem)
            out = attend(q, k, v)
            gradients, again = (torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for _ in range(2))
            results = [x.transpose(1, 2) if way.sequence_major else x for x in (out.detach(), *gradients)]
            errors = errors_of(_dense_mod(problem), shape, (problem.q, problem.k, problem.v), d_out, results, seed=0)
            if wrong := errors.problem(dtype):
                raise ValueError(f"wrong: {wrong}")
        except Exception as failure:  # a peer may refuse, or run out of memory: a row of the table
            yield row(impl, "both", None, note=f"{type(failure).__name__}: {failure}".splitlines()[0])
            continue
        deterministic[impl] = all(map(torch.equal, gradients, again))
        calls[impl, "forward"] = partial(_forward, attend, q, k, v)
        calls[impl, "backward"] = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        calls[impl, "both"] = partial(_both, attend, q, k, v, grad)
    times = time_calls({"|".join(key): call for key, call in calls.items()}, device, rounds=rounds)
    for impl, passes in calls:
        time = times[f"{impl}|{passes}"]
        us = time.call_us if time.gpu_us is None else time.gpu_us
        yield row(impl, passes, us, time.call_us, time.graphed, deterministic[impl])


def _dense_mod(problem: AttentionProblem) -> MaskMod:
    """The mask as a function of positions, from its definition as a dense tensor."""
    keep = problem.keep.expand(problem.shape.batch, problem.shape.heads, -1, -1)
    return lambda b, h, q, k: keep[b, h, q, k]


def _forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def _both(attend: Attend, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> object:
    return torch.autograd.grad(attend(q, k, v), (q, k, v), d_out)


def _stof(problem: AttentionProblem) -> Attend:
    shape = problem.shape
    plan = stof.plan(
        problem.grid_mask.mask(shape.q_len), shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads,
        device=problem.device,
    )  # fmt: skip
    return lambda q, k, v: stof.attention(q, k, v, plan)


def _sdpa(problem: AttentionProblem, backend: SDPBackend | None = None) -> Attend:
    named, shape = problem.grid_mask, problem.shape
    arguments: dict[str, Any] = {"enable_gqa": problem.grouped}
    if named.unmasked or (named.causal and shape.q_len == shape.kv_len):
        arguments["is_causal"] = named.causal
    else:
        arguments["attn_mask"] = problem.keep

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    return attend


def _flex(problem: AttentionProblem) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 1024
    lengths, device = (problem.shape.q_len, problem.shape.kv_len), problem.device
    block_mask = create_block_mask(
        mask_mod(problem.grid_mask, *lengths, device), None, None, *lengths, device=device.type
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, enable_gqa=problem.grouped, block_mask=block_mask)


@dataclass(frozen=True)
class Way:
    """One implementation under test.

    Attributes:
        prepare: whatever is done once for a mask and shape; returns what is timed.
        sequence_major: whether tensors are `[B, S, H, D]` instead of `[B, H, S, D]`.
    """

    prepare: Callable[[AttentionProblem], Attend]
    sequence_major: bool = False


WAYS: dict[str, Way] = {
    "stof": Way(_stof),
    "sdpa": Way(_sdpa),
    "flex": Way(_flex),
    "cudnn": Way(partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
    "flash-4": Way(flash4_with_gradients, sequence_major=True),
    "flash-4-deterministic": Way(partial(flash4_with_gradients, deterministic=True), sequence_major=True),
    "cudnn-flex": Way(cudnn_flex_with_gradients, sequence_major=True),
    "cudnn-flex-deterministic": Way(partial(cudnn_flex_with_gradients, deterministic=True), sequence_major=True),
}
