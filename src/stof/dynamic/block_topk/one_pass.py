"""Lists of Hopper's one-pass backward kernel for chosen blocks: tiles of 128 keys, whose place decides what they keep.

A tile has two halves of 64 keys and one or two halves of 64 queries. Blocks are of 64 or 128, so each of these two or
four parts is chosen or not as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.dynamic.sizes import int_zeros
from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK, TILE, BackwardLists, check_count, most_sums, tile_fields
from stof.kernels.implementation import tensors_of
from stof.layout import bitmaps as bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stof.dynamic.block_topk.buffers import BlockBuffers

# Queries, and keys, that are chosen together.
PART = 64
# Sets of chosen parts of a tile; places of a tile: not on the diagonal of a causal mask, or so many queries behind it.
SETS, PLACES = 16, (KEYS_OF_BLOCK, PART, 0)


def kept_by_parts(queries: int, keys: int) -> Tensor:
    """What tiles keep: bool `[2 * 3 * SETS, 128, queries]`.

    The one at `(tail * 3 + place) * SETS + chosen` keeps the parts whose bits are set in `chosen`, `2 * half of keys +
    half of queries`; of a tile whose first query is `PLACES[place]` behind its first key what a causal mask does; and
    with a tail only the first `keys % 128` keys.
    """
    key, query = torch.arange(KEYS_OF_BLOCK)[:, None], torch.arange(queries)
    part = 2 * (key // PART) + query // PART
    of_sets = torch.stack([(chosen >> part) & 1 > 0 for chosen in range(SETS)])
    causal = torch.stack([key <= query + place for place in PLACES])
    tail = torch.stack([torch.ones_like(key, dtype=torch.bool), key < keys % KEYS_OF_BLOCK])
    return (tail[:, None, None] & causal[:, None] & of_sets).flatten(0, 2)


@dataclass(frozen=True, eq=False)
class OnePassLists:
    """Lists of fixed size, and what fills them.

    Attributes:
        lists: what the kernel reads.
        taken: int8 `[P, query blocks, key blocks + 1]`, 1 where a block is chosen; filled before `fill` is called.
        bad: int32 `[P]`, not 0 where all gradients become NaN.
        state: as of `FilledTiles`: codes of tiles.
        turns, sums, ends: what `count_additions` writes, and sums up to the end of each part.
        fields: int32, `TileFields.bitmap` of each bitmap.
        unread: what `order_tiles` would write of keys that are seen.
        block_size, causal: of the mask.
    """

    lists: BackwardLists
    taken: Tensor
    bad: Tensor
    state: Tensor
    turns: Tensor
    sums: Tensor
    ends: Tensor
    fields: Tensor
    unread: Tensor
    block_size: int
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
        launch(
            code_tiles, patterns * row_blocks, (self.taken, self.bad, lists.row_block_ptr, self.state),
            (*sizes, *self.taken.shape[1:]), (lists.queries, self.block_size, self.causal), device=device,
        )  # fmt: skip
        lists.row_block_ptr[1:].cumsum_(0)
        counted = (self.state, lists.row_block_ptr, self.turns, self.sums)
        launch(
            count_additions, patterns * -(-q_blocks // COLUMNS), counted, (*sizes, 0), (lists.queries,), device=device
        )
        torch.cumsum(self.sums, 1, dtype=torch.int32, out=self.ends)
        lists.sum_ptr[:, 1:].copy_(self.ends[:, 1::2])
        tensors = (*counted, self.ends, lists.bitmaps, lists.tiles, self.unread, self.fields)
        launch(order_tiles, patterns * row_blocks, tensors, (*sizes, 0), (lists.queries, True), device=device)
        chosen = self.taken[..., :-1]
        for seen, dim in ((lists.seen_keys, 1), (lists.seen_queries, 2)):
            if seen is not None:
                blocks = (chosen > 0).any(dim)
                seen.copy_(blocks.repeat_interleave(self.block_size, 1)[:, : seen.shape[1]])


def one_pass_lists(buffers: BlockBuffers, queries: int) -> OnePassLists:
    """Lists in tiles of 128 keys and so many queries, with room for any choice, to be filled.

    Raises:
        UnfitLayoutError: too many tiles.
    """
    problem, device = buffers.problem, buffers.flags.device
    patterns, q_len, kv_len = problem.patterns, problem.q_len, problem.kv_len
    row_blocks, q_blocks = -(-kv_len // KEYS_OF_BLOCK), -(-q_len // queries)
    # Blocks of a bad pattern are listed once each.
    of_pattern = buffers.chosen.shape[1] * buffers.k * max(1, buffers.block_size // queries) + row_blocks + q_blocks
    room = patterns * min(of_pattern, row_blocks * q_blocks)
    check_count(room)
    zeros = int_zeros(device)
    # Halves of a tile may be in blocks that nothing sees, or that see nothing.
    seen = partial(torch.zeros, dtype=torch.bool, device=device)
    has_halves = buffers.block_size < KEYS_OF_BLOCK
    bitmaps = accumulator_order(bits.pack(kept_by_parts(queries, kv_len)), queries)
    lists = BackwardLists(
        pattern_of=buffers.work.pattern_of, row_block_ptr=zeros(patterns * row_blocks + 1),
        tiles=zeros(room + 2, len(TILE)), sum_ptr=zeros(patterns, q_blocks + 1), bitmaps=bitmaps.to(device),
        row_blocks=row_blocks, queries=queries, q_len=q_len, kv_len=kv_len, sums=most_sums(q_blocks),
        seen_queries=seen((patterns, q_len)) if buffers.block_size < queries else None,
        seen_keys=seen((patterns, kv_len)) if has_halves else None,
    )  # fmt: skip
    blocks = patterns * row_blocks
    # See `count_kernels.state_pointers`.
    state = zeros(4 * blocks + 2 * patterns + 2 + -(-blocks * q_blocks // 4))
    return OnePassLists(
        lists=lists, taken=buffers.taken, bad=buffers.bad, state=state, turns=zeros(patterns, row_blocks, q_blocks),
        sums=zeros(patterns, 2 * q_blocks), ends=zeros(patterns, 2 * q_blocks),
        fields=tile_fields(bitmaps).int().to(device), unread=zeros(1).char(), block_size=buffers.block_size,
        causal=buffers.causal,
    )  # fmt: skip
