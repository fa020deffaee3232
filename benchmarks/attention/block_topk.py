"""`python -m benchmarks block-topk`: training under blocks that are chosen in every step, checked against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import stof
from benchmarks.attention.float64_check import GRADIENT_TOLERANCE
from benchmarks.failures import first_line
from benchmarks.step_times import WrongResultError
from stof import masks
from stof.kernels.torch.reference import reference_backward
from stof.masks import Mask
from stof.testing.mask_grid import Shape
from stof.tuning.timing import time_calls

# Queries that are checked at once, in float64.
_CHECKED = 2048
_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TopkRow:
    """One pass of one implementation; times are of CUDA graphs on a GPU, else wall times.

    Attributes:
        shape, dtype, block: the problem; blocks of queries and keys have the same size.
        kept: share of the scores of a causal mask.
        impl, passes: who computes it, and "update", "forward" or "backward".
        us: microseconds; None where it failed or is wrong.
        tflops: useful ones a second: of kept scores alone, 4 and 10 times head_dim for each.
        deterministic: whether two backward passes gave equal bits.
        note: why there is no time.
    """

    shape: str
    dtype: str
    block: int
    kept: float
    impl: str
    passes: str
    us: float | None = None
    tflops: float | None = None
    deterministic: bool | None = None
    note: str = ""


def topk_rows(
    shapes: Sequence[Shape], blocks: Sequence[int], share: float, impls: Sequence[str], device: torch.device,
    dtype: torch.dtype, rounds: int,
) -> Iterator[TopkRow]:  # fmt: skip
    """Check and time each implementation; `share` is that of all key blocks that a query block takes."""
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
    with stream:
        for shape in shapes:
            for block in blocks:
                yield from _cell(shape, block, share, impls, device, dtype, rounds)


def _cell(
    shape: Shape, block: int, share: float, impls: Sequence[str], device: torch.device, dtype: torch.dtype, rounds: int
) -> Iterator[TopkRow]:
    generator = torch.Generator(device).manual_seed(0)

    def random_tensor(heads: int) -> Tensor:
        sizes = (shape.batch, heads, shape.q_len, shape.head_dim)
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    q, k, v = (random_tensor(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    d_out, count = random_tensor(shape.heads), -(-shape.q_len // block)
    scores = torch.randn(shape.batch, shape.heads, count, count, generator=generator, device=device)
    mask = masks.block_topk(scores, max(1, round(share * count)), block_size=block, causal=True)
    kept = _kept_scores(mask, shape.q_len, block)
    of_causal = kept / (shape.batch * shape.heads * shape.q_len * (shape.q_len + 1) / 2)
    row = TopkRow(str(shape), str(dtype).removeprefix("torch."), block, of_causal, "", "")
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    deterministic: dict[str, bool] = {}
    for impl in impls:
        try:
            attend, update = WAYS[impl](mask, shape)
            out = attend(q, k, v)
            gradients, again = (torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True) for _ in range(2))
            _check(mask, (q, k, v, d_out), (out, *gradients))
        except Exception as failure:  # a peer may refuse: a row of the table
            yield replace(row, impl=impl, passes="backward", note=first_line(failure))
            continue
        deterministic[impl] = all(map(torch.equal, gradients, again))
        calls[impl, "forward"] = partial(_forward, attend, q, k, v)
        calls[impl, "backward"] = partial(torch.autograd.grad, out, (q, k, v), d_out, retain_graph=True)
        if update is not None:
            calls[impl, "update"] = update
    # Updates come last: a backward pass after one of them would be refused.
    for passes in ("forward", "backward", "update"):
        of_passes = {impl: call for (impl, which), call in calls.items() if which == passes}
        times = time_calls(of_passes, device, rounds=rounds)
        for impl in of_passes:
            us = times[impl].call_us if times[impl].gpu_us is None else times[impl].gpu_us
            flops = {"forward": 4.0, "backward": 10.0, "update": 0.0}[passes] * shape.head_dim * kept
            yield replace(
                row, impl=impl, passes=passes, us=us, tflops=flops / us / 1e6 if us and flops else None,
                deterministic=deterministic[impl] if passes == "backward" else None,
            )  # fmt: skip


def _kept_scores(mask: Any, length: int, block: int) -> float:
    """Scores of all batch entries and heads that a causal mask of blocks keeps.

    A chosen block on the diagonal, of n rows, lacks n (n - 1) / 2 of its scores.
    """
    chosen = mask.selected()
    rows = torch.arange(chosen.shape[-1], device=chosen.device) * block
    sizes = (length - rows).clamp(max=block).double()
    diagonal = chosen.diagonal(dim1=-2, dim2=-1)
    kept = (chosen * sizes[:, None] * sizes).sum() - (diagonal * sizes * (sizes - 1) / 2).sum()
    return float(kept)


def _forward(attend: _Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def _check(mask: Any, inputs: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    """Compare the first key head of the first batch entry, and its query heads, with float64.

    Raises:
        WrongResultError: an error above the tolerance of the dtype, relative to the largest value.
    """
    q, k, v, d_out = (x.detach() for x in inputs)
    group, (length, head_dim) = q.shape[1] // k.shape[1], q.shape[2:]
    key, value = (x[:1, :1].double() for x in (k, v))
    heads = (group, group, 1, 1)
    expected = [torch.zeros_like(x[:1, :n], dtype=torch.float64) for x, n in zip(results, heads, strict=True)]
    chosen = mask.selected()[:1, :group]
    position = torch.arange(length, device=q.device)
    for first in range(0, length, _CHECKED):
        part = slice(first, first + _CHECKED)
        rows = position[part]
        keep = chosen[:, :, rows // mask.block_size][..., position // mask.block_size] & (rows[:, None] >= position)
        query, grad = (x[:1, :group, part].double() for x in (q, d_out))
        scores = (query @ key.transpose(2, 3) * head_dim**-0.5).masked_fill(~keep, -torch.inf)
        expected[0][:, :, part] = torch.softmax(scores, -1).nan_to_num() @ value
        gradients = reference_backward(query, key, value, grad, keep, scale=head_dim**-0.5)
        assert gradients.q is not None
        assert gradients.k is not None
        assert gradients.v is not None
        expected[1][:, :, part] = gradients.q
        expected[2] += gradients.k
        expected[3] += gradients.v
    for result, exact in zip(results, expected, strict=True):
        error = float((result.detach()[:1, : exact.shape[1]].double() - exact).abs().max() / exact.abs().max())
        if not error <= GRADIENT_TOLERANCE[q.itemsize]:
            raise WrongResultError(f"wrong: off by {error:.2g} of the largest value")


def _stof(mask: Mask, shape: Shape) -> tuple[_Attend, Callable[[], object]]:
    plan = stof.dynamic_plan(mask, shape.q_len, batch=shape.batch, heads=shape.heads)
    return lambda q, k, v: stof.attention(q, k, v, plan), partial(plan.update, mask)


def _flex(mask: Any, shape: Shape) -> tuple[_Attend, None]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    chosen = mask.selected().expand(shape.batch, shape.heads, -1, -1)
    diagonal = torch.eye(chosen.shape[-1], dtype=torch.bool, device=chosen.device)

    def counts_and_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()

    block_mask = BlockMask.from_kv_blocks(
        *counts_and_indices(chosen & diagonal), *counts_and_indices(chosen & ~diagonal), BLOCK_SIZE=mask.block_size,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, seq_lengths=(shape.q_len, shape.kv_len),
    )  # fmt: skip
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    # Its tiles have to divide the blocks.
    sizes = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
    options = dict.fromkeys(sizes, mask.block_size) if mask.block_size < 128 else None
    how: dict[str, Any] = {"enable_gqa": shape.heads > shape.kv_heads, "kernel_options": options}
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, **how), None


WAYS: dict[str, Callable[[Any, Shape], tuple[_Attend, Callable[[], object] | None]]] = {"stof": _stof, "flex": _flex}
