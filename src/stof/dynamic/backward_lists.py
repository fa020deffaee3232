"""Lists that the backward kernels read under dynamic plans: both layouts of the present mask, of fixed size.

dQ reads lists of the mask, dK and dV lists of the transposed mask. Both have square tiles. The gradients of a row block
that could not be listed are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.kernels.implementation import tensors_of
from stof.kernels.triton.backward_tiles import ITEM, BackwardTiles


@dataclass(frozen=True, eq=False)
class TritonLists:
    """Lists of the mask for dQ, and of the transposed mask for dK and dV.

    Attributes:
        dq, dkv: what the kernels read.
        tables: other memory that `fill` writes.
        fill: writes the lists; takes the mask's tensors. Without a reference to the buffers that hold it, which would
            be a cycle and keep their memory.
    """

    dq: BackwardTiles
    dkv: BackwardTiles
    tables: tuple[Tensor, ...]
    fill: Callable[[Tensor], None]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        for part in (self.dq, self.dkv, self.tables):
            yield from tensors_of(part)


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
        contiguous: whether the columns of a full tile are consecutive.
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
        full_contiguous=contiguous,
        has_nan=True,
    )
