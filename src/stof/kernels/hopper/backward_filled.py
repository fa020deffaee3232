"""Lists of the backward kernel of Hopper for tiles that the device has filled."""

from __future__ import annotations

from functools import partial

import torch

from stof.kernels.hopper.backward_lists import KEYS_OF_BLOCK, TILE, BackwardLists, check_count, most_sums
from stof.layout.fill.tiles import EVERYTHING, FilledTiles


def filled_backward_lists(filled: FilledTiles, q_len: int, kv_len: int) -> BackwardLists:
    """Prepare tiles of a transposed mask that the device has filled, with all columns; waits for it once.

    Raises:
        UnfitLayoutError: there are too many tiles.
    """
    from stof.kernels.hopper.backward_order import COLUMNS, count_additions, order_tiles
    from stof.runtime.launch import launch

    check_count(filled.tiles)
    queries, left, device = filled.columns.shape[1], kv_len % KEYS_OF_BLOCK, filled.state.device
    if left:
        filled.bitmaps[EVERYTHING, left:] = 0
    row_blocks, q_blocks = filled.row_blocks, -(-q_len // queries)
    patterns = len(filled.partial_count) // row_blocks
    empty = partial(torch.empty, dtype=torch.int32, device=device)
    turns, sums = empty((patterns, row_blocks, q_blocks)), empty((patterns, 2 * q_blocks))
    tiles, flags = empty((filled.tiles + 2, len(TILE))), torch.zeros(2, dtype=torch.int32, device=device)
    seen_keys = torch.empty((patterns, kv_len), dtype=torch.int8, device=device)
    counted = (filled.state, filled.row_block_ptr, turns, sums)
    sizes = (patterns, row_blocks, q_blocks, q_len, kv_len, filled.seen_words)
    launch(count_additions, patterns * -(-q_blocks // COLUMNS), counted, sizes, (queries,), device=device)
    end = sums.cumsum(1, dtype=torch.int32)
    tensors = (*counted, end, filled.bitmaps, tiles, seen_keys, flags)
    launch(order_tiles, patterns * row_blocks, tensors, sizes, (queries, False), device=device)
    sum_ptr = torch.nn.functional.pad(end[:, 1::2], (1, 0))
    some_query, some_key = flags.tolist()
    # `unseen` counts from the end: queries that see nothing are the last ones.
    to_end = q_len - torch.arange(q_len, device=device) if some_query else None
    return BackwardLists(
        filled.pattern_of, filled.row_block_ptr, tiles, sum_ptr, filled.bitmaps, row_blocks, queries, q_len, kv_len,
        most_sums(q_blocks), None if to_end is None else to_end > filled.unseen[:, None],
        seen_keys.view(torch.bool) if some_key else None,
    )  # fmt: skip
