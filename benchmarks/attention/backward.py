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

import stof
from benchmarks.peers.mask_formats import mask_mod
from stof.kernels.torch.reference import reference_backward
from stof.masks import Mask
from stof.testing.mask_grid import GridMask, Shape
from stof.tuning.timing import time_calls

PEERS = ("stof", "sdpa", "flex")
# The largest error of a gradient, relative to the largest value, by bytes of an element.
_TOLERANCE = {2: 3e-2, 4: 1e-3, 8: 1e-10}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    torch.manual_seed(0)
    sizes = ((shape.heads, shape.q_len), (shape.kv_heads, shape.kv_len), (shape.kv_heads, shape.kv_len))
    q, k, v = (
        torch.randn(shape.batch, *size, shape.head_dim, device=device, dtype=dtype).requires_grad_() for size in sizes
    )
    d_out = torch.randn(shape.batch, shape.heads, shape.q_len, shape.head_dim, device=device, dtype=dtype)
    row = partial(BackwardRow, named.name, str(shape), str(dtype).removeprefix("torch."))
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    deterministic: dict[str, bool] = {}
    for impl in impls:
        try:
            attend = _WAYS[impl](named.mask(shape.q_len), named, shape, device)
            out = attend(q, k, v)
            gradients, again = (
                torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True) for _ in range(2)
            )  # fmt: skip
            error = _error(gradients, q, k, v, d_out, named, shape)
            if not error <= _TOLERANCE[q.itemsize]:
                raise ValueError(f"wrong: a gradient is off by {error:.2g} of the largest")
        except Exception as problem:  # a peer may refuse, or run out of memory: a row of the table
            yield row(impl, "both", None, note=f"{type(problem).__name__}: {problem}".splitlines()[0])
            continue
        deterministic[impl] = all(map(torch.equal, gradients, again))
        calls[impl, "forward"] = partial(_forward, attend, q, k, v)
        calls[impl, "backward"] = partial(torch.autograd.grad, out, (q, k, v), d_out, retain_graph=True)
        calls[impl, "both"] = partial(_both, attend, q, k, v, d_out)
    times = time_calls({"|".join(key): call for key, call in calls.items()}, device, rounds=rounds)
    for impl, passes in calls:
        time = times[f"{impl}|{passes}"]
        us = time.call_us if time.gpu_us is None else time.gpu_us
        yield row(impl, passes, us, time.call_us, time.graphed, deterministic[impl])


def _forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def _both(attend: Attend, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> object:
    return torch.autograd.grad(attend(q, k, v), (q, k, v), d_out)


def _error(
    gradients: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, named: GridMask, shape: Shape
) -> float:
    """The largest error among the gradients of the first key head of the first sequence, whose memory is bounded."""
    group = shape.heads // shape.kv_heads
    heads = (slice(0, group), slice(0, 1), slice(0, 1))
    first_q, first_k, first_v = (x.detach()[:1, part].double() for x, part in zip((q, k, v), heads, strict=True))
    keep = named.dense(shape, q.device)[:1, :group]
    expected = reference_backward(
        first_q, first_k, first_v, d_out[:1, :group].double(), keep, scale=shape.head_dim**-0.5
    )
    errors = []
    for gradient, part, wanted in zip(gradients, heads, expected, strict=False):
        assert wanted is not None
        errors.append(float((gradient[:1, part].double() - wanted).abs().max() / wanted.abs().max()))
    return max(errors)


def _stof(mask: Mask, named: GridMask, shape: Shape, device: torch.device) -> Attend:
    plan = stof.plan(mask, shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads, device=device)
    return lambda q, k, v: stof.attention(q, k, v, plan)


def _sdpa(mask: Mask, named: GridMask, shape: Shape, device: torch.device) -> Attend:
    grouped = shape.heads != shape.kv_heads
    if named.unmasked or (named.causal and shape.q_len == shape.kv_len):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=named.causal, enable_gqa=grouped)
    keep = named.dense(shape, device)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=grouped)


def _flex(mask: Mask, named: GridMask, shape: Shape, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 1024
    block_mask = create_block_mask(
        mask_mod(named, shape.q_len, shape.kv_len, device), None, None, shape.q_len, shape.kv_len, device=device.type
    )
    grouped: dict[str, Any] = {"enable_gqa": shape.heads != shape.kv_heads, "block_mask": block_mask}
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **grouped)


_WAYS: dict[str, Callable[[Mask, GridMask, Shape, torch.device], Attend]] = {
    "stof": _stof,
    "sdpa": _sdpa,
    "flex": _flex,
}
