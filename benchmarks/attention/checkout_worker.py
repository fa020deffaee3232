"""A process that times `stof.attention` for `against.py`, with the checkout of stof that PYTHONPATH names.

Run as a script: it imports nothing of the benchmarks, so that an older checkout's stof serves. It reads one word a
line: `prepare MASK B,H,D,S` answers `ready` or `failed WHY`, `time` answers the microseconds of a call on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import stof
from stof.testing.mask_grid import GRID

# Rows of each head that are compared with float64.
CHECKED_ROWS = 64
# Calls in one CUDA graph last about as long.
GRAPH_US = 10_000
TOLERANCE = 5e-3


def prepare(name: str, batch: int, heads: int, head_dim: int, length: int) -> Callable[[], float]:
    """Check a call, and return what times it: microseconds of one call, replayed from a CUDA graph."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.float16) for _ in range(3))
    mask = GRID[name].mask(length)
    rows = torch.randint(length, (CHECKED_ROWS,), device="cuda")
    keep = mask.to_dense(length, device="cuda")[..., rows, :]
    error = _error(stof.attention(q, k, v, mask)[:1, :, rows], q[:1, :, rows], k[:1], v[:1], keep)
    if not error <= TOLERANCE:
        raise ValueError(f"wrong: largest error {error:.2g}")
    calls = 3
    one = _elapsed_us(_graph(lambda: stof.attention(q, k, v, mask), calls)) / calls
    calls = max(3, min(500, int(GRAPH_US / one)))
    graph = _graph(lambda: stof.attention(q, k, v, mask), calls)
    return lambda: _elapsed_us(graph) / calls


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> float:
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
            timed = prepare(words[1], *map(int, words[2].split(",")))
        except Exception as error:
            print("failed", f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        else:
            print("ready", flush=True)


if __name__ == "__main__":
    main()
