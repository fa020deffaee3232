"""Buffers for the work of vertical columns and slash distances, and the launches that fill them.

How many tiles a row block has only the device finds out, so the Hopper kernel's work is listed as if slash distances
lay evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.dynamic.buffers import HopperLists, WorkBuffers, empty_lists, empty_work
from stof.dynamic.sizes import DynamicSizes, int_zeros
from stof.errors import UnfitLayoutError
from stof.kernels.hopper.tile_lists import TileLists, oob_column
from stof.layout import LayoutConfig
from stof.layout.survey import TileCounts
from stof.masks.dynamic import NOT_ASCENDING, OUT_OF_RANGE

if TYPE_CHECKING:
    from stof.runtime.launch import Launch

# Distances before 0 that a window may begin at, see `tables.py`.
_BASE = 64
# Rows of its tables.
_TABLES = 7
# Table words and indices that the thread block of a pattern handles at once, vertical columns and left-over ones that
# the thread block of a row block does, and thread blocks that make the shared tiles of a pattern.
_WORDS, _COPY, _EDGES, _SIDE = 2048, 256, 128, 128
# Rows of a row block, and columns of a tile, of the Hopper kernel.
BLOCK = 64
# For the Hopper kernel: distances, or tiles, handled at once; thread blocks that make the bitmaps of a pattern.
_HOPPER_COPY, _TILES_AT_ONCE, _HOPPER_SIDE = 1024, 64, 64


@dataclass(frozen=True, eq=False, kw_only=True)
class SlashBuffers(WorkBuffers):
    """Lists for any `verticals` columns and `distances` slash distances.

    The list of tiles begins with shared tiles whose columns only some rows of a row block see, `chunks` a pattern; then
    come the row blocks' own tiles, `own_tiles` for each pattern; last shared tiles whose columns all rows see,
    `full_chunks` for each pattern.

    Attributes:
        chunks, own_tiles, full_chunks: tiles of each part of that list, for each pattern.
        slots: int32 `[R + 1]`, where the tiles of each row block begin.
        tables: int32 `[P, 7, words + 1]`, see `tables.py`.
        bad: int32 `[P]`, what is wrong with the present mask.
        columns: int32 `[mask_batch, mask_heads, n]`, the vertical columns, n a multiple of 64; -1 for none.
        slashes: int32 `[P, distances]`, the slash distances.
        verticals, distances: places in the masks' lists.
        offset: position of the first query.
    """

    chunks: int
    own_tiles: int
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

    def fill(self, *tensors: Tensor) -> None:
        """Read a `vertical_slash`, and fill the lists in use.

        Args:
            tensors: vertical columns and slash distances, int32 or int64 `[B | 1, H | 1, n]`, ascending, -1 in unused
                places at the end. Lists that are not make their pattern's results NaN.
        """
        vertical, slash = (indices.contiguous() for indices in tensors)
        key = (vertical.shape, vertical.dtype, slash.shape, slash.dtype)
        self.launched(key, lambda: _reading(self, vertical, slash))(vertical, slash)
        self.fill_lists()

    def work_launches(self) -> tuple[Launch, ...]:
        import triton

        from stof.dynamic.vertical_slash import triton_kernels as fill_slash
        from stof.runtime.launch import Launch

        problem, work = self.problem, self.work
        patterns, block_m, block_n = problem.patterns, problem.block_m, problem.block_n
        words = self.tables.shape[2] - 1
        own_base = patterns * self.chunks
        full_base = own_base + patterns * self.own_tiles
        programs = min(_SIDE, self.chunks + self.full_chunks)
        stride_h = self.columns.shape[-1]
        tiles = Launch(
            fill_slash.slash_tiles,
            patterns * programs,
            (self.tables, work.partial_columns, work.bitmaps),
            (words, words.bit_length(), self.chunks, self.full_chunks, full_base),
            (programs, block_m, block_n),
            num_warps=2,
        )
        fill = Launch(
            fill_slash.vertical_slash_fill,
            patterns * problem.row_blocks,
            (
                self.columns, self.bad, self.tables, self.slots, work.items, work.first_columns, work.partial_columns,
                work.bitmaps,
            ),
            (
                problem.mask_heads * stride_h, stride_h, problem.mask_heads, self.verticals, words, self.chunks,
                self.full_chunks, full_base, own_base, problem.row_blocks, problem.q_len, problem.kv_len, self.offset,
            ),
            (block_m, block_n, _EDGES, min(_COPY, max(32, triton.next_power_of_2(self.verticals)))),
            num_warps=1,
        )  # fmt: skip
        return tiles, fill

    def hopper_refusals(self) -> tuple[str, ...]:
        """Why the Hopper kernel cannot run masks like these."""
        problem, refusals = self.problem, []
        # 0 * NaN is NaN, and TMA reads whole tiles: each of their columns has to be seen by a row that exists.
        if problem.q_len % BLOCK:
            refusals.append(f"of vertical_slash, takes lengths of whole row blocks of {BLOCK}, not {problem.q_len}")
        if problem.kv_len != problem.q_len + self.offset:
            refusals.append(f"of vertical_slash, takes keys up to the last query, not {problem.kv_len}")
        return tuple(refusals)

    def hopper_serves(self, config: LayoutConfig) -> bool:
        return config == LayoutConfig(BLOCK, BLOCK)

    def counts(self, config: LayoutConfig) -> TileCounts:
        """Tiles of each row block, all of them partial, were all distances neighbours and all lists spread evenly."""
        problem = self.problem
        reach = problem.q_len + self.offset
        most = -(-min(self.distances + BLOCK, reach) // config.block_n) + -(-self.verticals // config.block_n)
        last = torch.arange(1, -(-problem.q_len // config.block_m) + 1) * config.block_m + self.offset
        partial = torch.div(most * last + reach - 1, reach, rounding_mode="floor")
        partial = partial.expand(problem.patterns, -1)
        return TileCounts(partial, torch.zeros_like(partial))

    def hopper_tiles(self, config: LayoutConfig, split_tiles: int) -> HopperLists:
        problem, device = self.problem, self.flags.device
        counts = self.counts(config)
        count = counts.partial.numel()
        n, vertical_tiles = self.distances, self.columns.shape[-1] // BLOCK
        slots = n + vertical_tiles
        nothing, own_bitmaps = count * slots, 1 + 2 * problem.patterns * n
        bitmaps = own_bitmaps + count * vertical_tiles
        if max(nothing + 3, bitmaps * BLOCK * 4) >= 2**31:
            raise UnfitLayoutError(f"{nothing} tiles with {bitmaps} bitmaps are more than 32-bit offsets reach")

        zeros = int_zeros(device)
        columns = zeros(nothing + 2, 1)
        columns[nothing:] = oob_column(problem.kv_len)
        lists, first_item = empty_lists(
            self.work, counts, split_tiles, columns, bitmaps=zeros(bitmaps, BLOCK, 4), compacted_keys=self.columns,
            block_m=BLOCK, block_n=BLOCK, slab=BLOCK, has_full=0,
        )  # fmt: skip
        tables = (zeros(problem.patterns, 2, n), zeros(problem.patterns, 2, n), zeros(problem.patterns), first_item)
        return HopperLists(lists, tables, _hopper_fills(self, lists, tables, slots, own_bitmaps, nothing))


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
    own_tiles = int(slots[-1])
    # A row ahead is read past the bitmaps of a row block's own tiles.
    work = empty_work(
        problem,
        device,
        tiles=patterns * (chunks + own_tiles + full_chunks),
        bitmaps=patterns * (chunks + own_tiles) + 1,
        shared=True,
    )
    zeros = int_zeros(device)
    words = -(-(reach + _BASE + problem.block_m + 64) // 32)
    return SlashBuffers(
        problem=problem,
        work=work,
        flags=zeros(patterns),
        chunks=chunks,
        own_tiles=own_tiles,
        full_chunks=full_chunks,
        slots=slots.to(device=device, dtype=torch.int32),
        tables=zeros(patterns, _TABLES, words + 1),
        bad=zeros(patterns),
        columns=zeros(problem.mask_batch, problem.mask_heads, -(-verticals // BLOCK) * BLOCK) - 1,
        slashes=zeros(patterns, distances) - 1,
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


def _reading(buffers: SlashBuffers, vertical: Tensor, slash: Tensor) -> Launch:
    """What checks a mask's lists, and makes tables of them."""
    import triton

    from stof.dynamic.vertical_slash.tables import slash_tables
    from stof.runtime.launch import Launch

    problem, words = buffers.problem, buffers.tables.shape[2] - 1
    at_once = min(_WORDS, triton.next_power_of_2(max(words, buffers.verticals, buffers.distances)))

    def strides(indices: Tensor) -> tuple[int, int]:
        b, h = (0 if indices.shape[i] == 1 else indices.stride(i) for i in range(2))
        return b, h

    return Launch(
        slash_tables,
        problem.patterns,
        (buffers.bad, buffers.flags, buffers.tables, buffers.columns, buffers.slashes),
        (
            *strides(vertical), *strides(slash), problem.mask_heads, buffers.verticals, buffers.distances,
            problem.kv_len, problem.q_len + buffers.offset, words, buffers.columns.shape[-1],
        ),
        (OUT_OF_RANGE, NOT_ASCENDING, problem.block_m, at_once),
        num_warps=8,
    )  # fmt: skip


def _hopper_fills(
    buffers: SlashBuffers, lists: TileLists, tables: tuple[Tensor, ...], slots: int, own_bitmaps: int, nothing: int
) -> tuple[Launch, ...]:
    from stof.dynamic.vertical_slash import hopper_kernels as kernels
    from stof.runtime.launch import Launch

    runs, tiles, number, first_item = tables
    problem, n = buffers.problem, buffers.distances
    words, n_columns = buffers.tables.shape[2] - 1, buffers.columns.shape[-1]
    row_blocks = (len(first_item) - 1) // problem.patterns
    columns = Launch(
        kernels.slash_columns,
        problem.patterns,
        (buffers.slashes, buffers.bad, runs, tiles, number),
        (n,),
        (BLOCK, _HOPPER_COPY),
        num_warps=8,
    )
    bitmaps = Launch(
        kernels.slash_bitmaps,
        problem.patterns * _HOPPER_SIDE,
        (buffers.tables, tiles, number, lists.bitmaps),
        (words, n, buffers.offset),
        (_HOPPER_SIDE, BLOCK),
        num_warps=2,
    )
    fill = Launch(
        kernels.slash_fill,
        problem.patterns * row_blocks,
        (
            buffers.columns, buffers.bad, buffers.tables, tiles, number, first_item, lists.tile_columns,
            lists.tile_bitmap, lists.bitmaps, lists.ranges,
        ),
        (n_columns, words, n, row_blocks, slots, own_bitmaps, nothing, buffers.offset),
        (BLOCK, _TILES_AT_ONCE),
        num_warps=1,
    )  # fmt: skip
    return columns, bitmaps, fill
