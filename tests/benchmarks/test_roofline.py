"""`benchmarks/attention/roofline.py`: floors of a result file's cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stof
from benchmarks.attention import roofline
from benchmarks.attention.report import cells_of
from benchmarks.attention.run import Row
from stof.testing.mask_grid import GRID, Shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = Shape(2, 3, 3, 64, 512, 512)


def row(mask: str, impl: str, us: float) -> Row:
    density = float(GRID[mask].mask(SHAPE.q_len).to_dense(SHAPE.q_len).double().mean())
    return Row(mask, 2, 3, 3, 64, 512, 512, "float16", density, impl, us, None, None, 0.0)


def test_the_largest_of_three() -> None:
    (cell,) = cells_of([row("causal", "stof", 10.0)])
    needed = 4 * 2 * 3 * 64 * cell.density * 512 * 512
    moved = 2 * 2 * 3 * 64 * 4 * 512
    assert roofline.floor(cell, 1e30, 1e30, 7.0) == (7.0, "start")
    assert roofline.floor(cell, 1e30, moved / 9, 7.0) == (pytest.approx(9.0), "bytes")
    us, what = roofline.floor(cell, needed / 20, moved / 9, 7.0)
    # No layout of the triangle computes less than the scores that are needed; that of 64 x 64 tiles an eighth more.
    assert what == "matrix"
    assert 20.0 <= us <= 20.0 * 9 / 8


def test_the_rate_is_the_fastest_full_call() -> None:
    cells = cells_of([row("full", "stof", 12.0), row("full", "peer", 8.0), row("causal", "peer", 1.0)])
    assert roofline.fastest(cells, 64) == pytest.approx(4 * 2 * 3 * 64 * 512 * 512 / 8.0)
    assert roofline.fastest(cells, 128) == 0.0


def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    monkeypatch.setattr(stof, "attention", wrong)
    with pytest.raises(AssertionError):
        roofline.measured(torch.device("cpu"))


def test_a_full_mask_reaches_the_floor_it_sets(tmp_path: Path) -> None:
    rows = [row("full", "stof", 100.0), row("full", "peer", 120.0), row("causal", "stof", 80.0)]
    results, known = tmp_path / "results.json", tmp_path / "floors.json"
    results.write_text(json.dumps({"meta": {}, "rows": [vars(r) for r in rows]}))
    known.write_text(json.dumps({"copy_gb_s": 4000.0, "start_us": {"tile of 64": 1.0}}))
    lines = roofline.table(results, known).splitlines()
    assert lines[2] == "| full | B2 H3 D64 S512 | 100.0 | 100.0 | matrix | 100% | 1.20x | 1.20x |"
    # The causal cell has no peer beside it.
    assert lines[3:] == ["", lines[-1]]
    assert lines[-1].startswith("- dense-like: 100% of the floor (geometric mean of 1 cells); 1.20x over the best peer")
