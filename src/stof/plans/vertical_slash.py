"""Room for the work of vertical columns and slash distances, and the launches that fill it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts
from stof.plans.buffers import DynamicSizes, WorkBuffers, empty_work
from stof.plans.hopper_buffers import FilledTiles
from stof.plans.hopper_vertical_slash import BLOCK, make_slash_tiles, slash_counts, slash_refusals

if TYPE_CHECKING:
    from stof.runtime.launch import Launch

# Distances before 0 that a window may begin at, see `fill_slash_tables.SLASH_BASE`.
_BASE = 64
# Rows of its tables.
_TABLES = 7
# Table words and indices that the program of a pattern handles at once, vertical columns and left-over ones that the
# program of a row block does, and programs that make the shared tiles of a pattern.
_WORDS, _COPY, _EDGES, _SIDE = 2048, 256, 128, 128


@dataclass(frozen=True, eq=False, kw_only=True)
class SlashBuffers(WorkBuffers):
    """Lists for any `verticals` columns and `distances` slash distances.

    The list of tiles begins with shared tiles whose columns only some rows of a row block see, `chunks` a pattern; then
    come the row blocks' own tiles, `own` for each pattern; last shared tiles whose columns all rows see,
    `full_chunks` for each pattern.

    Attributes:
        chunks, own, full_chunks: tiles of each part of that list, for each pattern.
        slots: int32 `[R + 1]`, where the tiles of each row block begin.
        tables: int32 `[P, 7, words + 1]`, see `fill_slash_tables`.
        bad: int32 `[P]`, what is wrong with the present mask.
        columns: int32 `[mask_batch, mask_heads, n]`, the vertical columns, n a multiple of 64; -1 for none.
        slashes: int32 `[P, distances]`, the slash distances.
        verticals, distances: places in the masks' lists.
        offset: position of the first query.
    """

    chunks: int
    own: int
    full_chunks: int
    slots: Tensor
    tables: Tensor
    bad: Tensor
    columns: Tensor
    slashes: Tensor
    verticals: int
    distances: int
    offset: int

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), self.slots, self.tables, self.bad, self.columns, self.slashes)

    def work_launches(self) -> tuple[Launch, ...]:
        return _work_launches(self)

    def hopper_refusals(self) -> tuple[str, ...]:
        return slash_refusals(self)

    def hopper_serves(self, config: LayoutConfig) -> bool:
        return config == LayoutConfig(BLOCK, BLOCK)

    def counts(self, config: LayoutConfig) -> TileCounts:
        return slash_counts(self, config)

    def hopper_tiles(self, config: LayoutConfig, split_tiles: int) -> FilledTiles:
        return make_slash_tiles(self, config, split_tiles)


def vertical_slash_buffers(
    problem: DynamicSizes, verticals: int, distances: int, offset: int, device: torch.device
) -> SlashBuffers:
    """Lists with room for any indices of these sizes; `offset` is the position of the first query.

    Raises:
        ArgumentError: more than 32-bit offsets reach.
    """
    patterns, reach = problem.patterns, problem.q_len + offset
    span = reach + problem.block_m - 1
    # Only where that many distances follow each other do all rows see a column.
    chunks = -(-min(span, distances * problem.block_m) // problem.block_n)
    full_chunks = -(-min(span, distances) // problem.block_n)
    slots = torch.tensor([0, *_own_tiles(problem, verticals, distances, offset)]).cumsum(0)
    own = int(slots[-1])
    # A row ahead is read past the bitmaps of a row block's own tiles.
    work = empty_work(
        problem,
        device,
        tiles=patterns * (chunks + own + full_chunks),
        bitmaps=patterns * (chunks + own) + 1,
        shared=True,
    )
    words = -(-(reach + _BASE + problem.block_m + 64) // 32)
    return SlashBuffers(
        problem=problem,
        work=work,
        flags=torch.zeros(patterns, dtype=torch.int32, device=device),
        chunks=chunks,
        own=own,
        full_chunks=full_chunks,
        slots=slots.to(device=device, dtype=torch.int32),
        tables=torch.zeros(patterns, _TABLES, words + 1, dtype=torch.int32, device=device),
        bad=torch.zeros(patterns, dtype=torch.int32, device=device),
        columns=torch.full(
            (problem.mask_batch, problem.mask_heads, -(-verticals // BLOCK) * BLOCK),
            -1,
            dtype=torch.int32,
            device=device,
        ),
        slashes=torch.full((patterns, distances), -1, dtype=torch.int32, device=device),
        verticals=verticals,
        distances=distances,
        offset=offset,
    )


def _own_tiles(problem: DynamicSizes, verticals: int, distances: int, offset: int) -> list[int]:
    """Tiles that each row block may need for itself: vertical columns, and less than a tile at each end of a run."""
    block_m, block_n, kv_len = problem.block_m, problem.block_n, problem.kv_len
    ends = [min((row_block + 1) * block_m + offset, kv_len) for row_block in range(problem.row_blocks)]
    # Runs of either kind begin inside a tile where the last rows' columns do not all exist.
    cuts = 2 if problem.row_blocks * block_m + offset <= kv_len else 4
    columns = [cuts * (block_n - 1) + min(verticals, end) for end in ends]
    if problem.q_len % block_m:
        # No shared tile of columns that some rows see serves a row block of which rows are missing.
        columns[-1] += min(ends[-1] + block_m, distances * block_m)
    return [-(-count // block_n) for count in columns]


def fill_vertical_slash(
    room: SlashBuffers, vertical: Tensor, slash: Tensor, out_of_range: int, not_ascending: int
) -> None:
    """Read a `vertical_slash`, and fill the lists in use.

    Args:
        room: from `vertical_slash_buffers`.
        vertical, slash: int32 or int64 `[B | 1, H | 1, n]`, ascending, -1 in unused places at the end. Lists that
            are not make their pattern's results NaN.
        out_of_range, not_ascending: flags for lists that are not.
    """
    vertical, slash = vertical.contiguous(), slash.contiguous()
    key = (vertical.shape, vertical.dtype, slash.shape, slash.dtype)
    (tables,) = room.launched(key, lambda: (_reading(room, vertical, slash, out_of_range, not_ascending),))
    tables(vertical, slash)
    room.fill()


def _reading(room: SlashBuffers, vertical: Tensor, slash: Tensor, out_of_range: int, not_ascending: int) -> Launch:
    """What checks a mask's lists, and makes tables of them."""
    import triton

    from stof.plans.fill import slash_tables as fill_slash_tables
    from stof.runtime.launch import Launch

    problem, words = room.problem, room.tables.shape[2] - 1
    at_once = min(_WORDS, triton.next_power_of_2(max(words, room.verticals, room.distances)))

    def strides(indices: Tensor) -> tuple[int, int]:
        b, h = (0 if indices.shape[i] == 1 else indices.stride(i) for i in range(2))
        return b, h

    return Launch(
        fill_slash_tables.slash_tables,
        problem.patterns,
        (room.bad, room.flags, room.tables, room.columns, room.slashes),
        (
            *strides(vertical), *strides(slash), problem.mask_heads, room.verticals, room.distances, problem.kv_len,
            problem.q_len + room.offset, words, room.columns.shape[-1],
        ),
        (out_of_range, not_ascending, problem.block_m, at_once),
        num_warps=8,
        num_stages=1,
        device=room.flags.device,
    )  # fmt: skip


def _work_launches(room: SlashBuffers) -> tuple[Launch, ...]:
    """What writes the block-wise kernel's work."""
    import triton

    from stof.plans.fill import vertical_slash as fill_slash
    from stof.runtime.launch import Launch

    problem, work, device = room.problem, room.work, room.flags.device
    patterns, block_m, block_n = problem.patterns, problem.block_m, problem.block_n
    words = room.tables.shape[2] - 1
    own_base = patterns * room.chunks
    full_base = own_base + patterns * room.own
    side = min(_SIDE, room.chunks + room.full_chunks)
    stride_h = room.columns.shape[-1]
    tiles = Launch(
        fill_slash.slash_tiles,
        patterns * side,
        (room.tables, work.partial_columns, work.bitmaps),
        (words, words.bit_length(), room.chunks, room.full_chunks, full_base),
        (side, block_m, block_n),
        num_warps=2,
        num_stages=1,
        device=device,
    )
    fill = Launch(
        fill_slash.vertical_slash_fill,
        patterns * problem.row_blocks,
        (
            room.columns, room.bad, room.tables, room.slots, work.items, work.first_columns, work.partial_columns,
            work.bitmaps,
        ),
        (
            problem.mask_heads * stride_h, stride_h, problem.mask_heads, room.verticals, words, room.chunks,
            room.full_chunks, full_base, own_base, problem.row_blocks, problem.q_len, problem.kv_len, room.offset,
        ),
        (block_m, block_n, _EDGES, min(_COPY, max(32, triton.next_power_of_2(room.verticals)))),
        num_warps=1,
        num_stages=1,
        device=device,
    )  # fmt: skip
    return tiles, fill
