"""What outlives a call is made outside of the pools of CUDA graphs, as if in the thread that asked."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stof.runtime.memory import made_for_calls, outside_graph_pool


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CUDA device whose streams have nothing to wait for."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return torch.device("cuda", 0)


def test_the_thread_takes_default_device_and_grad_mode_over(pretended_gpu: torch.device) -> None:
    """A mask function may say `torch.tensor(...)` and mean the default device."""
    with torch.device("meta"), torch.no_grad():
        made, grad = outside_graph_pool(pretended_gpu, lambda: (torch.zeros(1), torch.is_grad_enabled()))
    assert made.device.type == "meta"
    assert not grad


def test_errors_are_those_of_the_thread_that_asked(pretended_gpu: torch.device) -> None:
    with pytest.raises(ZeroDivisionError):
        outside_graph_pool(pretended_gpu, lambda: 1 // 0)


def test_an_error_keeps_nothing_alive(pretended_gpu: torch.device) -> None:
    """CUDA graphs of torch.compile demand that tensors die when they died while the graph was recorded."""

    def attempt() -> weakref.ref[torch.Tensor]:
        x = torch.zeros(1)
        with suppress(ZeroDivisionError):
            outside_graph_pool(pretended_gpu, lambda: x / (1 // 0))
        return weakref.ref(x)

    gc.disable()
    try:
        assert attempt()() is None
    finally:
        gc.enable()


class SeesOperators(TorchDispatchMode):
    """Fails where it sees an operator."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@pytest.mark.parametrize(("stream", "is_same_thread"), [(0, True), (7, False)], ids=["default stream", "another"])
def test_only_on_the_default_stream_no_pool_of_a_graph_is_in_use(
    pretended_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, stream: int, is_same_thread: bool
) -> None:
    """Nothing waits there; and what is made looks the same, whatever state the thread is in."""
    waits: list[None] = []
    idle = SimpleNamespace(synchronize=lambda: waits.append(None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: idle)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("stof.runtime.memory.raw_stream", lambda index: stream)

    def make() -> tuple[torch.Tensor, bool, int]:
        return torch.zeros(1), torch.is_grad_enabled(), threading.get_ident()

    for modes in ((torch.inference_mode(),), (torch.no_grad(), SeesOperators()), (torch.enable_grad(),)):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            expected = torch.is_grad_enabled()
            made, grad, thread = made_for_calls(pretended_gpu, make)
        assert not made.is_inference()
        assert grad == expected
        assert (thread == threading.get_ident()) == is_same_thread
    assert bool(waits) != is_same_thread
