"""Work for the best key blocks of each query block: choosing them, and lists for whichever kernels read them.

Choosing is one launch. Each kernel that calls run on has lists of its own, which updates fill from what was chosen,
from the first call on that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts
from stof.plans.buffers import DynamicSizes, WorkBuffers, empty_work
from stof.plans.hopper_block_topk import block_counts, block_refusals, fits_blocks, make_block_tiles
from stof.plans.hopper_buffers import FilledTiles

if TYPE_CHECKING:
    from stof.runtime.launch import Launch

# Tiles written at once.
_TILES_AT_ONCE = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockBuffers(WorkBuffers):
    """Lists for `k` key blocks of `block_size` keys to a query block.

    Attributes:
        causal: whether queries see no later keys.
        chosen: int32 `[P, query blocks, k]`, key blocks taken, ascending.
        count: int32 `[P, query blocks]`, how many.
        bad: int32 `[P]`, what is wrong with the present scores.
    """

    k: int
    block_size: int
    causal: bool
    chosen: Tensor
    count: Tensor
    bad: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self.chosen, self.count, self.bad)

    def work_launches(self) -> tuple[Launch, ...]:
        return (_filling(self),)

    def hopper_refusals(self) -> tuple[str, ...]:
        return block_refusals(self)

    def hopper_serves(self, config: LayoutConfig) -> bool:
        return fits_blocks(config, self.block_size)

    def counts(self, config: LayoutConfig) -> TileCounts:
        return block_counts(self, config)

    def hopper_tiles(self, config: LayoutConfig, split_tiles: int) -> FilledTiles:
        return make_block_tiles(self, config, split_tiles)


def block_buffers(problem: DynamicSizes, k: int, block_size: int, causal: bool, device: torch.device) -> BlockBuffers:
    """Lists for `k` key blocks to a query block: they always fit."""
    count = problem.patterns * problem.row_blocks
    query_blocks = -(-problem.q_len // block_size)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return BlockBuffers(
        problem=problem,
        work=empty_work(
            problem, device, tiles=count * _slots(problem, k, block_size), bitmaps=2 * count, contiguous_tiles=True
        ),
        flags=zeros(problem.patterns),
        k=k,
        block_size=block_size,
        causal=causal,
        chosen=zeros(problem.patterns, query_blocks, k),
        count=zeros(problem.patterns, query_blocks),
        bad=zeros(problem.patterns),
    )


def _slots(problem: DynamicSizes, k: int, block_size: int) -> int:
    """Tiles of a row block: two partial ones, then full ones."""
    return k * (block_size // problem.block_n) + 2


def fill_blocks(room: BlockBuffers, scores: Tensor, nan_bit: int) -> None:
    """Choose blocks, and fill the lists in use.

    Args:
        room: from `block_buffers`.
        scores: float `[B | 1, H | 1, query blocks, key blocks]`.
        nan_bit: the flag for NaN scores.
    """
    key = (scores.shape, scores.stride(), scores.dtype)
    (select,) = room.launched(key, lambda: (_selecting(room, scores, nan_bit),))
    room.bad.zero_()
    select(scores)
    room.fill()


def _selecting(room: BlockBuffers, scores: Tensor, nan_bit: int) -> Launch:
    import triton

    from stof.plans.fill import block_topk as kernels
    from stof.runtime.launch import Launch

    query_blocks, key_blocks = scores.shape[2:]
    width = triton.next_power_of_2(key_blocks)
    strides = [0 if size == 1 else stride for size, stride in zip(scores.shape, scores.stride(), strict=True)]
    return Launch(
        kernels.select_blocks,
        room.problem.patterns * query_blocks,
        (room.chosen, room.count, room.bad, room.flags),
        (*strides, room.problem.mask_heads, query_blocks, key_blocks, room.k),
        (nan_bit, room.causal, width),
        # A warp by itself sums without waiting for others, some 34 times in a row.
        num_warps=max(1, min(16, width // 1024)),
        num_stages=1,
        device=room.flags.device,
    )


def _filling(room: BlockBuffers) -> Launch:
    """What writes the block-wise kernel's work."""
    import triton

    from stof.plans.fill import block_topk as kernels
    from stof.runtime.launch import Launch

    problem, work = room.problem, room.work
    slots = _slots(problem, room.k, room.block_size)
    return Launch(
        kernels.block_fill,
        problem.patterns * problem.row_blocks,
        (
            room.chosen, room.count, room.bad, work.items, work.first_columns, work.partial_columns,
            work.partial_bitmap, work.bitmaps,
        ),
        (problem.row_blocks, room.chosen.shape[1], room.k, slots, problem.q_len, problem.kv_len),
        (
            room.block_size, room.causal, problem.block_m, problem.block_n,
            min(_TILES_AT_ONCE, triton.next_power_of_2(slots)),
        ),
        num_warps=4,
        num_stages=1,
        device=room.flags.device,
    )  # fmt: skip
