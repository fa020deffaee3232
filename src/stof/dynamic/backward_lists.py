"""Lists that the backward kernels read under dynamic plans: both layouts of the present mask, of fixed size.

dQ reads lists of the mask, dK and dV lists of the transposed mask. Both have square tiles. The gradients of a row block
that could not be listed are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.kernels.implementation import tensors_of
from stof.kernels.triton.backward_tiles import ITEM, NAN_ROW_BLOCK, BackwardTiles


@dataclass(frozen=True, eq=False)
class BackwardLists:
    """Lists of the mask for dQ, and of the transposed mask for dK and dV.

    Attributes:
        dq, dkv: what the kernels read.
        tables: what fills them, and its tensors.
    """

    dq: BackwardTiles
    dkv: BackwardTiles
    tables: Any

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        for part in (self.dq, self.dkv, self.tables):
            yield from tensors_of(part)


def transposed_sizes(problem: DynamicSizes, size: int) -> tuple[DynamicSizes, DynamicSizes]:
    """Sizes of the mask and of the transposed mask in tiles of `size` x `size`."""
    masks = problem.mask_batch, problem.mask_heads
    return (
        DynamicSizes(problem.q_len, problem.kv_len, size, size, *masks),
        DynamicSizes(problem.kv_len, problem.q_len, size, size, *masks),
    )


def empty_tiles(
    problem: DynamicSizes,
    pattern_of: Tensor,
    columns: Tensor,
    tile_bitmap: Tensor,
    bitmaps: Tensor,
    *,
    contiguous: bool,
    last_first: bool,
) -> BackwardTiles:
    """Lists of one layout, without tiles.

    Args:
        problem: the layout's sizes.
        pattern_of, columns, tile_bitmap, bitmaps: fields of the result.
        contiguous: whether columns of a full tile follow each other.
        last_first: whether the last row blocks, which under a causal mask have most keys, run first.
    """
    device = columns.device
    zeros = int_zeros(device)
    row_blocks = problem.row_blocks
    items = zeros(row_blocks, len(ITEM))
    numbers = torch.arange(row_blocks, device=device)
    items[:, ITEM.row_block] = numbers.flip(0) if last_first else numbers
    items[:, ITEM.chunks] = 1
    return BackwardTiles(
        pattern_of=pattern_of,
        items=items,
        splits=zeros(0, 3),
        row_block_ptr=zeros(problem.patterns * row_blocks + 1),
        partial_count=zeros(problem.patterns * row_blocks),
        columns=columns,
        tile_bitmap=tile_bitmap,
        bitmaps=bitmaps,
        row_order=zeros(0),
        block_m=problem.block_m,
        block_n=problem.block_n,
        rows=problem.q_len,
        row_blocks=row_blocks,
        slots=0,
        has_partial=True,
        has_full=True,
        full_contiguous=contiguous,
        has_nan=True,
    )


def store_counts(tiles: BackwardTiles, partial: Tensor, full: Tensor, is_nan: Tensor) -> None:
    """Write how many tiles row blocks have.

    Args:
        tiles: written to.
        partial, full: integers `[P, R]`.
        is_nan: bool `[P, R]`, row blocks that cannot be listed: they have no tiles, and NaN as gradients.
    """
    counts = torch.where(is_nan, 0, partial + full)
    torch.cumsum(counts.flatten(), 0, dtype=torch.int32, out=tiles.row_block_ptr[1:])
    tiles.partial_count.copy_(torch.where(is_nan, NAN_ROW_BLOCK, partial).flatten())
