"""What outlives a call is made in a thread of its own, as if in the thread that asked."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch

from stof.runtime.memory import outside_graph_pool


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
