"""Masks in the forms that peers take: sorted key intervals of each row, and lists of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
