"""Sizes of the lists of dynamic plans, which never change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stof.errors import ArgumentError


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

    def in_squares(self, size: int, *, transposed: bool) -> DynamicSizes:
        """Sizes of the mask, or of the transposed mask, in tiles of `size` x `size`."""
        lengths = (self.kv_len, self.q_len) if transposed else (self.q_len, self.kv_len)
        return DynamicSizes(*lengths, size, size, self.mask_batch, self.mask_heads)

    def check_offsets(self, tiles: int, width: int, bitmaps: int) -> None:
        """Raise ArgumentError for more tiles, with `width` listed columns each, than 32-bit offsets reach."""
        if max((tiles + 2) * width, bitmaps * self.block_m * 4) >= 2**31:
            raise ArgumentError(
                f"{tiles} tiles of {self.block_m}x{self.block_n} are more than a plan can hold; give a smaller "
                "`density`, or fewer indices, blocks, batch entries or heads"
            )


def int_zeros(device: torch.device) -> Callable[..., Tensor]:
    """`zeros(*shape)`, int32 on a device."""
    return partial(torch.zeros, dtype=torch.int32, device=device)
