"""Bitmaps in the order in which the threads of a tensor core's accumulator hold scores."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.layout import bitmaps as bits
from stof.layout.limits import MOST_WORDS


def accumulator_order(bitmaps: Tensor, block_n: int) -> Tensor:
    """Row-major bitmaps `[U, block_m, words]` in the order of `Work.bitmaps`.

    Raises:
        UnfitLayoutError: more than kernels can address.
    """
    if len(bitmaps) * bitmaps.shape[1] * 4 >= MOST_WORDS:
        raise UnfitLayoutError(f"{len(bitmaps)} different bitmaps are more than 32-bit offsets reach")
    out = torch.zeros(max(1, len(bitmaps)), bitmaps.shape[1], 4, dtype=torch.int32, device=bitmaps.device)
    start = 0
    for piece in bits.pieces(bitmaps):
        keep = bits.unpack(piece, block_n).unflatten(-1, (block_n // 8, 4, 2))
        out[start : start + len(piece)] = bits.pack(keep.transpose(2, 3).flatten(3))[..., 0]
        start += len(piece)
    return out
