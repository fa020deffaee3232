"""Draws mutants: a module, a kind of edit that it has, and one edit of this kind."""

from __future__ import annotations

import ast
import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.edits import Edit, Signature, changes_code, edits_of, signatures_of

SOURCE = Path("src/stof")
FOLDERS = ("masks", "layout", "kernels", "selection", "plans", "runtime", "integrations")
FILES = ("attention.py", "operators.py", "validation.py")


@dataclass(frozen=True)
class Mutant:
    """One edit of a file, whose path is relative to the repository."""

    path: Path
    edit: Edit

    def mutate(self, root: Path) -> None:
        file = root / self.path
        file.write_bytes(self.edit.apply(file.read_bytes()))

    def describe(self, root: Path) -> str:
        """`file:line kind: original -> mutated`; the two without the code that they share, except their line."""
        source = (root / self.path).read_bytes()
        first = source.rfind(b"\n", 0, self.edit.start) + 1
        last = source.find(b"\n", self.edit.end)
        old, new = source[first:last], self.edit.apply(source[:last])[first:]
        texts = (" ".join(text.decode().split()) for text in (old, new))
        return f"{self.path}:{self.edit.line} {self.edit.kind}: " + " -> ".join(texts)


def runs_on_a_gpu_alone(tree: ast.Module) -> bool:
    """Whether a module holds Gluon kernels: Triton's interpreter has none of Hopper's barriers and tensor cores."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return any(
        isinstance(one, ast.Attribute) and ast.unparse(one) == "gluon.jit"
        for node in functions
        for one in node.decorator_list
    )


def module_files(root: Path) -> Iterator[Path]:
    """Files that mutants are drawn from, relative to the repository."""
    for path in sorted([root / SOURCE / name for name in FILES] + _in_folders(root)):
        if path.name != "__init__.py" and not runs_on_a_gpu_alone(ast.parse(path.read_bytes())):
            yield path.relative_to(root)


def left_out(root: Path) -> list[Path]:
    """Files of Gluon kernels."""
    return sorted(
        {path.relative_to(root) for path in _in_folders(root) if path.name != "__init__.py"} - {*module_files(root)}
    )


def _in_folders(root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in (root / SOURCE / folder).rglob("*.py")]


@functools.cache
def edits_by_file(root: Path) -> dict[Path, list[Edit]]:
    """All edits of all files."""
    signatures: dict[str, list[Signature]] = defaultdict(list)
    for path in sorted((root / SOURCE).rglob("*.py")):
        for name, signature in signatures_of(ast.parse(path.read_bytes())):
            signatures[name].append(signature)
    return {path: edits_of((root / path).read_bytes(), signatures) for path in module_files(root)}


def draw_mutants(root: Path, seed: int, count: int) -> list[Mutant]:
    """Different mutants; files are drawn in proportion to their lines."""
    edits = {path: found for path, found in edits_by_file(root).items() if found}
    lines = [(root / path).read_bytes().count(b"\n") for path in edits]
    drawn: dict[Mutant, None] = {}
    for number in itertools.count():
        # A generator each: a rule on edits of one module leaves the mutants of others.
        chosen = random.Random(f"{seed} {number}")
        (path,) = chosen.choices(list(edits), lines)
        kind = chosen.choice(sorted({edit.kind for edit in edits[path]}))
        edit = chosen.choice([edit for edit in edits[path] if edit.kind == kind])
        if changes_code(edit, (root / path).read_bytes()):
            drawn[Mutant(path, edit)] = None
        if len(drawn) == count:
            break
    return list(drawn)
