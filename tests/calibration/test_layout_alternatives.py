"""The layouts a mask could have: every one listed once, estimated without a GPU, measured only when right."""

from __future__ import annotations

import pytest
import torch

from stof import LayoutConfig, masks
from stof.calibration import layout_alternatives as alternatives
from stof.calibration.layout_alternatives import estimated, estimated_reordered, measured
from stof.errors import KernelError
from stof.layout import build_layout, statistics
from stof.layout.orders.search import CLUSTERED
from stof.selection.device_model import load_model
from stof.testing.mask_grid import Shape

CPU = torch.device("cpu")
SHAPE = Shape(2, 2, 2, 32, 512, 512)
ROWS = torch.randperm(512, generator=torch.Generator().manual_seed(0))
SHUFFLED = masks.from_dense(masks.sliding_window(63).to_dense(512)[0, 0][ROWS].contiguous())


def test_estimates_list_every_layout_once_fastest_first() -> None:
    found = estimated(SHUFFLED, SHAPE, torch.float16)
    keys = [(one.choice.implementation, one.choice.layout, one.choice.row_order) for one in found]
    assert len(set(keys)) == len(keys)
    times = [one.estimate_us for one in found if one.estimate_us is not None]
    assert times == sorted(times)
    assert {one.choice.row_order for one in found} == {None, CLUSTERED}
    assert {one.choice.implementation for one in found} == {"hopper", "block_wise", "row_wise"}
    for one in found:
        layout = one.choice.layout
        if layout is not None and one.choice.row_order is None and layout.slab is None:
            own = statistics(build_layout(SHUFFLED, 512, 512, layout))
            assert one.computed_over_needed == pytest.approx(
                own.computed_over_needed
            )  # lengths divide: no unused slots


@pytest.mark.parametrize(
    "mask",
    [
        SHUFFLED,
        masks.dilated_window(255, dilation=8),
        masks.causal(),
        masks.padding([0, 300]) & masks.per_head([masks.causal(), masks.dilated_window(511, dilation=4)]),
    ],
    ids=["shuffled", "dilated", "causal", "per batch and head"],
)
def test_measured_on_a_cpu(mask: masks.Mask) -> None:
    found = measured(mask, SHAPE, torch.float32, CPU, rounds=1)
    assert {one.choice.row_order for one in found} == {
        None,
        *mask.row_orders(SHAPE.q_len, SHAPE.kv_len),
        *({CLUSTERED} if mask is SHUFFLED else ()),
    }
    assert all(not one.note for one in found)
    times = [one.measured_us or 0.0 for one in found]
    assert times == sorted(times)
    assert min(times) > 0


def test_what_is_wrong_or_fails_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = alternatives.runner

    def wrong(inputs, plan, choice):  # type: ignore[no-untyped-def]
        if plan.permuted_rows:
            raise KernelError("does not compile")
        return lambda: real(inputs, plan, choice)() + 0.1

    monkeypatch.setattr(alternatives, "runner", wrong)
    found = measured(SHUFFLED, SHAPE, torch.float32, CPU, rounds=1)
    assert [one.measured_us for one in found] == [None, None]
    notes = {one.choice.row_order: one.note for one in found}
    assert notes[CLUSTERED] == "does not compile"
    assert "wrong, relative error" in notes[None]


def test_reordering_counts_its_passes() -> None:
    """Contiguous tiles become as dense as gathered ones, and the passes over q, k, v and the output are in the time."""
    again = estimated_reordered(SHUFFLED, SHAPE, torch.float16)
    assert again
    assert all(one.reordered and one.choice.row_order is None for one in again)
    contiguous = [one for one in again if one.choice.layout == LayoutConfig(64, 64)]
    own = [one for one in estimated(SHUFFLED, SHAPE, torch.float16) if one.choice.layout == LayoutConfig(64, 64)]
    assert contiguous[0].computed_over_needed < 0.6 * own[0].computed_over_needed
    bytes_ = 2 * 4 * 2 * SHAPE.batch * SHAPE.heads * SHAPE.q_len * SHAPE.head_dim
    model = load_model(alternatives.DEFAULT_GPU)
    assert min(one.estimate_us or 0.0 for one in again) > bytes_ / model.bytes_per_us + 4 * model.launch
    assert estimated_reordered(masks.causal(), SHAPE, torch.float16) == []
