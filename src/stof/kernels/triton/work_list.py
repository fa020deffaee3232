"""A layout as the block-wise kernel reads it: work items, column lists, bitmaps in accumulator order.

Plain torch; importing it does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stof.kernels.bitmap_order import accumulator_order
from stof.kernels.common import PARTIAL_TILE_COST, chunks_of, parts_of
from stof.kernels.config import KernelConfig
from stof.layout import Layout

# Columns of a bias vector: 16 bytes of a bias of 16 bits.
BIAS_VECTOR = 8


class WorkItemFields(NamedTuple):
    """Where a work item holds what. Tiles of both kinds are ranges [begin, end).

    Attributes:
        row_block: -1 for no item; the results may become NaN instead (`packed_integers.py`).
        parts: chunks of the row block, 1 where it is not split.
        first_chunk: slot of the row block's first chunk.
        chunk: number of this chunk.
        split_row_block: number of the row block among the split ones.
        bitmap: of the first partial tile.
        full_column: the first column of the first full tile; in contiguous tiles, the last column that some row sees.
        own_partial, own_full: where work has shared tiles, the first tile of either kind of the row block's own.
        partial_shift, full_shift: what is added to the numbers of the shared tiles before these.
        origin: what is added to the columns of shared tiles, the position of the first row.
    """

    row_block: int = 0
    partial_begin: int = 1
    partial_end: int = 2
    full_begin: int = 3
    full_end: int = 4
    parts: int = 5
    first_chunk: int = 6
    chunk: int = 7
    split_row_block: int = 8
    bitmap: int = 9
    full_column: int = 10
    own_partial: int = 11
    partial_shift: int = 12
    own_full: int = 13
    full_shift: int = 14
    origin: int = 15


WORK_ITEM = WorkItemFields()


@dataclass(frozen=True, eq=False)
class Work:
    """A layout as the block-wise kernel reads it. `P` patterns, `I` items of the longest pattern.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        items: int32 `[P, I, 16]`, fields as `WorkItemFields`, longest first; row block -1 where a pattern has fewer
            items.
        first_columns: int32 `[P, I, block_n]`, key columns of the first tile of each item.
        partial_columns: int32 `[Tp + 2, block_n]`, key column of each tile column (where no row keeps it, another of
            the tile's columns).
        partial_bitmap: int32 `[Tp + 2]`, row of bitmaps.
        bitmaps: int32 `[U, block_m, 4]`; bit `2 j + b` of word `q` is column `8 j + 2 q + b`.
        full_columns: int32 `[Tf + 2, block_n]`, empty but for padding when `full_runs`.
        row_order: int32 `[P, q_len]`, empty when rows keep their order.
        block_m, block_n, q_len, kv_len: sizes of the layout.
        chunks: chunks of all split row blocks of a pattern, at most.
        splits: split row blocks of a pattern, at most.
        has_partial, has_full: whether there are tiles of that kind.
        full_runs: whether the columns of each item's full tiles follow each other, so that the first one tells all.
        has_nan_items: whether items may make the results of their row block NaN.
        shared: whether items may begin each kind with a run of tiles that several items use. These hold columns less
            the position of the item's first row. Tiles of both kinds are then rows of one list, and a partial tile's
            bitmap has its number.
        contiguous_tiles: whether the columns of every tile follow each other. Lists of columns are then `[..., 1]`, the
            first of each tile, and columns past the last one that some row sees are that one.
        bias_vectors: whether each 8 neighbouring places of a tile hold columns of 8 keys from a multiple of 8 on, those
            that some row keeps in order: the kernel may then load a bias in vectors of 16 bytes.

    The last two rows of `partial_*` and `full_columns` are padding: the kernel loads ahead.
    """

    pattern_of: Tensor
    items: Tensor
    first_columns: Tensor
    partial_columns: Tensor
    partial_bitmap: Tensor
    bitmaps: Tensor
    full_columns: Tensor
    row_order: Tensor
    block_m: int
    block_n: int
    q_len: int
    kv_len: int
    chunks: int = 0
    splits: int = 0
    has_partial: int = 1
    has_full: int = 1
    full_runs: int = 0
    has_nan_items: int = 0
    shared: int = 0
    contiguous_tiles: int = 0
    bias_vectors: int = 0


@dataclass(frozen=True, eq=False)
class PreparedWork:
    """Work, and how the kernel runs it."""

    work: Work
    config: KernelConfig


def prepare(layout: Layout, config: KernelConfig | None) -> PreparedWork:
    """The work of a layout; see `make_work`. `config` defaults to that of a call without options."""
    config = config or KernelConfig()
    return PreparedWork(make_work(layout, config.split_tiles), config)


def make_work(layout: Layout, split_tiles: int = 0) -> Work:
    """Prepare a layout.

    Args:
        layout: tiles of at most 128 columns.
        split_tiles: row blocks with more tiles are cut into equal chunks of at most so many; 0 never cuts.
    """
    config = layout.config
    is_partial = layout.tile_bitmap >= 0
    partial, full = is_partial.nonzero()[:, 0], (~is_partial).nonzero()[:, 0]
    bitmap = layout.tile_bitmap[partial]
    live = layout.tile_live()[partial]
    columns = only_live_columns(layout.tile_columns(partial), live)
    items, chunks, splits = _items(layout, is_partial, split_tiles)
    items[..., WORK_ITEM.bitmap] = _padded(bitmap)[items[..., WORK_ITEM.partial_begin].clamp(min=0).long()]
    full_columns = layout.tile_columns(full)
    first = _padded(full_columns)[items[..., WORK_ITEM.full_begin].clamp(min=0).long()]
    items[..., WORK_ITEM.full_column] = first[..., 0]
    some_partial = items[..., WORK_ITEM.partial_begin] < items[..., WORK_ITEM.partial_end]
    first_columns = torch.where(
        some_partial[..., None], _padded(columns)[items[..., WORK_ITEM.partial_begin].clamp(min=0).long()], first
    )
    full_runs = _full_runs(items, full_columns, config.block_n)
    return Work(
        pattern_of=layout.pattern_of.contiguous(),
        items=items,
        first_columns=first_columns.int().contiguous(),
        partial_columns=_padded(columns),
        partial_bitmap=_padded(bitmap),
        bitmaps=accumulator_order(layout.bitmaps, config.block_n),
        full_columns=_padded(full_columns[:0] if full_runs else full_columns),
        row_order=layout.pattern_of.new_empty(0) if layout.row_order is None else layout.row_order.contiguous(),
        block_m=config.block_m,
        block_n=config.block_n,
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        chunks=chunks,
        splits=splits,
        has_partial=len(partial) > 0,
        has_full=len(full) > 0,
        full_runs=full_runs,
        bias_vectors=config.slab != 1 and _in_bias_vectors(columns, live) and _in_bias_vectors(full_columns),
    )


def only_live_columns(columns: Tensor, live: Tensor) -> Tensor:
    """Columns `[t, block_n]` with those that no row keeps replaced by one of the tile that some row keeps.

    So the kernel loads every column of a tile without asking, and still reads nothing that no row keeps of K and V. The
    one is of the same bias vector where there is any.
    """
    first = live.int().argmax(1, keepdim=True)
    kept_column = columns.gather(1, first)
    kept, near = live.unflatten(1, (-1, BIAS_VECTOR)), columns.unflatten(1, (-1, BIAS_VECTOR))
    near = torch.where(
        kept.any(2, keepdim=True), near.gather(2, kept.int().argmax(2, keepdim=True)), kept_column[..., None]
    )
    # clamp: a tile that keeps nothing, which no builder makes but a file may hold
    return torch.where(live, columns, near.expand_as(kept).flatten(1)).clamp(min=0)


def _in_bias_vectors(columns: Tensor, live: Tensor | None = None) -> bool:
    """Whether tiles `[t, block_n]` are such as `Work.bias_vectors` says; every column is kept where `live` is None."""
    columns = columns.unflatten(1, (-1, BIAS_VECTOR))
    begin = columns - torch.remainder(columns, BIAS_VECTOR)
    in_order = columns == begin + torch.arange(BIAS_VECTOR, device=columns.device)
    if live is not None:
        in_order |= ~live.unflatten(1, (-1, BIAS_VECTOR))
    return bool((in_order & (begin == begin[..., :1])).all())


def _full_runs(items: Tensor, full_columns: Tensor, block_n: int) -> bool:
    """Whether full tiles follow each other without a gap within every item."""
    if not len(full_columns):
        return True
    steps = torch.arange(block_n, device=full_columns.device)
    if not bool((full_columns == full_columns[:, :1] + steps).all()):
        return False
    begins = torch.zeros(len(full_columns) + 1, dtype=torch.bool, device=full_columns.device)
    begins[items[..., WORK_ITEM.full_begin].clamp(min=0).long()] = True
    follows = full_columns[1:, 0] == full_columns[:-1, 0] + block_n
    return bool((follows | begins[1:-1]).all())


def _padded(rows: Tensor) -> Tensor:
    return torch.cat([rows.int(), rows.new_zeros(2, *rows.shape[1:], dtype=torch.int32)]).contiguous()


def _items(layout: Layout, is_partial: Tensor, split_tiles: int) -> tuple[Tensor, int, int]:
    """Work items `[P, I, 16]`, and the largest number of chunks and of split row blocks of a pattern."""
    device, patterns, row_blocks = layout.device, layout.patterns, layout.row_blocks
    pointers = layout.row_block_ptr.long()
    partial_before = torch.nn.functional.pad(is_partial.long().cumsum(0), (1, 0))[pointers]
    full_before = pointers - partial_before
    tiles, partials = pointers.diff(), partial_before.diff()

    chunks = chunks_of(tiles, split_tiles, patterns)
    owner, begin, end = chunks.row_block, chunks.begin, chunks.end

    def within(low: Tensor, high: Tensor, before: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """`begin`..`end` cut to one kind of tile, numbered among all tiles of that kind."""
        start = torch.minimum(torch.maximum(begin, low), high)
        stop = torch.minimum(torch.maximum(end, low), high)
        return before + start - offset, before + stop - offset

    zero, some = torch.zeros_like(begin), partials[owner]
    partial_begin, partial_end = within(zero, some, partial_before[:-1][owner], zero)
    full_begin, full_end = within(some, tiles[owner], full_before[:-1][owner], some)

    is_split = (parts_of(tiles, split_tiles) > 1).view(patterns, row_blocks)
    split = (is_split.long().cumsum(1) - 1).flatten()
    values = torch.stack(
        [
            owner % row_blocks, partial_begin, partial_end, full_begin, full_end, chunks.parts, chunks.first_slot,
            chunks.number, split[owner].clamp(min=0), *[torch.zeros_like(owner)] * (len(WORK_ITEM) - 9),
        ],
        1,
    ).int()  # fmt: skip

    cost = (partial_end - partial_begin) * PARTIAL_TILE_COST + (full_end - full_begin)
    pattern = torch.div(owner, row_blocks, rounding_mode="floor")
    order = torch.argsort(cost, descending=True, stable=True)
    order = order[torch.argsort(pattern[order], stable=True)]
    count = torch.bincount(pattern, minlength=patterns)
    place = torch.arange(len(owner), device=device) - (count.cumsum(0) - count)[pattern[order]]
    items = torch.full((patterns, int(count.max()), len(WORK_ITEM)), -1, dtype=torch.int32, device=device)
    items[pattern[order], place] = values[order]
    return items, chunks.slots, int(is_split.sum(1).max())
