"""Where memory lies: on the host, outside of a CUDA graph's pool; and what cannot be made within a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from stof.errors import UnsupportedError

T = TypeVar("T")


@contextmanager
def tensors_on_host() -> Iterator[None]:
    """Tensors made without naming a device are on the CPU, also where `torch.set_default_device` names another.

    For work lists and tables, which are made on the host and then copied. Not around mask functions: they may make
    tensors where their author wants them.
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


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
    return device.type == "cuda" and in_capture()


def in_capture() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    # Where PyTorch knows no GPU, asking about its streams is an error.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
