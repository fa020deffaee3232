"""Triton kernel that renews the Hopper kernel's work list from tile lists that the GPU has rebuilt."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.tile_fetch import BEGIN, BITMAP, COLUMNS, END, ITEM, NAN_OR_ZERO, PARTIAL_END
from stof.kernels.hopper.tile_lists import TILE_RANGE
from stof.kernels.hopper.tile_scheduler import WORK_SIZE

SIZE = tl.constexpr(WORK_SIZE)
# Of a range.
RANGE_SIZE = tl.constexpr(len(TILE_RANGE))
RANGE_BEGIN, RANGE_PARTIAL_END, RANGE_END, RANGE_BITMAP, RANGE_NAN_OR_ZERO = (
    tl.constexpr(field) for field in TILE_RANGE
)


@triton.jit
@no_type_check
def refresh_work(
    work_list_ptr,  # [W + 1, WORK_SIZE] int32
    ranges_ptr,  # [I, RANGE_SIZE] int32
    columns_ptr,  # [T + 2, SLABS] int32
    count,
    SLABS: tl.constexpr,
    COPY: tl.constexpr,  # work tiles written by one program
):
    """Write to each work tile what its item holds now: tile range, first bitmap and columns, NaN bits."""
    x = tl.program_id(0) * COPY + tl.arange(0, COPY)
    ok = x < count
    work_ptr = work_list_ptr + x * SIZE
    range_ptr = ranges_ptr + tl.load(work_ptr + ITEM, mask=ok, other=0) * RANGE_SIZE
    begin = tl.load(range_ptr + RANGE_BEGIN, mask=ok, other=0)
    # A plan that is updated during a call gives nonsense, but a work tile without a tile would never end.
    end = tl.maximum(tl.load(range_ptr + RANGE_END, mask=ok, other=0), begin + 1)
    tl.store(work_ptr + BEGIN, begin, mask=ok)
    tl.store(work_ptr + PARTIAL_END, tl.minimum(tl.load(range_ptr + RANGE_PARTIAL_END, mask=ok, other=0), end), mask=ok)
    tl.store(work_ptr + END, end, mask=ok)
    tl.store(work_ptr + BITMAP, tl.load(range_ptr + RANGE_BITMAP, mask=ok, other=0), mask=ok)
    tl.store(work_ptr + NAN_OR_ZERO, tl.load(range_ptr + RANGE_NAN_OR_ZERO, mask=ok, other=0), mask=ok)
    slab = tl.arange(0, SLABS)
    exists = ok[:, None] & (slab >= 0)[None, :]
    columns = tl.load(columns_ptr + begin.to(tl.int64)[:, None] * SLABS + slab[None, :], mask=exists, other=0)
    tl.store(work_ptr[:, None] + COLUMNS + slab[None, :], columns, mask=exists)
