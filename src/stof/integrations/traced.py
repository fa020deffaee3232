"""What traced code is from, and what it looked up outside of the model and the call: for later processes to compare."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stof.integrations.code_text import NAMED, IndescribableError, builtin_text, class_text, function_text, tensor_text


def files_of(codes: Iterable[types.CodeType]) -> dict[str, str]:
    """The source files that code is from, and their hashes; code that was generated (dataclasses) has none.

    Raises:
        IndescribableError: code from elsewhere than a file.
    """
    found = {}
    for name in sorted({code.co_filename for code in codes if not _is_generated(code)}):
        digest = file_digest(name)
        if digest is None:
            raise IndescribableError(f"code from {name}, which is no file, or was changed since it was read")
        found[name] = digest
    return found


def _is_generated(code: types.CodeType) -> bool:
    """Whether `dataclasses` wrote it, or it came with Python itself."""
    return code.co_filename.startswith("<frozen") or code.co_qualname.startswith("__create_fn__")


def file_digest(name: str) -> str | None:
    """The hash of a file; None where there is none, or it may have been changed since this process read it."""
    try:
        return content_digest(name) if Path(name).stat().st_mtime <= _began() else None
    except OSError:
        return None


@functools.cache
def _began() -> float:
    """When this process began, as the clock of files has it, and a second, in which no process has read its code yet.

    Where the system does not say so (Linux does), when this was first asked.
    """
    try:
        # Behind the name in brackets: the 20th field counts ticks since the system was started.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        started = int(next(line.split()[1] for line in lines if line.startswith("btime ")))
        return started + ticks / os.sysconf("SC_CLK_TCK") + 1.0
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()


def content_digest(name: str | Path) -> str | None:
    """The hash of a file as it is now; None where there is none."""
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return None


# A module, a global name in it, and what it stood for.
Name = tuple[str, str, str]


def names_of(codes: Iterable[types.CodeType], looks: Looks) -> list[Name]:
    """The global names that code may look up, each with a hash of what it stands for.

    Raises:
        IndescribableError: code from a file that is no module's.
    """
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items()) if module}
    asked: set[tuple[str, str]] = set()
    for code in codes:
        if _is_generated(code):
            continue
        if not {"environ", "getenv"}.isdisjoint(code.co_names):
            raise IndescribableError(f"code of {code.co_qualname}, which asks for environment variables")
        module = modules.get(code.co_filename)
        if module is None:
            raise IndescribableError(f"code from {code.co_filename}, which is no module")
        asked.update((module, name) for name in _looked_up(code))
    told = ((module, name, name_text(module, name, looks)) for module, name in sorted(asked))
    return [(module, name, text) for module, name, text in told if text is not None]


def _looked_up(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _looked_up(one)


class Looks:
    """Texts of values that are looked at one by one, such as what global names stand for, and what guards asked for.

    Each says what the value is and, one level deep, what it holds, not what that holds: whoever looked for more has
    asked for it by itself. What may be changed is told with a number, equal where it is the same object again.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # so that no two have one address
        self._classes: dict[type, tuple[object, ...]] = {}

    def text(self, value: object) -> str:
        """A hash of what a value is."""
        return hashlib.sha256(repr(self._said(value)).encode()).hexdigest()

    def _said(self, value: Any, deep: bool = True) -> object:
        if value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, NAMED):
            return type(value).__name__, value
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.FunctionType):
            return function_text(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, Tensor):
            return self._again(value), type(value).__name__, tensor_text(value)
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name, repr(value.value)
        if (named := builtin_text(value)) is not None:
            return named
        if isinstance(value, functools.partial) and deep:
            return [self._said(part, False) for part in (value.func, *value.args, *value.keywords.items())]
        if isinstance(value, tuple) and deep:
            return type(value).__name__, [self._said(item, False) for item in value]
        return self._again(value), self._class(type(value)), self._items(value) if deep else None

    def _items(self, value: Any) -> object:
        if isinstance(value, list):
            return [self._said(item, False) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(repr(self._said(item, False)) for item in value)
        if isinstance(value, Mapping):
            items = dict.items(value) if isinstance(value, dict) else value.items()
            return [(self._said(key, False), self._said(item, False)) for key, item in items]
        return None

    def _class(self, kind: type) -> tuple[object, ...]:
        if kind not in self._classes:
            self._classes[kind] = class_text(kind)
        return self._classes[kind]

    def _again(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
        return self._numbers[id(value)]


def name_text(module: str, name: str, looks: Looks) -> str | None:
    """What a global name stands for, hashed; None where there is no such name."""
    held = getattr(sys.modules.get(module), "__dict__", {})
    return looks.text(held[name]) if name in held else None
