"""The block-wise kernel's work, rebuilt on the device from tensors that change: no host synchronisation, fixed sizes.

A `WorkRoom` owns the lists, whose addresses and sizes never change, so attention and building may both be captured in
a CUDA graph. `fill_*` write them anew. What does not fit sets a flag and turns the rows concerned to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import ArgumentError
from stof.kernels.triton.work import ITEM_FIELDS, Work

# Set beside the mask's own problems: more tiles than there is room for.
OVERFLOW = 1 << 16
# Vertical columns, distances or tiles handled at once, and columns of a dense mask.
_COPY, _TILES_AT_ONCE, _COLUMNS = 1024, 16, 128
# Distances before 0 that a window may begin at, see `fill_slash.SLASH_BASE`.
_BASE = 64


@dataclass(frozen=True)
class Problem:
    """Sizes that never change. Rows and keys of the attention, block sizes, and leading sizes of the mask."""

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    mask_batch: int
    mask_heads: int

    @property
    def patterns(self) -> int:
        return self.mask_batch * self.mask_heads

    @property
    def row_blocks(self) -> int:
        return -(-self.q_len // self.block_m)


@dataclass(frozen=True, eq=False)
class WorkRoom:
    """Lists of fixed size for the work of one problem.

    Attributes:
        problem: its sizes.
        work: what the kernel reads; partial and full tiles share one list of columns.
        tiles: how many tiles there is room for.
        shared: bitmaps at the front that several row blocks use.
        flags: int32 `[P]`, bits of what was wrong since they were last cleared.
        owner: int32 `[tiles, 2]` for dense masks, else empty.
    """

    problem: Problem
    work: Work
    tiles: int
    shared: int
    flags: Tensor
    owner: Tensor

    @staticmethod
    def make(
        problem: Problem, device: torch.device, *, tiles: int, shared: int, bitmaps: int, owners: bool = False
    ) -> WorkRoom:
        """Lists for so many tiles and bitmaps.

        Raises:
            ArgumentError: more than 32-bit offsets reach.
        """
        block_m, block_n, patterns = problem.block_m, problem.block_n, problem.patterns
        if max((tiles + 2) * block_n, (shared + bitmaps) * block_m * 4) >= 2**31:
            raise ArgumentError(
                f"{tiles} tiles of {block_m}x{block_n} are more than a plan can hold; give a smaller `density`"
            )

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        columns = zeros(tiles + 2, block_n)
        items = zeros(patterns, problem.row_blocks, ITEM_FIELDS)
        items[..., 5] = 1
        items[..., 0] = -1
        work = Work(
            pattern_of=torch.arange(patterns, dtype=torch.int32, device=device).view(
                problem.mask_batch, problem.mask_heads
            ),
            items=items,
            first_columns=zeros(patterns, problem.row_blocks, block_n),
            partial_columns=columns,
            partial_bitmap=zeros(tiles + 2),
            bitmaps=zeros(shared + bitmaps, block_m, 4),
            full_columns=columns,
            row_order=zeros(0),
            block_m=block_m,
            block_n=block_n,
            q_len=problem.q_len,
            kv_len=problem.kv_len,
            chunks=0,
            splits=0,
            has_partial=1,
            has_full=1,
            full_runs=0,
            may_poison=1,
        )
        return WorkRoom(problem, work, tiles, shared, zeros(patterns), zeros(tiles, 2) if owners else zeros(0, 2))

    def bytes(self) -> int:
        """Memory of all lists."""
        held = {t.data_ptr(): t for t in (*self.work.flatten()[0], self.flags, self.owner)}
        return sum(t.numel() * t.element_size() for t in held.values())


def _as_rows(indices: Tensor, problem: Problem) -> Tensor:
    """`[B | 1, H | 1, n]` as int64 `[P, n]`."""
    shape = (problem.mask_batch, problem.mask_heads, indices.shape[-1])
    return indices.expand(shape).reshape(problem.patterns, -1).long()


def _placed(partial: Tensor, full: Tensor, bad: Tensor, tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the tiles of each row block go.

    Args:
        partial, full: int64 `[P, R]`, tiles of each kind, at most.
        bad: bool `[P]`, patterns that are not computed.
        tiles: room there is.

    Returns:
        First partial tile, first full tile, position in the item list (longest first), and whether the row block has no
        room or belongs to a bad pattern; all `[P, R]`.
    """
    needed = torch.where(bad[:, None], 0, partial + full)
    end = needed.flatten().cumsum(0).view_as(needed)
    poisoned = bad[:, None] | (end > tiles)
    begin = torch.where(poisoned, 0, end - needed)
    order = needed.argsort(dim=1, descending=True, stable=True)
    steps = torch.arange(needed.shape[1], device=needed.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, steps)
    return begin, begin + torch.where(poisoned, 0, partial), place, poisoned


def _flag(room: WorkRoom, problems: Tensor, poisoned: Tensor) -> None:
    """Remember what was wrong."""
    overflow = (poisoned & (problems == 0)[:, None]).any(1)
    room.flags.bitwise_or_(problems | torch.where(overflow, OVERFLOW, 0).int())


# ---- vertical columns and slash distances


def vertical_slash_room(
    problem: Problem, verticals: int, distances: int, offset: int, density: float | None, device: torch.device
) -> WorkRoom:
    """Lists for `verticals` columns and `distances` slash distances; see `vertical_slash_tiles` for `density`."""
    shared = problem.patterns * _slash_chunks(problem, distances, offset)
    own = problem.patterns * (
        sum(4 + -(-min(verticals, end) // problem.block_n) for end in _row_ends(problem, offset))
        + _slash_chunks(problem, distances, offset)
    )
    tiles = vertical_slash_tiles(problem, verticals, distances, offset, density)
    return WorkRoom.make(problem, device, tiles=tiles, shared=shared, bitmaps=own)


def vertical_slash_tiles(problem: Problem, verticals: int, distances: int, offset: int, density: float | None) -> int:
    """Tiles to have room for: any indices of these sizes, or a share `density` of all scores where that is fewer."""
    block_m, block_n = problem.block_m, problem.block_n
    worst = 0
    for end in _row_ends(problem, offset):
        slash = min(distances * block_m, end)
        worst += -(-slash // block_n) + 4 + -(-min(verticals, end) // block_n)
    if density is not None:
        dense = problem.row_blocks * (problem.kv_len / block_n)
        worst = min(worst, max(1, int(dense * density)))
    return worst * problem.patterns


def _row_ends(problem: Problem, offset: int) -> list[int]:
    """Keys that the last query of each row block may see."""
    ends = range(problem.block_m + offset, problem.q_len + problem.block_m + offset, problem.block_m)
    return [min(end, problem.kv_len) for end in ends]


def _slash_chunks(problem: Problem, distances: int, offset: int) -> int:
    """Tiles of slash columns that only some rows see, of one row block, at most."""
    span = problem.q_len + offset + problem.block_m - 1
    return -(-min(span, distances * problem.block_m) // problem.block_n)


def fill_vertical_slash(room: WorkRoom, vertical: Tensor, slash: Tensor, problems: Tensor, offset: int) -> None:
    """Write the work of `vertical_slash`.

    Args:
        room: from `vertical_slash_room`.
        vertical, slash: int32 or int64 `[B | 1, H | 1, n]`, ascending, -1 in unused places at the end.
        problems: int32 `[P]`; patterns where it is not 0 give NaN.
        offset: position of the first query.
    """
    from stof.kernels.triton import fill_slash

    problem, work = room.problem, room.work
    block_m, block_n, device = problem.block_m, problem.block_n, room.flags.device
    patterns, row_blocks = problem.patterns, problem.row_blocks

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    columns, distances = _as_rows(vertical, problem), _as_rows(slash, problem)
    reach = problem.q_len + offset  # distances are below it
    # Slash distances as places in a table that begins at distance -_BASE; windows reach past its last distance.
    size = -(-(reach + _BASE + block_m + 64) // 32) * 32
    member = torch.zeros(patterns, size, dtype=torch.int8, device=device)
    # What is no distance marks place 0, which is below every window's first.
    member.scatter_(1, torch.where((distances < 0) | (distances >= reach), 0, distances + _BASE), 1)
    member[:, 0] = 0
    # Columns at these distances from the first row of a row block may be seen by one of its rows.
    span = reach + block_m - 1
    table, before = empty(patterns, size // 32), empty(patterns, size + 1)
    full_list, some_list = empty(patterns, span), empty(patterns, span)
    full_before, some_before = empty(patterns, span + 1), empty(patterns, span + 1)
    fill_slash.slash_lists[(patterns,)](
        member, table, before, full_list, some_list, full_before, some_before, size, span, block_m, _COPY
    )
    chunks = room.shared // patterns
    fill_slash.slash_bitmaps[(room.shared,)](
        table, some_list, some_before, work.bitmaps, size // 32, span, chunks, block_m, block_n
    )
    # Columns up to a row block's last row; those that are no column are sorted behind all others.
    columns = torch.where((columns < 0) | (columns >= problem.kv_len), 2**31 - 1, columns).int()
    last = (torch.arange(1, row_blocks + 1, dtype=torch.int32, device=device) * block_m).clamp(max=problem.q_len)
    ends = (last + (offset - 1)).clamp(max=problem.kv_len - 1)
    n_vertical = torch.searchsorted(columns, ends.expand(patterns, -1).contiguous(), right=True, out_int32=True)
    tiles, own = empty(patterns, row_blocks), empty(patterns, row_blocks)
    fill_slash.vertical_slash_count[(patterns * -(-row_blocks // _COPY),)](
        full_before, some_before, n_vertical, problems, tiles, own, row_blocks, span, problem.q_len, problem.kv_len,
        offset, block_m, block_n, _COPY,
    )  # fmt: skip
    room.flags.bitwise_or_(problems)
    tiles_end, own_end = (x.flatten().cumsum(0, dtype=torch.int32) for x in (tiles, own))
    # Chains of dependent loads: what counts is programs at once, and this many registers spill nothing.
    fill_slash.vertical_slash_fill[(patterns * row_blocks,)](
        tiles_end, own_end, n_vertical, problems, room.flags, columns, table, before, full_list, some_list, full_before,
        some_before, work.items, work.first_columns, work.partial_columns, work.partial_bitmap, work.bitmaps,
        row_blocks, columns.shape[1], size // 32, span, chunks, room.shared, room.tiles, problem.q_len,
        problem.kv_len, offset, OVERFLOW, block_m, block_n, _COPY, num_warps=8, maxnreg=64,
    )  # fmt: skip


def _up(count: Tensor, step: int) -> Tensor:
    return torch.div(count + step - 1, step, rounding_mode="floor")


# ---- the best key blocks of each query block


def block_room(problem: Problem, k: int, block_size: int, device: torch.device) -> WorkRoom:
    """Lists for `k` key blocks to a query block: they always fit."""
    count = problem.patterns * problem.row_blocks
    slots = k * (block_size // problem.block_n) + 2
    return WorkRoom.make(problem, device, tiles=count * slots, shared=0, bitmaps=2 * count)


def fill_blocks(room: WorkRoom, scores: Tensor, k: int, block_size: int, causal: bool, nan_bit: int) -> None:
    """Write the work of `block_topk`.

    Args:
        room: from `block_room`.
        scores: float `[B | 1, H | 1, query blocks, key blocks]`.
        k, block_size, causal: of the mask.
        nan_bit: the flag for NaN scores.
    """
    import triton

    from stof.kernels.triton import fill_blocks as kernels

    problem, work, device = room.problem, room.work, room.flags.device
    shape = (problem.mask_batch, problem.mask_heads, *scores.shape[-2:])
    scores = scores.expand(shape).reshape(problem.patterns, *scores.shape[-2:])
    query_blocks, key_blocks = scores.shape[1:]
    chosen = torch.zeros(problem.patterns, query_blocks, k, dtype=torch.int32, device=device)
    count = torch.zeros(problem.patterns, query_blocks, dtype=torch.int32, device=device)
    bad = torch.zeros(problem.patterns, dtype=torch.int32, device=device)
    kernels.select_blocks[(problem.patterns * query_blocks,)](
        scores, chosen, count, bad, *scores.stride(), query_blocks, key_blocks, k, nan_bit, causal,
        triton.next_power_of_2(key_blocks),
    )  # fmt: skip
    room.flags.bitwise_or_(bad)
    slots = k * (block_size // problem.block_n) + 2
    kernels.block_fill[(problem.patterns * problem.row_blocks,)](
        chosen, count, bad, work.items, work.first_columns, work.partial_columns, work.partial_bitmap, work.bitmaps,
        problem.row_blocks, query_blocks, k, slots, problem.q_len, problem.kv_len, block_size, causal,
        problem.block_m, problem.block_n, _TILES_AT_ONCE,
    )  # fmt: skip


# ---- dense masks


def dense_room(problem: Problem, density: float | None, device: torch.device) -> WorkRoom:
    """Lists for tiles that hold a share `density` of all scores; None for all of them."""
    per_row = -(-problem.kv_len // problem.block_n)
    # Columns are gathered: two tiles of a row block, one of each kind, may be less than full.
    tiles = problem.row_blocks * (per_row + 1)
    if density is not None:
        tiles = min(tiles, max(1, int(problem.row_blocks * per_row * density)))
    tiles *= problem.patterns
    return WorkRoom.make(problem, device, tiles=tiles, shared=0, bitmaps=tiles, owners=True)


def fill_dense(room: WorkRoom, keep: Tensor) -> None:
    """Write the work of a dense mask.

    Args:
        room: from `dense_room`.
        keep: bool `[B | 1, H | 1, Sq, Skv]`, or bits of it, int32 `[B | 1, H | 1, Sq, ceil(Skv / 32)]`.
    """
    from stof.kernels.triton import fill_blocks as kernels

    problem, work, device = room.problem, room.work, room.flags.device
    packed = keep.dtype == torch.int32
    keep = keep if packed else keep.view(torch.uint8)
    strides = [0 if size == 1 else stride for size, stride in zip(keep.shape, keep.stride(), strict=True)]
    count = problem.patterns * problem.row_blocks
    column_blocks = -(-problem.kv_len // _COLUMNS)
    classes = torch.empty(count, problem.kv_len, dtype=torch.int8, device=device)
    kernels.dense_classes[(count * column_blocks,)](
        keep, classes, *strides, problem.mask_heads, problem.row_blocks, column_blocks, problem.q_len,
        problem.kv_len, packed, problem.block_m, _COLUMNS,
    )  # fmt: skip
    shape = (problem.patterns, problem.row_blocks)
    full_columns, any_columns = ((classes >= least).sum(1).view(shape) for least in (2, 1))
    full = torch.div(full_columns, problem.block_n, rounding_mode="floor")
    partial = _up(any_columns - full * problem.block_n, problem.block_n)
    problems = torch.zeros(problem.patterns, dtype=torch.int32, device=device)
    begin, full_begin, place, poisoned = _placed(partial, full, problems != 0, room.tiles)
    _flag(room, problems, poisoned)
    rows = torch.stack([place, begin, partial, full_begin, full, poisoned], -1).int()
    room.owner.fill_(-1)
    kernels.dense_fill[(count,)](
        rows, classes, work.items, work.first_columns, work.partial_columns, work.partial_bitmap, room.owner,
        problem.row_blocks, problem.kv_len, problem.block_n, _COPY,
    )  # fmt: skip
    kernels.dense_bitmaps[(room.tiles,)](
        keep, room.owner, work.partial_columns, work.bitmaps, *strides, problem.mask_heads, problem.row_blocks,
        problem.q_len, packed, problem.block_m, problem.block_n,
    )  # fmt: skip
