"""Many cases, in several processes."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

# Cases that a process runs: one that loses its device leaves the rest of its cases out.
_CHUNK = {"cpu": 500, "cuda": 100}


@dataclass
class Report:
    """What some cases came to."""

    cases: int = 0
    entries: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.cases += other.cases
        self.entries += other.entries
        self.refusals += other.refusals
        self.failures += other.failures


def run_chunk(
    seed: int, numbers: list[int], device: str, interpret: bool, until: float = float("inf"), training: bool = False
) -> Report:
    """Run some cases in this process; the rest is left out when the device is lost or at the time `until`."""
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    import torch

    from tests.fuzz.run import poison_memory

    draw_case, run_case = case_functions(training)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # slow mask functions are drawn on purpose
    poison_memory()
    report = Report()
    with contextlib.ExitStack() as stack:
        if interpret:
            from tests.interpreter import bfloat16_as_on_a_gpu, hasty_interpreter

            stack.enter_context(hasty_interpreter())
            stack.enter_context(bfloat16_as_on_a_gpu())
        for number in numbers:
            if time.time() > until:
                break
            case = draw_case(seed, number, device, kernels=interpret)
            outcome = run_case(case, device)
            report.cases += 1
            report.entries[case.entry] += 1
            if outcome.refused:
                wanted = "rightly" if case.must_refuse else "otherwise valid"
                if outcome.refused == "KernelError":  # of kernels that do not fit this device: each is worth a look
                    wanted += f", case {number}"
                report.refusals[f"{outcome.refused} ({case.entry}, {wanted})"] += 1
            if outcome.failure:
                report.failures.append(outcome.failure)
            if outcome.lost:
                break
    return report


def case_functions(training: bool) -> tuple[Any, Any]:
    """Those that draw and run a case."""
    if training:
        from tests.fuzz import training as drawn
        from tests.fuzz import training_run as run
    else:
        from tests.fuzz import cases as drawn  # type: ignore[no-redef]
        from tests.fuzz import run
    return drawn.draw_case, run.run_case


def run_all(
    seed: int,
    numbers: list[int],
    device: str,
    interpret: bool,
    workers: int,
    seconds: float = float("inf"),
    training: bool = False,
) -> Report:
    """Run cases in processes of their own, `_CHUNK` each, so that few are left with a broken device.

    Cases that have not begun after `seconds` are left out.
    """
    until = time.time() + seconds
    size = min(_CHUNK[device], -(-len(numbers) // max(workers, 1)))
    chunks = [numbers[n : n + size] for n in range(0, len(numbers), size)]
    total = Report()
    if workers == 0:
        for chunk in chunks:
            total.add(run_chunk(seed, chunk, device, interpret, until, training))
        return total
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = {pool.submit(run_chunk, seed, chunk, device, interpret, until, training): chunk for chunk in chunks}
        for done in as_completed(waiting):
            if time.time() > until:
                for future in waiting:  # each would start a process to run nothing
                    future.cancel()
            if done.cancelled():
                continue
            try:
                found = done.result()
            except BrokenProcessPool:
                first, last = waiting[done][0], waiting[done][-1]
                found = Report(failures=[f"# a process died, maybe in cases {first} to {last}: --case N runs one\n"])
            total.add(found)
            for failure in found.failures:
                print(failure, flush=True)
    return total
