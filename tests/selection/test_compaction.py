"""Compacted columns as the selector sees them: offered where they differ, weighed with their copy, taken if it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stof import LayoutConfig, masks
from stof.calibration import least_squares as fit
from stof.calibration import measure as selector
from stof.kernels.config import KernelConfig
from stof.layout.survey import Survey, TileCounts
from stof.masks import Mask
from stof.selection import KernelChoice, candidates, choose, failures
from stof.selection.cost_model import compaction_us, estimate, kernel_key
from stof.selection.device_model import load_model
from stof.selection.gpu_choices import gpu_choices
from stof.testing.mask_grid import Shape, grid_mask
from tests.selection.fakes import GPU, Geometry, call_of, fake_gpu

COMPACTED = LayoutConfig(64, 64, 1, compact_columns=True)
H200 = load_model("NVIDIA H200")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    failures.clear()
    fake_gpu(monkeypatch)


def picked(mask: Mask, length: int, **changes: Any) -> LayoutConfig | None:
    call = call_of(q_len=length, kv_len=length, **changes)
    return choose(call, GPU, Geometry(mask, length, length), "hopper").layout


def test_long_strided_masks_take_it_and_others_do_not() -> None:
    long = picked(grid_mask("strided").mask(8192), 8192, head_dim=128, heads=32)
    assert long is not None
    assert long.compact_columns
    for name, length in (("causal", 2048), ("window512", 2048), ("longformer", 2048), ("strided", 512)):
        layout = picked(grid_mask(name).mask(length), length)
        assert layout is not None
        assert not layout.compact_columns


def test_offered_only_where_something_is_compacted() -> None:
    def offered(mask: Mask, fixed: LayoutConfig | None = None) -> list[str]:
        found = candidates(call_of(q_len=2048, kv_len=2048), GPU, Geometry(mask, 2048, 2048, fixed))
        return [
            str(c) for c in found if c.choice and c.choice.layout and c.choice.layout.compact_columns and not c.refusals
        ]

    assert not offered(masks.causal())
    strided = offered(masks.strided(128, 128, 8))
    assert any("64x64 tiles, scattered columns compacted" in text and "us estimated" in text for text in strided)
    # A plan that keeps to such a layout runs on it, whatever it holds.
    for mask in (masks.causal(), masks.strided(128, 128, 8)):
        assert {text.split()[0] for text in offered(mask, COMPACTED)} >= {"hopper", "block_wise"}


def test_rows_in_another_order_have_none() -> None:
    geometry = Geometry(masks.causal(), 2048, 2048, row_orders=("remainder 2",))
    for choice in gpu_choices(call_of(q_len=2048, kv_len=2048), geometry, "hopper", "remainder 2"):
        assert choice.layout is not None
        assert not choice.layout.compact_columns


@pytest.mark.parametrize("mask_heads", [1, 12])
def test_the_copy_is_part_of_the_estimate(mask_heads: int) -> None:
    """Constants of contiguous tiles, and the bytes of the keys and values compacted, in and out."""
    choice = KernelChoice("hopper", COMPACTED, None, KernelConfig(4, 3))
    plain = replace(choice, layout=COMPACTED.contiguous())
    call = call_of(q_len=2048, kv_len=2048, kv_heads=4, batch=3)
    assert kernel_key(choice, call) == kernel_key(plain, call)
    tiles = torch.full((mask_heads, 32), 4)
    nothing = torch.zeros_like(tiles)
    counts = {COMPACTED: TileCounts(tiles, nothing, 640), COMPACTED.contiguous(): TileCounts(tiles, nothing)}
    survey = Survey(counts, torch.full((mask_heads, 2048), 64), 1, mask_heads)
    times = [estimate(each, call, survey, H200) for each in (choice, plain)]
    assert times[0] is not None
    assert times[1] is not None
    heads = 4 if mask_heads == 1 else 12
    copied = 2 * 2 * 3 * heads * 640 * 128 / H200.bytes_per_us
    assert times[0] - times[1] == pytest.approx(compaction_us(choice, call, survey, H200))
    assert compaction_us(choice, call, survey, H200) - copied == pytest.approx(1.5)
    assert compaction_us(plain, call, survey, H200) == 0
    assert compaction_us(replace(choice, implementation="block_wise"), call, survey, H200) == 0


def test_fitting_takes_the_copy_off() -> None:
    """Measurements with and without a copy, of one kernel, give back its constants."""
    rows = []
    for length in (1024, 2048, 4096):
        shape = Shape.parse(f"4,12,64,{length}")
        geometry = Geometry(grid_mask("strided").mask(length), length, length)
        for layout in (COMPACTED, COMPACTED.contiguous()):
            choice = KernelChoice("hopper", layout, None, KernelConfig(4, 3))
            survey = geometry.survey((layout,), None)
            counts = survey.counts[layout]
            us = estimate(choice, selector.call_of(shape, torch.float16), survey, H200)
            assert us is not None
            lists = (counts.partial.tolist(), counts.full.tolist(), float(survey.kept.sum()), counts.compacted_keys)
            rows.append(selector.Measured("strided", f"4,12,12,64,{length},{length}", "float16", choice, us, *lists))
    assert any(row.compacted_keys for row in rows)
    errors, _ = fit.self_check(rows, fit.fit(rows, H200))
    assert max(errors) < 0.05
