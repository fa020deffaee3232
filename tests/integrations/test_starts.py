"""Compiled calls that later processes go on with: when they serve, and that nothing else ever does."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import stof
from stof.integrations.starts import MOST_KEPT, _prune
from tests.integrations.starting import X, optimized, starts_in, traced

SHIFT = 1.0


def shifted(x: Tensor) -> Tensor:
    return x + SHIFT


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(width), Part(width)])
        self.register_buffer("shift", torch.randn(width))
        self.factor, self.settings = 1.5, {"signs": [1, -1]}

    def forward(self, x: Tensor, bias: Tensor | None = None, sign: int = 0) -> dict[str, Any]:
        for part in self.parts:
            x = shifted(part(x)) * self.factor + self.shift
        x = x * self.settings["signs"][sign]
        return {"out": x if bias is None else x + bias, "twice": (2 * x, None), "width": 8}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a process left the start of a `Layer`."""
    folder = tmp_path_factory.mktemp("store")
    model = Layer().eval()
    _, graphs = traced(lambda: optimized(model, folder)(X))
    assert graphs == 1
    return folder


def check(model: Layer, out: Any, *args: Any, **kwargs: Any) -> None:
    expected = model(*args, **kwargs)
    torch.testing.assert_close(out["out"], expected["out"])
    torch.testing.assert_close(out["twice"][0], expected["twice"][0])
    assert (out["twice"][1], out["width"]) == (None, 8)


def test_another_process_goes_on_without_tracing(kept: Path) -> None:
    assert len(starts_in(kept)) == 1
    model = Layer().eval()  # other values of its weights
    call = optimized(model, kept)
    for x in (X, 3 * X, -X):
        out, graphs = traced(functools.partial(call, x))
        assert graphs == 0
        check(model, out, x)
    with torch.no_grad():
        model.shift.add_(1.0)
    check(model, traced(lambda: call(X))[0], X)


def _set(name: str, value: object) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


def _hooked(model: Any) -> None:
    model.parts[1].register_forward_hook(lambda module, args, out: out + 1)


def _replaced(model: Any) -> None:
    model.parts[0].down = nn.Linear(16, 8, bias=False).eval()


def _tied(model: Any) -> None:
    model.parts[0].up.weight = model.parts[1].up.weight


def _own_forward(model: Any) -> None:
    part = model.parts[0]
    part.forward = lambda x: 2 * part.down(part.up(x))


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": _set("factor", 2.0),
    "another attribute": _set("added", "text"),
    "a nested setting": lambda model: model.settings["signs"].reverse(),
    "a hook": _hooked,
    "a module": _replaced,
    "a part in training mode": lambda model: model.parts[1].train(),
    "tied weights": _tied,
    "a buffer's strides": _set("shift", torch.randn(16)[::2]),
    "a dtype": lambda model: model.register_buffer("shift", torch.arange(8, dtype=torch.int32)),
    "a forward of its own": _own_forward,
    "fewer parts": lambda model: model.parts.__delitem__(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_is_compiled(change: str, kept: Path) -> None:
    model = Layer().eval()
    CHANGES[change](model)
    before = starts_in(kept)
    out, graphs = traced(lambda: optimized(model, kept)(X))
    assert graphs == 1
    check(model, out, X)
    for path in set(starts_in(kept)) - set(before):
        path.unlink()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X[:3],), {}), ((X.double(),), {}), ((X.t().contiguous().t(),), {}), ((X,), {"bias": X}), ((X, None, 1), {}),
     ((), {"x": X}), ((X,), {"sign": 0})],
)  # fmt: skip
def test_a_call_that_differs_is_compiled(args: Any, kwargs: Any, kept: Path) -> None:
    model = Layer().eval().to(args[0].dtype if args else X.dtype)
    before = starts_in(kept)
    out, graphs = traced(lambda: optimized(model, kept)(*args, **kwargs))
    assert graphs == 1
    check(model, out, *args, **kwargs)
    for path in set(starts_in(kept)) - set(before):
        path.unlink()


def test_code_that_differs_is_compiled(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind a name is not part of a file's name: the file is there, and does not hold."""

    def other(self: Part, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out

    here = sys.modules[__name__]
    patches: list[tuple[Any, str, Any]] = [
        (Part, "forward", other),
        (here, "SHIFT", 2.0),
        (here, "shifted", lambda x: x - 5.0),
        (nn.Linear, "forward", lambda self, x: x @ self.weight.t()),
    ]
    for number, (where, name, value) in enumerate(patches):
        folder = tmp_path / str(number)
        shutil.copytree(kept, folder)
        monkeypatch.setattr(where, name, value)
        model = Layer().eval()
        out, graphs = traced(lambda model=model, folder=folder: optimized(model, folder)(X))
        assert graphs == 1, name
        check(model, out, X)
        monkeypatch.undo()


def test_code_of_another_file_is_compiled(tmp_path: Path) -> None:
    """In processes of their own, whose module changes in between."""
    program = """
import sys, torch
sys.path.insert(0, "{folder}")
import a_model
from pathlib import Path
from tests.integrations.starting import optimized, traced
model = a_model.Model().eval()
out, graphs = traced(lambda: optimized(model, Path("{folder}"))(torch.ones(2, 4)))
torch.testing.assert_close(out, model(torch.ones(2, 4)))
print("graphs", graphs, "with" if "torch._inductor.lowering" in sys.modules else "without", "the compiler")
"""
    source = (
        "import torch\nfrom torch import nn\n\nclass Helper:\n    def scaled(self, x):\n        return x * 2.0\n\n"
        "class Model(nn.Module):\n    def forward(self, x):\n        return Helper().scaled(x) + 1\n"
    )
    root = Path(stof.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}

    def graphs() -> str:
        command = [sys.executable, "-c", program.format(folder=tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1]

    (tmp_path / "a_model.py").write_text(source, encoding="utf-8")
    assert graphs() == "graphs 1 with the compiler"
    assert graphs() == "graphs 0 without the compiler"
    (tmp_path / "a_model.py").write_text(source.replace("2.0", "3.0"), encoding="utf-8")
    assert graphs() == "graphs 1 with the compiler"


def test_reports_are_told_again(kept: Path) -> None:
    model, told = Layer().eval(), []
    call = optimized(model, kept, report=told.append)
    assert traced(lambda: call(X))[1] == 0
    (report,) = told
    assert report.segments
    assert report.measurements == 0
    assert "as an earlier process compiled it" in report.notes


@pytest.mark.parametrize("options", [{"fold": True}, {"effort": "quick", "budget_s": 1.0}, {"twins": True}])
def test_other_options_are_another_start(options: dict[str, Any], kept: Path) -> None:
    model = Layer().eval()
    before = starts_in(kept)
    out, graphs = traced(lambda: optimized(model, kept, **options)(X))
    assert graphs == 1
    check(model, out, X)
    for path in set(starts_in(kept)) - set(before):
        path.unlink()


def test_settings_of_torch_are_part_of_a_start(kept: Path) -> None:
    model = Layer().eval()
    torch.use_deterministic_algorithms(True)
    try:
        before = starts_in(kept)
        _, graphs = traced(lambda: optimized(model, kept)(X))
    finally:
        torch.use_deterministic_algorithms(False)
    assert graphs == 1
    for path in set(starts_in(kept)) - set(before):
        path.unlink()


def test_a_broken_file_is_passed_over(kept: Path, tmp_path: Path) -> None:
    (found,) = starts_in(kept)
    content = found.read_bytes()
    (tmp_path / "starts").mkdir()
    for broken in (content[:-1], content[:40], b"", content[:32] + b"x" + content[33:]):
        (tmp_path / "starts" / found.name).write_bytes(broken)
        model = Layer().eval()
        out, graphs = traced(lambda model=model: optimized(model, tmp_path)(X))
        assert graphs == 1
        check(model, out, X)
        assert len(starts_in(tmp_path)[0].read_bytes()) > 1000, "written anew"


def test_changes_between_the_first_calls_are_noticed(tmp_path: Path) -> None:
    """A model may change after its start was found, before anything is recorded."""
    first, model = Layer().eval(), Layer().eval()
    traced(lambda: optimized(first, tmp_path)(X))
    call = optimized(model, tmp_path)
    assert traced(lambda: call(X))[1] == 0
    model.factor = 5.0
    check(model, traced(lambda: call(X))[0], X)


def test_function_modes_see_each_operator(kept: Path) -> None:
    class Tenfold(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return 10 * out if func is F.relu else out

    model = Layer().eval()
    call = optimized(model, kept)
    with Tenfold():
        out = traced(lambda: call(X))[0]
        expected = model(X)
    torch.testing.assert_close(out["out"], expected["out"])


def test_the_oldest_starts_go(tmp_path: Path) -> None:
    for number in range(MOST_KEPT + 3):
        path = tmp_path / f"{number:03}.start"
        path.write_bytes(b"")
        os.utime(path, (number, number))
    (tmp_path / "a.start.1.part").write_bytes(b"")
    (tmp_path / "a.start.2.part").write_bytes(b"")
    os.utime(tmp_path / "a.start.1.part", (0, 0))
    _prune(tmp_path)
    assert [path.name for path in tmp_path.glob("*.part")] == ["a.start.2.part"]
    assert min(path.stem for path in tmp_path.glob("*.start")) == "003"
