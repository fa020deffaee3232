"""A process that times `stof.attention` for `against.py`, with the stof of the checkout that is its only argument.

Run as a script: it imports nothing of the benchmarks, so that an older checkout's stof serves. It reads one request a
line: `prepare MASK SHAPE` answers `ready` or `failed WHY`, `time` answers the microseconds of a call on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import stof
from stof.testing.mask_grid import Shape, grid_mask

# Rows of each head of the first batch entry that are compared with float64, and how far they may be off.
CHECKED_ROWS = 64
TOLERANCE = 5e-3
# Calls in one CUDA graph last about as long.
GRAPH_US = 10_000


def prepare(name: str, shape: Shape) -> Callable[[], float]:
    """Check a call, and return what times it: microseconds of one call, replayed from a CUDA graph."""
    torch.manual_seed(0)
    query = (shape.batch, shape.heads, shape.q_len, shape.head_dim)
    key = (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.float16) for size in (query, key, key))
    mask = grid_mask(name).mask(shape.q_len)
    rows = torch.randint(shape.q_len, (CHECKED_ROWS,), device="cuda")
    keep = mask.to_dense(shape.q_len, shape.kv_len, device="cuda")[..., rows, :]
    error = _error(stof.attention(q, k, v, mask)[:1, :, rows], q[:1, :, rows], k[:1], v[:1], keep)
    if not error <= TOLERANCE:
        raise ValueError(f"wrong: largest error {error:.2g}")
    calls = 3
    one = _elapsed_us(_graph(lambda: stof.attention(q, k, v, mask), calls)) / calls
    calls = max(3, min(500, int(GRAPH_US / one)))
    graph = _graph(lambda: stof.attention(q, k, v, mask), calls)
    return lambda: _elapsed_us(graph) / calls


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> float:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    expected = scores.masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num() @ v.double()
    return float((out.double() - expected).abs().max())


def _graph(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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
    for line in sys.stdin:
        words = line.split()
        if words[0] == "time":
            assert timed is not None
            print(timed(), flush=True)
            continue
        timed = None
        torch.cuda.empty_cache()
        try:
            timed = prepare(words[1], Shape.parse(words[2]))
        except Exception as error:
            print("failed", f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        else:
            print("ready", flush=True)


if __name__ == "__main__":
    main()
