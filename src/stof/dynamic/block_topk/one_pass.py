"""Lists of Hopper's one-pass backward kernel for chosen blocks of 128, filled on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.dynamic.block_topk.bitmaps import tile_masks
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK, TILE, BackwardLists, check_count, most_sums
from stof.kernels.implementation import tensors_of
from stof.layout import bitmaps as bits
from stof.layout.fill.tiles import state_size


@dataclass(frozen=True, eq=False)
class OnePassLists:
    """Lists of fixed size, and what fills them.

    Attributes:
        lists: what the kernel reads.
        taken: int8 `[P, query blocks, R + 1]`, 1 where a block of 128 keys is chosen; filled before `fill` is called.
        bad: int32 `[P]`, not 0 where all gradients become NaN.
        state: int32, holds the code of each tile, see `count_kernels.state_pointers`.
        ranks: int32 `[P, R, tiles of a row]`, how many tiles add to the same queries before this one.
        sums: int32 `[P, 2 * tiles of a row]`, how many sums of dQ each block of queries has: of tiles from the diagonal
            on, and of those before it. `sum_ends` is the inclusive prefix sum.
        unused: for outputs of `order_tiles` that are not written here.
        causal: whether queries see no later keys.
    """

    lists: BackwardLists
    taken: Tensor
    bad: Tensor
    state: Tensor
    ranks: Tensor
    sums: Tensor
    sum_ends: Tensor
    unused: Tensor
    causal: bool

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        yield from tensors_of(self)

    def fill(self, _: Tensor) -> None:
        """Write the lists of the blocks that are taken; does not wait for the device.

        The argument, the mask's scores, is what the lists of other kernels read.
        """
        from stof.dynamic.block_topk.hopper_kernels import code_tiles
        from stof.kernels.hopper.backward_order import COLUMNS, count_additions, order_tiles
        from stof.runtime.launch import launch

        lists, device = self.lists, self.state.device
        patterns, row_blocks, q_tiles = self.ranks.shape
        sizes = (patterns, row_blocks, q_tiles, lists.q_len, lists.kv_len)
        constants = (lists.queries, self.causal)
        tensors: tuple[Tensor, ...] = (self.taken, self.bad, lists.row_block_ptr, self.state)
        launch(code_tiles, patterns * row_blocks, tensors, sizes, constants, device=device)
        lists.row_block_ptr[1:].cumsum_(0)
        inputs = (self.state, lists.row_block_ptr, self.ranks, self.sums)
        seen_words = 0
        groups = patterns * -(-q_tiles // COLUMNS)
        launch(count_additions, groups, inputs, (*sizes, seen_words), (lists.queries,), device=device)
        torch.cumsum(self.sums, 1, dtype=torch.int32, out=self.sum_ends)
        lists.sum_ptr[:, 1:].copy_(self.sum_ends[:, 1::2])
        tensors = (*inputs, self.sum_ends, lists.bitmaps, lists.tiles, self.unused, self.unused)
        constants = (lists.queries, True)
        launch(order_tiles, patterns * row_blocks, tensors, (*sizes, seen_words), constants, device=device)


def one_pass_lists(
    problem: DynamicSizes, pattern_of: Tensor, taken: Tensor, bad: Tensor, *, k: int, causal: bool, queries: int
) -> OnePassLists:
    """Allocate lists for any choice of blocks, in tiles of 128 keys x `queries` queries.

    Args:
        problem: sizes of the attention.
        pattern_of: int32 `[mask_batch, mask_heads]`.
        taken, bad, causal: as of `OnePassLists`.
        k: most blocks that a block of queries takes.
        queries: of a tile.

    Raises:
        UnfitLayoutError: too many tiles.
    """
    device = taken.device
    patterns, q_len, kv_len = problem.patterns, problem.q_len, problem.kv_len
    row_blocks, q_tiles = -(-kv_len // KEYS_OF_BLOCK), -(-q_len // queries)
    # A bad pattern has at most `q_tiles + row_blocks` tiles, see `code_tiles`.
    most_tiles = patterns * min(q_tiles * k + row_blocks, row_blocks * q_tiles)
    check_count(most_tiles)
    zeros = int_zeros(device)
    bitmaps = accumulator_order(bits.pack(tile_masks(queries, kv_len)), queries).to(device)
    lists = BackwardLists(
        pattern_of=pattern_of, row_block_ptr=zeros(patterns * row_blocks + 1),
        tiles=zeros(most_tiles + 2, len(TILE)), sum_ptr=zeros(patterns, q_tiles + 1), bitmaps=bitmaps,
        row_blocks=row_blocks, queries=queries, q_len=q_len, kv_len=kv_len, sums=most_sums(q_tiles),
        # Every query and key of a chosen block has a kept score; `hopper_refusals` excludes the exceptions.
        seen_queries=None, seen_keys=None,
    )  # fmt: skip
    return OnePassLists(
        lists=lists, taken=taken, bad=bad, state=zeros(state_size(patterns, row_blocks, q_tiles)),
        ranks=zeros(patterns, row_blocks, q_tiles), sums=zeros(patterns, 2 * q_tiles),
        sum_ends=zeros(patterns, 2 * q_tiles), unused=zeros(2).char(), causal=causal,
    )  # fmt: skip
