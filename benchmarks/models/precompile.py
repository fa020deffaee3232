"""Compile whole models in parallel before they are timed one after another: caches of Inductor and Triton fill.

A process compiles some ways of a case that are much alike, calls each once and ends. What max-autotune measures there,
beside other processes on the GPU, is not kept: its picks, and graphs that hold them, stay out of the caches. What its
candidates compile to is kept, so that the real run only measures them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, Any

from benchmarks import environment
from benchmarks.failures import first_line
from benchmarks.models.compare import AUTOTUNE, PEERS, prepared
from stof.errors import StofError
from stof.testing.models import Case, build, inputs_of

# Processes of Inductor that compile kernels, for each of ours.
_COMPILERS = 4
_POLL_S = 0.2


# A case, and ways to run it.
Job = tuple[Case, tuple[str, ...]]


def jobs_of(wanted: Sequence[tuple[Case, str]]) -> list[Job]:
    """What a process each compiles: max-autotune, which takes longest and comes first; other peers by attention; ours.

    Ways that are alike share most kernels.
    """
    found: dict[tuple[Case, str], list[str]] = {}
    for case, impl in wanted:
        group = AUTOTUNE if impl.startswith(AUTOTUNE) else impl.rsplit("-", 1)[1] if impl in PEERS else "ours"
        found.setdefault((case, group), []).append(impl)
    groups = sorted(found, key=lambda key: key[1] != AUTOTUNE)
    return [(case, tuple(found[case, group])) for case, group in groups]


@dataclass
class _Process:
    """A running job; what it prints goes to a file, for max-autotune prints more than a pipe holds."""

    job: Job
    log: IO[str]
    popen: subprocess.Popen[str]

    @staticmethod
    def start(job: Job, dtype: str) -> _Process:
        asked = json.dumps({"case": str(job[0]), "impls": job[1], "dtype": dtype})
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        command = [sys.executable, "-m", "benchmarks.models.precompile", asked]
        variables = environment() | {"TORCHINDUCTOR_COMPILE_THREADS": str(_COMPILERS)}
        # A group of its own, so that Inductor's processes end with it.
        popen = subprocess.Popen(
            command, env=variables, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        return _Process(job, log, popen)

    @property
    def name(self) -> str:
        return named(self.job)

    def problem(self) -> str:
        """The last line of a process that failed, "" of others; its log is gone then."""
        with self.log as log:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["no message"])[-1]
        return last if self.popen.returncode else ""

    def end(self) -> None:
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.log.close()


def named(job: Job) -> str:
    """A job in words."""
    return f"{job[0]} {' '.join(job[1])}"


def warm(
    jobs: Sequence[Job], dtype: str, *, workers: int, seconds: float, tell: Callable[[str], object] = print
) -> list[str]:
    """Run every job, `workers` at a time, in their order; what still runs after `seconds` is ended.

    So it is when this process is asked to end (SIGTERM, as `timeout` does): nothing is left to disturb a run after it.

    Returns:
        what did not end well, a line each.
    """
    waiting = list(jobs)
    running: list[_Process] = []
    problems, start = [], time.monotonic()
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        while (waiting or running) and not asked and time.monotonic() - start < seconds:
            while waiting and len(running) < workers:
                running.append(_Process.start(waiting.pop(0), dtype))
            time.sleep(_POLL_S)
            for process in [one for one in running if one.popen.poll() is not None]:
                running.remove(process)
                problem = process.problem()
                problems += [f"{process.name}: {problem}"] if problem else []
                tell(f"{process.name}, {time.monotonic() - start:.0f} s{', failed' if problem else ''}")
    finally:
        for process in running:
            process.end()
            problems.append(f"{process.name}: ended for the budget")
        signal.signal(signal.SIGTERM, before)
    if asked:
        sys.exit(128 + asked[0])
    return problems + [f"{named(job)}: not begun" for job in waiting]


def warm_here(asked: dict[str, Any]) -> None:
    """Be the process that compiles some ways of one case, and calls each.

    Raises:
        StofError: some failed; the others are compiled.
    """
    import torch
    from torch._inductor import config

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    case, dtype = Case.parse(asked["case"]), getattr(torch, asked["dtype"])
    with device:
        model = build(case.model, case.seq).to(dtype)
    torch.cuda.empty_cache()  # of the weights in float32: many such processes share a GPU
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs_of(case, device).items()}
    failed = []
    for impl in asked["impls"]:
        torch.compiler.reset()
        apart: AbstractContextManager[object] = nullcontext()
        if impl.startswith(AUTOTUNE):
            apart = config.patch(autotune_local_cache=False, fx_graph_cache=False)
        try:
            with torch.no_grad(), apart:
                compiled, arguments = prepared(model, case, impl, device)
                compiled(**inputs, **arguments)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # whatever a compiler or a model raises must not keep the others from compiling
            failed.append(f"{impl}: {first_line(failure)}")
    if failed:
        raise StofError("; ".join(failed))


if __name__ == "__main__":
    warm_here(json.loads(sys.argv[1]))
