"""Triton kernel that orders the row blocks of filled tiles for the backward kernels."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.triton.backward_tiles import ITEM
from stof.layout.fill.write_kernels import rank_of

_ROW_BLOCK, _CHUNKS, _SIZE = tl.constexpr(ITEM.row_block), tl.constexpr(ITEM.chunks), tl.constexpr(len(ITEM))


@triton.jit(do_not_specialize=["row_blocks", "patterns"])
@no_type_check
def write_items(pointers_ptr, items_ptr, row_blocks, patterns):
    """Write the item of a row block to its place among the items of `BackwardTiles`, which all patterns share."""
    row_block = tl.program_id(0)
    item_ptr = items_ptr + rank_of(pointers_ptr, row_block, row_blocks, patterns) * _SIZE
    field = tl.arange(0, _SIZE)
    value = tl.where(field == _ROW_BLOCK, row_block, tl.where(field == _CHUNKS, 1, 0))
    tl.store(item_ptr + field, value)
