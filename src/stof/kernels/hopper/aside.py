"""Layouts whose scattered columns are put side by side: the list of keys, and where on it tiles begin."""

from __future__ import annotations

import torch
from torch import Tensor

from stof.errors import UnfitLayoutError
from stof.layout import Layout


def listed_keys(layout: Layout) -> tuple[Tensor, Tensor]:
    """The keys of each pattern's gathered tiles, and where on that list each tile begins.

    Args:
        layout: columns gathered one by one; tiles that are gathered are stretches of one list of each pattern.

    Returns:
        int64 `[P, n]`, ascending, then -1; n is a multiple of `block_n`. And int64 `[G]`, by row of `layout.gathered`.

    Raises:
        UnfitLayoutError: some tile is no such stretch.
    """
    block_n = layout.config.block_n
    slots = layout.gathered.long()
    of_list = layout.tile_base < 0
    pattern = torch.zeros_like(slots[:, 0])
    pattern[~layout.tile_base[of_list].long()] = torch.div(
        layout.tile_row_block()[of_list], layout.row_blocks, rounding_mode="floor"
    )
    used = slots >= 0
    numbers = (pattern[:, None] * layout.kv_len + slots)[used]
    distinct, place = numbers.unique(return_inverse=True)
    owner = torch.div(distinct, layout.kv_len, rounding_mode="floor")
    count = torch.bincount(owner, minlength=layout.patterns)
    first = count.cumsum(0) - count
    longest = -(-int(count.max()) // block_n) * block_n
    keys = torch.full((layout.patterns, longest), -1, dtype=torch.int64, device=slots.device)
    keys[owner, torch.arange(len(distinct), device=slots.device) - first[owner]] = distinct % layout.kv_len
    # Were the tile's first column on the list, it would be here; the same for every column it uses.
    begins = torch.zeros_like(slots)
    begins[used] = place - first[pattern.repeat_interleave(used.sum(1))] - used.nonzero()[:, 1]
    begin = torch.where(used, begins, 0).sum(1) // used.sum(1).clamp(min=1)
    if bool((used & (begins != begin[:, None])).any()) or bool((begin < 0).any()):
        raise UnfitLayoutError("gathered tiles are not stretches of one list of columns")
    return keys, begin
