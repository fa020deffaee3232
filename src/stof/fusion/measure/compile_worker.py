"""Compiles Triton kernels into Triton's cache on disk, N at a time: `python -m stof.fusion.measure.compile_worker N`.

Jobs come on standard input, one JSON object a line; answers leave on standard output, `{"id": ..., "problem": ""}`. It
ends with its input. One process imports everything and forks N workers, which is far quicker than starting N of them.
They know their GPU by its name alone and never touch it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from importlib import import_module
from typing import Any


class OfflineDriver:
    """What Triton asks of its driver before a kernel is launched, for a GPU that need not be there."""

    def __init__(self, backend: str, arch: int, warp_size: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(backend, arch, warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_one(line: str) -> str:
    """Compile what a job describes; why it failed, or ""."""
    import triton
    from triton.runtime.driver import driver

    from stof.runtime.cache_keys import settled

    job = json.loads(line)
    try:
        os.environ["TRITON_CACHE_DIR"] = job["cache"]
        _assemble_with(job["assembler"])
        driver.set_active(OfflineDriver(*job["target"]))
        kernel = getattr(import_module(job["module"]), job["name"])
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = None
            settled(kernel).preload(job["specialization"])
    except Exception as error:  # it fails again, visibly, in the process that wants the kernel
        return f"{type(error).__name__}: {error}"
    return ""


def _assemble_with(assembler: tuple[str, str] | None) -> None:
    """Call the same ptxas as the process that wants the kernels, and keep them under the version that it goes by."""
    if assembler is not None:
        path, version = assembler
        os.environ |= {"TRITON_PTXAS_PATH": path, "TRITON_PTXAS_BLACKWELL_PATH": path}
        os.environ["TRITON_MOCK_PTX_VERSION"] = version


def _end_with_parent() -> None:
    """Workers of a process that is killed would wait for jobs for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(workers: int) -> None:
    """Serve until the input ends."""
    pool: ProcessPoolExecutor | None = None

    def answer(number: int, done: Future[str]) -> None:
        if not done.cancelled():
            problem = str(done.exception() or "") or done.result()
            print(json.dumps({"id": number, "problem": problem}), flush=True)

    for line in sys.stdin:
        job = json.loads(line)
        if pool is None:
            # Before the first fork, so that every worker has it.
            import_module(job["module"])
            forked = multiprocessing.get_context("fork")
            pool = ProcessPoolExecutor(workers, mp_context=forked, initializer=_end_with_parent)
        number = job["id"]
        pool.submit(compile_one, line).add_done_callback(lambda done, number=number: answer(number, done))  # type: ignore[misc]
    if pool is not None:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
