"""The benchmark's JSON: stable keys, provenance, merging runs."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import stof
from benchmarks.attention.run import NotRun
from stof.errors import ArgumentError
from stof.runtime.files import read_json, write_atomically
from stof.tuning.machine import device_name, package_version

_R = TypeVar("_R")


@dataclass(frozen=True)
class Results(Generic[_R]):
    """A file's contents: `{"meta": {...}, "rows": [...], "not_run": [...]}`, the last only where it is not empty."""

    meta: dict[str, Any]
    rows: list[_R]
    not_run: list[NotRun]


def read_results(path: Path, row: Callable[..., _R]) -> Results[_R]:
    """Read a file whose rows are of the dataclass `row`.

    Raises:
        ArgumentError: there is no such file, or it holds other rows.
    """
    try:
        data = read_json(path)
        not_run = [NotRun(**one) for one in data.get("not_run", [])]
        return Results(dict(data["meta"]), [row(**one) for one in data["rows"]], not_run)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        reason = f"it has no entry {error}" if isinstance(error, KeyError) else str(error)
        raise ArgumentError(f"{path} is no result of this benchmark's --output FILE: {reason}") from None


def write_results(path: Path, meta: dict[str, Any], rows: Iterable[Any], not_run: Iterable[NotRun] = ()) -> None:
    """Write provenance and rows, one a line; readers never see half a file."""
    parts = [f'"meta": {json.dumps(meta, indent=1)}']
    for name, entries in (("rows", list(rows)), ("not_run", list(not_run))):
        if entries or name == "rows":
            lines = ",\n  ".join(json.dumps(asdict(entry)) for entry in entries)
            parts.append(f'"{name}": [\n  {lines}\n ]')
    write_atomically(path, "{" + ",\n ".join(parts) + "}\n")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object; readers never see half a file."""
    write_atomically(path, json.dumps(data, indent=1) + "\n")


class RowFile(Generic[_R]):
    """The rows of one benchmark in one file, complete after every `add`.

    Args:
        path: the file; None for none.
        device: where the benchmark runs.
        row: its dataclass of a row.
        names: the fields that tell measurements apart, of `row` and of `NotRun` where it is used.
        keep: keep the rows that the file has; otherwise the first `add` starts it anew.
        mixed: the file may have rows of several versions and commits; otherwise all are from one.
        meta: what `meta` says beside `provenance`.

    Raises:
        ArgumentError: the file's rows are from another device, version or commit, or of another benchmark.
    """

    def __init__(
        self,
        path: Path | None,
        device: torch.device,
        row: Callable[..., _R],
        names: Sequence[str],
        *,
        keep: bool = True,
        mixed: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.device, self.names, self.meta = path, device, tuple(names), dict(meta or {})
        self.rows: list[_R] = []
        self.not_run: list[NotRun] = []
        if path is not None and keep and path.exists():
            found, here = read_results(path, row), provenance(device)
            self.rows, self.not_run = found.rows, found.not_run
            alike = ("device",) if mixed else tuple(name for name in here if name != "date")
            differing = [name for name in alike if state(found.meta.get(name)) != state(here[name])]
            if differing:
                was = ", ".join(f"{name} {found.meta.get(name)}" for name in differing)
                raise ArgumentError(f"{path} holds results of {was}, which are not these; write to another file")

    def done(self) -> set[tuple[Any, ...]]:
        """The key of every row, and of what could not be run."""
        return {self.key(entry) for entry in (*self.rows, *self.not_run)}

    def key(self, entry: object) -> tuple[Any, ...]:
        return tuple(getattr(entry, name) for name in self.names)

    def add(self, rows: Sequence[_R], not_run: Sequence[NotRun] = ()) -> None:
        """Take entries in place of older ones of the same measurements, and write the file."""
        again = {self.key(entry) for entry in (*rows, *not_run)}
        self.rows = [row for row in self.rows if self.key(row) not in again] + list(rows)
        self.not_run = [entry for entry in self.not_run if self.key(entry) not in again] + list(not_run)
        if self.path is not None:
            write_results(self.path, provenance(self.device) | self.meta, self.rows, self.not_run)


def saving(rows: Iterable[_R], output: Path | None, device: torch.device) -> Iterator[_R]:
    """Yield rows, which are dataclasses; where there is an output file, write all rows so far to it before each."""
    results: list[Any] = []
    for row in rows:
        results.append(row)
        if output is not None:
            write_json(output, {"provenance": provenance(device), "rows": [asdict(one) for one in results]})
        yield row


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
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
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
