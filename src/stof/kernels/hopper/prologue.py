"""What both forward kernels do before the warps specialise: allocate barriers and start the first copies."""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from stof.kernels.hopper.intrinsics import shfl_idx
from stof.kernels.hopper.producer import copy_k, copy_q, copy_v, kv_heads
from stof.kernels.hopper.tile_fetch import COLUMNS, DESCRIPTOR_STAGES, descriptor_layout

# Barriers of the pipelines, see `forward_kernel.py`, and the ring of descriptors.
Barriers = namedtuple("Barriers", "q_full q_empty k_full v_full kv_empty descriptors descriptor_full")


@gluon.jit
@no_type_check
def allocate_barriers(config: gl.constexpr):
    """Allocate the barriers and the ring of descriptors; `init_barriers` initialises them."""
    q_full = gl.allocate_shared_memory(gl.int64, [config.q_stages, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [config.q_stages, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    descriptors = q_full
    descriptor_full = q_full
    if config.persistent:
        # Allocated only if used: Triton may reuse the memory of barriers that are initialised but never waited on, and
        # the initialisation could land after the new owner's write.
        descriptors = gl.allocate_shared_memory(gl.int32, [DESCRIPTOR_STAGES, 32], descriptor_layout())
        descriptor_full = gl.allocate_shared_memory(gl.int64, [DESCRIPTOR_STAGES, 1], mbarrier.MBarrierLayout())
    return Barriers(
        q_full=q_full, q_empty=q_empty, k_full=k_full, v_full=v_full, kv_empty=kv_empty,
        descriptors=descriptors, descriptor_full=descriptor_full,
    )  # fmt: skip


@gluon.jit
@no_type_check
def init_barriers(barriers, config: gl.constexpr):
    """Initialise the barriers, for one producer warp and `config.groups` consumer warpgroups."""
    for i in gl.static_range(max(config.stages, config.q_stages)):
        if i < config.q_stages:
            mbarrier.init(barriers.q_full.index(i), count=1)
            mbarrier.init(barriers.q_empty.index(i), count=config.groups)
        if i < config.stages:
            mbarrier.init(barriers.k_full.index(i), count=1)
            mbarrier.init(barriers.v_full.index(i), count=1)
            mbarrier.init(barriers.kv_empty.index(i), count=config.groups)
    if config.persistent:
        for i in gl.static_range(DESCRIPTOR_STAGES):
            mbarrier.init(barriers.descriptor_full.index(i), count=1)
    # Stage 0 of V, the zeros before the first tile, counts as full.
    mbarrier.arrive(barriers.v_full.index(0), count=1)
    fence_async_shared()


@gluon.jit
@no_type_check
def start_copies(args, start, lane, config: gl.constexpr):
    """Start the copies of the first work tile's Q and of its first tile; `start` holds the descriptor."""
    columns = shfl_idx(start, lane + COLUMNS)
    at = kv_heads(args, start)
    copy_k(args, start, at, columns, 0, config)
    copy_q(args, start, 0, config)
    copy_v(args, at, columns, 1, config)
