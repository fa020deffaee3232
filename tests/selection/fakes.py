"""What the selector asks of a GPU and of a plan, without either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stof.layout import LayoutConfig
from stof.masks import Mask
from stof.selection import CallSpec, MaskGeometry, select
from stof.selection.device_model import load_model

GPU = torch.device("cuda", 0)
H200_SHARED = 232_448


class Geometry(MaskGeometry):
    """A plan as the selector sees it, with a layout or row orders of its own; counts its searches."""

    def __init__(
        self,
        mask: Mask,
        q_len: int,
        kv_len: int,
        fixed: LayoutConfig | None = None,
        row_orders: tuple[str, ...] = (),
    ) -> None:
        super().__init__(mask, q_len, kv_len)
        self.fixed = fixed
        self.row_orders = self.orders.names = row_orders
        self.searches = 0

    def found_order(self) -> str | None:
        self.searches += 1
        return super().found_order()


def call_of(**changes: Any) -> CallSpec:
    """A float16 call of 12 heads of 64 on an H200."""
    plain: dict[str, Any] = {
        "device": "cuda",
        "dtype": torch.float16,
        "head_dim": 64,
        "value_dim": changes.get("head_dim", 64),
        "heads": 12,
        "kv_heads": changes.get("heads", 12),
        "q_len": 512,
        "kv_len": 512,
        "compute_capability": (9, 0),
    }
    return CallSpec(**plain | changes)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, shared: int = H200_SHARED) -> None:
    """An H200, or a GPU with less shared memory."""
    monkeypatch.setattr(select, "device_model", lambda device: load_model("NVIDIA H200"))
    monkeypatch.setattr(select, "shared_memory_limit", lambda device: shared)


def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream on which dynamic plans find themselves where there is no GPU; whatever it is asked for is nothing."""
    stream = SimpleNamespace(cuda_stream=0, record_event=lambda: None, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr("stof.runtime.streams.stream_id", lambda: 0)
