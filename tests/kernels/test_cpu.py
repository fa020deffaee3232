"""Parts of the CPU's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stof.kernels.cpu.attention import _MaskReader


def test_steps_share_bytes_but_not_their_shape() -> None:
    """Rows of 16 columns, of 15, and twice as many of 8 have the same bytes."""
    schedule: Any = SimpleNamespace(mask_bytes=torch.tensor([0b101, 0b11, 0xFF, 0], dtype=torch.uint8))
    reader = _MaskReader(schedule, torch.float32)
    bits = (schedule.mask_bytes[:, None].int() >> torch.arange(8)) & 1
    for rows, columns in ((2, 16), (2, 15), (4, 8), (4, 3), (2, 16)):
        want = torch.where(bits.view(rows, -1)[:, :columns] == 1, 0.0, -torch.inf)
        assert torch.equal(reader.additive(0, rows, columns), want)
