"""What was fastest on a device, by shape: choices outlive the versions they were measured with.

A file a device: the package's own, which is only read, then the user's, whose entries come first. Times in the store
of measurements are for one version of everything; these serve where nothing has been measured yet, as rules and as the
first candidates of a search.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stof.tuning.files import remembering, replace_whole, slug, sole_writer

VERSION = 1
PACKAGED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Tuned:
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


# By the problem's text, its rows rounded up to a power of two (`Problem.bucket`).
Choices = dict[str, Tuned]
# What is known of a problem, by that text.
Known = Callable[[str], Tuned | None]


def choices_path(folder: Path, device: str) -> Path:
    """The file for a device, by its name."""
    return folder / f"choices-{slug(device)}.json"


def read_choices(path: Path) -> Choices:
    """What a file holds; broken entries, and a broken file, are left out with a warning, other versions without."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            return {}
        entries = dict(data["choices"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{path} is not readable and is ignored: {error!r}", stacklevel=2)
        return {}
    choices, broken = parse_choices(entries)
    if broken:
        warnings.warn(f"{path}: {broken} broken entries are ignored", stacklevel=2)
    return choices


def parse_choices(entries: Mapping[str, Any]) -> tuple[Choices, int]:
    """The choices in JSON's objects, and how many make no sense."""
    choices: Choices = {}
    broken = 0
    for key, value in entries.items():
        try:
            choices[key] = Tuned(str(value["config"]), float(value["template_us"]), float(value["inductor_us"]))
        except (ValueError, TypeError, KeyError):
            broken += 1
    return choices, broken


def choices_to_json(choices: Choices) -> dict[str, Any]:
    """Sorted, times in four digits: files that are compared by eye."""
    return {
        key: {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in asdict(one).items()}
        for key, one in sorted(choices.items())
    }


def update_choices(path: Path, device: str, new: Choices, without: Set[str] = frozenset()) -> None:
    """Add to a file; newer choices take the place of older ones, and `without` go."""
    if not new and not without:
        return
    with remembering(path), sole_writer(path):
        merged = {key: one for key, one in read_choices(path).items() if key not in without} | new
        content = {"version": VERSION, "device": device, "choices": choices_to_json(merged)}
        replace_whole(path, json.dumps(content, indent=1) + "\n")


def known_choices(device: str, folder: Path | None, packaged: Path = PACKAGED) -> Known:
    """What is known of a device: packaged, and in the user's folder (None: packaged alone)."""
    choices = read_choices(choices_path(packaged, device))
    if folder is not None:
        choices |= read_choices(choices_path(folder, device))
    return choices.get
