"""Fetching work tiles on the device: the producer takes the next one and passes its descriptor to the consumers.

A descriptor is a row of the work list (`tile_scheduler.WorkFields`). The producer holds it one field a lane, and writes
it to a ring of stages in shared memory.
"""

from __future__ import annotations

from collections import namedtuple
from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from stof.kernels.hopper.intrinsics import hide_from_compiler, reinterpret, shfl_idx
from stof.kernels.hopper.tile_scheduler import WORK

# Fields of a descriptor. Triton's cache keys hold constants of a module that are named, not fields of an object.
(
    ROW_BLOCK, BATCH, HEAD, BEGIN, PARTIAL_END, END, PARTS, SLOT, CHUNK, PATTERN, BITMAP, NAN_OR_ZERO, WORK_COUNT, ITEM,
    LIST_INDEX, COLUMNS, PAIR_SKIPPED, PAIR_BITMAP,
) = (gl.constexpr(field) for field in WORK)  # fmt: skip
# Stages of the ring of descriptors. The producer waits until Q of the work tile Q_STAGES (at most 3) before is
# released, so it is never further ahead.
DESCRIPTOR_STAGES = gl.constexpr(3)


# Coordinates of a work tile. `slot` and `chunk` are 0 unless the last chunk merges all (`split_kv_merge.py`).
WorkTile = namedtuple("WorkTile", "row_block b h parts slot chunk")


@gluon.constexpr_function
def last_merges(config):  # type: ignore[no-untyped-def]
    """Whether the last chunk of a row block merges all; several warpgroups lack the registers (`merge_by_last`)."""
    return config.split and config.groups == 1


@gluon.constexpr_function
def descriptor_layout():  # type: ignore[no-untyped-def]
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
@no_type_check
def fetch_next(counter_ptr, lane):
    """Take the next number from the tile scheduler's counter; only the warp's first lane holds it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; setp.eq.b32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }",
        "=r,l,r", [counter_ptr.to(gl.int64, bitcast=True), lane], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
@no_type_check
def send_descriptor(work_index, work, number, lane, descriptors, descriptor_full):
    """Write the descriptor of the next work tile to its stage, one field a lane, and signal the consumers."""
    stage = work_index % DESCRIPTOR_STAGES
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    descriptors.index(stage).store(gl.full([32], gl.where(lane == LIST_INDEX, number, work), gl.int32, layout=by_lane))
    mbarrier.arrive(descriptor_full.index(stage), count=1)


@gluon.jit
@no_type_check
def descriptor_field(descriptors, work_index, number: gl.constexpr):
    """Return a field of the descriptor that follows a work index; the caller has waited for it."""
    fields = reinterpret(descriptors, gl.int32, [DESCRIPTOR_STAGES * 32, 1], descriptor_layout())
    everyone: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(fields.index((work_index % DESCRIPTOR_STAGES) * 32 + number).load(everyone), 0)


@gluon.jit
@no_type_check
def wait_descriptor(descriptors, descriptor_full, work_index):
    """Wait for the descriptor that follows a work index; return its position in the work list."""
    mbarrier.wait(descriptor_full.index(work_index % DESCRIPTOR_STAGES), (work_index // DESCRIPTOR_STAGES) & 1)
    return descriptor_field(descriptors, work_index, LIST_INDEX)


@gluon.jit
@no_type_check
def load_work_tile(descriptors, work_index, config: gl.constexpr):
    """Return the coordinates of the work tile that follows a work index."""
    parts = descriptor_field(descriptors, work_index, PARTS) if config.split else 1
    slot = descriptor_field(descriptors, work_index, SLOT) if last_merges(config) else 0
    chunk = descriptor_field(descriptors, work_index, CHUNK) if last_merges(config) else 0
    row_block = hide_from_compiler(descriptor_field(descriptors, work_index, ROW_BLOCK))
    b = descriptor_field(descriptors, work_index, BATCH)
    h = descriptor_field(descriptors, work_index, HEAD)
    return WorkTile(row_block=row_block, b=b, h=h, parts=parts, slot=slot, chunk=chunk)


@gluon.jit
@no_type_check
def first_work_tile(start, config: gl.constexpr):
    """The same for a thread block's first work tile, whose descriptor `start` holds one field a lane."""
    parts = shfl_idx(start, PARTS) if config.split else 1
    slot = shfl_idx(start, SLOT) if last_merges(config) else 0
    chunk = shfl_idx(start, CHUNK) if last_merges(config) else 0
    return WorkTile(
        row_block=shfl_idx(start, ROW_BLOCK), b=shfl_idx(start, BATCH), h=shfl_idx(start, HEAD),
        parts=parts, slot=slot, chunk=chunk,
    )  # fmt: skip


@gluon.jit
@no_type_check
def carry_work_tile(tile, config: gl.constexpr):
    """Identity that hides the coordinates from Triton's loop-invariant analysis; see `hide_from_compiler`."""
    parts = hide_from_compiler(tile.parts) if config.split else 1
    slot = hide_from_compiler(tile.slot) if last_merges(config) else 0
    chunk = hide_from_compiler(tile.chunk) if last_merges(config) else 0
    row_block = hide_from_compiler(tile.row_block)
    b = hide_from_compiler(tile.b)
    h = hide_from_compiler(tile.h)
    return WorkTile(row_block=row_block, b=b, h=h, parts=parts, slot=slot, chunk=chunk)


# Of a pair of row blocks, for each: bitmap of the first tile, and the tiles it skips in total; 0 without pairs.
PairFields = namedtuple("PairFields", "bitmaps skipped")


@gluon.jit
@no_type_check
def first_pair(start, config: gl.constexpr):
    """Return the pair fields of a thread block's first work tile."""
    bitmaps = (0, 0)
    skipped = (0, 0)
    if config.paired:
        bitmaps = (shfl_idx(start, PAIR_BITMAP), shfl_idx(start, PAIR_BITMAP + 1))
        skipped = (shfl_idx(start, PAIR_SKIPPED), shfl_idx(start, PAIR_SKIPPED + 1))
    return PairFields(bitmaps=bitmaps, skipped=skipped)
