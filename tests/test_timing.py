"""The GPU protocol's arithmetic, on a GPU that is only a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import chain_us, sustained_us
from stof.tuning import timing
from stof.tuning.timing import time_calls, wall_us

LAUNCH_US, FLUSH_US = 10.0, 80.0


class Clock:
    """Stands for `torch.cuda`: work moves the clock, events read it, a captured graph is its work and one launch."""

    def __init__(self) -> None:
        self.us = 0.0
        self.capturing = False

    def work(self, us: float) -> None:
        self.us += us

    def share(self, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let others work on the GPU during the first pairs of replays, for a random time."""
        elapsed, chance, left = timing.elapsed_us, random.Random(0), [2 * rounds]

        def disturbed(run: Callable[[], object]) -> float:
            left[0] -= 1
            return elapsed(run) + (chance.uniform(0, 1000) if left[0] >= 0 else 0.0)

        monkeypatch.setattr(timing, "elapsed_us", disturbed)

    def replace_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.us

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            length = 0.0

            def replay(self) -> None:
                clock.work(LAUNCH_US + self.length)

        @contextmanager
        def capture(graph: Graph, **options: object) -> Iterator[None]:
            before, self.capturing = self.us, True
            try:
                yield
                graph.length = self.us - before
            finally:
                self.us, self.capturing = before, False

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fake = SimpleNamespace(
            Event=Event,
            CUDAGraph=Graph,
            graph=capture,
            graph_pool_handle=lambda: (0, 1),
            Stream=lambda: stream,
            stream=lambda chosen: nullcontext(),
            current_stream=lambda: stream,
            device=lambda chosen: nullcontext(),
            synchronize=lambda device=None: None,
        )
        monkeypatch.setattr(torch, "cuda", fake)
        flush = SimpleNamespace(fill_=lambda value: clock.work(FLUSH_US))
        monkeypatch.setattr(timing.torch, "empty", lambda *size, **options: flush)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.replace_cuda(monkeypatch)
    return made


def counted(clock: Clock, us: float) -> tuple[Callable[[], None], list[bool]]:
    captured: list[bool] = []

    def call() -> None:
        captured.append(clock.capturing)
        clock.work(us)

    return call, captured


def test_launches_and_flushes_cancel(clock: Clock) -> None:
    short, captured = counted(clock, 3.0)
    long, captured_long = counted(clock, 9000.0)
    found = time_calls({"short": short, "long": long}, torch.device("cuda"), rounds=3)
    assert found["short"].gpu_us == pytest.approx(3.0)
    assert found["long"].gpu_us == pytest.approx(9000.0)
    assert found["short"].graphed
    assert sum(captured) == 20  # calls in one graph: as many as fit in 2 ms, at most 20
    assert sum(captured_long) == 1


def test_chains_are_captured_whole(clock: Clock) -> None:
    first, captured = counted(clock, 3.0)
    second, _ = counted(clock, 5.0)
    found = chain_us({"equal": [first] * 4, "mixed": [first, second] * 2}, torch.device("cuda"), rounds=3)
    assert found["mixed"] - found["equal"] == pytest.approx(1.0)
    assert sum(captured) == 4 + 2


def test_sustained_calls_follow_each_other_for_as_long_as_is_asked(clock: Clock) -> None:
    short, captured = counted(clock, 3.0)
    long, _ = counted(clock, 700.0)
    start = clock.us
    found = sustained_us({"short": short, "long": long}, torch.device("cuda"), seconds=0.1, rounds=3)
    assert 0.6e6 < clock.us - start < 0.7e6
    count = sum(captured)  # one after the other in one graph
    assert found["short"] == pytest.approx(3.0 + LAUNCH_US / count)
    assert found["long"] == pytest.approx(700.0 + LAUNCH_US / 2)


def test_what_cannot_be_captured_is_timed_eagerly(clock: Clock) -> None:
    def synchronises() -> None:
        if clock.capturing:
            raise ValueError("not while capturing")
        clock.work(5.0)

    found = time_calls({"eager": synchronises}, torch.device("cuda"), rounds=3)["eager"]
    assert not found.graphed
    assert found.gpu_us == pytest.approx(5.0)


@pytest.mark.parametrize("disturbed", range(1, 9))
def test_what_others_do_for_a_while_is_no_time(clock: Clock, disturbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = counted(clock, 3.0)
    clock.share(disturbed, monkeypatch)
    found = time_calls({"short": short}, torch.device("cuda"), rounds=5)["short"]
    assert found.clear
    assert found.gpu_us == pytest.approx(3.0)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_times_on_a_gpu_that_stays_busy_are_told(clock: Clock, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = counted(clock, 0.1)
    clock.share(10**6, monkeypatch)
    timings = [time_calls({"short": short}, torch.device("cuda"), rounds=rounds)["short"] for _ in range(40)]
    assert any(timing.gpu_us is not None and timing.gpu_us <= 0 for timing in timings)
    assert all(timing.gpu_us is not None and timing.gpu_us > 0 for timing in timings if timing.clear)
    assert sum(timing.clear for timing in timings) < 10
    long, _ = counted(clock, 9000.0)
    kept = time_calls({"long": long}, torch.device("cuda"), rounds=rounds)["long"]
    assert kept.clear
    assert kept.gpu_us == pytest.approx(9000.0, abs=1000.0)


def test_wall_times_follow_the_calls() -> None:
    times = wall_us({"short": lambda: None, "long": lambda: sum(range(30000))}, torch.device("cpu"), rounds=3)
    assert 0 <= times["short"] < times["long"]
