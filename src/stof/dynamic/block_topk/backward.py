"""Lists for gradients under the best key blocks of each query block.

Tiles lie within blocks, so only which tiles are listed differs from step to step. What a listed tile keeps follows from
its place: all of it or, on the diagonal of a causal mask and at the end of the columns, one of three bitmaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.dynamic.backward_lists import BackwardLists, empty_tiles
from stof.dynamic.block_topk.bitmaps import bitmaps_of
from stof.dynamic.sizes import int_zeros
from stof.kernels.triton.backward_tiles import BackwardTiles

if TYPE_CHECKING:
    from stof.dynamic.block_topk.buffers import BlockBuffers
    from stof.runtime.launch import Launch

# Tiles that `list_tiles` looks at in one step.
_COPY = 64


def block_backward_lists(buffers: BlockBuffers, size: int) -> BackwardLists:
    """Lists without tiles, with room for those of all blocks that may be chosen.

    Args:
        buffers: what says which blocks are chosen.
        size: rows and columns of a tile; a divisor of the block size.

    Raises:
        ArgumentError: more tiles than 32-bit offsets reach.
    """
    chosen, count, block_size = buffers.chosen, buffers.count, buffers.block_size
    patterns, query_blocks, k = chosen.shape
    key_blocks = -(-buffers.problem.kv_len // block_size)
    # In each row, the last place is that of blocks that are not chosen.
    taken = torch.zeros(patterns, query_blocks, key_blocks + 1, dtype=torch.int8, device=chosen.device)
    layouts = [_lists(buffers, size, taken, transposed) for transposed in (False, True)]

    def fill(*_: Tensor) -> None:
        is_chosen = torch.arange(k, device=chosen.device) < count[..., None]
        taken.zero_().scatter_(2, torch.where(is_chosen, chosen, key_blocks).long(), 1)
        for tiles, count_tiles, write_tiles in layouts:
            count_tiles()
            tiles.row_block_ptr[1:].cumsum_(0)
            write_tiles()

    return BackwardLists(layouts[0][0], layouts[1][0], (taken,), fill)


def _lists(buffers: BlockBuffers, size: int, taken: Tensor, transposed: bool) -> tuple[BackwardTiles, Launch, Launch]:
    """Lists of one layout, and the launches that count their tiles and write them."""
    from stof.dynamic.block_topk.triton_kernels import list_tiles
    from stof.runtime.launch import Launch

    problem, per_block = buffers.problem.in_squares(size, transposed=transposed), buffers.block_size // size
    room = buffers.chosen.numel() * per_block**2
    problem.check_offsets(room, size, 0)
    zeros = int_zeros(taken.device)
    bitmaps = bitmaps_of(size, size, problem.kv_len, transposed).to(taken.device)
    tiles = empty_tiles(
        problem, buffers.work.pattern_of, zeros(room + 2, size), zeros(room + 2), bitmaps, contiguous=True,
        last_first=not transposed,
    )  # fmt: skip
    strides = (taken.stride(0), taken.stride(2), taken.stride(1)) if transposed else taken.stride()
    count_tiles, write_tiles = (
        Launch(
            list_tiles,
            problem.patterns * problem.row_blocks,
            (taken, buffers.bad, tiles.row_block_ptr, tiles.partial_count, tiles.columns, tiles.tile_bitmap),
            (*strides, problem.row_blocks, problem.q_len, problem.kv_len),
            (per_block, buffers.causal, transposed, size, _COPY, write),
        )
        for write in (False, True)
    )
    return tiles, count_tiles, write_tiles
