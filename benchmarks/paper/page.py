"""The tables of `docs/paper.md`: what the STOF paper publishes next to what was measured here.

Each table is of one GPU: that whose file has most cells of the table's figures, of several the last by name. The table
of attention is of every GPU whose file has all cells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.fusion.search_ablation import SHARES, read_table
from benchmarks.paper import attention, models, motivation, selector
from benchmarks.paper.charts import ATTENTION, NATIVE, SIX, regrets
from benchmarks.paper.experiment import ABSENT, Row
from benchmarks.paper.masks import paper_masks
from benchmarks.results_io import read_results
from stof.errors import ArgumentError

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
NOT_MEASURED = "-"
# Masks of the paper's own evaluation; the others are additions.
PAPER_MASKS = ("causal", "sliding 32", "longformer", "bigbird")
# Phases of a search that the paper counts as overhead.
OVERHEAD = ("analytical model", "scheme encoding", "scheme decoding", "reward")
_STOF = ("stof",)
_COMPILED = ("native-compiled",)
# A marker, and the table, list or code line after it.
_BLOCK = re.compile(r"^<!--(\w+)-->\n(?:\n(?:[|`-].*\n)+)?", flags=re.MULTILINE)


def write_page(folder: Path, page: Path = PAGE) -> None:
    """Write the tables of the page from the result files of `python -m benchmarks paper` in a folder.

    Raises:
        ArgumentError: the folder has no result file, a file has other rows than `Row`, or the page other tables.
    """
    page.write_text(with_tables(page.read_text(encoding="utf-8"), folder), encoding="utf-8")


def with_tables(text: str, folder: Path) -> str:
    """The page's text with the table after each `<!--NAME-->` made from the result files of a folder."""
    made = tables(folder)
    named = _BLOCK.findall(text)
    if sorted(named) != sorted(made):
        raise ArgumentError(f"the page has tables {sorted(named)}, the results make {sorted(made)}")
    return _BLOCK.sub(lambda at: "\n".join((f"<!--{at[1]}-->", "", *made[at[1]], "")), text)


@dataclass(frozen=True)
class _File:
    name: str
    device: str
    rows: list[Row]

    @property
    def gpu(self) -> str:
        """`H100`."""
        return self.device.removeprefix("NVIDIA ").split()[0]

    def describe(self) -> str:
        releases = sorted({row.versions.split(",")[0].removeprefix("torch ") for row in self.rows})
        return f"- `{self.name}` (PyTorch {', '.join(releases)})"


def tables(folder: Path) -> dict[str, list[str]]:
    """Lines of Markdown by the name of the table.

    Raises:
        ArgumentError: the folder has no result file, or one holds other rows.
    """
    files = [_read(path) for path in sorted(folder.glob("*-paper.json"))]
    if not files:
        raise ArgumentError(f"{folder} has no *-paper.json")
    searches = [rows for path in sorted(folder.glob("h200-search-*.json")) if (rows := read_table(path)[0].get("rows"))]
    progress = [[file.gpu, *_progress(file.rows)] for file in files]
    found = {
        "file": [file.describe() for file in files],
        "absent": [f"- {name}: {why}" for name, why in ABSENT.items()],
        "measured": _table(["cells of figure", *_planned()], progress),
        "search": _searches(searches),
        "attention": _attention(files),
    }
    for name, (make, figures) in _TABLES.items():
        fullest = _fullest(files, figures)
        found[name] = make(fullest.rows, fullest.gpu)
    return found


def _fullest(files: Sequence[_File], figures: Sequence[str]) -> _File:
    """The file with most cells of some figures, of several the last by name."""
    return max(files, key=lambda file: (sum(len(_ours(file.rows, figure)) for figure in figures), file.name))


def _read(path: Path) -> _File:
    results = read_results(path, Row)
    # Neighbourhoods are an addition, no mask of the paper; rows without a time failed.
    rows = [row for row in results.rows if row.time and not row.mask.startswith("neighborhood")]
    return _File(path.name, str(results.meta["device"]), rows)


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join("---" for _ in headings)
    return [f"| {' | '.join(headings)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)]


def _planned() -> dict[str, int]:
    """How many cells each figure has when all are measured."""
    operators = [figure for figure, _ in motivation.OPERATORS.values()]
    sizes = len(models.SIZES)
    searched = sizes * sum(name != "vit-base" for name in models.MODELS)
    return {
        "9": len(paper_masks(torch.device("cpu"))) * len(attention.SIZES),
        "11": len(models.MODELS) * sizes,
        "12": len(models.MODELS) * sizes,
        "table4": searched,
        "3": operators.count("3") * sizes,
        "4": operators.count("4") * sizes,
        "selector": len(selector.mask_makers()) * len(selector.SHAPES),
        "unseen": len(selector.mask_makers()) * len(selector.SHAPES),
    }


def _progress(rows: Sequence[Row]) -> list[str]:
    """`measured/planned` cells of each figure."""
    return [f"{len(_ours(rows, figure))}/{count}" for figure, count in _planned().items()]


def _ours(rows: Sequence[Row], figure: str) -> list[dict[str, float]]:
    """Cells with the times of ours that the figure is about; a tuned model's comes with table 4."""
    wanted = {"12": ("stof-attention", "stof-fusion"), "13": ("stof compiling",)}
    impls = wanted.get(figure, _STOF)
    return [times for times in cells(rows, figure) if all(impl in times for impl in impls)]


def cells(rows: Iterable[Row], figure: str) -> list[dict[str, float]]:
    """Times by implementation, of every mask or model and size of a figure."""
    found: dict[tuple[str, str, int, int], dict[str, float]] = {}
    for row in rows:
        if row.figure == figure and row.time:
            found.setdefault((row.mask, row.model, row.batch, row.length), {})[row.impl] = row.time
    return list(found.values())


def ratios(found: Iterable[dict[str, float]], ours: Sequence[str], other: Sequence[str]) -> list[float]:
    """Time of the fastest of `other` over the fastest of `ours`, in every cell that has both."""
    pairs = [([times[i] for i in other if i in times], [times[i] for i in ours if i in times]) for times in found]
    return [min(theirs) / min(own) for theirs, own in pairs if theirs and own]


def _mean(values: Sequence[float], unit: str = "x") -> str:
    """Their geometric mean."""
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}{unit}" if values else NOT_MEASURED


def _mean_and_lowest(values: Sequence[float]) -> str:
    return f"{_mean(values)} ({_lowest(values)})" if values else NOT_MEASURED


def _lowest(values: Sequence[float]) -> str:
    """In three digits: 0.995 is slower, and must not read as 1.00."""
    return f"lowest {min(values):.3g}x"


def _partial_mean(values: Sequence[float], planned: int) -> str:
    """The mean, and of how many cells where some are not measured yet."""
    return _mean(values) + _part(len(values), planned)


def _part(measured: int, planned: int) -> str:
    return "" if measured in (0, planned) else f" ({measured}/{planned})"


def _range(values: Sequence[float], unit: str, digits: int) -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}{unit}" if values else NOT_MEASURED


def _attention(files: Sequence[_File]) -> list[str]:
    """A column of every GPU that has all cells; of the fullest where none has."""
    planned = _planned()["9"]
    shown = [file for file in files if len(_ours(file.rows, "9")) == planned] or [_fullest(files, ("9",))]
    published = (("1.8x", "1.6x"), ("", "4.9x"), ("", "4.8x"), ("", ""), ("", ""))
    columns = [_attention_of(file.rows) for file in shown]
    labels = columns[0].keys()
    lines = [(label, *theirs, *(c[label] for c in columns)) for label, theirs in zip(labels, published, strict=True)]
    return _table(("STOF over", "4090", "A100", *(file.gpu for file in shown)), lines)


def _attention_of(rows: Sequence[Row]) -> dict[str, str]:
    four = cells([row for row in rows if row.mask in PAPER_MASKS], "9")
    largest = cells([row for row in rows if row.mask in PAPER_MASKS and (row.batch, row.length) == (16, 4096)], "9")
    flex, flash = ATTENTION["FlexAttention"], ATTENTION["FlashAttention-2"]
    every = cells(rows, "9")
    everyone = [name for impls in ATTENTION.values() for name in impls if name not in _STOF]
    paper_baselines = [name for name in everyone if name not in ATTENTION["SDPA"]]
    return {
        "FlexAttention, 4 masks": _mean(ratios(four, _STOF, flex)),
        "FlexAttention, 4 masks, 16x4096": _mean(ratios(largest, _STOF, flex)),
        "FlashAttention-2, 4 masks, 16x4096": _mean(ratios(largest, _STOF, flash)),
        "best of the paper's baselines, 6 masks": _mean_and_lowest(ratios(every, _STOF, paper_baselines)),
        "best of these and SDPA, 6 masks": _mean_and_lowest(ratios(every, _STOF, everyone)),
    }


def _masks(rows: Sequence[Row], gpu: str) -> list[str]:
    """Speed by mask with PyTorch native as 1, as the paper draws it."""
    shown = {label: impls for label, impls in ATTENTION.items() if NATIVE not in impls}
    lines = []
    for mask in paper_masks(torch.device("cpu")):
        found = cells([row for row in rows if row.mask == mask], "9")
        speeds = [_mean(ratios(found, impls, (NATIVE,)), "") for impls in shown.values()]
        lines.append((mask, *speeds))
    return _table((f"{gpu}, native = 1", *shown), lines)


def _models(rows: Sequence[Row], gpu: str) -> list[str]:
    published = {"bert-base": 1.5, "bert-large": 1.5, "gpt2": 1.2, "llama": 1.3, "t5": 1.1, "vit-base": 1.2}
    every = cells(rows, "11")
    planned = len(models.MODELS) * len(models.SIZES)
    compared = [times for times in every if any(way in times for way in SIX)]
    ways = (*_COMPILED, *SIX)
    timed = min((sum(way in times for way in ways) for times in compared), default=len(ways))
    best = ratios(compared, _STOF, ways)
    others = (("native", "", "", (NATIVE,)), ("native, compiled", "1.3x", "1.4x", _COMPILED))
    lines = [(name, *theirs, _partial_mean(ratios(every, _STOF, impls), planned)) for name, *theirs, impls in others]
    lowest = f", {_lowest(best)}" if best else ""
    lines.append((f"best of {timed} ways", "", "", _partial_mean(best, planned) + lowest))
    for name, speed in published.items():
        largest = cells([row for row in rows if row.model == name and row.batch == 16], "11")
        lines.append((name, f"{speed}x", "", _mean(ratios(largest, _STOF, _COMPILED))))
    return _table(("STOF over", "4090", "A100", gpu), lines)


def _ablation(rows: Sequence[Row], gpu: str) -> list[str]:
    small, large = (cells([row for row in rows if row.batch == batch], "12") for batch in (1, 16))
    fusion, alone, planned = ("stof-fusion",), ("stof-attention",), len(models.MODELS)
    compared = (
        ("fusion alone over attention alone, batch 1", "1.195x", ratios(small, fusion, alone)),
        ("attention alone over native, batch 16", "2.0x", ratios(large, alone, (NATIVE,))),
        ("attention alone over native, compiled, batch 16", "", ratios(large, alone, _COMPILED)),
    )
    lines = [(label, theirs, _partial_mean(found, planned)) for label, theirs, found in compared]
    return _table(("speed-up", "A100", gpu), lines)


def _overhead(rows: Sequence[Row], gpu: str) -> list[str]:
    searches = [times for times in cells(rows, "13") if sum(times.values())]

    def most(phases: Sequence[str]) -> str:
        shares = [sum(times.get(f"stof {phase}", 0.0) for phase in phases) / sum(times.values()) for times in searches]
        return f"{max(shares):.1%}" if shares else NOT_MEASURED

    lines = (("all overhead", "<3%", most(OVERHEAD)), ("analytical model", "0.5%", most(OVERHEAD[:1])))
    return _table(("largest share of a search", "A100", gpu), lines)


def _tuning(rows: Sequence[Row], gpu: str) -> list[str]:
    seconds = [times["stof"] for times in cells(rows, "table4") if "stof" in times]
    lines = (
        ("STOF", "22.6-412.8", _range(seconds, "", 1) + _part(len(seconds), _planned()["table4"])),
        ("MCFuser", "48.8-4264.3", "absent"),
        ("Bolt", "48.8-3848.6", "absent"),
    )
    return _table(("tuning, s", "A100", gpu), lines)


def _operators(rows: Sequence[Row], gpu: str) -> list[str]:
    def ours(name: str) -> str:
        figure, _ = motivation.OPERATORS[name]
        return _range(ratios(cells([row for row in rows if row.model == name], figure), _STOF, (NATIVE,)), "x", 2)

    lines = (
        ("bias + LayerNorm", "", "", ours("bias + LayerNorm")),
        ("matmul + bias + LayerNorm", "≤16.5x", "≤39.1x", ours("matmul + bias + LayerNorm")),
        ("matmul + bias + GELU + matmul", ">2x", "<1x", ours("matmul + bias + GELU + matmul")),
    )
    return _table(("fused over separate", "4090", "A100", gpu), lines)


def _selector(rows: Sequence[Row], gpu: str) -> list[str]:
    found = {choice: (count, mean, most) for choice, count, mean, most, _ in regrets(rows)}
    wanted = (("STOF", selector.OURS), ("the paper's rules", f"Eq. 1, tau {selector.TAU:g}"))
    lines = [(name, *found.get(impl, ("0", NOT_MEASURED, NOT_MEASURED))) for name, impl in wanted]
    return _table((gpu, "cells", "mean regret", "largest"), lines)


def _unseen(rows: Sequence[Row], gpu: str) -> list[str]:
    found = ratios(cells(rows, "unseen"), _STOF, [name for name in selector.RACED if name not in _STOF])
    lowest = f"{min(found):.3g}x" if found else NOT_MEASURED
    line = ("STOF over the fastest", str(len(found)), _mean(found), lowest)
    return _table((gpu, "cells", "mean", "lowest"), [line])


def _searches(results: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Savings of each search over those of the exhaustive one: mean and minimum over the models."""
    results = [rows for rows in results if rows[0]["best_us"]]  # models with something to save
    names = dict.fromkeys(row["search"] for rows in results for row in rows if row["share"] < 1)
    lines = []
    for name in names:
        line = [name]
        for share in SHARES:
            found = [row for rows in results for row in rows if (row["search"], row["share"]) == (name, share)]
            part = [row["saved_us"] / row["best_us"] for row in found]
            line.append(f"{fmean(part):.0%} ({min(part):.0%})" if part else NOT_MEASURED)
        lines.append(line)
    return _table((f"{len(results)} models", *(f"{share:.0%} of measurements" for share in SHARES)), lines)


# How each table is made, and the figures that its rows are of.
_TABLES: dict[str, tuple[Callable[[Sequence[Row], str], list[str]], tuple[str, ...]]] = {
    "masks": (_masks, ("9",)),
    "models": (_models, ("11",)),
    "ablation": (_ablation, ("12",)),
    "overhead": (_overhead, ("13",)),
    "tuning": (_tuning, ("table4",)),
    "operators": (_operators, ("3", "4")),
    "selector": (_selector, ("selector",)),
    "unseen": (_unseen, ("unseen",)),
}
