"""Compiled calls that later processes go on with: when they serve, and that nothing else ever does."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

import stof
from stof import masks
from stof.integrations.fingerprint import Description, IndescribableError, file_digest, names_of
from stof.integrations.starts import MOST_KEPT, _prune
from stof.integrations.torch_compile import CompileOptions, stof_backend
from stof.integrations.whole_calls import WholeCalls

SHIFT = 1.0


def shifted(x: Tensor) -> Tensor:
    return x + SHIFT


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


X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a process left the start of a `Layer`."""
    folder = tmp_path_factory.mktemp("store")
    model = Layer().eval()
    _, graphs = traced(lambda: optimized(model, folder)(X))
    assert graphs == 1
    return folder


def starts_in(folder: Path) -> list[Path]:
    return sorted((folder / "starts").glob("*.start"))


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
from tests.integrations.test_starts import optimized, traced
model = a_model.Model().eval()
out, graphs = traced(lambda: optimized(model, Path("{folder}"))(torch.ones(2, 4)))
torch.testing.assert_close(out, model(torch.ones(2, 4)))
print("graphs", graphs)
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
    assert graphs() == "graphs 1"
    assert graphs() == "graphs 0"
    (tmp_path / "a_model.py").write_text(source.replace("2.0", "3.0"), encoding="utf-8")
    assert graphs() == "graphs 1"


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


def test_descriptions_are_equal_in_every_process() -> None:
    program = (
        "from tests.integrations.test_starts import Layer\n"
        "from stof.integrations.fingerprint import Description\n"
        "said = Description(); said.add(Layer()); said.add({'a': {1, 'b', None}, 'f': len, 's': (1.5, 2j)})\n"
        "print(said.digest())"
    )
    root = Path(stof.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    found = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("value", [iter([1]), object(), {object()}, [torch.empty(2, device="meta")], [].append])
def test_what_cannot_be_described_is_refused(value: object) -> None:
    holder = nn.Module()
    holder.value = value
    with pytest.raises(IndescribableError):
        Description().add(holder)


def test_files_that_were_changed_since_are_not_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\n", encoding="utf-8")
    os.utime(path, (time.time() + 60, time.time() + 60))
    assert file_digest(str(path)) is None
    os.utime(path, (1.0, 1.0))
    assert file_digest(str(path)) is not None
    assert file_digest(str(tmp_path / "none.py")) is None


def test_code_that_is_no_modules_is_refused() -> None:
    found: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x + unknown\n", str(Path("somewhere.py").resolve()), "exec"), found)
    with pytest.raises(IndescribableError, match="which is no module"):
        names_of([found["f"].__code__])


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
