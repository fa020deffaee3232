"""Who may import whom, read from the source, and what `import stof` loads."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
import stof
import stof.testing

SOURCE = Path(stof.__file__).parent

# Lowest first; a unit may import from its own line and lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("runtime",),
    ("masks",),
    ("layout",),
    ("kernels",),
    ("selection",),
    ("validation", "plans"),
    ("dynamic",),
    ("handles",),
    ("dispatch",),
    ("operators",),
    ("dtensors", "flop_formula"),
    ("attention",),
    ("fusion", "drawing", "unpadding", "nn", "varlen"),
    ("integrations", "distributed"),
    ("calibration",),
    ("__init__",),  # what users import; the library's own modules import each other
    ("demo",),
    ("cli", "__main__"),
)
# Folders of `fusion`, lowest first: modules import from their own folder and lower ones. `pipeline` is on top.
FUSION = ("graph", "templates", "records", "planner", "measure", "passes", "pipeline")
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
# Measuring knows nothing of attention.
TUNING = "tuning"
# For tests, and for commands that check what they time.
TESTING = "testing"


def unit_of(module: str) -> str:
    """`stof.layout.builders.build` -> `layout`, `stof` -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def modules(folder: Path) -> dict[str, Path]:
    paths = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules(SOURCE)
BENCHMARKS = modules(Path(benchmarks.__file__).parent)


def imports(path: Path) -> list[tuple[int, str]]:
    """`(line, module)` of every import of stof's own modules and of the benchmarks, wherever in the file it stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                # `from stof import masks` imports a module, `from stof.masks import Mask` a name.
                full = f"{base}.{alias.name}"
                found.append((node.lineno, full if full in MODULES or full in BENCHMARKS else base))
    return [(line, name) for line, name in found if name.split(".")[0] in ("stof", "benchmarks")]


def test_every_unit_has_its_layer() -> None:
    units = {unit_of(name) for name in MODULES}
    assert units - set(RANK) - {TUNING, TESTING} == set(), "place new units in LAYERS"


@pytest.mark.parametrize("name", MODULES)
def test_import_direction(name: str) -> None:
    unit = unit_of(name)
    problems = []
    for line, target in imports(MODULES[name]):
        other = unit_of(target)
        if other in (unit, "errors"):
            continue
        if other == TESTING:
            allowed = unit in ("calibration", "cli")
        elif unit == TESTING:
            allowed = RANK.get(other, 99) < RANK["attention"]
        elif unit == TUNING:
            allowed = other == "runtime"
        elif other == TUNING:
            allowed = RANK[unit] > RANK["attention"]
        else:
            allowed = RANK[other] <= RANK[unit]
        if not allowed:
            problems.append(f"{MODULES[name]}:{line}: {unit} imports {target}")
    assert not problems, "\n".join(problems)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, directly or through others (strongly connected, Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            group = {stack.pop()}
            while name not in group:
                group.add(stack.pop())
            found.append(group)

    for name in graph:
        if name not in order:
            visit(name)
    return [group for group in found if len(group) > 1]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f", "d"}, "f": {"e"}}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["e", "f"]]


def test_no_import_circles() -> None:
    """Every import counts: those inside functions, and those under `if TYPE_CHECKING`, which never run."""
    paths = MODULES | BENCHMARKS
    graph = {name: {target for _, target in imports(path) if target in paths} - {name} for name, path in paths.items()}
    assert circles(graph) == []


def test_the_package_never_imports_benchmarks() -> None:
    found = {name for name, path in MODULES.items() if any(at.startswith("benchmarks") for _, at in imports(path))}
    assert found == set()


def test_errors_import_nothing_of_ours() -> None:
    assert imports(MODULES["stof.errors"]) == []


def test_kernels_never_look_at_masks_or_the_environment() -> None:
    for name, path in MODULES.items():
        if unit_of(name) == "kernels":
            assert not any(unit_of(target) in ("masks", "selection") for _, target in imports(path)), name
            assert "environ" not in path.read_text(encoding="utf-8"), name


@functools.cache
def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_import_loads_torch_only() -> None:
    """Optional and heavy packages are imported when used. What torch itself loads does not count."""
    extra = loaded_by("import stof") - loaded_by("import torch")
    packages = {name.split(".")[0] for name in extra}
    foreign = packages - set(sys.stdlib_module_names) - {"stof", "torch"}
    assert foreign == set()
    heavy = {"fusion", "integrations", "distributed", "cli", "calibration", "demo", "drawing", TESTING, TUNING}
    assert not {name for name in extra if name.startswith("stof.") and name.split(".")[1] in heavy}


@pytest.mark.parametrize("module", ["stof.testing", "stof.masks", "stof.layout"])
def test_parts_load_torch_only(module: str) -> None:
    extra = loaded_by(f"import {module}") - loaded_by("import torch")
    assert {name.split(".")[0] for name in extra} - set(sys.stdlib_module_names) == {"stof"} | (
        {"torch"} if any(name.startswith("torch.") for name in extra) else set()
    )


def test_public_names_exist() -> None:
    for module in (stof, stof.masks, stof.layout, stof.selection, stof.testing):
        assert all(hasattr(module, name) for name in module.__all__)
