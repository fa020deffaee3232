"""Triton kernels that write the Hopper kernel's lists from blocks chosen on the device, and renew its jobs."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.jobs import JOB_FIELDS, RANGE_FIELDS

FIELDS = tl.constexpr(JOB_FIELDS)
RANGE = tl.constexpr(RANGE_FIELDS)
# The bits of a float32 that is not a number.
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
@no_type_check
def fill_tiles(
    chosen_ptr,  # [P, query blocks, k] int32, ascending
    count_ptr,  # [P, query blocks] int32
    bad_ptr,  # [P] int32, not 0 where nothing is computed
    first_item_ptr,  # [P * R + 1] int32, items of each row block
    columns_ptr,  # [P * R * slots + 2] int32, first column of each tile
    bitmap_ptr,  # [P * R * slots + 3] int32, see `runtime_blocks.bitmaps_of`
    ranges_ptr,  # [I, RANGE_FIELDS] int32
    row_blocks,
    query_blocks,
    k,
    slots,  # tiles that a row block has room for: one partial one, then full ones
    nothing,  # a tile that keeps nothing
    q_len,
    kv_len,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPY: tl.constexpr,  # tiles written at once
):
    """Tiles of one row block from its chosen key blocks, and what part of them each of its items takes."""
    # No row block then has two partial tiles: of causal masks the one that holds its last rows' own keys, else the one
    # at the end of the keys.
    tl.static_assert(BLOCK_M <= BLOCK_N and BLOCK_N <= BLOCK_SIZE)
    PER: tl.constexpr = BLOCK_SIZE // BLOCK_N
    program = tl.program_id(0)
    pattern = program // row_blocks
    q0 = (program % row_blocks) * BLOCK_M
    last_row = tl.minimum(q0 + BLOCK_M, q_len) - 1
    query_block = pattern * query_blocks + q0 // BLOCK_SIZE
    bad = tl.load(bad_ptr + pattern) != 0
    count = tl.where(bad, 0, tl.load(count_ptr + query_block) * PER)
    base = program * slots
    n_partial, n_full, partial_bitmap = 0, 0, 0
    for start in range(0, count, COPY):
        x = start + tl.arange(0, COPY)
        ok = x < count
        block = tl.load(chosen_ptr + query_block.to(tl.int64) * k + x // PER, mask=ok, other=0)
        begin = block * BLOCK_SIZE + (x % PER) * BLOCK_N
        ok = ok & (begin < kv_len)
        bitmap = 1 + (begin + BLOCK_N > kv_len).to(tl.int32)
        if CAUSAL:
            ok = ok & (begin <= last_row)
            bitmap += tl.where(begin + BLOCK_N > q0, 2 * ((begin - q0 + BLOCK_N) // BLOCK_M), 0)
        full = (ok & (bitmap == 1)).to(tl.int32)
        partial = ok & (bitmap != 1)
        place = base + tl.where(partial, 0, n_full + tl.cumsum(full, 0))
        tl.store(columns_ptr + place, begin, mask=ok)
        tl.store(bitmap_ptr + place, bitmap, mask=ok)
        n_full += tl.sum(full, 0)
        n_partial += tl.sum(partial.to(tl.int32), 0)
        partial_bitmap += tl.sum(tl.where(partial, bitmap, 0), 0)
    tiles = n_partial + n_full
    first = base + 1 - n_partial
    item = tl.load(first_item_ptr + program)
    parts = tl.load(first_item_ptr + program + 1) - item
    spoil = tl.where(bad, NAN_BITS, 0)
    for part in range(parts):
        begin = first + part * tiles // parts
        end = first + (part + 1) * tiles // parts
        partial_end = tl.minimum(tl.maximum(first + n_partial, begin), end)
        empty = begin == end
        bitmap = tl.where(empty, 0, tl.where(begin < partial_end, partial_bitmap, 1))
        range_ptr = ranges_ptr + (item + part) * RANGE
        tl.store(range_ptr, tl.where(empty, nothing, begin))
        tl.store(range_ptr + 1, tl.where(empty, nothing + 1, partial_end))
        tl.store(range_ptr + 2, tl.where(empty, nothing + 1, end))
        tl.store(range_ptr + 3, bitmap)
        tl.store(range_ptr + 4, spoil)


@triton.jit
@no_type_check
def refresh_jobs(
    jobs_ptr,  # [J + 1, JOB_FIELDS] int32
    starts_ptr,  # [blocks, 2 * JOB_FIELDS] int32
    ranges_ptr,  # [I, RANGE_FIELDS] int32
    columns_ptr,  # [T + 2] int32
    jobs,
    blocks,
    COPY: tl.constexpr,  # jobs written at once
):
    """Give jobs, and the copies of each thread block's first one, the tiles that their items have now."""
    x = tl.program_id(0) * COPY + tl.arange(0, COPY)
    _refresh(jobs_ptr + x * FIELDS, ranges_ptr, x < jobs)
    starts_ptr += x * (2 * FIELDS)
    begin = _refresh(starts_ptr, ranges_ptr, x < blocks)
    tl.store(starts_ptr + FIELDS, tl.load(columns_ptr + begin, mask=x < blocks, other=0), mask=x < blocks)


@triton.jit
@no_type_check
def _refresh(job_ptr, ranges_ptr, ok):
    """Tiles, first bitmap and what spoils the result, from a job's item; the first tile."""
    range_ptr = ranges_ptr + tl.load(job_ptr + 14, mask=ok, other=0) * RANGE
    begin = tl.load(range_ptr, mask=ok, other=0)
    tl.store(job_ptr + 3, begin, mask=ok)
    tl.store(job_ptr + 4, tl.load(range_ptr + 1, mask=ok, other=0), mask=ok)
    tl.store(job_ptr + 5, tl.load(range_ptr + 2, mask=ok, other=0), mask=ok)
    tl.store(job_ptr + 10, tl.load(range_ptr + 3, mask=ok, other=0), mask=ok)
    tl.store(job_ptr + 11, tl.load(range_ptr + 4, mask=ok, other=0), mask=ok)
    return begin
