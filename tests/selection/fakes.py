"""What the selector asks of a GPU and of a plan, without either."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from stof.layout import LayoutConfig
from stof.layout.search import RowOrders
from stof.layout.survey import Survey, survey
from stof.masks import Mask
from stof.selection import CallSpec, Choice, select
from stof.selection.model import load_model

GPU = torch.device("cuda", 0)
H200_SHARED = 232_448


@dataclass
class Geometry:
    """A plan as the selector sees it; counts on the CPU."""

    mask: Mask
    q_len: int
    kv_len: int
    fixed: LayoutConfig | None = None
    row_orders: tuple[str, ...] = ()
    searches: int = 0

    @cached_property
    def orders(self) -> RowOrders:
        return RowOrders(self.mask, self.q_len, self.kv_len, batch=1, heads=1, device="cpu")

    def found_order(self) -> str | None:
        self.searches += 1
        return self.orders.found()

    def unfit(self, choice: Choice) -> str | None:
        return None

    def survey(self, geometries: tuple[LayoutConfig, ...], row_order: str | None) -> Survey:
        order = self.orders.rows(row_order)
        return survey(self.mask, self.q_len, self.kv_len, geometries, row_order=order)


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
