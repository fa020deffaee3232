"""Real text that is on every machine: the documentation strings of Python's standard library."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from stof.errors import StofError


class NoTextError(StofError, RuntimeError):
    """The standard library's sources are not installed."""


def docstrings(minimum_words: int = 8) -> list[str]:
    """Documentation strings of the standard library's top-level modules, in file order, one of each."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for path in sorted(library.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text.split()) >= minimum_words:
                    found.setdefault(text)
    if not found:
        raise NoTextError(f"no documentation strings under {library}; the demo reads the standard library's .py files")
    return list(found)


def passages(count: int) -> list[str]:
    """`count` documentation strings spread over the library: lengths vary from a line to several pages."""
    texts = docstrings()
    step = max(1, len(texts) // count)
    return texts[::step][:count]
