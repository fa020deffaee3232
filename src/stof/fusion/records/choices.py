"""Tables of choices: the fastest configuration of each shape on a device, and what computes whole graphs.

    {"version": 3, "device": "NVIDIA H200", "versions": {"stof": ..., "torch": ..., "triton": ...},
     "choices": {"linear 4096x3072x768 activation=gelu bias float16": {"config": ..., "template_us": ..., ...}},
     "graphs": {KEY: {"fold": false, "segments": [[6, 8, "linear", "128x128x64,5s,pingpong"], ...]}},
     "checksum": ...}

A device has a table of the package and one of the user, whose entries come first. These hold choices alone, which serve
any version: as rules, and as the first candidates of a search. A lock file ("stof_lock" instead of "version") is the
table of a model, to commit. A graph's key is a hash of its operators, their shapes and dtypes, equal in every process
and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from stof.errors import LockFileError
from stof.fusion.records.typed_json import from_json, to_text
from stof.runtime.files import DEVICE_DATA, read_checked, read_or_ignore, remembering, slug, sole_writer, write_checked
from stof.tuning.machine import package_version
from stof.version import __version__

VERSION = 3
_LOCK = "stof_lock"


@dataclass(frozen=True)
class TunedConfig:
    """The fastest configuration of a template for a shape, its microseconds, and those of Inductor's code."""

    config: str
    template_us: float
    inductor_us: float

    def __post_init__(self) -> None:
        if not all(0 < time < math.inf for time in (self.template_us, self.inductor_us)):
            raise ValueError("times are positive")

    @property
    def pays(self) -> bool:
        return self.template_us < self.inductor_us


# By the problem's text, its rows rounded up to a power of two (`GemmProblem.bucket`).
Choices = dict[str, TunedConfig]


@dataclass(frozen=True)
class GraphChoice:
    """What computes a graph: whether norms' weights are folded, and the segments that templates compute, in order.

    A segment is its first operator, the operator behind its last one, its template and its configuration.
    """

    fold: bool
    segments: tuple[tuple[int, int, str, str], ...]

    def __post_init__(self) -> None:
        edges = [0, *(edge for start, stop, _, _ in self.segments for edge in (start, stop))]
        if any(after < before + i % 2 for i, (before, after) in enumerate(pairwise(edges))):
            raise ValueError("segments are empty, overlap or are out of order")


@dataclass
class ChoiceTable:
    """The content of a file; `device` and `versions` say where it was made."""

    device: str
    versions: dict[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    graphs: dict[str, GraphChoice] = field(default_factory=dict)

    def write(self, path: Path, version_name: str = "version") -> None:
        """Write the table, choices sorted: files that are compared by eye."""
        table = ChoiceTable(self.device, self.versions, dict(sorted(self.choices.items())), self.graphs)
        write_checked(path, to_text({version_name: VERSION}, table))

    def write_lock(self, path: Path) -> None:
        """Write the table as a lock file."""
        self.write(path, _LOCK)


def read_table(path: Path, version_name: str = "version") -> ChoiceTable:
    """Read a table.

    Raises:
        OSError, ValueError: see `read_checked`.
    """
    return read_checked(path, version_name, VERSION, partial(from_json, ChoiceTable))


def read_lock(path: Path) -> ChoiceTable:
    """Read a lock file.

    Raises:
        LockFileError: there is none, it is no lock, its version is another one, or it has changed since it was written.
    """
    try:
        return read_table(path, _LOCK)
    except (OSError, ValueError) as error:
        raise LockFileError(
            f"{path} is not a usable lock file: {error}. Restore it from version control, or delete it and write it "
            "anew with `stof tune MODEL --lock FILE`; it cannot be edited by hand"
        ) from None


def choices_path(folder: Path, device: str) -> Path:
    """The file for a device, by its name. Other versions of the format have files of their own."""
    return folder / f"choices-{slug(device)}-v{VERSION}.json"


def read_choices(folder: Path, device: str) -> Choices:
    """The choices of a device in a folder; a file that is damaged or of another device is ignored with a warning."""

    def convert(data: dict[str, object]) -> Choices:
        table: ChoiceTable = from_json(ChoiceTable, data)
        if table.device != device:
            raise ValueError(f"it is of the device {table.device!r}, not {device!r}")
        return table.choices

    return read_or_ignore(choices_path(folder, device), "version", VERSION, convert, {})


def update_choices(folder: Path, device: str, new: Mapping[str, TunedConfig], without: Set[str] = frozenset()) -> None:
    """Add to the choices of a device; newer ones take the place of older ones, and `without` go."""
    if not new and not without:
        return
    path = choices_path(folder, device)
    with remembering(path), sole_writer(path):
        kept = {key: one for key, one in read_choices(folder, device).items() if key not in without}
        ChoiceTable(device, choices={**kept, **new}).write(path)


def known_choices(device: str, folder: Path | None, packaged: Path = DEVICE_DATA) -> Choices:
    """What is known of a device: packaged, and in the user's folder (None: packaged alone)."""
    return read_choices(packaged, device) | ({} if folder is None else read_choices(folder, device))


def current_versions() -> dict[str, str]:
    """What a lock is made with."""
    return {"stof": __version__, "torch": torch.__version__, "triton": package_version("triton") or "none"}
