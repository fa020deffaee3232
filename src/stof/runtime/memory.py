"""Memory that outlives the call that first needs it, and what cannot be made within a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from stof.errors import UnsupportedError

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """What `make()` returns, with its tensors in ordinary memory of `device`.

    The first run of a graph that `torch.compile(mode="reduce-overhead")` is about to capture sends every allocation of
    its thread to a pool that later graphs reuse, and refuses tensors that stay alive there. So on a GPU, `make` runs in
    a thread of its own; both sides wait for what the other has launched. Within a capture it runs as it is.

    Raises:
        Whatever `make` raises.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    default = torch.get_default_device()  # like the grad mode, each thread has its own; mask functions make tensors
    grad = torch.is_grad_enabled()
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.device(default), torch.set_grad_enabled(grad):
                made.append(make())
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # raised again by the thread that asked
            failed.append(error)

    torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=run, name="stof")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on this kind of device."""
    # Where PyTorch knows no GPU, asking about its streams is an error.
    return device.type == "cuda" and torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()


def refuse_capture(device: torch.device) -> None:
    """Raise within a capture: what a first call makes is computed on the host, which no CUDA graph can hold.

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


def record(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Have PyTorch's allocator wait, when these are freed, for what is launched on the current stream until then.

    Lasting tensors are allocated for the default stream, whichever streams read them. Once for a stream is enough.
    """
    stream = torch.cuda.current_stream(device)
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)
