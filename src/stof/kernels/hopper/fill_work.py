"""Triton kernel that writes the work list of the Hopper kernel for filled tiles."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.tile_scheduler import WORK, WORK_SIZE
from stof.layout.fill.write_kernels import rank_of

# (Batch entry, head) pairs whose work tiles are written together.
_PAIRS = tl.constexpr(32)
_ROW_BLOCK, _BATCH, _HEAD = tl.constexpr(WORK.row_block), tl.constexpr(WORK.batch), tl.constexpr(WORK.head)
_BEGIN, _PARTIAL_END, _END = tl.constexpr(WORK.begin), tl.constexpr(WORK.partial_end), tl.constexpr(WORK.end)
_PARTS, _PATTERN, _BITMAP = tl.constexpr(WORK.parts), tl.constexpr(WORK.pattern), tl.constexpr(WORK.bitmap)
_WORK_COUNT, _COLUMNS, _SIZE = tl.constexpr(WORK.work_count), tl.constexpr(WORK.columns), tl.constexpr(WORK_SIZE)


@triton.jit(do_not_specialize=["row_blocks", "patterns", "mask_batch", "mask_heads", "batch", "heads", "heads_at_once"])
@no_type_check
def write_work(
    pattern_of_ptr,  # [mask_batch, mask_heads] int32
    pointers_ptr,  # [P * R + 1] int32
    partial_count_ptr,  # [P * R] int32
    columns_ptr,  # [T + 3 or more] int32
    tile_bitmap_ptr,  # [T + 3 or more] int32
    work_ptr,  # [B * H * R + 1, WORK_SIZE] int32, see `tile_scheduler.WorkFields`
    row_blocks,
    patterns,
    mask_batch,
    mask_heads,
    batch,
    heads,
    heads_at_once,
):
    """Write the work tiles of a row block for every (batch entry, head) pair of its pattern.

    One group of pairs follows another; within a group come the longest row blocks of each pattern first.
    """
    pid = tl.program_id(0)
    field = tl.arange(0, _SIZE)
    pairs = batch * heads
    count = pairs * row_blocks
    if pid == patterns * row_blocks:  # the row that is only fetched
        tl.store(work_ptr + count.to(tl.int64) * _SIZE + field, tl.zeros([_SIZE], tl.int32))
        return
    pattern = pid // row_blocks
    row_block = pid % row_blocks
    rank = rank_of(pointers_ptr + pattern * row_blocks, row_block, row_blocks, 1)
    begin = tl.load(pointers_ptr + pid)
    end = tl.load(pointers_ptr + pid + 1)
    # A row block without tiles has the one past the end.
    tiles = tl.load(pointers_ptr + patterns * row_blocks)
    empty = begin == end
    begin = tl.where(empty, tiles, begin)
    end = tl.where(empty, tiles + 1, end)
    partial_end = tl.where(empty, end, begin + tl.load(partial_count_ptr + pid))
    shared = tl.where(field == _ROW_BLOCK, row_block, 0)
    shared = tl.where(field == _BEGIN, begin, shared)
    shared = tl.where(field == _PARTIAL_END, partial_end, shared)
    shared = tl.where(field == _END, end, shared)
    shared = tl.where(field == _PARTS, 1, shared)
    shared = tl.where(field == _PATTERN, pattern, shared)
    shared = tl.where(field == _BITMAP, tl.load(tile_bitmap_ptr + begin), shared)
    shared = tl.where(field == _WORK_COUNT, count, shared)
    shared = tl.where(field == _COLUMNS, tl.load(columns_ptr + begin), shared)
    for first in range(0, pairs, _PAIRS):
        pair = first + tl.arange(0, _PAIRS)
        b = pair // heads
        h = pair % heads
        at = tl.where(mask_batch > 1, b, 0) * mask_heads + tl.where(mask_heads > 1, h, 0)
        mine = (pair < pairs) & (tl.load(pattern_of_ptr + at, mask=pair < pairs, other=-1) == pattern)
        group = pair // heads_at_once
        in_group = tl.minimum(heads_at_once, pairs - group * heads_at_once)
        place = group * heads_at_once * row_blocks + rank * in_group + pair % heads_at_once
        row = tl.where(field[None, :] == _BATCH, b[:, None], shared[None, :])
        row = tl.where(field[None, :] == _HEAD, h[:, None], row)
        tl.store(work_ptr + place.to(tl.int64)[:, None] * _SIZE + field[None, :], row, mask=mine[:, None])
