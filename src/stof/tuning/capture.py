"""Capturing CUDA graphs, and putting things in order after a capture that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from stof.runtime.memory import own_capture
from stof.runtime.private import end_failed_capture

T = TypeVar("T")


def captured(call: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """What a call launches, as a CUDA graph of the current device, and what it returned.

    Args:
        stream: to capture on; the call has run on it before, as libraries allocate a stream's workspaces on first use.
        pool: where its memory comes from, as from `torch.cuda.graph_pool_handle`; None for memory of its own.

    Raises:
        Whatever the call raises, or PyTorch because something cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    # Chosen here: a graph whose capture failed does not return its pool.
    graph_pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        # `torch.cuda.graph` leaves the thread on the capture stream if the capture fails; this context restores it.
        # Other threads may go on using the GPU while this one captures.
        with (
            own_capture(),
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=graph_pool, stream=stream, capture_error_mode="thread_local"),
        ):
            out = call()
    except BaseException:
        _recover(graph_pool, stream)
        raise
    return graph, out


def _recover(pool: Any, stream: torch.cuda.Stream) -> None:
    """Undo what PyTorch leaves undone when a capture fails.

    It notices at the capture's end, and raises before it tells the allocator and the random number generator that
    the capture is over: the first would keep memory back from then on, the second refuse to draw. A small capture that
    succeeds brings the generator back.
    """
    torch.cuda.synchronize()
    end_failed_capture(pool)
    some = torch.zeros(1, device=stream.device)
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
    ):
        some.zero_()
