"""Which test files import a module, and how directly, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def modules_in(root: Path, package: str) -> dict[str, Path]:
    """Modules of a package by their full names."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = (package, *path.relative_to(root / package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Imports:
    """The import graph of the package, the benchmarks and the tests."""

    def __init__(self, root: Path) -> None:
        self.source = modules_in(root / "src", "stof") | modules_in(root, "benchmarks")
        self.tests = modules_in(root, "tests")
        self._trees = {
            name: ast.parse(path.read_text(encoding="utf-8")) for name, path in (self.source | self.tests).items()
        }
        self._targets = {name: set(self._imported(tree)) - {name} for name, tree in self._trees.items()}

    def _origin(self, module: str, name: str) -> str | None:
        """The module that a name of `module` comes from: itself a module, or re-exported by a package."""
        full = f"{module}.{name}"
        if full in self._trees:
            return full
        tree = self._trees.get(module)
        if tree is None:
            return None
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                return self._origin(node.module or "", name)
        return module

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        named = {"stof": "stof"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name != "stof" and alias.name in self._trees)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    origin = self._origin(node.module or "", alias.name)
                    if origin is None:
                        continue
                    package = origin in self._trees and self._is_package(origin)
                    if package:
                        named[alias.asname or alias.name] = origin
                    else:
                        yield origin
        for node in ast.walk(tree):
            # A module that is imported by its name when it is needed.
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in self.source:
                yield node.value
            # `masks.causal` and `stof.masks.causal`
            if isinstance(node, ast.Attribute):
                inner = node.value
                package = named.get(inner.id) if isinstance(inner, ast.Name) else None
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id in named:
                    package = self._origin(named[inner.value.id], inner.attr)
                if package is not None and self._is_package(package):
                    origin = self._origin(package, node.attr)
                    if origin is not None:
                        yield origin

    def _is_package(self, module: str) -> bool:
        path = (self.source | self.tests).get(module)
        return path is not None and path.name == "__init__.py"

    def distances(self, module: str) -> dict[Path, int]:
        """Test files that reach a module, by the number of modules between the two."""
        found = {}
        for name, path in self.tests.items():
            if path.name.startswith("test_"):
                distance = self._distance(name, module)
                if distance is not None:
                    found[path] = distance
        return found

    def _distance(self, test: str, module: str) -> int | None:
        seen, edge, steps = {test}, self._with_helpers({test}), 0
        while edge:
            edge = {target for name in edge for target in self._targets.get(name, ())} - seen
            if module in edge:
                return steps
            seen |= edge
            steps += 1
        return None

    def _with_helpers(self, names: set[str]) -> set[str]:
        """Test modules, and what they import of other test modules."""
        more = {target for name in names for target in self._targets[name] if target in self.tests} | names
        return names if more == names else self._with_helpers(more)
