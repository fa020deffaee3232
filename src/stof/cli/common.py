"""What commands ask for alike: values of options, a device, a file to write, a console for tables."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from stof.errors import ArgumentError, StofError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

# What a number on a command line may be at most: sizes of tensors, counts and seconds.
_MOST = 2**31 - 1
# Characters of a line in a file or a pipe, where rich would cut tables at 80.
_WIDE = 160
# How files begin.
_BEGINNINGS = {
    "png": rb"\x89PNG\r\n\x1a\n",
    "svg": rb"(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE svg|<svg)\b",
    "pdf": rb"%PDF-",
}


class Commands(TyperGroup):
    """Reports STOF's own errors, whose messages say what to do, and files' in red and without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StofError as error:
            _show_error(str(error))
        except OSError as error:
            if error.filename is None or isinstance(error, BrokenPipeError):
                raise
            _show_error(f"cannot read or write {error.filename}: {error.strerror}")


def _show_error(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"error: {text}", style="red"), soft_wrap=True)
    raise typer.Exit(2) from None


class CheckedCommand(TyperCommand):
    """Refuses empty text and numbers that no option of any command can have, before the command runs."""

    def invoke(self, ctx: Any) -> Any:
        for param in self.params:
            source = ctx.get_parameter_source(param.name)
            if source is not None and source.name == "COMMANDLINE":
                values = ctx.params.get(param.name)
                for value in values if isinstance(values, list | tuple) else (values,):
                    _check_value(param.opts[0], value)
        return super().invoke(ctx)


def _check_value(name: str, value: object) -> None:
    from stof.errors import ArgumentError, shown

    if isinstance(value, str) and not value.strip():
        raise ArgumentError(f"{name} is empty; give a value, or leave {name} out for its default")
    if isinstance(value, int | float) and not 0 <= value <= _MOST:  # not <: a NaN is refused
        raise ArgumentError(f"{name} is a number from 0 to {_MOST}, got {shown(value)}")


def names(name: str, text: str, known: Collection[str]) -> list[str]:
    """Names separated by spaces, "" for none.

    Raises:
        ArgumentError: one that is not known.
    """
    from stof.errors import ArgumentError, shown

    unknown = [word for word in text.split() if word not in known]
    if unknown:
        raise ArgumentError(f"{name}: unknown {', '.join(map(shown, unknown))}; there are {', '.join(known)}")
    return text.split()


def device_of(text: str) -> torch.device:
    """The device of this name; "" for the GPU if there is one.

    Raises:
        ArgumentError: the name is none, or there is no such device here.
    """
    import torch

    from stof.errors import ArgumentError

    try:
        device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ArgumentError(f"device is cpu or cuda, got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device is cpu or cuda, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"PyTorch finds no device {text!r} here; it finds {torch.cuda.device_count()} CUDA devices")
    return device


def must_be_writable(*paths: Path | None) -> None:
    """Refuse files that could not be written, before what they are for takes minutes. None is no file.

    Raises:
        ArgumentError: a path is a folder, in none that could be written to, or given twice.
    """
    from stof.errors import ArgumentError

    outputs: set[Path] = set()
    for path in paths:
        if path is None:
            continue
        if path.resolve() in outputs:
            raise ArgumentError(f"cannot write {path}: another output goes there; name a file for each")
        outputs.add(path.resolve())
        if path.is_dir():
            raise ArgumentError(f"cannot write {path}: it is a folder")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ArgumentError(f"cannot write {path}: {folder} is no folder that can be written to")


def must_be_replaceable(path: Path | None, kind: str) -> None:
    """Refuse to write over a file of another kind, a plan or a script say. None is no file; an empty one is replaced.

    Args:
        path: what is to be written.
        kind: png, svg or pdf.

    Raises:
        ArgumentError: the file exists, and does not begin like one of that kind.
    """
    from stof.errors import ArgumentError

    if path is None or not path.is_file():
        return
    with path.open("rb") as file:
        content = file.read(4096)
    if content and not re.match(_BEGINNINGS[kind], content, re.DOTALL | re.IGNORECASE):
        raise ArgumentError(f"cannot write {path}: it exists and is no {kind.upper()} file; name another file")


def picture_kind(path: Path) -> str:
    """What `stof.drawing.draw_picture` writes to a file: svg or png."""
    return "svg" if path.suffix == ".svg" else "png"


def table_console() -> Console:
    """For tables: as wide as the terminal, and wide enough for them where there is none."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDE)


def imported(text: str) -> Any:
    """What `module:name` names, also in a file of the current folder.

    Raises:
        ArgumentError: there is no such module, or nothing of this name in it.
    """
    module, _, name = text.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # as `python -m` does: a file of the current folder is a module
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"cannot load {text}: {error}") from error
