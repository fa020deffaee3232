"""Work for the best key blocks of each query block: choosing them, and lists for whichever kernels read them.

Choosing is one launch. Each kernel that calls run on has lists of its own, which updates fill from what was chosen,
from the first call on that reads them. How many tiles each row block has on the Hopper kernel is known beforehand but
for scores that exclude blocks: its work is listed once, and the device finds the tiles' columns and, within its place
in the lists, what each item computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.dynamic.backward_lists import TritonLists, empty_tiles
from stof.dynamic.block_topk.bitmaps import bitmaps_of, kept_by_place
from stof.dynamic.block_topk.one_pass import OnePassLists, one_pass_lists
from stof.dynamic.buffers import HopperLists, WorkBuffers, empty_lists, empty_work
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.errors import UnfitLayoutError
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK
from stof.kernels.hopper.config import RUN
from stof.kernels.hopper.tile_lists import TileLists, oob_column
from stof.kernels.packed_integers import run_column
from stof.kernels.triton.backward_tiles import BackwardTiles
from stof.layout import LayoutConfig
from stof.layout import bitmaps as bits
from stof.layout.survey import TileCounts
from stof.masks.dynamic import NOT_A_NUMBER
from stof.selection import CallSpec

if TYPE_CHECKING:
    from stof.runtime.launch import Launch

# Tiles written at once.
_TILES_AT_ONCE = 64
# Columns of a slab where tiles are pairs of blocks; a block is a run of them.
_SLAB = 16


def _paired(config: LayoutConfig, block_size: int) -> bool:
    """Whether each half of a tile is a block of its own."""
    return config == LayoutConfig(RUN, 2 * RUN, _SLAB) and block_size == RUN


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

    @cached_property
    def taken(self) -> Tensor:
        """int8 `[P, query blocks, key blocks + 1]`, 1 where a block is chosen; the last column is of none.

        Filled for lists of backward passes.
        """
        key_blocks = -(-self.problem.kv_len // self.block_size)
        return torch.zeros(*self.count.shape, key_blocks + 1, dtype=torch.int8, device=self.count.device)

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self.chosen, self.count, self.bad)

    def fill(self, *tensors: Tensor) -> None:
        """Choose blocks by scores, float `[B | 1, H | 1, query blocks, key blocks]`, and fill the lists in use."""
        (scores,) = tensors
        key = (scores.shape, scores.stride(), scores.dtype)
        select = self.launched(key, lambda: _selecting(self, scores))
        self.bad.zero_()
        select(scores)
        self.fill_lists()
        if self.backward:
            last = self.taken.shape[2] - 1
            is_chosen = torch.arange(self.k, device=scores.device) < self.count[..., None]
            self.taken.zero_().scatter_(2, torch.where(is_chosen, self.chosen, last).long(), 1)
        for lists in self.backward.values():
            lists.fill(scores)

    def work_launches(self) -> tuple[Launch, ...]:
        import triton

        from stof.dynamic.block_topk import triton_kernels as kernels
        from stof.runtime.launch import Launch

        problem, work = self.problem, self.work
        slots = _slots(problem, self.k, self.block_size)
        fill = Launch(
            kernels.fill_work,
            problem.patterns * problem.row_blocks,
            (
                self.chosen, self.count, self.bad, work.items, work.first_columns, work.partial_columns,
                work.partial_bitmap,
            ),
            (problem.row_blocks, self.chosen.shape[1], self.k, slots, problem.q_len, problem.kv_len),
            (
                self.block_size, self.causal, problem.block_m, problem.block_n,
                min(_TILES_AT_ONCE, triton.next_power_of_2(slots)),
            ),
            num_warps=1,
        )  # fmt: skip
        return (fill,)

    def backward_size(self, size: int) -> int:
        return min(size, self.block_size)

    def backward_lists(self, size: int) -> TritonLists:
        """Tiles lie within blocks: which are listed follows from what is chosen, what they keep from their place."""
        layouts = [_backward_lists(self, size, self.taken, transposed) for transposed in (False, True)]

        def fill(_: Tensor) -> None:
            for tiles, count_tiles, write_tiles in layouts:
                count_tiles()
                tiles.row_block_ptr[1:].cumsum_(0)
                write_tiles()

        return TritonLists(layouts[0][0], layouts[1][0], (self.taken,), fill)

    def one_pass_refusals(self, call: CallSpec) -> tuple[str, ...]:
        refusals = list(self.hopper_refusals())
        if call.has_sinks:
            refusals.append("no sinks where tiles are made at run time")
        if self.block_size != KEYS_OF_BLOCK:
            refusals.append(f"blocks of {KEYS_OF_BLOCK} keys; tiles of smaller ones would be partly empty")
        return tuple(refusals)

    def one_pass_lists(self, config: LayoutConfig) -> OnePassLists:
        return one_pass_lists(
            self.problem, self.work.pattern_of, self.taken, self.bad, k=self.k, causal=self.causal,
            queries=config.block_n,
        )  # fmt: skip

    def hopper_refusals(self) -> tuple[str, ...]:
        """Why the Hopper kernel cannot run masks like these, in any shape of tiles."""
        problem, refusals = self.problem, []
        if self.block_size < 64:
            refusals.append(f"takes blocks of 64 or 128 made at run time, not {self.block_size}")
        if self.causal and problem.kv_len > problem.q_len and problem.q_len % self.block_size:
            # 0 * NaN is NaN, and TMA reads whole tiles.
            refusals.append(f"the last block holds keys past query {problem.q_len - 1}, which no query sees")
        return tuple(refusals)

    def hopper_serves(self, config: LayoutConfig) -> bool:
        """Whether tiles hold keys of one block, or pairs of blocks of 64, and row blocks one partial one at most."""
        if _paired(config, self.block_size):
            return True
        return config.slab is None and config.block_m <= config.block_n <= self.block_size

    def counts(self, config: LayoutConfig) -> TileCounts:
        """Tiles of each row block where no score is -inf; of two possible counts of partial ones, the likelier."""
        problem, size = self.problem, self.block_size
        row_blocks = -(-problem.q_len // config.block_m)
        key_blocks = -(-problem.kv_len // size)
        query_block = torch.div(torch.arange(row_blocks) * config.block_m, size, rounding_mode="floor")
        seen = (query_block + 1).clamp(max=key_blocks) if self.causal else torch.full_like(query_block, key_blocks)
        taken = seen.clamp(max=self.k)
        tiles = torch.div(taken * size + config.block_n - 1, config.block_n, rounding_mode="floor")
        # With more blocks to choose from than are taken, a query's own is one among many.
        partial = (seen <= self.k) & self.causal
        if _paired(config, size):
            partial |= taken % 2 == 1
        shape = (problem.patterns, row_blocks)
        return TileCounts(partial.long().expand(shape), (tiles - partial.long()).expand(shape))

    def hopper_tiles(self, config: LayoutConfig, split_tiles: int) -> HopperLists:
        problem, device = self.problem, self.flags.device
        counts = self.counts(config)
        paired = _paired(config, self.block_size)
        slots = -(-self.k * self.block_size // config.block_n) + 1
        nothing = counts.full.numel() * slots
        keep, everything = kept_by_place(config.block_m, config.block_n // (1 + paired), problem.kv_len), 1
        if paired:  # every one on the left, with every one on the right
            bitmaps = len(keep)
            keep = torch.cat([keep.repeat_interleave(bitmaps, 0), keep.repeat(bitmaps, 1, 1)], 2)
            everything = bitmaps + 1
        width = config.block_n // _SLAB if paired else 1
        if (nothing + 2) * width >= 2**31:
            raise UnfitLayoutError(f"{nothing} tiles are more than 32-bit offsets reach")
        zeros = int_zeros(device)
        columns = zeros(nothing + 2, width)
        spare = oob_column(problem.kv_len)
        columns[nothing:] = run_column(spare) if paired else spare
        lists, first_item = empty_lists(
            self.work, counts, split_tiles, columns,
            bitmaps=accumulator_order(bits.pack(keep), config.block_n).to(device), compacted_keys=zeros(0),
            block_m=config.block_m, block_n=config.block_n, slab=_SLAB if paired else 0,
        )  # fmt: skip
        lists.tile_bitmap[:nothing] = everything
        return HopperLists(lists, (first_item,), (_hopper_fill(self, lists, first_item, slots, nothing),))


def block_buffers(problem: DynamicSizes, k: int, block_size: int, causal: bool, device: torch.device) -> BlockBuffers:
    """Lists for `k` key blocks to a query block: they always fit."""
    count = problem.patterns * problem.row_blocks
    query_blocks = -(-problem.q_len // block_size)

    zeros = int_zeros(device)
    work = empty_work(problem, device, tiles=count * _slots(problem, k, block_size), bitmaps=0, contiguous_tiles=True)
    return BlockBuffers(
        problem=problem,
        work=replace(work, bitmaps=bitmaps_of(problem.block_m, problem.block_n, problem.kv_len).to(device)),
        flags=zeros(problem.patterns),
        k=k,
        block_size=block_size,
        causal=causal,
        chosen=zeros(problem.patterns, query_blocks, k),
        count=zeros(problem.patterns, query_blocks),
        bad=zeros(problem.patterns),
    )


def _slots(problem: DynamicSizes, k: int, block_size: int) -> int:
    """Tiles of a row block: a partial one, then full ones."""
    return k * (block_size // problem.block_n) + 1


def _selecting(buffers: BlockBuffers, scores: Tensor) -> Launch:
    import triton

    from stof.dynamic.block_topk import triton_kernels as kernels
    from stof.runtime.launch import Launch

    query_blocks, key_blocks = scores.shape[2:]
    width = triton.next_power_of_2(key_blocks)
    strides = [0 if size == 1 else stride for size, stride in zip(scores.shape, scores.stride(), strict=True)]
    return Launch(
        kernels.select_blocks,
        buffers.problem.patterns * query_blocks,
        (buffers.chosen, buffers.count, buffers.bad, buffers.flags),
        (*strides, buffers.problem.mask_heads, query_blocks, key_blocks, buffers.k),
        (NOT_A_NUMBER, buffers.causal, width),
        # A warp by itself sums without waiting for others, some 34 times in a row.
        num_warps=max(1, min(16, width // 1024)),
    )


def _hopper_fill(buffers: BlockBuffers, lists: TileLists, first_item: Tensor, slots: int, nothing: int) -> Launch:
    from stof.dynamic.block_topk.hopper_kernels import fill_tiles
    from stof.runtime.launch import Launch

    problem = buffers.problem
    row_blocks = (len(first_item) - 1) // problem.patterns
    return Launch(
        fill_tiles,
        problem.patterns * row_blocks,
        (buffers.chosen, buffers.count, buffers.bad, first_item, lists.tile_columns, lists.tile_bitmap, lists.ranges),
        (row_blocks, buffers.chosen.shape[1], buffers.k, slots, nothing, problem.q_len, problem.kv_len),
        (
            buffers.block_size, buffers.causal, lists.block_m, min(lists.block_n, buffers.block_size), lists.slab > 0,
            _TILES_AT_ONCE,
        ),
        num_warps=1,
    )  # fmt: skip


def _backward_lists(
    buffers: BlockBuffers, size: int, taken: Tensor, transposed: bool
) -> tuple[BackwardTiles, Launch, Launch]:
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
            (per_block, buffers.causal, transposed, size, _TILES_AT_ONCE, write),
        )
        for write in (False, True)
    )
    return tiles, count_tiles, write_tiles
