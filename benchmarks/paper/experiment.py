"""Running the experiments: cells in their order, a row of every result at once, time limits and resuming.

A row is kept as long as the sources it measured are the same; rows of older sources are measured again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import stof
from benchmarks.failures import device_problem, first_line
from benchmarks.results_io import RowFile, provenance
from stof.errors import MissingDependencyError
from stof.tuning.machine import device_name, package_version

# What a row's time depends on, below src/stof.
_ATTENTION = ("device_data", "kernels", "layout", "runtime", "selection")
_MODELS = (*_ATTENTION, "fusion", "integrations")
_PEERS = ("transformers", "flash-attn", "flash-attn-4", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend")
# Baselines of the paper, and peers, that no cell has.
ABSENT = {
    "ByteTransformer": "no Python package; for older GPUs",
    "SPLAT": "no Python package",
    "FlashAttention-3": "its wheel has neither float16 nor windows",
    "FastVideo": "takes bfloat16 and whole blocks only",
    "FlashInfer": "compiles for minutes; in `python -m benchmarks attention`",
    "MCFuser": "needs a TVM of 2023",
    "Bolt": "needs a TVM of 2022",
}


@dataclass(frozen=True)
class Row:
    """One result; one of the times is given, none where `note` says why.

    Attributes:
        figure: "3", "4", "9", "11", "12", "13", "table4", "selector" or "unseen". Figures 9 and 10 are the same cells,
            "9".
        mask, model: "" where there is none.
        impl: ours begin with `stof`.
        us, ms, s: GPU time of a call, wall time of a call, seconds of a search.
        max_rel_err: largest error over the largest value of float64.
        sources: digest of our sources that the time depends on.
    """

    figure: str
    mask: str
    model: str
    batch: int
    length: int
    impl: str
    us: float | None = None
    ms: float | None = None
    s: float | None = None
    max_rel_err: float | None = None
    note: str = ""
    device: str = ""
    commit: str = ""
    versions: str = ""
    sources: str = ""

    @property
    def time(self) -> float | None:
        """The time in whichever unit it has."""
        return next((t for t in (self.us, self.ms, self.s) if t is not None), None)


NO_MEMORY = "skipped: too little memory on this GPU"
KEY = ("figure", "mask", "model", "batch", "length", "impl")
Key = tuple[Any, ...]
Report = Callable[[str], None]


class StopError(Exception):
    """The device no longer answers; what was measured is in the file."""


@dataclass(frozen=True)
class Cell:
    """What is measured together.

    Attributes:
        parts: names of `--only` that it belongs to.
        rows: rows it gives, without results: their keys are known before.
        measure: the rows with results, of implementations by name; the report gets a line per event. Timed rounds are
            left out where the last argument is False, which only fills caches.
    """

    parts: tuple[str, ...]
    rows: tuple[Row, ...]
    measure: Callable[[Sequence[Row], Report, bool], list[Row]]

    @property
    def label(self) -> str:
        row = self.rows[0]
        words = (row.model, row.mask, f"B{row.batch} S{row.length}")
        return f"figure {row.figure}: " + " ".join(filter(None, words))


def key(row: Row) -> Key:
    return tuple(getattr(row, name) for name in KEY)


@cache
def sources(models: bool) -> str:
    """Digest of the sources that a time on a GPU depends on."""
    root, digest = Path(stof.__file__).parent, hashlib.sha256()
    for folder in _MODELS if models else _ATTENTION:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json") and root / "kernels" / "cpu" not in path.parents:
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of PyTorch, Triton and the peers that are installed."""
    found = {"torch": torch.__version__, "triton": package_version("triton")}
    found |= {name: package_version(name) for name in _PEERS}
    return {name: version for name, version in found.items() if version is not None}


def open_file(path: Path | None, device: torch.device) -> RowFile[Row]:
    """The result file, with what it has."""
    return RowFile(path, device, Row, KEY, mixed=True, meta={"versions": versions(), "absent": ABSENT})


def missing(cell: Cell, file: RowFile[Row]) -> list[Row]:
    """Rows of a cell that the file lacks, or has of other sources."""
    held = {key(row): row.sources for row in file.rows}
    return [row for row in cell.rows if held.get(key(row)) != sources(bool(row.model))]


def pending(cells: Sequence[Cell], file: RowFile[Row]) -> list[int]:
    """Places of the cells that have to be measured, those that the file has of other sources last."""
    held = {key(row) for row in file.rows}
    places = [i for i, cell in enumerate(cells) if missing(cell, file)]
    return sorted(places, key=lambda i: all(key(row) in held for row in cells[i].rows))


def run(cells: Sequence[Cell], file: RowFile[Row], *, seconds: float, report: Report, timed: bool = True) -> int:
    """Measure what the file lacks, cell by cell, and write every cell at once; the number of cells left.

    Args:
        seconds: after which no further cell is begun.
        report: gets progress.

    Raises:
        StopError: the device no longer answers.
    """
    start = time.monotonic()
    places = pending(cells, file)
    report(f"{len(places)} cells to measure, {len(cells) - len(places)} are there already")
    commit = str(provenance(file.device)["commit"])
    text = ", ".join(f"{name} {version}" for name, version in versions().items())
    stamp: dict[str, Any] = {"device": device_name(file.device), "commit": commit, "versions": text}
    for number, place in enumerate(places):
        cell = cells[place]
        spent = time.monotonic() - start
        if spent > seconds:
            report(f"{seconds:.0f} s are used: {len(places) - number} cells left, run the command again to go on")
            return len(places) - number
        left = f", about {spent / number * (len(places) - number):.0f} s left" if number else ""
        report(f"[{number + 1}/{len(places)}{left}] {cell.label}")
        wanted = missing(cell, file)
        try:
            found = cell.measure(wanted, report, timed)
        except MissingDependencyError as error:  # no row: it is measured once the package is there
            report(f"  left out: {error}")
            continue
        except torch.OutOfMemoryError as error:
            report(f"  skipped, too little memory: {first_line(error)}")
            found = [replace(row, note=NO_MEMORY) for row in wanted]
        except Exception as error:  # whatever a library raises must not end the other experiments
            report(f"  failed: {first_line(error)}")
            found = [replace(row, note=first_line(error)) for row in wanted]
        if timed:
            file.add([replace(row, **stamp, sources=sources(bool(row.model))) for row in found])
        problem = device_problem(file.device) if len(found) < len(wanted) or any(row.note for row in found) else ""
        if problem:
            raise StopError(f"the device no longer answers ({problem}): run the command again to go on")
    return 0
