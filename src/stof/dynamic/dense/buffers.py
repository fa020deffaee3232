"""Buffers for dense masks: bool tensors and bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.dynamic.backward_lists import BackwardLists, both_sizes, empty_tiles, store_counts
from stof.dynamic.buffers import OVERFLOW, WorkBuffers, empty_work
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.runtime.cache_keys import on_grid

# Columns handled at once, in lists and of a dense mask.
_COPY, _COLUMNS = 1024, 128


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseBuffers(WorkBuffers):
    """Lists for a dense mask.

    Attributes:
        owner: int32 `[tiles, 2]`, see `triton_kernels.dense_bitmaps`.
        density: largest share of all scores that tiles may take, None for all.
    """

    owner: Tensor
    density: float | None

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self.owner)

    def backward_lists(self, size: int) -> BackwardLists:
        """Lists with room for the same share of all scores, of the mask and of the transposed mask."""
        both = [dense_buffers(sizes, self.density, self.flags) for sizes in both_sizes(self.problem, size)]
        dq, dkv = (
            empty_tiles(
                part.problem, part.work.pattern_of, part.work.partial_columns, part.work.partial_bitmap,
                part.work.bitmaps, contiguous=False, last_first=part is both[0],
            )
            for part in both
        )  # fmt: skip
        return BackwardLists(dq, dkv, tuple(both))


def dense_buffers(problem: DynamicSizes, density: float | None, flags: Tensor) -> DenseBuffers:
    """Lists for tiles that hold a share `density` of all scores; None for all of them.

    Args:
        problem: the sizes.
        density: see `DenseBuffers`.
        flags: see `WorkBuffers`, on the lists' device.
    """
    device = flags.device
    per_row = -(-problem.kv_len // problem.block_n)
    # Columns are gathered: two tiles of a row block, one of each kind, may be less than full.
    tiles = problem.row_blocks * (per_row + 1)
    if density is not None:
        tiles = min(tiles, max(1, int(problem.row_blocks * per_row * density)))
    tiles *= problem.patterns
    zeros = int_zeros(device)
    return DenseBuffers(
        problem=problem,
        work=empty_work(problem, device, tiles=tiles, bitmaps=tiles),
        flags=flags,
        owner=zeros(tiles, 2),
        density=density,
    )


def fill_dense(buffers: DenseBuffers, keep: Tensor) -> None:
    """Write the work of a dense mask, and the lists for its gradients.

    Args:
        buffers: from `dense_buffers`.
        keep: bool `[B | 1, H | 1, Sq, Skv]`, or bits of it, int32 `[B | 1, H | 1, Sq, ceil(Skv / 32)]`.
    """
    keep = keep if keep.dtype == torch.int32 else keep.view(torch.uint8)
    _list_tiles(buffers, keep)
    for lists in buffers.backward.values():
        of_mask, of_transposed = lists.tables
        store_counts(lists.dq, *_list_tiles(of_mask, keep))
        store_counts(lists.dkv, *_list_tiles(of_transposed, keep, transposed=True))


def _list_tiles(buffers: DenseBuffers, keep: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Write the tiles of a mask, or of the transposed mask; bytes or words `[B | 1, H | 1, ...]`.

    Returns:
        Partial tiles, full tiles, and whether there is no room for them; all `[P, R]`.
    """
    from stof.dynamic.dense import triton_kernels as kernels

    problem, work, device = buffers.problem, buffers.work, buffers.flags.device
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
    shape = (problem.patterns, problem.row_blocks)
    full_columns, any_columns = ((classes >= least).sum(1).view(shape) for least in (2, 1))
    full = torch.div(full_columns, problem.block_n, rounding_mode="floor")
    partial = _up(any_columns - full * problem.block_n, problem.block_n)
    problems = int_zeros(device)(problem.patterns)
    begin, full_begin, place, poisoned = _placed(partial, full, problems != 0, buffers.tiles)
    _flag(buffers, problems, poisoned)
    rows = torch.stack([place, begin, partial, full_begin, full, poisoned], -1).int()
    buffers.owner.fill_(-1)
    on_grid(kernels.dense_fill, (count,))(
        rows, classes, work.items, work.first_columns, work.partial_columns, work.partial_bitmap, buffers.owner,
        problem.row_blocks, problem.kv_len, problem.block_n, _COPY,
    )  # fmt: skip
    on_grid(kernels.dense_bitmaps, (buffers.tiles,))(
        keep, buffers.owner, work.partial_columns, work.bitmaps, *strides, problem.mask_heads, problem.row_blocks,
        problem.q_len, form.value, problem.block_m, problem.block_n,
    )  # fmt: skip
    return partial, full, poisoned


def _placed(partial: Tensor, full: Tensor, bad: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the tiles of each row block go.

    Args:
        partial, full: int64 `[P, R]`, tiles of each kind, at most.
        bad: bool `[P]`, patterns that are not computed.
        tiles: room there is.

    Returns:
        First partial tile, first full tile, position in the item list (longest first), and whether the row block has no
        buffers or belongs to a bad pattern; all `[P, R]`.
    """
    needed = torch.where(bad[:, None], 0, partial + full)
    end = needed.flatten().cumsum(0).view_as(needed)
    poisoned = bad[:, None] | (end > tiles)
    begin = torch.where(poisoned, 0, end - needed)
    order = needed.argsort(dim=1, descending=True, stable=True)
    steps = torch.arange(needed.shape[1], device=needed.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, steps)
    return begin, begin + torch.where(poisoned, 0, partial), place, poisoned


def _flag(buffers: WorkBuffers, problems: Tensor, poisoned: Tensor) -> None:
    """Remember what was wrong."""
    overflow = (poisoned & (problems == 0)[:, None]).any(1)
    buffers.flags.bitwise_or_(problems | torch.where(overflow, OVERFLOW, 0).int())


def _up(count: Tensor, step: int) -> Tensor:
    return torch.div(count + step - 1, step, rounding_mode="floor")
