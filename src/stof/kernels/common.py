"""What kernels of all devices share: buffers, softmax of rows without keys, pattern ranges, chunks of row blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.quantization import FP8


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised `[B, H, Sq, Dv]` in q's memory order, so that `[B, S, H, D]` callers need no copy.

    Of q's dtype, but bfloat16 where that has 8 bits.
    """
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)


def empty_gradient(x: Tensor) -> Tensor:
    """Uninitialised memory for the gradient of a tensor: in its memory order if the last dimension is contiguous."""
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def softmax_and_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[..., n]` and log-sum-exp `[...]` over the last dimension; a row of -inf gives zeros and -inf.

    Not `exp(scores - lse)`: at scores of 10^5 the rounding of lse alone is 0.8 % in float32.
    """
    lse = torch.logsumexp(scores, dim=-1)
    return torch.softmax(scores, dim=-1).masked_fill_((lse == -torch.inf)[..., None], 0.0), lse


def pattern_ranges(pattern_of: list[list[int]], group: int) -> list[tuple[slice, slice, int]]:
    """`(batches, heads, pattern)` rectangles that cover `pattern_of [B, H]`.

    Head ranges are whole groups of `group` query heads (the heads of one key head), or lie inside one group.
    """
    out: list[tuple[slice, slice, int]] = []
    first = 0
    for b in range(1, len(pattern_of) + 1):
        if b < len(pattern_of) and pattern_of[b] == pattern_of[first]:
            continue
        row, start = pattern_of[first], 0
        while start < len(row):
            stop = start + 1
            while stop < len(row) and row[stop] == row[start]:
                stop += 1
            if start % group:
                stop = min(stop, start - start % group + group)
            elif stop - start > group:
                stop -= (stop - start) % group
            out.append((slice(first, b), slice(start, stop), row[start]))
            start = stop
        first = b
    return out


# A partial tile costs 1.09 full ones (measured on an H200 with bitmaps in registers, D = 128).
PARTIAL_TILE_COST = 1.09
# Bytes of K and V that heads side by side may keep in the L2 cache together (an H200 has 50 MB).
L2_SHARE = 32 * 2**20


def heads_in_l2(heads: int, bytes_per_head: int, share: int) -> int:
    """How many of `heads` run side by side so that their K and V take at most `share` bytes; it divides `heads`.

    Args:
        heads: (batch, query head) pairs of the call.
        bytes_per_head: K and V of one; where query heads share a key head, that one's bytes divided among them.
    """
    most = min(heads, max(1, share // max(1, bytes_per_head)))
    return next(count for count in range(most, 0, -1) if heads % count == 0)


def parts_of(tiles: Tensor, split_tiles: int) -> Tensor:
    """Chunks that each row block is cut into, given its number of tiles; at least 1, at most `split_tiles` tiles each.

    0 `split_tiles` never cuts.
    """
    if not split_tiles:
        return torch.ones_like(tiles)
    return torch.div(tiles + split_tiles - 1, split_tiles, rounding_mode="floor").clamp(min=1)


class Chunks(NamedTuple):
    """Row blocks cut into chunks of about equal numbers of tiles; int64 `[I]` for `I` chunks.

    Attributes:
        row_block: the row block of each chunk, of all patterns.
        number: of this chunk in its row block.
        parts: chunks of its row block, 1 where it is not cut.
        begin, end: its tiles among those of its row block.
        first_slot: chunks of cut row blocks of the pattern before this one's.
        slots: chunks of all cut row blocks of a pattern, at most.
    """

    row_block: Tensor
    number: Tensor
    parts: Tensor
    begin: Tensor
    end: Tensor
    first_slot: Tensor
    slots: int


def chunks_of(tiles: Tensor, split_tiles: int, patterns: int) -> Chunks:
    """Cut row blocks, whose tiles are given as int64 `[patterns * row blocks]`; see `parts_of`."""
    parts = parts_of(tiles, split_tiles)
    row_block = torch.repeat_interleave(torch.arange(len(tiles), device=tiles.device), parts)
    number = torch.arange(len(row_block), device=tiles.device) - (parts.cumsum(0) - parts)[row_block]
    of_row_block = parts[row_block]
    begin, end = (torch.div(n * tiles[row_block], of_row_block, rounding_mode="floor") for n in (number, number + 1))
    slots = torch.where(parts > 1, parts, 0).view(patterns, -1)
    first_slot = (slots.cumsum(1) - slots).flatten()[row_block]
    return Chunks(row_block, number, of_row_block, begin, end, first_slot, int(slots.sum(1).max()))
