"""What was fastest on a device, by shape: choices outlive the versions they were measured with.

A file a device: the package's own, which is only read, then the user's, whose entries come first. Times in the store
of measurements are for one version of everything; these serve where nothing has been measured yet, as rules and as the
first candidates of a search.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stof.fusion.records.typed_json import from_json, to_json
from stof.runtime.files import DEVICE_DATA, read_or_ignore, remembering, slug, sole_writer, write_checked

VERSION = 2


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
# What is known of a problem, by that text.
ConfigLookup = Callable[[str], TunedConfig | None]


def choices_path(folder: Path, device: str) -> Path:
    """The file for a device, by its name. Other versions of the format have files of their own."""
    return folder / f"choices-{slug(device)}-v{VERSION}.json"


def read_choices(path: Path) -> Choices:
    """What a file holds; a file that was damaged is ignored with a warning."""
    return read_or_ignore(path, "version", VERSION, choices_of, {})


def choices_of(content: Mapping[str, Any]) -> Choices:
    """The choices in the content of a file."""
    choices: Choices = from_json(Choices, content["choices"])
    return choices


def choices_to_json(choices: Choices) -> dict[str, Any]:
    """Sorted, times in four digits: files that are compared by eye."""
    return {key: to_json(one, digits=4) for key, one in sorted(choices.items())}


def update_choices(path: Path, device: str, new: Choices, without: Set[str] = frozenset()) -> None:
    """Add to a file; newer choices take the place of older ones, and `without` go."""
    if not new and not without:
        return
    with remembering(path), sole_writer(path):
        merged = {key: one for key, one in read_choices(path).items() if key not in without} | new
        write_choices(path, device, merged)


def write_choices(path: Path, device: str, choices: Choices) -> None:
    """Write a file of choices."""
    content = {"version": VERSION, "device": device, "choices": choices_to_json(choices)}
    write_checked(path, json.dumps(content, indent=1))


def known_choices(device: str, folder: Path | None, packaged: Path = DEVICE_DATA) -> ConfigLookup:
    """What is known of a device: packaged, and in the user's folder (None: packaged alone)."""
    choices = read_choices(choices_path(packaged, device))
    if folder is not None:
        choices |= read_choices(choices_path(folder, device))
    return choices.get
