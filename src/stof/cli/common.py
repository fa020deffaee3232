"""What several commands ask for alike: a device, a file to write, a console for tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.console import Console

# Characters of a line in a file or a pipe, where rich would cut tables at 80.
_WIDE = 160


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
        ArgumentError: a path is a folder, or in none that could be written to.
    """
    from stof.errors import ArgumentError

    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ArgumentError(f"cannot write {path}: it is a folder")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ArgumentError(f"cannot write {path}: {folder} is no folder that can be written to")


def table_console() -> Console:
    """For tables: as wide as the terminal, and wide enough for them where there is none."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDE)
