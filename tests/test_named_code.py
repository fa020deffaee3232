"""Files, functions and fields that texts name exist: documentation, CONTRIBUTING, and docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "benchmarks", "tests", "docs", "examples")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
PATHS = [f"/{path.relative_to(ROOT).as_posix()}" for path in FILES]
SOURCES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in FILES
    if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("src", "benchmarks")
}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "notes" / "fusion.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts() -> Iterator[tuple[str, str]]:
    """Yield pages without their code blocks, and docstrings, by what they are of."""
    for page in PAGES:
        yield page.name, re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}, {getattr(node, 'name', 'module')}", text


def quoted(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def names_in(node: ast.AST) -> set[str]:
    """Return functions, classes, arguments, fields and constants of a module or class, and attributes that it sets."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(inner.name)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names.add(inner.attr)
        elif isinstance(inner, ast.arg):
            names.add(inner.arg)
        if isinstance(inner, ast.Module | ast.ClassDef):
            targets = [one for line in inner.body for one in getattr(line, "targets", [getattr(line, "target", None)])]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_files_that_are_named_exist() -> None:
    missing = [
        (where, name)
        for where, text in texts()
        for name in quoted(text)
        if re.fullmatch(r"[\w./-]+\.(py|md)|(src|tests|docs|benchmarks)/[a-z0-9_./-]+", name)
        and not any(path.endswith(f"/{name.rstrip('/')}") for path in PATHS)
        and not (ROOT / name).exists()
    ]
    assert missing == []


def test_public_names_exist() -> None:
    """`stof.a.b` is a module, or an attribute of one."""
    missing = []
    for where, text in texts():
        for name in quoted(text):
            dotted = re.match(r"(?:stof|benchmarks)(?:\.\w+)+", name)
            if dotted and not name.endswith((".py", ".md")) and not resolves(dotted[0]):
                missing.append((where, name))
    assert missing == []


def resolves(dotted: str) -> bool:
    """Whether a module has the attribute that a dotted name says, or imports it."""
    module, *rest = dotted.split(".")
    folder = ROOT / "src" / module if module == "stof" else ROOT / module
    while rest and (folder / rest[0]).is_dir():
        folder = folder / rest.pop(0)
    path = folder / f"{rest.pop(0)}.py" if rest and (folder / f"{rest[0]}.py").is_file() else folder / "__init__.py"
    tree = SOURCES[path]
    aliases = [one for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names]
    return not rest or rest[0] in names_in(tree) | {one.asname or one.name for one in aliases}


def test_members_that_are_named_exist() -> None:
    """`Class.member`, and `module_name.member` of modules whose names have an underscore."""
    members: dict[str, set[str]] = defaultdict(set)
    derived: set[str] = set()
    for path, tree in SOURCES.items():
        if "_" in path.stem.strip("_"):
            members[path.stem] |= names_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members[node.name] |= names_in(node)
                derived |= {node.name} if node.bases else set()
    missing = []
    for where, text in texts():
        for name in quoted(text):
            match = re.match(r"(\w+)\.(\w+)(?:\(|$)", name)
            owner, member = match.groups() if match else ("", "")
            if owner in members.keys() - derived and member not in members[owner] | {"py", "md"}:
                missing.append((where, name))
    assert missing == []


def test_contributing_names_what_exists() -> None:
    known = set().union(*map(names_in, SOURCES.values())) | {"DIR"}
    words = quoted((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert {word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)} <= known


def dataclasses_with_attributes() -> Iterator[tuple[str, ast.ClassDef, list[str]]]:
    """Yield classes whose docstring has a section `Attributes:`, and the names that it explains."""
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.ClassDef) else None
            section = re.search(r"^Attributes:\n((?:(?:    .*)?\n?)*)", text or "", flags=re.MULTILINE)
            if section and isinstance(node, ast.ClassDef):
                listed = re.findall(r"^    (\w+(?:, \w+)*):", section[1], flags=re.MULTILINE)
                yield f"{path.relative_to(ROOT)}, {node.name}", node, [n for one in listed for n in one.split(", ")]


@pytest.mark.parametrize(
    ("node", "listed"), [pytest.param(node, listed, id=where) for where, node, listed in dataclasses_with_attributes()]
)
def test_attributes_that_are_explained_exist(node: ast.ClassDef, listed: list[str]) -> None:
    assert listed
    fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
    known = {field.id for field in fields if isinstance(field, ast.Name)}
    known |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    known |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute) and inner.attr in listed
              and isinstance(inner.ctx, ast.Store)}  # fmt: skip
    assert set(listed) <= known
