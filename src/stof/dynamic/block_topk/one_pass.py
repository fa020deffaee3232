"""Lists of Hopper's one-pass backward kernel for chosen blocks of 128: tiles whose place decides what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.dynamic.sizes import int_zeros
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK, TILE, BackwardLists, check_count, most_sums
from stof.kernels.implementation import tensors_of
from stof.layout import bitmaps as bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stof.dynamic.block_topk.buffers import BlockBuffers

# Places of tiles under a causal mask: queries between their first key and their first query, which are multiples of 64.
# Those that are further behind keep everything, as at the first place.
PLACES = (128, 64, 0)


def kept_by_place(queries: int, keys: int) -> Tensor:
    """What tiles keep: bool `[2 * 3, 128, queries]`.

    The one at `3 * tail + place` keeps what a causal mask does `PLACES[place]` queries behind its keys, and with a tail
    only the first `keys % 128` keys.
    """
    key, query = torch.arange(KEYS_OF_BLOCK)[:, None], torch.arange(queries)
    causal = torch.stack([key <= query + place for place in PLACES])
    return torch.cat([causal, causal & (key < keys % KEYS_OF_BLOCK)])


@dataclass(frozen=True, eq=False)
class OnePassLists:
    """Lists of fixed size, and what fills them.

    Attributes:
        lists: what the kernel reads.
        taken: int8 `[P, query blocks, key blocks + 1]`, 1 where a block is chosen; filled before `fill` is called.
        bad: int32 `[P]`, not 0 where all gradients become NaN.
        state: as of `FilledTiles`: codes of tiles.
        turns, sums, ends: what `count_additions` writes, and sums up to the end of each part.
        unread: for outputs that `order_tiles` does not write here.
        causal: of the mask.
    """

    lists: BackwardLists
    taken: Tensor
    bad: Tensor
    state: Tensor
    turns: Tensor
    sums: Tensor
    ends: Tensor
    unread: Tensor
    causal: bool

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        yield from tensors_of(self)

    def fill(self, _: Tensor) -> None:
        """Write the lists of the blocks that are taken; the host is not asked."""
        from stof.dynamic.block_topk.hopper_kernels import code_tiles
        from stof.kernels.hopper.backward_order import COLUMNS, count_additions, order_tiles
        from stof.runtime.launch import launch

        lists, device = self.lists, self.state.device
        patterns, row_blocks, q_blocks = self.turns.shape
        sizes = (patterns, row_blocks, q_blocks, lists.q_len, lists.kv_len)
        constants = (lists.queries, self.causal)
        tensors: tuple[Tensor, ...] = (self.taken, self.bad, lists.row_block_ptr, self.state)
        launch(code_tiles, patterns * row_blocks, tensors, sizes, constants, device=device)
        lists.row_block_ptr[1:].cumsum_(0)
        counted = (self.state, lists.row_block_ptr, self.turns, self.sums)
        groups = patterns * -(-q_blocks // COLUMNS)
        launch(count_additions, groups, counted, (*sizes, 0), (lists.queries,), device=device)
        torch.cumsum(self.sums, 1, dtype=torch.int32, out=self.ends)
        lists.sum_ptr[:, 1:].copy_(self.ends[:, 1::2])
        tensors = (*counted, self.ends, lists.bitmaps, lists.tiles, self.unread, self.unread)
        launch(order_tiles, patterns * row_blocks, tensors, (*sizes, 0), (lists.queries, True), device=device)


def one_pass_lists(buffers: BlockBuffers, queries: int) -> OnePassLists:
    """Lists in tiles of 128 keys and so many queries, with room for any choice, to be filled.

    Raises:
        UnfitLayoutError: too many tiles.
    """
    problem, device = buffers.problem, buffers.flags.device
    patterns, q_len, kv_len = problem.patterns, problem.q_len, problem.kv_len
    row_blocks, q_blocks = -(-kv_len // KEYS_OF_BLOCK), -(-q_len // queries)
    # A bad pattern has a tile for each block of keys, and for each of queries.
    of_pattern = q_blocks * buffers.k + row_blocks
    room = patterns * min(of_pattern, row_blocks * q_blocks)
    check_count(room)
    zeros = int_zeros(device)
    bitmaps = accumulator_order(bits.pack(kept_by_place(queries, kv_len)), queries).to(device)
    lists = BackwardLists(
        pattern_of=buffers.work.pattern_of, row_block_ptr=zeros(patterns * row_blocks + 1),
        tiles=zeros(room + 2, len(TILE)), sum_ptr=zeros(patterns, q_blocks + 1), bitmaps=bitmaps,
        row_blocks=row_blocks, queries=queries, q_len=q_len, kv_len=kv_len, sums=most_sums(q_blocks),
        # A block that is chosen is seen by all queries of the other, up to the diagonal of a causal mask.
        seen_queries=None, seen_keys=None,
    )  # fmt: skip
    blocks = patterns * row_blocks
    # See `count_kernels.state_pointers`.
    state = zeros(4 * blocks + 2 * patterns + 2 + -(-blocks * q_blocks // 4))
    return OnePassLists(
        lists=lists, taken=buffers.taken, bad=buffers.bad, state=state, turns=zeros(patterns, row_blocks, q_blocks),
        sums=zeros(patterns, 2 * q_blocks), ends=zeros(patterns, 2 * q_blocks), unread=zeros(2).char(),
        causal=buffers.causal,
    )  # fmt: skip
