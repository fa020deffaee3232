"""Asynchronous compilation: worker processes compile kernels into Triton's cache before this process measures them.

The launching code itself determines what to compile: a candidate is called while Triton's JIT hook records the
specializations of new kernels and stops each call before it compiles or launches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import torch

from stof.fusion.measure.segment_timer import bound_call, random_inputs
from stof.fusion.planner.match import TemplateMatch

# Seconds for a kernel; the slowest take a few. What is not there by then is compiled where it is wanted.
COMPILE_TIMEOUT_S = 60.0


class WorkerPool:
    """A pool of compiling processes, started with the first kernel and ended by `close`.

    Args:
        workers: how many compile at a time.
        target: `(backend, architecture, threads of a warp)`, as Triton writes it; None for the current GPU's.
    """

    def __init__(self, workers: int, target: tuple[str, int, int] | None = None) -> None:
        self._workers, self._target = workers, target
        self._process: subprocess.Popen[str] | None = None
        self._jobs: dict[tuple[str, str], int] = {}
        self._wanted: dict[Hashable, list[int]] = {}
        self._problems: dict[int, str] = {}
        self._ended = False
        self._answered = threading.Condition()

    @staticmethod
    def on(device: torch.device) -> WorkerPool | None:
        """Return a pool as large as Inductor's; None if Inductor compiles in this process, or for a CPU."""
        from torch._inductor import config

        threads = int(config.compile_threads)
        return WorkerPool(threads) if device.type == "cuda" and threads > 1 else None

    def start(self, match: TemplateMatch, configs: Sequence[str]) -> None:
        """Have the kernels of a match's configurations compiled; TileLang's are compiled where they are measured."""
        new = [c for c in configs if (match.problem.text(), c) not in self._wanted and "tilelang" not in c]
        if not new:
            return
        with torch._guards.tracing(None), torch.no_grad():
            inputs = random_inputs(match)
            for config in new:
                found = specializations(bound_call(match, inputs, config))
                self._wanted[match.problem.text(), config] = [self.submit(*one) for one in found]

    def wait(self, match: TemplateMatch, configs: Iterable[str]) -> None:
        """Wait until these are compiled or have failed."""
        self.wait_for({number for config in configs for number in self._wanted.get((match.problem.text(), config), ())})

    def wait_for(self, numbers: set[int]) -> None:
        """Wait until the jobs with these numbers are done."""
        with self._answered:
            self._answered.wait_for(lambda: numbers <= self._problems.keys() or self._ended, COMPILE_TIMEOUT_S)

    @property
    def problems(self) -> list[str]:
        """Return why kernels could not be compiled."""
        return [problem for problem in self._problems.values() if problem]

    @property
    def compiled(self) -> int:
        """Return the number of finished kernels."""
        return len(self._problems)

    def close(self) -> None:
        """Terminate the processes and abandon unfinished kernels."""
        self._ended = True
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._listener.join()

    def submit(self, module: str, name: str, specialization: str) -> int:
        """Submit a kernel; return the number of its job. Equal kernels are one job."""
        number = self._jobs.get((name, specialization))
        if number is None:
            number = self._jobs[name, specialization] = len(self._jobs)
            job: dict[str, Any] = {
                "id": number, "module": module, "name": name, "specialization": specialization,
                "cache": cache_folder(), "target": self._target or current_target(),
            }  # fmt: skip
            job["assembler"] = assembler(*job["target"][:2])
            self._send(json.dumps(job))
        return number

    def _send(self, line: str) -> None:
        if self._ended:  # kernels are compiled where they are wanted, one by one
            return
        process = self._process or self._launched()
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, and the listener will tell
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _launched(self) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C is for the process that waits, and ends the others by ending their input.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stof.fusion.measure.compile_worker", str(self._workers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()
        return self._process

    def _listen(self, answers: IO[str]) -> None:
        with answers:
            for line in answers:
                answer = json.loads(line)
                with self._answered:
                    self._problems[answer["id"]] = answer["problem"]
                    self._answered.notify_all()
        with self._answered:
            self._ended = True
            self._answered.notify_all()


def cache_folder() -> str:
    """Triton's cache folder; Inductor puts it into its own when it first runs, and does so here if it has not yet."""
    import triton
    from torch._inductor.runtime.runtime_utils import triton_cache_dir

    if torch.cuda.is_available():
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(torch.cuda.current_device()))
    return str(triton.knobs.cache.dir)


def assembler(backend: str, arch: int) -> tuple[str, str] | None:
    """The path of ptxas, and the version of it that this process's kernels are kept under; None for other backends.

    These may be two programs. Triton asks for the version once in a process, and Inductor may point Triton at the ptxas
    that comes with torch when it first compiles a kernel. A kernel that another process keeps under another version is
    not found.
    """
    if backend != "cuda":
        return None
    from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

    return get_ptxas(arch).path, get_ptxas_version(arch)


def init_triton_cache() -> None:
    """Have Inductor choose the ptxas and Triton's cache folder now, before any kernel is compiled or looked for.

    It does so when it first compiles a kernel of its own, if it does: processes that measure, and compile a lot, would
    keep kernels where those after them, which load everything, do not look.
    """
    select_ptxas()
    with suppress(ImportError):  # without Triton there are no kernels to keep
        cache_folder()


def select_ptxas() -> None:
    """Have Inductor choose the ptxas now, before Triton asks for its version: processes then keep kernels alike."""
    from torch._inductor.runtime import compile_tasks

    settle = getattr(compile_tasks, "_set_triton_ptxas_path", None)  # private: another torch may not have it
    if settle is not None:
        settle()


def current_target() -> tuple[str, int, int]:
    """Return the GPU target that this process compiles for."""
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def specializations(call: Callable[[], object]) -> list[tuple[str, str, str]]:
    """Return module, name and specialization of every kernel that a call would compile, without compiling or launching.

    A call that cannot run at all may have none: it fails again where it is measured.
    """
    with _recorded() as found, suppress(Exception):
        call()
    return found


@contextmanager
def _recorded() -> Iterator[list[tuple[str, str, str]]]:
    import triton

    found: list[tuple[str, str, str]] = []

    def take(*args: Any, fn: Any, compile: dict[str, Any], **kwargs: Any) -> bool:
        found.append((fn.module, fn.name, compile["specialization_data"]))
        return True  # Triton goes no further

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = take
        yield found
