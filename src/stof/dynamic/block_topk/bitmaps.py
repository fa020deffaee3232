"""Bitmaps of tiles of chosen blocks, which their place decides."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK
from stof.layout import bitmaps as bits

# The offset of a tile is its first query less its first key, a multiple of 64. Causal masks keep all of it from 128 on.
OFFSETS = (128, 64, 0)


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


def tile_masks(queries: int, keys: int) -> Tensor:
    """What tiles keep: bool `[2 * 3, 128, queries]`.

    Row `3 * has_tail + n` is a causal mask at offset `OFFSETS[n]`; with a tail, of the first `keys % 128` keys alone.
    """
    key, query = torch.arange(KEYS_OF_BLOCK)[:, None], torch.arange(queries)
    causal = torch.stack([key <= query + offset for offset in OFFSETS])
    return torch.cat([causal, causal & (key < keys % KEYS_OF_BLOCK)])
