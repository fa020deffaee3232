"""Triton kernel that renews the Hopper kernel's work list from tile lists that the GPU has rebuilt."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from stof.kernels.hopper.tile_lists import RANGE_FIELDS
from stof.kernels.hopper.tile_scheduler import WORK_FIELDS, WORK_SIZE

FIELDS = tl.constexpr(WORK_FIELDS)
SIZE = tl.constexpr(WORK_SIZE)
RANGE = tl.constexpr(RANGE_FIELDS)


@triton.jit
@no_type_check
def refresh_work(
    work_list_ptr,  # [W + 1, WORK_SIZE] int32
    ranges_ptr,  # [I, RANGE_FIELDS] int32
    columns_ptr,  # [T + 2, SLABS] int32
    jobs,
    SLABS: tl.constexpr,
    COPY: tl.constexpr,  # jobs written at once
):
    """Write to each work tile what its item holds now: tile range, first bitmap and columns, NaN bits."""
    x = tl.program_id(0) * COPY + tl.arange(0, COPY)
    ok = x < jobs
    job_ptr = work_list_ptr + x * SIZE
    range_ptr = ranges_ptr + tl.load(job_ptr + 14, mask=ok, other=0) * RANGE
    begin = tl.load(range_ptr, mask=ok, other=0)
    # Whoever updates a plan while it attends reads nonsense; but a job without a tile would never end.
    end = tl.maximum(tl.load(range_ptr + 2, mask=ok, other=0), begin + 1)
    tl.store(job_ptr + 3, begin, mask=ok)
    tl.store(job_ptr + 4, tl.minimum(tl.load(range_ptr + 1, mask=ok, other=0), end), mask=ok)
    tl.store(job_ptr + 5, end, mask=ok)
    tl.store(job_ptr + 10, tl.load(range_ptr + 3, mask=ok, other=0), mask=ok)
    tl.store(job_ptr + 11, tl.load(range_ptr + 4, mask=ok, other=0), mask=ok)
    slab = tl.arange(0, SLABS)
    exists = ok[:, None] & (slab >= 0)[None, :]
    columns = tl.load(columns_ptr + begin.to(tl.int64)[:, None] * SLABS + slab[None, :], mask=exists, other=0)
    tl.store(job_ptr[:, None] + FIELDS + slab[None, :], columns, mask=exists)
