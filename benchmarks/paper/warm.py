"""Compiling the cells in parallel before they are timed one after another: caches of Inductor and Triton fill."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Sequence
from functools import cache

import torch

from benchmarks.failures import first_line
from benchmarks.paper.cells import cells_of
from benchmarks.paper.experiment import Cell, Report

# What these measure while they compile would be disturbed by other processes, and kept.
_NOT_AHEAD = {"autotune", "fig3", "fig4", "fig13", "table4"}


def warm_cells(
    cells: Sequence[Cell],
    places: Sequence[int],
    parts: Sequence[str],
    models: str,
    *,
    workers: int,
    seconds: float,
    report: Report,
) -> None:
    """Run the cells at `places` once without timing, `workers` at a time; none is begun after `seconds`.

    Those that run then are waited for: a process that is ended leaves files in the caches that are not whole.
    """
    start, ends = time.monotonic(), time.time() + seconds
    jobs = [(tuple(parts), models, i, ends) for i in places if not _NOT_AHEAD & set(cells[i].parts)]
    left = 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for number, done in enumerate(pool.imap_unordered(_warm, jobs, chunksize=1)):
            left += done is None
            if done is not None:
                report(f"[{number + 1}/{len(jobs)}, {time.monotonic() - start:.0f} s] {done}")
    if left:
        report(f"{seconds:.0f} s are used: {left} of {len(jobs)} cells are not compiled ahead")


@cache
def _cells(parts: tuple[str, ...], models: str) -> list[Cell]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return cells_of(parts, models, device, lambda line: None)


def _warm(job: tuple[tuple[str, ...], str, int, float]) -> str | None:
    """What a process did, in words; None where the time was used."""
    parts, models, number, ends = job
    if time.time() > ends:
        return None
    cell = _cells(parts, models)[number]
    try:
        cell.measure(cell.rows, lambda line: None, False)
    except Exception as error:  # what fails here fails again, visibly, when it is measured
        return f"{cell.label}: {first_line(error)}"
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return cell.label
