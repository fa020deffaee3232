"""Bitmaps: one bit per score, 32 columns to an int32 word, lowest bit first."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

_LITTLE_ENDIAN = sys.byteorder == "little"
# Bits unpacked at once: bounds the memory of what looks at all bitmaps of a layout.
_AT_ONCE = 2**25


def words(columns: int) -> int:
    """int32 words that hold one row of `columns` bits."""
    return -(-columns // 32)


def pack(keep: Tensor) -> Tensor:
    """Bool `[..., N]` to int32 `[..., ceil(N / 32)]`; bit `c % 32` of word `c // 32` is column `c`."""
    columns = keep.shape[-1]
    padded = words(columns) * 32
    if padded != columns:
        keep = torch.nn.functional.pad(keep, (0, padded - columns))
    if keep.device.type == "cpu":
        packed = torch.from_numpy(np.packbits(keep.contiguous().numpy(), axis=-1, bitorder="little"))
    else:
        # Made on the device: a copy from the host could not be captured in a CUDA graph.
        place = torch.arange(8, dtype=torch.uint8, device=keep.device)
        weights = torch.ones_like(place) << place
        bytes_ = keep.contiguous().view(torch.uint8).view(*keep.shape[:-1], padded // 8, 8)
        packed = (bytes_ * weights).sum(-1, dtype=torch.uint8)
    # Through one dimension: an empty or one-word last dimension can have a stride that no view as words accepts.
    return _little_endian(packed).reshape(-1).view(torch.int32).view(*keep.shape[:-1], padded // 32)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Inverse of `pack`: int32 `[..., W]` to bool `[..., columns]`."""
    # Through one dimension, as in `pack`.
    bytes_ = packed.reshape(-1).view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * 4)
    bytes_ = _little_endian(bytes_)
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(bytes_.numpy(), axis=-1, count=columns, bitorder="little"))
        return bits.view(torch.bool)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (bytes_[..., None] >> shifts) & 1
    return bits.flatten(-2)[..., :columns].to(torch.bool)


def _little_endian(bytes_: Tensor) -> Tensor:
    """The bytes of int32 words `[..., 4 * W]`, lowest first, from or to the order of this machine."""
    return bytes_ if _LITTLE_ENDIAN else bytes_.view(*bytes_.shape[:-1], -1, 4).flip(-1).flatten(-2)


def live_columns(bitmaps: Tensor, columns: int) -> Tensor:
    """Bool `[U, columns]`: columns that some row of a bitmap `[U, rows, W]` keeps."""
    live = [unpack(piece, columns).any(1) for piece in pieces(bitmaps)]
    return torch.cat(live) if live else torch.zeros(0, columns, dtype=torch.bool, device=bitmaps.device)


def pieces(bitmaps: Tensor) -> list[Tensor]:
    """Bitmaps `[U, rows, W]` in parts that may be unpacked at once; none where there are none."""
    if not len(bitmaps):
        return []
    return list(bitmaps.split(max(1, _AT_ONCE // (bitmaps[0].numel() * 32))))
