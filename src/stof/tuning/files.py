"""Small files that several processes read and write: readers never see half of one, writers never lose another's."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_whole(path: Path, text: str) -> None:
    """Write a file in one step: whoever is killed on the way leaves the old one."""
    replace_whole_bytes(path, text.encode())


def replace_whole_bytes(path: Path, content: bytes) -> None:
    """`replace_whole` of what is no text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        half.write_bytes(content)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold a file's lock, which a process that is killed gives back; what killed ones left half written goes."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.stem}.lock")):
        for half in path.parent.glob(f"{path.name}.*.part"):
            half.unlink(missing_ok=True)
        yield


@contextmanager
def remembering(path: Path) -> Iterator[None]:
    """What cannot be remembered (a full disk, a folder that is read-only) is a warning: the result is there anyway."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"nothing is remembered in {path}: {error}", stacklevel=3)


def cache_folder() -> Path:
    """`stof` in the platform's folder for caches (`XDG_CACHE_HOME` on Linux, where it is set)."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "stof"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / usual) / "stof"


def slug(name: str) -> str:
    """A device's name for file names: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
