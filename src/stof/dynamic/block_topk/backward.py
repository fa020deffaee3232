"""Lists for gradients under the best key blocks of each query block.

Tiles lie within blocks, so only which tiles are listed differs from step to step. What a listed tile keeps follows from
its place: all of it or, on the diagonal of a causal mask and at the end of the columns, one of four bitmaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.dynamic.backward_lists import BackwardLists, empty_tiles, store_counts, transposed_sizes
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.triton.backward_tiles import BackwardTiles
from stof.layout import bitmaps as bits

if TYPE_CHECKING:
    from stof.runtime.launch import Launch

# Kinds of tiles: not listed, full, and partial with bitmap `kind - FIRST_BITMAP`.
NOT_LISTED, FULL, FIRST_BITMAP = 0, 1, 2
# Tiles looked at once.
_COPY = 64


@dataclass(frozen=True, eq=False)
class LayoutFill:
    """What fills the lists of one layout.

    Attributes:
        kinds: int8 `[R, C]`, kinds of the tiles if their blocks are taken.
        last_column: int32 `[R]`, the last column that some row of a row block may keep.
        launch: of `list_tiles`, bound to the lists.
    """

    kinds: Tensor
    last_column: Tensor
    launch: Launch


def block_backward_lists(
    problem: DynamicSizes, pattern_of: Tensor, blocks: int, block_size: int, causal: bool, size: int
) -> BackwardLists:
    """Lists with room for a number of blocks.

    Args:
        problem: sizes of the attention.
        pattern_of: see `BackwardTiles`, on the lists' device.
        blocks: how many are chosen at most.
        block_size, causal: of the mask.
        size: rows and columns of a tile, which divide `block_size`.
    """
    sizes, transposed = transposed_sizes(problem, size)
    tiles = blocks * (block_size // size) ** 2
    dq = _lists(sizes, pattern_of, tiles, causal, transposed=False)
    dkv = _lists(transposed, pattern_of, tiles, causal, transposed=True)
    return BackwardLists(dq[0], dkv[0], (dq[1], dkv[1]))


def _lists(
    problem: DynamicSizes, pattern_of: Tensor, tiles: int, causal: bool, *, transposed: bool
) -> tuple[BackwardTiles, LayoutFill]:
    from stof.dynamic.block_topk.triton_kernels import list_tiles
    from stof.runtime.launch import Launch

    size, device = problem.block_m, pattern_of.device
    zeros = int_zeros(device)
    kinds, last_column, keep = tile_kinds(problem, causal, transposed)
    lists = empty_tiles(
        problem, pattern_of, zeros(tiles + 2, size), zeros(tiles + 2),
        accumulator_order(bits.pack(keep), size).to(device), contiguous=True, last_first=not transposed,
    )  # fmt: skip
    kinds, last_column = kinds.to(device), last_column.to(device)
    launch = Launch(
        list_tiles,
        problem.patterns * problem.row_blocks,
        (last_column, lists.row_block_ptr, lists.partial_count, lists.columns, lists.tile_bitmap),
        tuple(kinds.shape),
        (FULL, FIRST_BITMAP, size, _COPY),
    )
    return lists, LayoutFill(kinds, last_column, launch)


def fill_block_backward(lists: BackwardLists, chosen: Tensor, count: Tensor, bad: Tensor, block_size: int) -> None:
    """List the tiles of chosen blocks.

    Args:
        lists: from `block_backward_lists`.
        chosen, count, bad: see `BlockBuffers`.
        block_size: of the mask.
    """
    patterns, query_blocks, k = chosen.shape
    key_blocks = -(-lists.dkv.rows // block_size)
    listed = torch.arange(k, device=chosen.device) < count[..., None]
    # What is not listed goes to a column that is cut off.
    place = torch.where(listed, chosen, key_blocks).long()
    taken = torch.zeros(patterns, query_blocks, key_blocks + 1, dtype=torch.bool, device=chosen.device)
    taken = taken.scatter_(2, place, True)[..., :key_blocks]
    in_block = block_size // lists.dq.block_m
    taken = taken.repeat_interleave(in_block, 1).repeat_interleave(in_block, 2)
    is_nan = (bad != 0)[:, None]
    for tiles, fill, blocks in zip((lists.dq, lists.dkv), lists.tables, (taken, taken.transpose(1, 2)), strict=True):
        rows, columns = fill.kinds.shape
        kinds = torch.where(blocks[:, :rows, :columns], fill.kinds, NOT_LISTED).contiguous()
        partial, full = (kinds >= FIRST_BITMAP).sum(2), (kinds == FULL).sum(2)
        store_counts(tiles, partial, full, is_nan.expand_as(partial))
        fill.launch(kinds)


def tile_kinds(problem: DynamicSizes, causal: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What square tiles keep if their blocks are taken.

    Returns:
        `LayoutFill.kinds` and `LayoutFill.last_column`, and the bitmaps, bool `[4, size, size]`: everything, columns
        that exist, the causal mask on the diagonal, and both.
    """
    size, rows, columns = problem.block_m, problem.q_len, problem.kv_len
    row, column = torch.arange(-(-rows // size))[:, None], torch.arange(-(-columns // size))[None, :]
    at_end = ((column + 1) * size > columns).expand(len(row), -1)
    on_diagonal = (row == column) & causal
    partial = at_end | on_diagonal
    kinds = torch.where(partial, FIRST_BITMAP + at_end.int() + 2 * on_diagonal.int(), FULL)
    last_column = torch.full((len(row),), columns - 1)
    if causal:
        kinds = kinds.masked_fill(column < row if transposed else column > row, NOT_LISTED)
        if not transposed:
            last_column = torch.minimum(last_column, ((row[:, 0] + 1) * size).clamp(max=rows) - 1)
    i = torch.arange(size)
    exists = (i < columns % size).expand(size, size)
    diagonal = i[None, :] >= i[:, None] if transposed else i[None, :] <= i[:, None]
    everything = torch.ones(size, size, dtype=torch.bool)
    keep = torch.stack([everything, exists, diagonal, diagonal & exists])
    return kinds.to(torch.int8), last_column.int(), keep
