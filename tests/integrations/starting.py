"""Calls of models as processes one after another make them, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from stof.integrations.torch_compile import CompileOptions, stof_backend
from stof.integrations.whole_calls import WholeCalls

X = torch.linspace(-1, 1, 32).view(4, 8)


def as_they_are(call: Any, args: Any, kwargs: Any) -> Any:
    """In place of recordings."""
    return lambda tensors: call(*tensors)


def optimized(model: nn.Module, folder: Path, **options: Any) -> Any:
    """What `stof.optimize(model, cuda_graphs="whole")` makes, for tensors on the CPU, as in another process."""
    torch._dynamo.reset()
    given = {"cuda_graphs": "whole", "starts": True, "store": str(folder), **options}
    compiled: Any = torch.compile(model, backend=stof_backend, dynamic=False, options=given)
    starts = CompileOptions.parse(given).starts_of(model)
    return WholeCalls(compiled.forward, model, recorder=as_they_are, device_type="cpu", starts=starts)


def traced(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and how many graphs Dynamo traced for it."""
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        out = call()
    return out, counters["stats"]["unique_graphs"] - before


def starts_in(folder: Path) -> list[Path]:
    return sorted((folder / "starts").glob("*.start"))
