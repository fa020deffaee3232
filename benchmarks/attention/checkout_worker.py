"""A process that times `stof.attention` for `against.py`, with the stof of the checkout that is its only argument.

Run as a script: it imports nothing of the benchmarks, so that an older checkout's stof serves. It reads one request a
line: `prepare PASS MASK SHAPE`, with PASS forward or backward, answers `ready` or `failed WHY`, `time` answers the
microseconds of a pass on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import stof
from stof.testing.mask_grid import Shape, grid_mask

# Rows of each head of the first batch entry that are compared with float64. They, and gradients of the first key head
# relative to their norm, may be off by so much.
CHECKED_ROWS = 64
TOLERANCE = 5e-3
# Calls in one CUDA graph last about as long.
GRAPH_US = 10_000


def prepare(passes: str, name: str, shape: Shape) -> Callable[[], float]:
    """Check a pass, and return what times it: microseconds of one pass, replayed from a CUDA graph."""
    torch.manual_seed(0)
    query = (shape.batch, shape.heads, shape.q_len, shape.head_dim)
    key = (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim)
    q, k, v, d_out = (torch.randn(size, device="cuda", dtype=torch.float16) for size in (query, key, key, query))
    mask = grid_mask(name).mask(shape.q_len)
    keep = mask.to_dense(shape.q_len, shape.kv_len, device="cuda")
    call = _forward(q, k, v, mask, keep) if passes == "forward" else _backward(q, k, v, d_out, mask, keep)
    calls = 3
    one = _elapsed_us(_graph(call, calls)) / calls
    calls = max(3, min(500, int(GRAPH_US / one)))
    graph = _graph(call, calls)
    return lambda: _elapsed_us(graph) / calls


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: stof.Mask, keep: Tensor) -> Callable[[], object]:
    """A forward pass that was checked."""
    rows = torch.randint(q.shape[2], (CHECKED_ROWS,), device=q.device)
    error = _error(stof.attention(q, k, v, mask)[:1, :, rows], q[:1, :, rows], k[:1], v[:1], keep[..., rows, :])
    if not error <= TOLERANCE:
        raise ValueError(f"wrong: largest error {error:.2g}")
    return lambda: stof.attention(q, k, v, mask)


def _backward(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, mask: stof.Mask, keep: Tensor) -> Callable[[], object]:
    """A backward pass that was checked."""
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    out = stof.attention(q, k, v, mask)
    error = gradient_error(torch.autograd.grad(out, inputs, d_out, retain_graph=True), inputs, d_out, keep)
    if not error <= TOLERANCE:
        raise ValueError(f"wrong: largest relative error of a gradient {error:.2g}")
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def gradient_error(gradients: Sequence[Tensor], inputs: Sequence[Tensor], d_out: Tensor, keep: Tensor) -> float:
    """Return the largest error of dQ, dK and dV of the first key head, relative to the norm of the gradient in float64.

    `keep` is bool, `[Sq, Skv]` behind dimensions of 1.
    """
    group = inputs[0].shape[1] // inputs[1].shape[1]
    q, k, v = (x.detach()[0, :count].double().requires_grad_() for x, count in zip(inputs, (group, 1, 1), strict=True))
    for head in range(group):  # one after another: float64 scores of a head may take gigabytes
        scores = (q[head] @ k[0].mT * q.shape[-1] ** -0.5).masked_fill(~keep.flatten(0, -3)[0], float("-inf"))
        (scores.softmax(-1).nan_to_num() @ v[0]).backward(d_out[0, head].double())
    errors = []
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert x.grad is not None
        errors.append(float((gradient[0, : len(x)].double() - x.grad).norm() / x.grad.norm()))
    return max(errors)


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> float:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    expected = scores.masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num() @ v.double()
    return float((out.double() - expected).abs().max())


def _graph(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Autograd runs a backward pass on its forward pass's stream.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            call()
    return graph


def _elapsed_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def main() -> None:
    if Path(sys.argv[1]) not in Path(stof.__file__).parents:
        sys.exit(f"this process has {stof.__file__}, not the stof of {sys.argv[1]}")
    timed: Callable[[], float] | None = None
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.Stream())  # nothing can be captured on the default stream
    for line in sys.stdin:
        words = line.split()
        if words[0] == "time":
            assert timed is not None
            print(timed(), flush=True)
            continue
        timed = None
        torch.cuda.empty_cache()
        try:
            timed = prepare(words[1], words[2], Shape.parse(words[3]))
        except Exception as error:
            print("failed", f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        else:
            print("ready", flush=True)


if __name__ == "__main__":
    main()
