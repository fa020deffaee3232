"""Masks in the forms that peers take: functions of positions, sorted key intervals of each row, and lists of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stof.masks.rules import RandomBlocks
from stof.testing.mask_grid import NEIGHBORHOOD, GridMask, document_ends, grid_sides, window_of

# FlexAttention's form: whether the score at `(batch, head, query, key)` is kept.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WrittenMask(GridMask):
    """A mask with the function that FlexAttention's users would write for it.

    Attributes:
        mod: that function, for a length and a device.
    """

    mod: Callable[[int, torch.device], MaskMod] | None = None


def mask_mod(grid_mask: GridMask, q_len: int, kv_len: int, device: torch.device) -> MaskMod:
    """A mask of the grid, of `decode_masks` or a `WrittenMask`, written the way FlexAttention's users would."""
    if isinstance(grid_mask, WrittenMask) and grid_mask.mod is not None:
        return grid_mask.mod(q_len, device)
    if grid_mask.unmasked:
        return lambda b, h, q, k: q >= 0
    if grid_mask.at_end:
        offset, left = kv_len - q_len, grid_mask.window and grid_mask.window[0]
        assert left is not None
        return lambda b, h, q, k: (q + offset >= k) & (q + offset - k <= left)
    return _MASK_MODS[grid_mask.name](q_len, kv_len, device)


def _longformer_mod(q_len: int, kv_len: int, device: torch.device) -> MaskMod:
    del kv_len, device
    w = window_of(q_len)
    return lambda b, h, q, k: ((q - k).abs() <= w) | (q < w) | (k < w)


def random_blocks(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """BigBird's random key blocks, int64 `[ceil(q_len / 64), 3]` (fewer columns for fewer than 3 key blocks)."""
    rows = torch.arange(-(-q_len // 64), device=device)
    return RandomBlocks(3, 64, 0).choose(rows, -(-kv_len // 64))


def _bigbird_mod(q_len: int, kv_len: int, device: torch.device) -> MaskMod:
    chosen = random_blocks(q_len, kv_len, device)
    table = torch.zeros(len(chosen), -(-kv_len // 64), dtype=torch.bool, device=device).scatter_(1, chosen, True)
    local = _longformer_mod(q_len, kv_len, device)
    return lambda b, h, q, k: local(b, h, q, k) | table[q // 64, k // 64]


def documents_mod(ends: list[int], device: torch.device) -> MaskMod:
    """Causal documents with these cumulative lengths, from 0."""
    lengths = torch.tensor(ends).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    return lambda b, h, q, k: (q >= k) & (document[q] == document[k])


def _neighborhood_mod(q_len: int, kv_len: int, device: torch.device) -> MaskMod:
    width, reach = grid_sides(q_len)[1], NEIGHBORHOOD // 2
    return lambda b, h, q, k: ((q // width - k // width).abs() <= reach) & ((q % width - k % width).abs() <= reach)


_MASK_MODS: dict[str, Callable[[int, int, torch.device], MaskMod]] = {
    "causal": lambda s, t, d: lambda b, h, q, k: q >= k,
    "window512": lambda s, t, d: lambda b, h, q, k: (q >= k) & (q - k < 512),
    "longformer": _longformer_mod,
    "bigbird": _bigbird_mod,
    "strided": lambda s, t, d: lambda b, h, q, k: (q >= k) & ((q - k < 128) | (k % 128 >= 120)),
    "dilated": lambda s, t, d: lambda b, h, q, k: (q >= k) & ((q - k) % 16 == 0) & (q - k < 2048),
    "documents": lambda s, t, d: documents_mod(document_ends(s, s // 8), d),
    "neighborhood": _neighborhood_mod,
}


@dataclass(frozen=True)
class BlockLists:
    """Key blocks of every row of query blocks, ascending; FlexAttention's and FlashAttention-4's form.

    Attributes:
        partial_count, full_count: int32 `[R]`.
        partial_index, full_index: int32 `[R, C]`; the first `count` entries of a row are block columns.
        block: rows and columns of one block.
    """

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor
    block: tuple[int, int]


def block_lists(keep: Tensor, block_q: int, block_kv: int) -> BlockLists:
    """Lists of the blocks of `keep` (bool `[Sq, Skv]`) that keep some, or all, of their scores.

    A block that sticks out of the matrix is never full.
    """
    q_len, kv_len = keep.shape
    padded = F.pad(keep, (0, -kv_len % block_kv, 0, -q_len % block_q))
    blocks = padded.view(padded.shape[0] // block_q, block_q, padded.shape[1] // block_kv, block_kv)
    some, every = blocks.any(3).any(1), blocks.all(3).all(1)

    def listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.argsort(wanted.to(torch.int8), dim=1, descending=True, stable=True)
        return wanted.sum(1, dtype=torch.int32), index.to(torch.int32).contiguous()

    return BlockLists(*listed(some & ~every), *listed(every), block=(block_q, block_kv))


def intervals(keep: Tensor) -> Tensor:
    """Each row's kept keys as half-open intervals `[0, F0) u [F1, F2) u ...`: int32 `[F, Sq]`, F odd.

    This is the form of cuDNN's interval masks. Intervals are sorted and disjoint; rows with fewer of them end in
    empty ones at `kv_len`.
    """
    q_len, kv_len = keep.shape
    padded = F.pad(keep, (1, 1))
    row, begin = (padded[:, 1:] & ~padded[:, :-1]).nonzero(as_tuple=True)
    end = (padded[:, :-1] & ~padded[:, 1:]).nonzero(as_tuple=True)[1]
    runs = torch.bincount(row, minlength=q_len)
    place = torch.arange(len(row), device=keep.device) - (runs.cumsum(0) - runs)[row]
    # The first interval has no begin of its own: a run that does not start at key 0 moves on by one place.
    place = place + (~keep[:, 0])[row]
    places = int(place.max()) + 1 if len(row) else 1
    out = torch.full((2 * places - 1, q_len), kv_len, dtype=torch.int32, device=keep.device)
    out[0] = 0
    later = place > 0
    out[2 * place[later] - 1, row[later]] = begin[later].to(torch.int32)
    out[2 * place, row] = end.to(torch.int32)
    return out
