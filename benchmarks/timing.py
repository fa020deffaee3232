"""Times that only benchmarks take: calls in a chain, calls that heat a card up, and host time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from stof.tuning.timing import as_replay, elapsed_us, repeats_of

# In a sustained run nothing cancels the launches of replays: they are to be few.
_MOST_SUSTAINED = 400
_CHAIN_REPLAYS = 3


def chain_us(
    chains: Mapping[str, Sequence[Callable[[], object]]], device: torch.device, *, rounds: int = 7
) -> dict[str, float]:
    """GPU time of one call in a chain of them, in microseconds: medians over rounds that take the chains in turn.

    Every chain is one CUDA graph, so that its kernels follow each other as in a model's, and may be set up while those
    before them run. Let the calls read different weights, more than the L2 holds, as a model's layers do.
    """
    with torch.cuda.device(device):
        replays = {name: as_replay(partial(_each, calls))[0] for name, calls in chains.items()}
        taken: dict[str, list[float]] = {name: [] for name in chains}
        for _ in range(rounds):
            for name, replay in replays.items():
                # Several replays: the launch of the first is part of what the events enclose.
                us = elapsed_us(partial(_each, [replay] * _CHAIN_REPLAYS))
                taken[name].append(us / (_CHAIN_REPLAYS * len(chains[name])))
    return {name: statistics.median(times) for name, times in taken.items()}


def sustained_us(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, seconds: float, rounds: int = 3
) -> dict[str, float]:
    """GPU time of one call among many that follow each other for `seconds`, in microseconds: medians over rounds.

    A card that reaches its power limit lowers its clock after some milliseconds; single calls, or short bursts, do not
    show that. Times are of the second half of each run, in CUDA-graph replays. The calls read the same memory each
    time, so give them more than the L2 holds where that matters.
    """
    with torch.cuda.device(device):
        replays = {}
        for name, call in calls.items():
            count = repeats_of(call, 1, most=_MOST_SUSTAINED)
            replays[name] = as_replay(partial(_each, [call] * count))[0], count
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, (replay, count) in replays.items():
                turns = max(1, round(seconds / 2 * 1e6 / max(1.0, elapsed_us(replay))))
                _each([replay] * turns)
                taken[name].append(elapsed_us(partial(_each, [replay] * turns), wait=False) / (turns * count))
    return {name: statistics.median(times) for name, times in taken.items()}


def host_us(
    contenders: Mapping[str, Callable[[], object]], device: torch.device, *, calls: int = 2000, batch: int = 50
) -> dict[str, float]:
    """Median host time of one eager call of each, over batches with a synchronisation after each.

    Contenders are interleaved, so that a host that others slow down for a while slows all of them. A batch is far below
    the 1024 launches that a stream queues, so the host never waits for the GPU.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(2 + max(1, calls // batch)):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(batch):
                call()
            end = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= 2:
                taken[name].append((end - start) / batch)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def _each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
