"""What layouts are built from: the mask of one batch entry and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.masks import Mask


@dataclass(frozen=True, eq=False)
class HeadMask:
    """The mask of one batch entry and head between given lengths.

    Attributes:
        mask: of all batch entries and heads.
        q_len, kv_len: lengths in tokens.
        b, h: batch entry and head.
        order: int64 `[q_len]`, which original row stands at each position, on the device; None where rows keep theirs.
        device: where to evaluate it.
    """

    mask: Mask
    q_len: int
    kv_len: int
    b: int
    h: int
    order: Tensor | None
    device: torch.device

    def row_blocks(self, block_m: int) -> int:
        return -(-self.q_len // block_m)
