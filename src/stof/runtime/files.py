"""Files that other processes may read, write or damage: written in one step, read in one step, checked."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# What comes with the package for each device: constants of the attention cost model, and fusion's best configurations.
DEVICE_DATA = Path(__file__).parents[1] / "device_data"

# Temporary files this old belong to processes that were killed.
_LEFTOVER_S = 24 * 3600
# What JSON of an unexpected shape raises while it is read or converted.
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace or create a file in one step: readers see the old content or the new, also when the writer is killed.

    The folder is created if need be. A new file's mode follows the umask, as with `open`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent.resolve())
    # Names are random because threads, and containers that share a volume, may have equal process ids. Mode "x" opens
    # with O_EXCL, which follows no symbolic link.
    temporary = path.with_name(f".stof-{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the temporary file's name
    finally:
        with suppress(OSError):  # usually it is not there any more
            temporary.unlink()


@functools.cache
def _sweep(folder: Path) -> None:
    """Delete old temporary files of killed processes, once a process and folder."""
    for leftover in folder.glob(".stof-*.part"):
        with suppress(OSError):  # another process may be deleting it, or it is another user's
            if time.time() - leftover.lstat().st_mtime > _LEFTOVER_S:
                leftover.unlink()


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_checked(path: Path, text: str) -> None:
    """Write the text of a JSON object with a checksum as its last entry."""
    checksum = _checksum(json.loads(text))
    write_atomically(path, f'{text.rstrip().removesuffix("}").rstrip()},\n "checksum": "{checksum}"\n}}\n')


def read_checked(path: Path, version_name: str, version: int, convert: Callable[[dict[str, Any]], T]) -> T:
    """What `convert` makes of an object that `write_checked` wrote.

    Args:
        version_name: the entry that holds the format's version.
        version: the only one accepted.

    Raises:
        OSError: the file cannot be read.
        ValueError: it was not written by `write_checked`, has changed since, is of another version, or `convert`
            raised one of the errors that values of the wrong type cause.
    """
    try:
        data = read_json(path)
        if not isinstance(data, dict) or version_name not in data:
            raise ValueError(f"it is not a JSON object with an entry {version_name!r}")
        if data[version_name] != version:
            raise ValueError(f"it is of version {data[version_name]!r}, this stof reads version {version}")
        if data.pop("checksum", None) != _checksum(data):
            raise ValueError("its content does not match its checksum: it was edited or damaged")
        return convert(data)
    except _MALFORMED as error:
        raise ValueError(str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}") from error


def read_or_ignore(
    path: Path, version_name: str, version: int, convert: Callable[[dict[str, Any]], T], default: T
) -> T:
    """`read_checked`; `default` where there is no file, and with a warning where it cannot be used."""
    try:
        return read_checked(path, version_name, version, convert)
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored: {error}", stacklevel=3)
        return default


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the values, however the file is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold a file's lock, which the system releases when a process is killed."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.stem}.lock")):
        yield


@contextmanager
def remembering(path: Path) -> Iterator[None]:
    """What cannot be remembered (a full disk, a folder that is read-only) is a warning: the result is there anyway."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"nothing is remembered in {path}: {error}", stacklevel=3)


def cache_folder() -> Path | None:
    """`stof` in the platform's folder for caches (`XDG_CACHE_HOME` on Linux, where it is set).

    None, with one warning, for a user without a home folder.
    """
    variable, usual = "XDG_CACHE_HOME", ".cache"
    if sys.platform == "darwin":
        variable, usual = "", "Library/Caches"
    elif sys.platform == "win32":
        variable, usual = "LOCALAPPDATA", "AppData/Local"
    try:
        return Path(os.environ.get(variable) or Path.home() / usual) / "stof"
    except RuntimeError:
        _warn_homeless(variable)
        return None


@functools.cache
def _warn_homeless(variable: str) -> None:
    way_out = f"set {variable}, or name a folder with store=" if variable else "name a folder with store="
    warnings.warn(f"nothing is remembered: this user has no home folder; {way_out}", stacklevel=3)


def slug(name: str) -> str:
    """A device's name for file names: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
