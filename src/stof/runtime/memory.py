"""Where tensors are allocated (on the CPU, or outside a CUDA graph's pool), and what a graph capture refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from stof.errors import UnsupportedError
from stof.runtime.private import past_modes, raw_stream

T = TypeVar("T")
_LOCAL = threading.local()


@contextmanager
def tensors_on_host() -> Iterator[None]:
    """Make the CPU the default device, whatever `torch.set_default_device` was given.

    For work lists and tables, which are made on the host and then copied. Do not use it around mask functions: their
    authors may rely on the default device.
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


def outside_graph_pool(device: torch.device, make: Callable[[], T]) -> T:
    """Return `make()`, whose tensors are allocated outside the memory pool of a CUDA graph.

    `torch.compile(mode="reduce-overhead")` runs a graph once before it captures it. During that run, every allocation
    of the thread goes to a pool that later graphs reuse, and tensors that stay alive there are an error. So on a GPU
    `make` runs in a thread of its own, and each thread synchronises its stream before the other continues. During a
    capture `make` runs in the calling thread.

    Raises:
        The errors of `make`.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    default = torch.get_default_device()  # like the grad mode, each thread has its own; mask functions make tensors
    grad = torch.is_grad_enabled()
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.device(default), torch.set_grad_enabled(grad):
                results.append(make())
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # raised again by the thread that asked
            failed.append(error)

    torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=run, name="stof")
    thread.start()
    thread.join()
    if failed:
        # Not `failed[0]`: the error's traceback holds this list, a cycle that keeps the caller's tensors alive.
        raise failed.pop()
    return results[0]


@past_modes
def made_for_calls(device: torch.device, make: Callable[[], T]) -> T:
    """Return `make()`, as `outside_graph_pool` does, whose tensors only bound calls and other such `make` read.

    Bound calls on other streams wait for the default stream (`record_streams`). Where that is the current one, `make`
    runs in the calling thread, and nothing waits: CUDA graphs are captured, and `torch.compile` runs what it will
    capture, on other streams. Inside of `torch.cuda.use_mem_pool`, memory comes from the pool that its user chose.

    Raises:
        The errors of `make`.
    """
    if device.type != "cuda" or raw_stream(torch.cuda.current_device() if device.index is None else device.index):
        return outside_graph_pool(device, make)
    grad = torch.is_grad_enabled()
    with current_device(device):
        if not torch.is_inference_mode_enabled():
            return make()
        # Calls outside of inference mode will read the tensors, too.
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            return make()


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, if it is a GPU. `torch.cuda.device` alone takes 10 us where it is already."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream, if `device` is a GPU."""
    return device.type == "cuda" and in_capture()


def in_capture() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    # Where PyTorch knows no GPU, asking about its streams is an error.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Raise during a capture: a first call works on the host, which a CUDA graph cannot capture.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if capturing(device):
        raise UnsupportedError(
            "the first call under a mask or plan with tensors of these shapes, strides and dtypes cannot be captured "
            "in a CUDA graph: lists are made and kernels compiled then, on the host. Make this call of stof.attention "
            "once before the capture",
            {},
        )


@contextmanager
def own_capture() -> Iterator[None]:
    """A capture that is only timed, or whose owner checks the masks' versions: it may read tensors of masks."""
    before, _LOCAL.capture = getattr(_LOCAL, "capture", False), True
    try:
        yield
    finally:
        _LOCAL.capture = before


def refuse_values(device: torch.device, *, also_own: bool = False) -> None:
    """Raise during a capture under a mask with tensors in it: replays would not see what is written to them.

    Args:
        also_own: raise in an `own_capture` too, as for a tensor that each replay gets new values for.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if capturing(device) and (also_own or not getattr(_LOCAL, "capture", False)):
        raise UnsupportedError(
            "a mask with tensors in it cannot be captured in a CUDA graph: replays would compute under the tensors' "
            "present values. Make a stof.dynamic_plan, or make a plan before the capture",
            {},
        )


def record_streams(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> None:
    """Call `record_stream`, so that memory of freed tensors is reused only after the current stream's work so far.

    Tensors of `outside_graph_pool` and `made_for_calls` belong to the default stream, whichever streams read them, and
    those of the latter may still be computed there: the current stream waits for it. One call for each stream is
    enough. Not within captures: the owner of the graph must keep what it reads alive, and starts when it is computed.

    Args:
        seen: ids of the streams that were recorded; the current one's is added.
    """
    stream = torch.cuda.current_stream(device)
    if stream.cuda_stream in seen or in_capture():
        return
    seen.add(stream.cuda_stream)
    if stream.cuda_stream:
        stream.wait_stream(torch.cuda.default_stream(device))
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)
