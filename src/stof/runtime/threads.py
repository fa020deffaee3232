"""Calls that run beside others, so that their kernels are compiled at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def beside(device: torch.device, calls: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Make calls in threads of their own while the body runs, on the same stream of a GPU, and wait for them.

    Their results and errors are dropped: who needs a kernel that does not compile meets the error again.
    """
    if not calls:
        yield
        return
    stream = torch.cuda.current_stream(device)

    def run(call: Callable[[], object]) -> None:
        with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(len(calls), thread_name_prefix="stof") as pool:
        for call in calls:
            pool.submit(run, call)
        yield
