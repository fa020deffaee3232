"""Timing callables against each other: interleaved rounds, medians, cold L2 on a GPU.

How GPU time is taken. Events around one short kernel measure launches as much as the kernel: after an event the GPU
waits some microseconds for what comes next, more than a kernel of 5 us takes. So the call is captured in a CUDA graph
N times, each after a kernel that overwrites the L2, and the time of N such kernels alone (a graph likewise) is
subtracted: the launch of the graph and both events cancel, and what remains over N is what one call adds to a chain of
dependent kernels, its one gap between kernels included. All callables are treated alike, and each pair of replays
lies side by side in time, so that a drifting clock cancels as well.

Other work on the GPU does not cancel: a difference of two replays then says little, and may be negative. Differences
that scatter too much are taken more often, and a timing says so if that does not help.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.tuning.capture import captured

# Larger than the L2 of any current GPU (H200: 60 MB; B200: 126 MB).
_L2_FLUSH_BYTES = 256 * 2**20
# A replay holds as many calls as fit in about 2 ms, at most 20: then the jitter of a replay, about 1 us, is 0.05 us a
# call where calls are short, and long calls cost no more than they need.
_REPLAY_US, _MOST_REPEATS = 2000.0, 20
# Half of a call's times are to lie within this share of their median, far more than a replay's own jitter. Else the
# rounds asked for are taken again, this often in all.
_SCATTER, _MOST_TURNS = 0.25, 4
# The scatter of fewer times says nothing.
_LEAST_TIMES = 3

_Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Medians over rounds, in microseconds.

    Attributes:
        call_us: wall time of one eager call; on a GPU the time until the call returns, work still queued.
        gpu_us: GPU time of one call with a cold L2, None on the CPU.
        graphed: whether gpu_us is from CUDA-graph replay (else from eager calls, host time included where longer).
        clear: whether gpu_us can be told from other work on the GPU; where not, it may even be negative.
    """

    call_us: float
    gpu_us: float | None = None
    graphed: bool = False
    clear: bool = True


def time_calls(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = 7, warmup: int = 1
) -> dict[str, Timing]:
    """Time all `calls` in turn, round after round, so that a drifting machine slows them alike.

    On the CPU each timed call follows an untimed one of its own: what ran before it would otherwise decide whether its
    output lies in fresh pages (a fault for every 4 KB) and what caches hold.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
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


def wall_us(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 10,
    warmup: int = 3,
    rest: float = 0.0,
) -> dict[str, float]:
    """Median wall time of whole calls in turn, their results awaited: what a user of a model waits for.

    Args:
        rest: seconds before each call. A card that calls in a row bring to its power limit runs single ones faster.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        for name, call in calls.items():
            _await(device)
            if rest:
                time.sleep(rest)
            start = time.perf_counter()
            call()
            _await(device)
            if turn >= warmup:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def replayed_us(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """As `wall_us`, of calls that a CUDA graph replays; elsewhere, and for what cannot be captured, as they are."""
    if device.type != "cuda":
        return wall_us(calls, device)
    with torch.cuda.device(device):
        return wall_us({name: as_replay(call)[0] for name, call in calls.items()}, device)


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_cuda(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, warmup: int
) -> dict[str, Timing]:
    flush = torch.empty(_L2_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    repeats = {name: repeats_of(call, warmup) for name, call in calls.items()}
    runs = {name: _repeated(call, flush, repeats[name]) for name, call in calls.items()}
    baselines: dict[tuple[int, bool], _Run] = {}
    for name, (_, graphed) in runs.items():
        key = (repeats[name], graphed)
        if key not in baselines:
            baselines[key] = _repeated(None, flush, *key)[0]
    gpu: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_MOST_TURNS):
        unclear = [name for name in calls if not _clear(gpu[name])]
        for _ in range(rounds):
            for name in unclear:
                torch.cuda.synchronize(device)
                start = time.perf_counter()
                calls[name]()
                host[name].append(time.perf_counter() - start)
                run, graphed = runs[name]
                idle = elapsed_us(baselines[repeats[name], graphed])
                gpu[name].append((elapsed_us(run) - idle) / repeats[name])
    return {
        name: Timing(
            statistics.median(host[name]) * 1e6,
            statistics.median(gpu[name]),
            runs[name][1],
            _clear(gpu[name]),
        )
        for name in calls
    }


def _clear(taken: Sequence[float]) -> bool:
    """Whether differences of times are a time: positive, and about as large each time."""
    if len(taken) < _LEAST_TIMES:
        return False
    middle = statistics.median(taken)
    return statistics.median(abs(one - middle) for one in taken) < _SCATTER * middle


def elapsed_us(run: _Run, wait: bool = True) -> float:
    """GPU time of a run; it begins when the GPU is idle, or without a pause after what it still does."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if wait:
        torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def repeats_of(call: _Run, warmup: int, most: int = _MOST_REPEATS) -> int:
    for _ in range(max(1, warmup)):
        call()
    return max(1, min(most, int(_REPLAY_US / max(elapsed_us(call), 1.0))))


def _repeated(call: _Run | None, flush: Tensor, repeats: int, graphed: bool = True) -> tuple[_Run, bool]:
    """`repeats` times an L2 flush and the call, as a CUDA graph if it can be captured; and whether it was."""

    def run() -> None:
        for _ in range(repeats):
            flush.fill_(1)  # a kernel, unlike zero_(), which may become a copy node with other gaps around it
            if call is not None:
                call()

    return as_replay(run) if graphed else (run, False)


def as_replay(run: _Run) -> tuple[_Run, bool]:
    """The replay of a call as a CUDA graph and True, or the call itself and False when it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # libraries allocate their workspaces for a stream on first use, which a capture forbids
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph, _ = captured(run, side)
    except Exception:  # whatever a callable raises because it synchronises, copies or allocates while captured
        return run, False
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, True
