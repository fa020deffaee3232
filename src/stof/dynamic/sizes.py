"""Sizes of the lists of dynamic plans, which never change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class DynamicSizes:
    """Sizes that never change. Rows and keys of the attention, block sizes, and leading sizes of the mask."""

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    mask_batch: int
    mask_heads: int

    @property
    def patterns(self) -> int:
        return self.mask_batch * self.mask_heads

    @property
    def row_blocks(self) -> int:
        return -(-self.q_len // self.block_m)


def int_zeros(device: torch.device) -> Callable[..., Tensor]:
    """`zeros(*shape)`, int32 on a device."""
    return partial(torch.zeros, dtype=torch.int32, device=device)
