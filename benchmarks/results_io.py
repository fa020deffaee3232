"""The benchmark's JSON: stable keys, provenance, merging runs."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import stof
from benchmarks.attention.run import NotRun, Row, key
from stof.errors import ArgumentError
from stof.files import read_json, write_atomically
from stof.tuning.machine import device_name, package_version


@dataclass(frozen=True)
class Results:
    """A file's contents: `{"meta": {...}, "rows": [...], "not_run": [...]}`, the last only where it is not empty."""

    meta: dict[str, Any]
    rows: list[Row]
    not_run: list[NotRun]


def read_results(path: Path) -> Results:
    """Read a file of this benchmark.

    Raises:
        ArgumentError: there is no such file, or it is not one of this benchmark.
    """
    try:
        data = read_json(path)
        rows = [Row(**row) for row in data["rows"]]
        return Results(data["meta"], rows, [NotRun(**entry) for entry in data.get("not_run", [])])
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{path} is no result of `python -m benchmarks attention --output FILE`, and no others can be read here: "
            f"{_reason(error)}"
        ) from None


def write_results(path: Path, rows: Iterable[Row], device: torch.device, not_run: Iterable[NotRun] = ()) -> None:
    """Write the results with this machine's provenance, one row a line; readers never see half a file."""
    meta = json.dumps(provenance(device), indent=1)
    parts = [f'"meta": {meta}', f'"rows": {_lines(rows)}']
    missing = list(not_run)
    if missing:
        parts.append(f'"not_run": {_lines(missing)}')
    write_atomically(path, "{" + ",\n ".join(parts) + "}\n")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object; readers never see half a file."""
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def _lines(entries: Iterable[Any]) -> str:
    return "[\n  " + ",\n  ".join(json.dumps(asdict(entry)) for entry in entries) + "\n ]"


class Recorder:
    """Collects a race's cells in a file, which is complete after every cell.

    Args:
        path: the file.
        device: where the race runs.
        merge: keep what the file holds, except measurements made again; otherwise start it anew.

    Raises:
        ArgumentError: `merge` into a file of another device, or into no result of this benchmark.
    """

    def __init__(self, path: Path, device: torch.device, merge: bool) -> None:
        self.path, self.device = path, device
        old = read_results(path) if merge and path.exists() else Results({}, [], [])
        here = device_name(device)
        if old.meta and old.meta.get("device") != here:
            raise ArgumentError(
                f"{path} holds results of {old.meta.get('device')!r}, this is {here!r}; write to another file"
            )
        self.rows, self.not_run = list(old.rows), list(old.not_run)

    def done(self) -> set[tuple[Any, ...]]:
        """The `key` of every measurement in the file, those that could not be made included."""
        return {key(row) for row in self.rows} | {key(entry) for entry in self.not_run}

    def add(self, rows: list[Row], not_run: list[NotRun]) -> None:
        """Take a cell's lines in place of any older ones of the same measurements, and write the file."""
        again = {key(row) for row in rows} | {key(entry) for entry in not_run}
        self.rows = [row for row in self.rows if key(row) not in again] + rows
        self.not_run = [entry for entry in self.not_run if key(entry) not in again] + not_run
        write_results(self.path, self.rows, self.device, self.not_run)


_R = TypeVar("_R")


class RowFile(Generic[_R]):
    """The rows of one benchmark in one file, complete after every `add`; all of them from one state of the code.

    Args:
        path: the file, whose rows are kept; None for none.
        device: where the benchmark runs.
        row: its dataclass of a row.
        names: the fields that tell measurements apart.

    Raises:
        ArgumentError: the file's rows are from another device, version or commit, or of another benchmark.
    """

    def __init__(self, path: Path | None, device: torch.device, row: Callable[..., _R], names: Sequence[str]) -> None:
        self.path, self.device, self.names = path, device, tuple(names)
        self.rows: list[_R] = []
        if path is not None and path.exists():
            meta, self.rows = read_rows(path, row)
            here = provenance(device)
            differing = [name for name in here if name != "date" and state(meta.get(name)) != state(here[name])]
            if differing:
                was = ", ".join(f"{name} {meta.get(name)}" for name in differing)
                raise ArgumentError(f"{path} holds results of {was}, which are not these; write to another file")

    def done(self) -> set[tuple[Any, ...]]:
        """The key of every row."""
        return {self.key(row) for row in self.rows}

    def key(self, row: _R) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self.names)

    def add(self, rows: Sequence[_R]) -> None:
        """Take rows in place of older ones of the same measurements, and write the file."""
        again = {self.key(row) for row in rows}
        self.rows = [row for row in self.rows if self.key(row) not in again] + list(rows)
        if self.path is not None:
            write_rows(self.path, provenance(self.device), self.rows)


def read_rows(path: Path, row: Callable[..., _R]) -> tuple[dict[str, Any], list[_R]]:
    """Provenance and rows of a file.

    Raises:
        ArgumentError: there is no such file, or it holds other rows.
    """
    try:
        data = read_json(path)
        return dict(data["meta"]), [row(**one) for one in data["rows"]]
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{path} is no result of this benchmark: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return f"it has no entry {error}" if isinstance(error, KeyError) else str(error)


def write_rows(path: Path, meta: dict[str, Any], rows: Iterable[Any]) -> None:
    """Write provenance and rows, one a line; readers never see half a file."""
    write_atomically(path, f'{{"meta": {json.dumps(meta, indent=1)},\n "rows": {_lines(rows)}}}\n')


def state(value: Any) -> Any:
    """A commit without the mark of local changes: results that are written beside it are such changes."""
    return value.removesuffix("+changes") if isinstance(value, str) else value


def provenance(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit and date of a run."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "stof": stof.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """Commit of the checkout this package runs from, marked when it has local changes."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+changes" if dirty.stdout.strip() else "")
