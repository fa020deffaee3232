"""Lock files: the schemes and configurations of a model as a small text to commit, which reproduces them elsewhere.

    {"stof_lock": 2, "device": "NVIDIA H200", "versions": {"stof": ..., "torch": ..., "triton": ...},
     "graphs": {KEY: {"scheme": "0110...", "fold": false, "segments": [
                {"segment": "linear 768>3072 + gelu", "template": "linear", "config": "128x128x64,5s,pingpong",
                 "at": [6, 15, ...]}]}},
     "choices": {"linear 4096x3072x768 activation=gelu bias float16": {"config": ..., "template_us": ..., ...}},
     "checksum": ...}

A graph's key is a hash of its operators, their shapes and dtypes, equal in every process and on every machine. `fold`
is the option of that name, `at` are the first operators of the segments. Choices serve graphs that are not in the lock,
of another length for example.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stof.errors import LockFileError
from stof.fusion.graph.scheme import Scheme
from stof.fusion.records.choices import Choices, choices_to_json
from stof.fusion.records.report import FusionReport
from stof.fusion.records.typed_json import from_json, to_json
from stof.runtime.files import read_checked, write_checked
from stof.tuning.machine import package_version
from stof.version import __version__

VERSION = 2


@dataclass(frozen=True)
class LockedSegment:
    """What computes alike segments: their operators in words, template, configuration, and first operators."""

    segment: str
    template: str
    config: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class LockedGraph:
    """A graph's scheme as bits, whether norms' weights were folded, and the segments that templates compute."""

    scheme: str
    fold: bool
    segments: tuple[LockedSegment, ...]

    def __post_init__(self) -> None:
        places = [at for segment in self.segments for at in segment.at]
        starts = {segment.start for segment in Scheme.from_bits(self.scheme).segments}
        if len(set(places)) < len(places) or not starts.issuperset(places):
            raise ValueError("segments do not fit their scheme")


@dataclass
class Lock:
    """A lock file's content; `device` and `versions` say where it was made."""

    device: str
    versions: dict[str, str] = field(default_factory=lambda: current_versions())
    graphs: dict[str, LockedGraph] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)

    def add(self, reports: Iterable[FusionReport]) -> None:
        """Take over what was decided for some graphs."""
        for report in reports:
            at: dict[tuple[str, str, str], list[int]] = {}
            for row in report.segments:
                if row.template:
                    at.setdefault((row.operators, row.template, row.config), []).append(row.start)
            segments = tuple(LockedSegment(*names, tuple(places)) for names, places in at.items())
            if report.graph:
                self.graphs[report.graph] = LockedGraph(report.scheme, report.fold, segments)
            self.choices |= report.choices

    def folds(self, graph: str) -> bool:
        """Whether norms' weights are to be folded in a graph; in one that is not here if in all that are."""
        locked = self.graphs.get(graph)
        return locked.fold if locked is not None else bool(self.graphs) and all(g.fold for g in self.graphs.values())

    def write(self, path: Path) -> None:
        """Write it whole."""
        head = {"stof_lock": VERSION, "device": self.device, "versions": self.versions}
        lines = [f'"{name}": {json.dumps(value)}' for name, value in head.items()]
        lines += [f'"graphs": {_graph_lines(self.graphs)}', f'"choices": {_lines(choices_to_json(self.choices))}']
        write_checked(path, "{" + ",\n ".join(lines) + "}")


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        LockFileError: there is none, it is no lock, its version is another one, or it has changed since it was written.
    """
    try:
        return read_checked(path, "stof_lock", VERSION, partial(from_json, Lock))
    except (OSError, ValueError) as error:
        raise LockFileError(
            f"{path} is not a usable lock file: {error}. Restore it from version control, or delete it and write it "
            "anew with `stof tune MODEL --lock FILE`; it cannot be edited by hand"
        ) from None


def _lines(entries: dict[str, Any]) -> str:
    """One entry a line."""
    inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    return "{\n" + inner + "}" if inner else "{}"


def _graph_lines(graphs: dict[str, LockedGraph]) -> str:
    """One segment a line."""
    parts = []
    for key, graph in sorted(graphs.items()):
        rows = ",\n".join(f"   {json.dumps(to_json(row))}" for row in graph.segments)
        head = f'"scheme": "{graph.scheme}", "fold": {json.dumps(graph.fold)}'
        parts.append(f'  "{key}": {{{head}, "segments": [\n{rows}]}}')
    return "{\n" + ",\n".join(parts) + "}" if parts else "{}"


def current_versions() -> dict[str, str]:
    """What a lock is made with."""
    return {"stof": __version__, "torch": torch.__version__, "triton": package_version("triton") or "none"}
