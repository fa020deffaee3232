"""Parallel compilation: threads compile the kernels of candidates before these are measured, one by one.

The launching code itself determines what to compile: a candidate is called while Triton's JIT hook records the
specializations of new kernels and stops each call before it compiles or launches. Triton's passes, LLVM and ptxas run
without Python's global lock. Nothing is timed meanwhile: a launch that waits for that lock would be timed wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from stof.fusion.measure.segment_timer import bound_call, random_inputs
from stof.fusion.planner.match import TemplateMatch

# A Triton kernel, and the specialization to compile as text.
Specialization = tuple[Any, str]


def compile_candidates(wanted: Iterable[tuple[TemplateMatch, Sequence[str]]]) -> None:
    """Compile the kernels of some matches' configurations; TileLang's, and all on a CPU, are left to their first call.

    What does not compile fails again, with a reason, where it is measured.
    """
    by_device: dict[torch.device, list[Specialization]] = {}
    for match, configs in wanted:
        if match.problem.device.type != "cuda" or not configs:
            continue
        with torch.no_grad():
            inputs = random_inputs(match)
            kernels = by_device.setdefault(match.problem.device, [])
            for config in configs:
                if "tilelang" not in config:
                    kernels += specializations(bound_call(match, inputs, config))
    for device, kernels in by_device.items():
        compile_specializations(kernels, device)


def compile_specializations(kernels: Iterable[Specialization], device: torch.device) -> list[str]:
    """Compile kernels for a GPU on all cores, each once; return why some failed."""

    def compile_one(kernel: Any, specialization: str) -> str:
        try:
            with torch.cuda.device(device):  # a thread's own setting
                kernel.preload(specialization)
        except Exception as error:  # whatever a compiler raises
            return f"{type(error).__name__}: {error}"
        return ""

    distinct = {specialization: kernel for kernel, specialization in kernels}
    with ThreadPoolExecutor() as threads:
        return [problem for problem in threads.map(compile_one, distinct.values(), distinct) if problem]


def specializations(call: Callable[[], object]) -> list[Specialization]:
    """Return every kernel that a call would compile, with its specialization, without compiling or launching it.

    A call that cannot run at all may have none: it fails again where it is measured.
    """
    with _recorded() as recorded, suppress(Exception):
        call()
    return recorded


@contextmanager
def _recorded() -> Iterator[list[Specialization]]:
    import triton

    recorded: list[Specialization] = []
    # All threads share the hook: calls of other threads must compile and launch.
    thread, before = threading.get_ident(), triton.knobs.runtime.jit_cache_hook

    def take(*args: Any, fn: Any, compile: Mapping[str, Any], **kwargs: Any) -> bool:
        if threading.get_ident() != thread:
            return before is not None and bool(before(*args, fn=fn, compile=compile, **kwargs))
        recorded.append((fn.jit_function, compile["specialization_data"]))
        return True  # Triton then neither compiles nor launches

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = take
        yield recorded
