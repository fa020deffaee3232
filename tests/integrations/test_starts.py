"""Compiled calls that later processes go on with: when they serve, and that nothing else ever does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from stof.integrations.torch_compile import CompileOptions, stof_backend
from stof.integrations.whole_calls import WholeCalls


class Recorder:
    """Makes no recordings: each call is run as it is."""

    def __call__(self, call: Any, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("nothing is recorded here")


def started(model: nn.Module, folder: Path, **options: Any) -> Any:
    """What `stof.optimize(model, cuda_graphs="whole")` calls, for tensors on the CPU."""
    torch._dynamo.reset()  # as in another process
    given = {"cuda_graphs": "whole", "store": str(folder), **options}
    compiled: Any = torch.compile(model, backend=stof_backend, dynamic=False, options=given)
    starts = CompileOptions.parse(given).starts(model)
    return WholeCalls(compiled.forward, model, recorder=Recorder(), device_type="cpu", starts=starts)


def traced(call: Any) -> tuple[Any, int]:
    """What a call returns, and how many graphs Dynamo traced for it."""
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        out = call()
    return out, counters["stats"]["unique_graphs"] - before


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.randn(width))
        self.factor = 1.5

    def forward(self, x: Tensor, bias: Tensor | None = None) -> dict[str, Any]:
        out = self.down(torch.relu(self.up(x))) * self.factor + self.shift
        return {"out": out if bias is None else out + bias, "twice": (2 * out, None), "width": 8}


def test_another_process_goes_on_without_tracing(tmp_path: Path) -> None:
    first, other = Layer().eval(), Layer().eval()
    x = torch.randn(4, 8)
    _, graphs = traced(lambda: started(first, tmp_path)(x))
    assert graphs == 1
    assert len(list((tmp_path / "starts").glob("*.start"))) == 1
    call = started(other, tmp_path)
    out, graphs = traced(lambda: call(x))
    assert graphs == 0
    expected = other(x)
    assert out["width"] == 8 and out["twice"][1] is None
    torch.testing.assert_close(out["out"], expected["out"])
    torch.testing.assert_close(out["twice"][0], expected["twice"][0])
