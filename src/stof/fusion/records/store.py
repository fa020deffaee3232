"""What has been measured, kept on disk: a second process searches without measuring.

One JSON file for each environment (device, versions, this package's kernels). Writers take a lock, merge with what
others wrote meanwhile, and replace the file whole: readers never see half of one, and a killed process leaves the old.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from stof.fusion.records.choices import Choices, current_versions, update_choices
from stof.fusion.records.typed_json import from_json, to_text
from stof.runtime.files import read_or_ignore, remembering, sole_writer, write_checked
from stof.tuning.machine import device_name, package_version

# A template and its configuration, e.g. ("linear", "128x128x64,8w,3s,tile"); None is Inductor's own code.
SegmentCandidate = tuple[str, str]
VERSION = 4


@dataclass
class Records:
    """What a store holds, by keys.

    Attributes:
        segments: their times in microseconds, `math.inf` for what does not run.
        races: of whole models, microseconds with templates and without.
        checks: of templates in segments why they may not be used, "" where they may.
        searched: of segments and graphs, how many configurations of a segment a round drew in the most thorough search
            that came to its end. Of a graph, every time that its choices depend on is then in `segments`.
    """

    segments: dict[str, dict[SegmentCandidate | None, float]] = field(default_factory=dict)
    races: dict[str, tuple[float, float]] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    searched: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = [*(us for of_segment in self.segments.values() for us in of_segment.values())]
        races = [us for of_model in self.races.values() for us in of_model]
        if not all(us > 0 for us in times) or not all(0 < us < math.inf for us in races):
            raise ValueError("times are positive")


class Store:
    """A folder of measurements.

    Args:
        folder: created when something is written.
        environment: what measurements depend on beside the segment; other environments' files are not read.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, dict(environment)
        text = json.dumps({"version": VERSION, **self.environment}, sort_keys=True)
        self.path = folder / f"fusion-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def load(self) -> Records:
        """What the file holds; a file that was damaged is ignored with a warning."""
        return read_or_ignore(self.path, "version", VERSION, partial(from_json, Records), Records())

    def update(self, new: Records) -> None:
        """Add to the file; newer times take the place of older ones."""
        with remembering(self.path), sole_writer(self.path):
            merged = self.load()
            for key, times in new.segments.items():
                merged.segments[key] = merged.segments.get(key, {}) | times
            merged.races |= new.races
            merged.checks |= new.checks
            merged.searched |= {key: max(draws, merged.searched.get(key, 0)) for key, draws in new.searched.items()}
            write_checked(self.path, to_text({"version": VERSION, "environment": self.environment}, merged))

    def update_choices(self, new: Choices, without: Set[str] = frozenset()) -> None:
        """Add to the choices of the device in the same folder."""
        update_choices(self.folder, self.environment["device"], new, without)


def segment_key(key: Hashable) -> str:
    """A search key as text for files: equal in every process for equal segments."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def default_store(device: torch.device, folder: Path) -> Store:
    """The store for a device and the installed versions."""
    return Store(
        folder,
        {
            "device": device_name(device),
            **current_versions(),
            "tilelang": package_version("tilelang") or "none",  # without it, its times are of what does not run
            "source": source_digest("templates"),
        },
    )


@functools.cache
def source_digest(part: str = "") -> str:
    """A hash of this package's source, or of a part of it: what another version measured or compiled is not used."""
    hashed = hashlib.sha256()
    for file in sorted((Path(__file__).parents[1] / part).rglob("*.py")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]
