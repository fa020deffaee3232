"""Options of `torch.compile(model, backend="stof", options={...})` and `stof.optimize`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from stof.errors import ArgumentError, shown
from stof.fusion.measure.parallel_compile import compile_candidates
from stof.fusion.measure.segment_timer import SegmentTimer, check
from stof.fusion.pipeline import Search
from stof.fusion.planner.lock_replay import Replay
from stof.fusion.planner.search_space import Progress
from stof.fusion.records.choices import Choices, ChoiceTable, known_choices, read_lock
from stof.fusion.records.report import FusionReport
from stof.fusion.records.store import Store, default_store
from stof.runtime.files import cache_folder
from stof.tuning.machine import device_name

# The value of `cuda_graphs` for a CUDA graph of the whole model.
WHOLE = "whole"
# Seconds, and configurations drawn for each segment in a round.
EFFORTS: dict[str, tuple[float, int]] = {"none": (0.0, 0), "quick": (40.0, 3), "full": (600.0, 8)}
# Options of earlier versions, and what to do instead.
_REMOVED = {
    "experimental": "leave it out: it let a search try two matrix multiplications in one kernel, which never was "
    "faster than two kernels",
    "twins": "give references instead",
}


@dataclass(frozen=True)
class CompileOptions:
    """Options of the backend, as `torch.compile(..., options={...})` takes them.

    Attributes:
        effort: "none" decides by rules, without measuring; "quick" and "full" search for the scheme and its parameters
            by measuring segments, and finally the whole model with and without templates.
        budget_s: seconds that searching may take; None for the effort's own: 40 or 600. A compiled model has one budget
            for each of its graphs.
        cuda_graphs: True lets Inductor replay the compiled model as CUDA graphs; for fixed shapes and few tokens.
            "whole", for `stof.optimize`, replays one graph of the whole model for each combination of argument shapes;
            `CudaGraphRunner` says which changes between calls are noticed.
        deterministic: equal choices in every run; nothing is measured, by Inductor neither.
        fold: fold the weights of RMSNorms into the GEMMs after them, in a copy that takes as much memory as those
            GEMMs' weights. For weights that stay as they are: new parameters, other memory and writes that PyTorch
            counts are noticed between calls; writes through `.data`, NumPy or other tensors of the same memory, to
            tensors made under inference mode, and any by a CUDA graph that Inductor recorded before, are not. A lock
            that was tuned so folds as well.
        references: run the templates' PyTorch references where there is no kernel, on a CPU for example, to try
            templates. The references fuse nothing; without this option Inductor compiles those operators.
        report: True prints the report of each graph that is compiled to stderr, a callable is called with it.
        progress: True prints a line to stderr after each measurement, a callable is called with it.
        store: where measurements are kept for later processes: True for the user's cache folder, a path for another
            folder, False for nowhere. Without measuring, what it knows of a shape goes before the rules; what comes
            with the package does in any case.
        lock: a lock file (`stof tune MODEL --lock FILE`), whose choices are reproduced with nothing measured; what does
            not fit is reported, and left to the rules.

    Raises:
        ArgumentError: a value that is none of these.
        LockFileError: a lock that cannot be read.
    """

    effort: str = "none"
    budget_s: float | None = None
    cuda_graphs: bool | str = False
    deterministic: bool = False
    fold: bool = False
    references: bool = False
    report: bool | Callable[[FusionReport], object] = False
    progress: bool | Callable[[Progress], object] = False
    store: bool | str | Path = True
    lock: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.effort, str) or self.effort not in EFFORTS:
            raise ArgumentError(f"effort {shown(self.effort)} is none of {', '.join(EFFORTS)}")
        number = isinstance(self.budget_s, int | float) and not isinstance(self.budget_s, bool)
        if self.budget_s is not None and not (number and self.budget_s > 0):
            raise ArgumentError(f"budget_s must be a positive number of seconds, got {shown(self.budget_s)}")
        if self.budget_s is not None and self.effort == "none":
            raise ArgumentError("budget_s limits measuring, and effort 'none' measures nothing; use 'quick' or 'full'")
        if not isinstance(self.cuda_graphs, bool) and not (
            isinstance(self.cuda_graphs, str) and self.cuda_graphs == WHOLE
        ):
            raise ArgumentError(f'cuda_graphs is True, False or "whole", got {shown(self.cuda_graphs)}')
        for name in ("report", "progress"):
            if not isinstance(getattr(self, name), bool) and not callable(getattr(self, name)):
                raise ArgumentError(f"{name} is True, False or a function, got {shown(getattr(self, name))}")
        if not isinstance(self.store, bool | str | Path):
            raise ArgumentError(f"store is True, False or a folder, got {shown(self.store)}")
        if self.lock is not None and not isinstance(self.lock, str | Path):
            raise ArgumentError(f"lock is the path of a lock file, got {shown(self.lock)}")
        for name in ("deterministic", "fold", "references"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is True or False, got {shown(getattr(self, name))}")
        if self.deterministic and self.effort != "none":
            raise ArgumentError(f"deterministic=True measures nothing; effort {self.effort!r} does")
        if self._lock is not None and self.effort != "none":
            raise ArgumentError(
                f"lock reproduces choices, effort {self.effort!r} searches for them; give one of the two"
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from a mapping.

        Raises:
            ArgumentError: a name that is no option, or a value it cannot have.
        """
        for name, problem in _REMOVED.items():
            if name in (options or {}):
                raise ArgumentError(f"option {name} is removed, {problem}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options or {}) - set(known))
        if unknown:
            raise ArgumentError(f"no such option: {', '.join(unknown)}; backend 'stof' takes {', '.join(known)}")
        return cls(**dict(options or {}))

    def search(self, device: torch.device) -> Search | None:
        """What the effort asks for."""
        if self.effort == "none":
            return None
        seconds, per_segment = EFFORTS[self.effort]
        seconds = self.budget_s or seconds
        return Search(
            SegmentTimer(),
            seconds,
            per_segment,
            self._shown(),
            store=self._store(device),
            compiler=compile_candidates,
        )

    def known(self, device: torch.device) -> Choices:
        """What was measured on this device before; with `deterministic` only what comes with the package."""
        folder = None if self.deterministic else self._folder()
        return known_choices(device_name(device), folder)

    def replay(self, device: torch.device) -> Replay | None:
        """The lock, if there is one."""
        return None if self._lock is None else Replay(self._lock, device_name(device), check, self._store(device))

    @functools.cached_property
    def _lock(self) -> ChoiceTable | None:
        return None if self.lock is None else read_lock(Path(self.lock))

    def _folder(self) -> Path | None:
        if isinstance(self.store, bool):
            return cache_folder() if self.store else None
        return Path(self.store)

    def _store(self, device: torch.device) -> Store | None:
        folder = self._folder()
        return None if folder is None else default_store(device, folder)

    def _shown(self) -> Callable[[Progress], object] | None:
        if callable(self.progress):
            return self.progress
        return (lambda step: print(step, file=sys.stderr)) if self.progress else None

    def tell(self, report: FusionReport) -> None:
        """Hand a report to whoever asked for it."""
        if callable(self.report):
            self.report(report)
        elif self.report:
            from rich.console import Console

            Console(stderr=True).print(report)
