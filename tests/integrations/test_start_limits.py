"""What a start compares beside the model itself, and calls that are never kept."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stof
from stof import masks
from tests.integrations.starting import X, optimized, starts_in, traced


class Kind(enum.Enum):
    SCALE = 2.0


class Settings:
    scale = 2.0

    def __init__(self) -> None:
        self.bias = 1.0


SETTINGS = Settings()
NESTED: dict[str, Any] = {"a": {"b": [2.0]}}
NAMES = {"twice"}


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


class Reads(nn.Module):
    """Its result depends on what lies outside of it."""

    scale = 3.0
    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.slot = 1.0
        self.scale_with_kwargs = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale * Settings.scale + SETTINGS.bias + NESTED["a"]["b"][0]
        x = scaled(x) * self.slot * self.scale_with_kwargs * Kind.SCALE.value
        return x if "twice" in NAMES else -x


def _class_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "scale", 4.0)


OUTSIDE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nothing": lambda patch: None,
    "a constant of its class": _class_constant,
    "a constant of another class": lambda patch: patch.setattr(Settings, "scale", 4.0),
    "a global object": lambda patch: patch.setattr(SETTINGS, "bias", 4.0),
    "a nested global": lambda patch: patch.setitem(NESTED["a"], "b", [4.0]),
    "a default": lambda patch: patch.setattr(scaled, "__defaults__", (4.0,)),
    "a set": lambda patch: patch.setattr(sys.modules[__name__], "NAMES", set()),
    "a member": lambda patch: patch.setattr(Kind.SCALE, "_value_", 4.0),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_a_model_reads_outside_of_it_is_compared(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, model = Reads().eval(), Reads().eval()
    assert traced(lambda: optimized(first, tmp_path)(X))[1] == 1
    assert len(starts_in(tmp_path)) == 1
    OUTSIDE[what](monkeypatch)
    out, graphs = traced(lambda: optimized(model, tmp_path)(X))
    torch.testing.assert_close(out, model(X))
    assert graphs == (what != "nothing")


@pytest.mark.parametrize("name", ["slot", "scale_with_kwargs"])
def test_attributes_of_odd_names_are_compared(name: str, tmp_path: Path) -> None:
    first, model = Reads().eval(), Reads().eval()
    assert traced(lambda: optimized(first, tmp_path)(X))[1] == 1
    setattr(model, name, 5.0)
    out, graphs = traced(lambda: optimized(model, tmp_path)(X))
    torch.testing.assert_close(out, model(X))
    assert graphs == 1


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + super().forward(x)
        return out


def test_the_same_parts_in_other_places_are_another_model(tmp_path: Path) -> None:
    for make in (
        lambda: Residual(Residual(nn.Linear(8, 8)), nn.ReLU()),
        lambda: Residual(Residual(nn.Linear(8, 8), nn.ReLU())),
    ):
        model = make().eval()
        out, graphs = traced(lambda model=model: optimized(model, tmp_path)(X))
        torch.testing.assert_close(out, model(X))
        assert graphs == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.linear(x) - 2 * y
        return out


def test_a_tensor_that_is_given_twice(tmp_path: Path) -> None:
    model, other = Pair().eval(), torch.randn(4, 8)
    for args in ((X, X), (X, other), (other, X)):
        call = optimized(model, tmp_path)
        out, _ = traced(lambda call=call, args=args: call(*args))
        torch.testing.assert_close(out, model(*args))


class Told(nn.Module):
    """Calls that cannot be kept, by what they do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.calls = nn.Linear(8, 8), how, 0
        self.register_buffer("seen", torch.zeros(8))
        if how == "iterator":
            self.held = iter([1])
        if how == "deep":
            self.held = functools.reduce(lambda inner, _: [inner], range(5000), [])
        if how == "conjugate":
            self.held = [torch.tensor([1 + 1j]).conj(), torch.ones(2).to_sparse()]

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        if self.how == "breaks":
            torch._dynamo.graph_break()
            out = out + 1
        if self.how == "counts":
            self.calls += 1
        if self.how == "writes":
            self.seen.add_(1.0)
        if self.how == "constant":
            out = out + TABLE
        if self.how == "branches" and bool((x > -5).all()):
            return out
        if self.how == "looks before":
            disabled(x)
        if self.how == "assigns":
            self.last = out * 2
        if self.how == "tells others":
            SETTINGS.tally = getattr(SETTINGS, "tally", 0) + 1
        if self.how == "asks the environment" and os.environ.get("STOF_NO_SUCH_VARIABLE"):
            out = out + 1
        if self.how == "returns odd keys":
            return {("a", 0): out}
        if self.how == "tries":
            with contextlib.suppress(ValueError):
                disabled(x)
                return self.linear(x)
        return (out, x) if self.how == "returns its input" else out


TABLE = torch.arange(8.0)


@torch._dynamo.disable
def disabled(x: Tensor) -> None:
    """Runs as Python, whatever is compiled around it."""


HOWS = (
    "breaks", "counts", "writes", "constant", "returns its input", "iterator", "branches", "looks before", "assigns",
    "tells others", "asks the environment", "returns odd keys", "tries", "deep", "conjugate",
)  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_calls_that_are_more_than_one_graph_are_not_kept(how: str, tmp_path: Path) -> None:
    model = Told(how).eval()
    out, _ = traced(lambda: optimized(model, tmp_path)(X))
    first = out[0] if isinstance(out, tuple) else out[("a", 0)] if isinstance(out, dict) else out
    expected = model.linear(X) + (TABLE if how == "constant" else 1.0 if how == "breaks" else 0.0)
    torch.testing.assert_close(first, expected)
    assert starts_in(tmp_path) == []


class Attends(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return stof.attention(x, x, x, self.mask)


def test_masks_are_part_of_a_start(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 64, 16)
    for mask, expected in [(masks.sliding_window(8), 1), (masks.sliding_window(9), 1), (masks.sliding_window(8), 0)]:
        model = Attends(mask).eval()
        out, graphs = traced(lambda model=model: optimized(model, tmp_path)(x))
        assert graphs == expected, mask
        torch.testing.assert_close(out, stof.attention(x, x, x, mask))


def test_masks_of_this_process_alone_are_not_kept(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 64, 16)
    dense = masks.from_dense(torch.rand(64, 64) > 0.5)
    function = masks.from_function(lambda b, h, q, kv: q >= kv)
    for mask in (dense, function, stof.plan(masks.causal(), 64, heads=2)):
        model = Attends(mask).eval()
        out, _ = traced(lambda model=model: optimized(model, tmp_path)(x))
        torch.testing.assert_close(out, stof.attention(x, x, x, mask))
    assert starts_in(tmp_path) == []
