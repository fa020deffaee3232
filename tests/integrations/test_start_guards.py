"""What traced code looked at outside of the model and the call: where that is another thing, nothing kept serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.starting import X, optimized, traced


class Thing:
    def factor(self) -> float:
        return 2.0

    def other_factor(self) -> float:
        return 3.0


REG: Any = SimpleNamespace()
NOWHERE = object()


class Looking(nn.Module):
    """Its forward is one of `LOOKS`, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "an attribute that comes":
            return x * getattr(REG, "table", 2.0)
        if self.name == "a function of C":
            out: Tensor = REG.act(x)
            return out
        if self.name == "a function of C in a dictionary":
            return x + REG.acts["a"](x)
        if self.name == "a tensor's shape":
            return x * REG.tensor.shape[0]
        if self.name == "a module's class":
            return 2 * REG.act(x)
        if self.name == "a dictionary's order":
            return x * len(next(iter(REG.names)))
        if self.name == "which object it is":
            return x + 1 if REG.one is REG.two else x - 1
        return x * REG.thing.factor()


LOOKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an attribute that comes": ({}, {"table": 5.0}),
    "a function of C": ({"act": torch.tanh}, {"act": torch.sigmoid}),
    "a function of C in a dictionary": ({"acts": {"a": torch.tanh}}, {"acts": {"a": torch.sigmoid}}),
    "a tensor's shape": ({"tensor": torch.ones(2)}, {"tensor": torch.ones(3)}),
    "a module's class": ({"act": nn.Tanh()}, {"act": nn.Sigmoid()}),
    "a dictionary's order": ({"names": {"a": 1, "bc": 2}}, {"names": {"bc": 2, "a": 1}}),
    "which object it is": ({"one": NOWHERE, "two": NOWHERE}, {"one": NOWHERE, "two": object()}),
}


def first_call(name: str, folder: Path) -> int:
    """Graphs that were traced for it; its result is checked."""
    model = Looking(name).eval()
    out, graphs = traced(lambda: optimized(model, folder)(X))
    torch.testing.assert_close(out, model(X))
    return graphs


@pytest.mark.parametrize("name", LOOKS)
def test_what_was_looked_at_is_compared(name: str, tmp_path: Path) -> None:
    before, after = LOOKS[name]
    vars(REG).clear()
    vars(REG).update(before)
    assert first_call(name, tmp_path) == 1
    assert first_call(name, tmp_path) == 0
    vars(REG).clear()
    vars(REG).update(after)
    assert first_call(name, tmp_path) == 1


def test_a_method_of_an_object_elsewhere_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vars(REG).update(thing=Thing())
    assert [first_call("a method", tmp_path) for _ in range(2)] == [1, 0]
    monkeypatch.setattr(Thing, "factor", Thing.other_factor)
    assert first_call("a method", tmp_path) == 1


STANCES = ["force_eager", "eager_on_recompile"]


@pytest.mark.parametrize("stance", STANCES)
def test_what_torch_compile_was_told_goes_first(stance: str, tmp_path: Path) -> None:
    vars(REG).update(thing=Thing())
    first_call("a method", tmp_path)
    found: Callable[[Tensor], Any] = optimized(Looking("a method").eval(), tmp_path)
    with torch.compiler.set_stance(stance):
        torch.testing.assert_close(traced(lambda: found(X))[0], 2 * X)
    assert not any(found._started.values())  # type: ignore[attr-defined]
