"""`python -m benchmarks against`: the attention grid of two checkouts of stof, timed in turn in two processes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stof.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """One cell: microseconds of a pass on the GPU in both checkouts, and the median ratio new / old of the rounds."""

    mask: str
    shape: str
    old_us: float
    new_us: float
    ratio: float


class _Worker:
    """A process with one checkout's stof; its compiled kernels are kept apart from those of other checkouts."""

    def __init__(self, checkout: Path, cache: Path) -> None:
        paths = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}
        script = Path(__file__).with_name("checkout_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(checkout)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        return line or f"failed: the process ended with exit status {self.process.wait()}"

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def changes(
    old: Path, passes: str, cells: Sequence[tuple[str, str]], caches: Path, rounds: int, report: Callable[[str], None]
) -> list[Change]:
    """Time each cell, a mask's name and a shape as `Shape.parse` reads it, in turn with `old` and with this checkout.

    `passes` is "forward" or "backward".

    Raises:
        ArgumentError: `old` is not a checkout of stof.
    """
    if not (old / "src" / "stof" / "__init__.py").is_file():
        raise ArgumentError(f"{old} is not a checkout of stof; make one with: git worktree add {old} COMMIT")
    timed = []
    with ExitStack() as stack:
        pair = [_Worker(old.resolve(), caches / "old"), _Worker(ROOT, caches / "new")]
        for worker in pair:
            stack.callback(worker.end)
        for mask, shape in cells:
            for worker in pair:
                worker.ask(f"prepare {passes} {mask} {shape}")
            answers = [worker.answer() for worker in pair]
            if answers != ["ready", "ready"]:
                report(f"{mask} {shape}: old {answers[0]}, new {answers[1]}")
                continue
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    pair[which].ask("time")
                    times[which].append(float(pair[which].answer()))
            ratio = statistics.median(new / before for before, new in zip(*times, strict=True))
            timed.append(Change(mask, shape, statistics.median(times[0]), statistics.median(times[1]), ratio))
    return timed
