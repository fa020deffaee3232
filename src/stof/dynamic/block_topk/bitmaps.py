"""Bitmaps of tiles of chosen blocks, which their place decides."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.kernels.bitmap_order import accumulator_order
from stof.layout import bitmaps as bits


def kept_by_place(block_m: int, width: int, columns: int, transposed: bool = False) -> Tensor:
    """What tiles of `width` columns keep: bool `[3 + 2 * width / block_m, block_m, width]`.

    The first keeps nothing. The one at `1 + 2 * place + tail` keeps what a causal mask does in tiles that begin
    `place * block_m - width` columns after their row block (at place 0 that is everything), and with a tail only
    columns before `columns`, in the tile that holds the last of them. Of the transposed mask, tiles are square.
    """
    row, column = torch.arange(block_m)[:, None], torch.arange(width)[None, :]
    keep = [torch.zeros(block_m, width, dtype=torch.bool)]
    for place in range(1 + width // block_m):
        causal = column + place * block_m - width <= row
        causal = causal.T if transposed else causal
        keep += [causal, causal & (column < columns % width)]
    return torch.stack(keep)


def bitmaps_of(block_m: int, width: int, columns: int, transposed: bool = False) -> Tensor:
    """`kept_by_place` in accumulator order, int32."""
    return accumulator_order(bits.pack(kept_by_place(block_m, width, columns, transposed)), width)
