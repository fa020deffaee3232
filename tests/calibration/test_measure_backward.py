"""Constants of the backward kernels: measured after a check, fitted, and picked by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stof.calibration import measure_backward, measurement_file
from stof.calibration.measure import call_of
from stof.calibration.measure_backward import MeasuredTile, fit, from_json, measure, summary
from stof.cli.main import app
from stof.errors import ArgumentError
from stof.selection.backward_tilings import BackwardTile, tiles_of
from stof.selection.device_model import DEFAULT_DEVICE, BackwardTimes, load_model, model_from_dict, model_to_dict
from tests.interpreter import IN_INTERPRETER

BASE = load_model(DEFAULT_DEVICE)
SHAPE = "1,4,4,64,512,512"


def rows_of(times: dict[str, BackwardTimes]) -> list[MeasuredTile]:
    """What a GPU with these constants would measure."""
    rows = []
    model = replace(BASE, backward=times)
    for shape in (SHAPE, "1,32,8,64,1024,1024"):
        call = call_of(measure_backward.Shape.parse(shape), torch.bfloat16)
        for mask in ("full", "causal", "window512", "strided"):
            for kernel in ("dq", "dkv"):  # the third has one tile size and no splits: too few rows
                for tile in tiles_of(kernel, call):
                    for split in (0, 2, 6):
                        row = MeasuredTile(mask, shape, "bfloat16", kernel, tile, None, split, 0.0)
                        us = float(measure_backward._load(row, model, times[row.key]) @ times[row.key].weights())
                        rows.append(replace(row, us=us + 2 * BASE.launch))
    return rows


def test_constants_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_backward, "_statistics_us", lambda row, model: 2 * model.launch)
    times = {key: BackwardTimes(3.0, 1.0, 0.8, 2.0) for key in BASE.backward}
    rows = rows_of(times)
    fitted = fit(rows, BASE)
    for key in {row.key for row in rows}:
        torch.testing.assert_close(fitted.backward[key].weights(), times[key].weights(), rtol=0.05, atol=0.05)
    assert summary(rows, fitted).endswith("regret 0.00% (mean), 0.0% (worst)")
    worse = replace(BASE, backward={key: BackwardTimes(9.0, 0.1, 3.0, 0.0) for key in BASE.backward})
    assert summary(rows, worse) > summary(rows, fitted)


def test_models_without_these_constants_have_the_default_ones() -> None:
    values = model_to_dict(replace(BASE, device="another"))
    assert model_from_dict(values).backward == BASE.backward
    del values["backward"]
    assert model_from_dict(values).backward == BASE.backward


@IN_INTERPRETER
def test_wrong_variants_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_backward, "tiles_of", lambda kernel, call: (BackwardTile(16, 16, 4, 2),))
    monkeypatch.setattr(measure_backward, "SPLITS", (0, 1))
    lines: list[str] = []
    kept: list[int] = []
    cell = ("causal", "1,2,1,16,32,32", "float32")
    rows = measure([cell], torch.device("cpu"), None, lines.append, lambda rows: kept.append(len(rows)))
    # Both kernels, contiguous and gathered columns, in one piece and split.
    assert [(row.kernel, row.slab, row.split_tiles) for row in rows] == [
        (kernel, slab, split) for kernel in ("dq", "dkv") for slab in (None, 1) for split in (0, 1)
    ]
    assert all(row.us > 0 for row in rows)
    assert kept == [8]
    monkeypatch.setitem(measure_backward._TOLERANCE, torch.float32, -1.0)
    assert measure([cell], torch.device("cpu"), None, lines.append, len) == []
    assert "WRONG" in lines[-1]


def test_files_and_the_command(tmp_path: Path) -> None:
    rows = rows_of(BASE.backward)[:12]
    measurement_file.write(tmp_path / "rows.json", BASE, rows)
    assert from_json(measurement_file.read([tmp_path / "rows.json"])[1]) == rows
    command = ["tune", "--backward", "--measurements", str(tmp_path / "rows.json")]
    done = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "model.json")])
    assert done.exit_code == 0, done.output
    assert "kernels" in (tmp_path / "model.json").read_text()
    with pytest.raises(ArgumentError, match="no measurements of stof tune --device --backward"):
        from_json([{"a": 1}])
