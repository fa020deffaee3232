"""Constants of the cost model by what is picked with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stof import masks
from stof.calibration import least_squares as fit
from stof.calibration import measure as selector
from stof.calibration.constant_refinement import FACTORS, LEAST_GAIN, polish
from stof.kernels.config import KernelConfig
from stof.layout import LayoutConfig
from stof.layout.survey import survey
from stof.selection.cost_model import kernel_key
from stof.selection.device_model import DeviceModel, KernelTimes
from stof.selection.kernel_choice import KernelChoice
from stof.testing.mask_grid import Shape

LAYOUTS = [LayoutConfig(64, 64), LayoutConfig(128, 128), LayoutConfig(64, 32)]
CHOICES = [KernelChoice("block_wise", layout, None, KernelConfig(4, 3)) for layout in LAYOUTS]
LENGTHS = (512, 1024, 2048)


def shape_of(length: int) -> Shape:
    return Shape.parse(f"4,12,64,{length}")


KEYS = [kernel_key(choice, selector.call_of(shape_of(512), torch.float16)) for choice in CHOICES]


def model_of(times: list[KernelTimes]) -> DeviceModel:
    return DeviceModel("test", 132, 233_472, 2.0, 4.5e6, (2e-4, 1e-4), dict(zip(KEYS, times, strict=True)))


def measured(us: list[list[float]]) -> list[selector.Measured]:
    """Causal cells of each length, with these times of each choice."""
    rows = []
    for length, of_choices in zip(LENGTHS, us, strict=True):
        counted = survey(masks.causal(), length, length, LAYOUTS)
        for choice, time in zip(CHOICES, of_choices, strict=True):
            assert choice.layout is not None
            counts = counted.counts[choice.layout]
            sizes = f"4,12,12,64,{length},{length}"
            tiles = counts.partial.tolist(), counts.full.tolist()
            rows.append(selector.Measured("causal", sizes, "float16", choice, time, *tiles, float(counted.kept.sum())))
    return rows


def loss(rows: list[selector.Measured], model: DeviceModel) -> float:
    return sum(regret.share for regret in fit.regrets(rows, model))


def estimates(model: DeviceModel) -> list[list[float]]:
    errors_of = measured([[1.0] * len(CHOICES)] * len(LENGTHS))
    flat = [1 + error for error in fit.self_check(errors_of, model)[0]]
    return [flat[i : i + len(CHOICES)] for i in range(0, len(flat), len(CHOICES))]


TIMES = [KernelTimes(5.0, 0.5, 0.4, 1.0, 0.2, 0.6), KernelTimes(6.0, 1.8, 1.5, 1.0, 0.2, 0.6)]
TIMES.append(KernelTimes(5.0, 0.3, 0.25, 1.0, 0.2, 0.6))


def test_nothing_changes_where_picks_are_right() -> None:
    model = model_of(TIMES)
    assert polish(measured(estimates(model)), [model, model_of(TIMES[::-1])]) == model


def test_a_few_percent_decide() -> None:
    """A kernel that is estimated just faster than another, and measured just slower, is not picked afterwards."""
    model = model_of(TIMES)
    us = estimates(model)
    best, second = sorted(range(len(CHOICES)), key=us[1].__getitem__)[:2]
    # Estimates of both within 2 %.
    factor = 1.02 * us[1][best] / us[1][second]
    near = replace(TIMES[second], **{n: getattr(TIMES[second], n) * factor for n in ("item", "partial", "full")})
    model = replace(model, kernels={**model.kernels, KEYS[second]: near})
    us = estimates(model)
    assert us[1][best] < us[1][second] < 1.04 * us[1][best]
    us[1][best], us[1][second] = 1.05 * us[1][second], us[1][second]
    rows = measured(us)[len(CHOICES) : 2 * len(CHOICES)]
    assert loss(rows, model) == pytest.approx(0.05)
    polished = polish(rows, [model])
    assert loss(rows, polished) == 0.0
    changed = [key for key in KEYS if polished.kernels[key] != model.kernels[key]]
    assert len(changed) == 1


def test_constants_of_another_model_are_taken_where_they_pick_better() -> None:
    truth = model_of(TIMES)
    us = estimates(truth)
    rows = measured(us)
    slowest = max(range(len(CHOICES)), key=us[1].__getitem__)
    bold = [replace(t, item=0.01, partial=0.01, full=0.01) if i == slowest else t for i, t in enumerate(TIMES)]
    assert loss(rows, model_of(bold)) > LEAST_GAIN
    assert polish(rows, [model_of(bold), truth]) == truth


@pytest.mark.slow
@given(
    us=st.lists(st.lists(st.floats(20.0, 200.0), min_size=3, max_size=3), min_size=3, max_size=3),
    scales=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_regrets_never_grow(us: list[list[float]], scales: list[float]) -> None:
    rows = measured(us)
    first = model_of(TIMES)
    other = model_of([replace(t, full=t.full * f, partial=t.partial * f) for t, f in zip(TIMES, scales, strict=True)])

    def weighed(model: DeviceModel) -> float:
        return sum(r.share * (1 + 3 * r.share) for r in fit.regrets(rows, model))

    polished = polish(rows, [first, other])
    assert weighed(polished) <= weighed(first) + 1e-9
    ratios = [polished.kernels[k].item / first.kernels[k].item for k in KEYS]
    assert all(min(abs(ratio / factor - 1) for factor in FACTORS) < 1e-9 for ratio in ratios)


def test_kernels_that_no_model_knows_keep_their_guess() -> None:
    model = model_of(TIMES)
    unknown = replace(model, kernels={KEYS[0]: TIMES[0]})
    rows = measured(estimates(model))
    assert set(polish(rows, [unknown]).kernels) == {KEYS[0]}
