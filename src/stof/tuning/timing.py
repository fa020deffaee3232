"""Timing callables against each other: interleaved rounds, medians, cold L2 on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Larger than the L2 of any current GPU (H200: 60 MB; B200: 126 MB).
_L2_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Medians over rounds, in microseconds.

    Attributes:
        call_us: wall time of one eager call; on a GPU the time until the call returns, work still queued.
        gpu_us: GPU time of one call with a cold L2, None on the CPU.
        graphed: whether gpu_us is from CUDA-graph replay (else events around the eager call).
    """

    call_us: float
    gpu_us: float | None = None
    graphed: bool = False


def time_calls(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = 7, warmup: int = 1
) -> dict[str, Timing]:
    """Time all `calls` in turn, round after round, so that a drifting machine slows them alike.

    On the CPU each timed call follows an untimed one of its own: what ran before it would otherwise decide whether its
    output lies in fresh pages (a fault for every 4 KB) and what caches hold.
    """
    if device.type == "cuda":
        return _time_cuda(calls, device, rounds, warmup)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            if turn >= warmup:
                taken[name].append(time.perf_counter() - start)
    return {name: Timing(statistics.median(times) * 1e6) for name, times in taken.items()}


def _time_cuda(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, warmup: int
) -> dict[str, Timing]:
    flush = torch.empty(_L2_FLUSH_BYTES, dtype=torch.uint8, device=device)
    runners = {name: _graphed(call, warmup) for name, call in calls.items()}
    gpu: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            host[name].append(time.perf_counter() - start)
            run = runners[name] or call
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize(device)
            gpu[name].append(begin.elapsed_time(end) * 1e3)
    return {
        name: Timing(statistics.median(host[name]) * 1e6, statistics.median(gpu[name]), runners[name] is not None)
        for name in calls
    }


def _graphed(call: Callable[[], object], warmup: int) -> Callable[[], object] | None:
    """Replay of a CUDA graph of `call`, or None when it cannot be captured (it synchronises or copies)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(max(1, warmup)):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    graph.replay()
    return graph.replay
