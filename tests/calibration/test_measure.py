"""Fitting the cost model: synthetic times give back the constants they were made with, and no regret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stof import LayoutConfig, attention, masks
from stof.calibration import least_squares as fit
from stof.calibration import measure as selector
from stof.calibration import measurement_file
from stof.cli.tune_device import tune_device
from stof.errors import ArgumentError
from stof.kernels.config import KernelConfig
from stof.layout.survey import survey
from stof.selection import KernelChoice
from stof.selection.cost_model import estimate, kernel_key
from stof.selection.device_model import DEFAULT_DEVICE, DeviceModel, KernelTimes, load_model
from stof.testing.attention_check import AttentionProblem, Expected
from stof.testing.mask_grid import Shape

MASKS = {
    "causal": masks.causal(),
    "full": masks.full(),
    "window": masks.sliding_window(300),
    "longformer": masks.longformer(40, 40),
    "strided": masks.strided(64, 64, 8),
}
LAYOUT = LayoutConfig(64, 64)
CHOICES = [KernelChoice("block_wise", LAYOUT, None, KernelConfig(4, 3, 128, split_tiles=split)) for split in (0, 8)]
TRUTH = KernelTimes(item=5.0, partial=1.5, full=0.8, merge=2.5, collect=0.3, solo=0.5)


def model_with(times: KernelTimes) -> DeviceModel:
    key = kernel_key(CHOICES[0], selector.call_of(Shape.parse("1,12,64,512"), torch.float16))
    return DeviceModel("test", 132, 233_472, 2.0, 4.5e6, (2e-4, 1e-4), {key: times})


@pytest.fixture(scope="module")
def measured() -> list[selector.Measured]:
    rows = []
    for name, mask in MASKS.items():
        for batch, length in ((1, 512), (2, 1024), (8, 1024), (16, 2048)):
            shape = Shape.parse(f"{batch},12,64,{length}")
            counted = survey(mask, length, length, [LAYOUT])
            counts = counted.counts[LAYOUT]
            for choice in CHOICES:
                us = estimate(choice, selector.call_of(shape, torch.float16), counted, model_with(TRUTH))
                assert us is not None
                sizes = f"{batch},12,12,64,{length},{length}"
                kept = float(counted.kept.sum())
                row = (name, sizes, "float16", choice, us, counts.partial.tolist(), counts.full.tolist(), kept)
                rows.append(selector.Measured(*row))
    return rows


def test_fit_gives_back_the_constants(measured: list[selector.Measured]) -> None:
    start = KernelTimes(item=3.0, partial=1.0, full=1.0, merge=1.0, collect=0.2, solo=0.9)
    fitted = fit.fit(measured, model_with(start))
    errors, regrets = fit.self_check(measured, fitted)
    assert max(errors) < 0.1
    assert max(regret.share for regret in regrets) < 0.05
    (times,) = fitted.kernels.values()
    assert times.full == pytest.approx(TRUTH.full, rel=0.15)
    assert times.partial == pytest.approx(TRUTH.partial, rel=0.15)


def test_fit_of_the_row_wise_kernel() -> None:
    """Heads of 64 and 128, rows with few keys and many."""
    truth, rows = model_with(TRUTH), []
    choice = KernelChoice("row_wise", LayoutConfig(64, 64, 1))
    for head_dim in (64, 128):
        for keys in (1, 20):
            shape = Shape.parse(f"4,12,{head_dim},1024")
            counted = survey(masks.sliding_window(keys - 1), 1024, 1024, [LAYOUT])
            us = estimate(choice, selector.call_of(shape, torch.float16), counted, truth)
            assert us is not None
            sizes, kept = f"4,12,12,{head_dim},1024,1024", float(counted.kept.sum())
            rows.append(selector.Measured("window", sizes, "float16", choice, us, [], [], kept))
    fitted = fit.fit(rows, replace(truth, row_wise=(1e-3, 1e-3)))
    assert fitted.row_wise == pytest.approx(truth.row_wise, rel=1e-6)


def test_shapes_are_left_out_of_the_fit_that_they_test(measured: list[selector.Measured]) -> None:
    some = [row for row in measured if row.mask in ("causal", "window", "longformer")]
    errors, regrets = fit.cross_validate(some, model_with(replace(TRUTH, item=4.0)))
    assert len(errors) == len(some)
    assert {regret.mask for regret in regrets} == {row.mask for row in some}
    assert "regret" in fit.summary(errors, regrets)


def test_a_full_tile_costs_no_less_than_half_a_partial_one(measured: list[selector.Measured]) -> None:
    """Where no measurement has a full tile, and the constants to start from are wrong."""
    rows = [replace(row, full=[[0] * len(row.full[0])]) for row in measured if row.mask == "strided"]
    fitted = fit.fit(rows, model_with(replace(TRUTH, full=1e-3)))
    (times,) = fitted.kernels.values()
    assert times.full >= times.partial / 2


def test_the_longest_row_of_a_measurement_is_in_its_survey(measured: list[selector.Measured]) -> None:
    row = replace(measured[0], kept=1000.0, longest_row=300)
    kept = selector.survey_of(row).kept
    assert float(kept.max()) == 300
    assert float(kept.sum()) == pytest.approx(1000, rel=1e-5)
    assert float(selector.survey_of(replace(row, longest_row=0)).kept.max()) < 300


def test_measurements_survive_a_file(measured: list[selector.Measured], tmp_path: Path) -> None:
    """With the device's name and bandwidth, so that they can be fitted on another machine."""
    file, device = tmp_path / "rows.json", replace(model_with(TRUTH), device="Another GPU", bytes_per_us=1.5e6)
    measurement_file.write(file, device, measured)
    model, values = measurement_file.read([file, file])
    assert selector.from_json(values) == measured * 2
    assert (model.device, model.multiprocessors, model.bytes_per_us, model.stands_in_for) == (
        "Another GPU",
        132,
        1.5e6,
        "",
    )
    assert model.kernels == load_model(DEFAULT_DEVICE).kernels
    other = tmp_path / "other.json"
    measurement_file.write(other, replace(device, device="NVIDIA H200"), measured)
    with pytest.raises(ArgumentError, match="measured on NVIDIA H200, not on Another GPU"):
        measurement_file.read([file, other])


def test_new_measurements_replace_those_of_the_same_candidates(measured: list[selector.Measured]) -> None:
    new = [replace(row, us=7.0) for row in measured[:3]]
    rows = selector.replaced(measured, new)
    assert len(rows) == len(measured)
    assert [row.us for row in rows[-3:]] == [7.0] * 3
    assert rows[:-3] == measured[3:]


def test_every_cell_is_kept_as_soon_as_it_is_measured(
    measured: list[selector.Measured], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that is killed loses one cell; what a file holds of others stays."""
    cells = list(dict.fromkeys(row.cell for row in measured))
    path = tmp_path / "rows" / "measured.json"
    path.parent.mkdir()
    device = model_with(TRUTH)
    measurement_file.write(path, device, measured)

    def cell(mask: str, shape: Shape, *rest: object) -> list[selector.Measured]:
        if mask == cells[-1][0]:
            raise KeyboardInterrupt
        sizes = f"{shape.batch},{shape.heads},{shape.kv_heads},{shape.head_dim},{shape.q_len},{shape.kv_len}"
        return [replace(row, us=7.0) for row in measured if row.cell == (mask, sizes, "float16")]

    monkeypatch.setattr(selector, "measure_cell", cell)
    monkeypatch.setattr(selector, "CELLS", [(mask, shape) for mask, shape, _ in cells])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measurement_file, "measured_device", lambda: device)
    with pytest.raises(KeyboardInterrupt):
        tune_device(True, [path], None, "", "", "", None, 1, False)
    rows = selector.from_json(measurement_file.read([path])[1])
    assert len(rows) == len(measured)
    assert {row.cell for row in rows if row.us == 7.0} == {cell for cell in cells if cell[0] != cells[-1][0]}


def test_cells_can_be_drawn() -> None:
    for mask, sizes in selector.CELLS:
        shape = Shape.parse(sizes)
        assert selector.cell_mask(mask, shape).name == mask.removesuffix(selector.BIAS)


def test_cells_with_a_bias() -> None:
    """What is measured is checked against attention with that bias, and fitted to kernels that take one."""
    shape = Shape.parse("2,2,16,40")
    problem = AttentionProblem.draw(selector.cell_mask("causal+bias", shape), shape, torch.device("cpu"), torch.float32)
    assert selector.cell_bias("causal", problem) is None
    bias = selector.cell_bias("causal+bias", problem)
    assert bias is not None
    assert bias.shape == (1, 2, 40, 40)
    out = attention(problem.q, problem.k, problem.v, problem.grid_mask.mask(40), bias=bias)
    assert Expected.of(problem, 64, bias).error(out) < 1e-5
    assert Expected.of(problem, 16, bias).error(out) < 1e-5
    assert Expected.of(problem, 64).error(out) > 0.1
    choice = KernelChoice("block_wise")
    row = selector.Measured("causal+bias", "2,2,2,16,40,40", "float16", choice, 1.0, [[0]], [[0]], 1.0)
    assert selector.call_of_row(row).has_bias
    assert not selector.call_of_row(replace(row, mask="causal")).has_bias
