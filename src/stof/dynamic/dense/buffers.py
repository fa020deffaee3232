"""Buffers for dense masks: bool tensors and bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.dynamic.backward_lists import TritonLists, empty_tiles
from stof.dynamic.buffers import OVERFLOW, WorkBuffers, empty_work
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.kernels.triton.backward_tiles import NAN_ROW_BLOCK, BackwardTiles
from stof.kernels.triton.work_list import Work
from stof.runtime.cache_keys import on_grid

# Columns handled at once, in lists and of a dense mask.
_COPY, _COLUMNS = 1024, 128


@dataclass(frozen=True, eq=False)
class DenseLists:
    """Lists of one layout of a dense mask: the forward and the backward kernels read the same tiles.

    Attributes:
        problem: sizes of the layout.
        work: what the block-wise kernel reads; not filled for the backward kernels.
        tiles: what the backward kernels read.
        owner: int32 `[tiles, 2]`, see `triton_kernels.dense_bitmaps`.
    """

    problem: DynamicSizes
    work: Work
    tiles: BackwardTiles
    owner: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseBuffers(WorkBuffers):
    """Lists for a dense mask.

    Attributes:
        lists: of the mask.
        density: largest share of all scores that tiles may take, None for all.
    """

    lists: DenseLists
    density: float | None

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self.lists.owner, self.lists.tiles.row_block_ptr, self.lists.tiles.partial_count)

    def fill(self, *tensors: Tensor) -> None:
        """Write the work of a dense mask, and the lists for its gradients.

        Args:
            tensors: bool `[B | 1, H | 1, Sq, Skv]`, or bits of it, int32 `[B | 1, H | 1, Sq, ceil(Skv / 32)]`.
        """
        (keep,) = tensors
        keep = keep if keep.dtype == torch.int32 else keep.view(torch.uint8)
        _list_tiles(self.lists, keep, self.flags, in_work=True)
        for lists in self.backward.values():
            lists.fill(keep)

    def backward_lists(self, size: int) -> TritonLists:
        """Lists with room for the same share of all scores, of the mask and of the transposed mask."""
        flags, device = self.flags, self.flags.device
        of_mask, of_transposed = (self.problem.in_squares(size, transposed=transposed) for transposed in (False, True))
        is_filled = of_mask == self.problem
        dq = self.lists if is_filled else _empty_lists(of_mask, self.density, device)
        dkv = _empty_lists(of_transposed, self.density, device, transposed=True)

        def fill(keep: Tensor) -> None:
            if not is_filled:
                _list_tiles(dq, keep, flags)
            _list_tiles(dkv, keep, flags, transposed=True)

        return TritonLists(dq.tiles, dkv.tiles, (dq.owner, dkv.owner), fill)


def dense_buffers(problem: DynamicSizes, density: float | None, device: torch.device) -> DenseBuffers:
    """Lists for tiles that hold a share `density` of all scores; None for all of them."""
    lists = _empty_lists(problem, density, device)
    return DenseBuffers(
        problem=problem, work=lists.work, flags=int_zeros(device)(problem.patterns), lists=lists, density=density
    )


def _empty_lists(
    problem: DynamicSizes, density: float | None, device: torch.device, transposed: bool = False
) -> DenseLists:
    per_row = -(-problem.kv_len // problem.block_n)
    # Columns are gathered: two tiles of a row block, one of each kind, may be less than full.
    count = problem.row_blocks * (per_row + 1)
    if density is not None:
        count = min(count, max(1, int(problem.row_blocks * per_row * density)))
    count *= problem.patterns
    work = empty_work(problem, device, tiles=count, bitmaps=count)
    tiles = empty_tiles(
        problem, work.pattern_of, work.partial_columns, work.partial_bitmap, work.bitmaps, contiguous=False,
        last_first=not transposed,
    )  # fmt: skip
    return DenseLists(problem, work, tiles, int_zeros(device)(count, 2))


def _list_tiles(
    lists: DenseLists, keep: Tensor, flags: Tensor, *, in_work: bool = False, transposed: bool = False
) -> None:
    """Write the tiles of a mask, or of the transposed mask.

    Args:
        lists: written to.
        keep: of the mask, bytes or words `[B | 1, H | 1, ...]`.
        flags: int32 `[P]`, of patterns without room for all tiles; their row blocks that have none become NaN.
        in_work: whether `DenseLists.work` is filled.
        transposed: whether tiles are those of the transposed mask.
    """
    from stof.dynamic.dense import triton_kernels as kernels

    problem, work, tiles, device = lists.problem, lists.work, lists.tiles, flags.device
    form = kernels.BYTES if keep.dtype == torch.uint8 else kernels.ROW_BITS if transposed else kernels.COLUMN_BITS
    keep = keep.transpose(2, 3) if transposed else keep
    strides = [0 if size == 1 else stride for size, stride in zip(keep.shape, keep.stride(), strict=True)]
    count = problem.patterns * problem.row_blocks
    column_blocks = -(-problem.kv_len // _COLUMNS)
    classes = torch.empty(count, problem.kv_len, dtype=torch.int8, device=device)
    on_grid(kernels.dense_classes, (count * column_blocks,))(
        keep, classes, *strides, problem.mask_heads, problem.row_blocks, column_blocks, problem.q_len,
        problem.kv_len, form.value, problem.block_m, _COLUMNS,
    )  # fmt: skip
    width = problem.block_n
    full_columns, any_columns = ((classes >= least).sum(1) for least in (2, 1))
    full = torch.div(full_columns, width, rounding_mode="floor")
    partial = torch.div(any_columns - full * width + width - 1, width, rounding_mode="floor")
    needed = partial + full
    without_room = needed.cumsum(0) > len(lists.owner)
    by_pattern = (problem.patterns, problem.row_blocks)
    flags.bitwise_or_(torch.where(without_room.view(by_pattern).any(1), OVERFLOW, 0).int())
    torch.cumsum(torch.where(without_room, 0, needed), 0, dtype=torch.int32, out=tiles.row_block_ptr[1:])
    tiles.partial_count.copy_(torch.where(without_room, NAN_ROW_BLOCK, partial))
    # Longest first.
    place = needed.view(by_pattern).argsort(dim=1, descending=True, stable=True).argsort(1).int() if in_work else needed
    lists.owner.fill_(-1)
    on_grid(kernels.dense_fill, (count,))(
        tiles.row_block_ptr, tiles.partial_count, place, classes, work.items, work.first_columns, tiles.columns,
        tiles.tile_bitmap, lists.owner, problem.row_blocks, problem.kv_len, in_work, problem.block_n, _COPY,
    )  # fmt: skip
    on_grid(kernels.dense_bitmaps, (len(lists.owner),))(
        keep, lists.owner, tiles.columns, tiles.bitmaps, *strides, problem.mask_heads, problem.row_blocks,
        problem.q_len, form.value, problem.block_m, problem.block_n,
    )  # fmt: skip
