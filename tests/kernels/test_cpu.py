"""Parts of the CPU's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stof
from stof import masks
from stof.kernels.cpu.schedule import COLUMNS, MASK_OFFSET, ROW_START, ROW_STOP, make_schedule
from stof.kernels.cpu.steps import MaskReader
from stof.layout import LayoutConfig, build_layout
from stof.testing.oracle import oracle_attention


def test_steps_share_bytes_but_not_their_shape() -> None:
    """Rows of 16 columns, of 15, and twice as many of 8 have the same bytes."""
    schedule: Any = SimpleNamespace(mask_bytes=torch.tensor([0b101, 0b11, 0xFF, 0], dtype=torch.uint8))
    reader = MaskReader(schedule, torch.float32)
    bits = (schedule.mask_bytes[:, None].int() >> torch.arange(8)) & 1
    for rows, columns in ((2, 16), (2, 15), (4, 8), (4, 3), (2, 16)):
        want = torch.where(bits.view(rows, -1)[:, :columns] == 1, 0.0, -torch.inf)
        assert torch.equal(reader.additive(0, rows, columns), want)


@pytest.mark.parametrize(
    ("rows", "calls"), [(64, [64]), (127, [64, 63]), (128, [128]), (300, [300]), (1152, [1024, 128])]
)
def test_scattered_rows_are_computed_together(rows: int, calls: list[int]) -> None:
    """In up to 1024 rows; a rest of 128 and more too. Keys that no query sees hold NaN."""
    generator = torch.Generator().manual_seed(rows)
    keep = torch.rand(rows, 520, generator=generator) < 0.1
    keep[:, 8:16] = False  # seen by none, between others
    keep[rows // 2] = False
    layout = build_layout(masks.from_dense(keep), rows, 520, LayoutConfig(64, 64, 1), device="cpu")
    schedule = make_schedule(layout)
    assert sorted((schedule.steps[:, ROW_STOP] - schedule.steps[:, ROW_START]).tolist()) == sorted(calls)
    assert bool((schedule.steps[:, MASK_OFFSET] >= 0).all())
    assert bool((schedule.steps[:, COLUMNS] <= 528).all())
    q, k, v = (torch.randn(2, 3, length, 32, generator=generator) for length in (rows, 520, 520))
    expected, _ = oracle_attention(q, k, v, keep)
    k[:, :, 8:16] = v[:, :, 8:16] = torch.nan
    out = stof.attention(q, k, v, masks.from_dense(keep))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    assert bool((out[:, :, rows // 2] == 0).all())
