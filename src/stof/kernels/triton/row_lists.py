"""A layout as the row-wise kernel reads it: the kept columns of every row, and how the kernel cuts its work.

Plain torch; importing it does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import ArgumentError, LayoutError
from stof.layout.layout import Layout

# Scores of tiles unpacked at once while preparing; at 70 bytes each, temporaries stay below 0.3 GB.
STRIP_SCORES = 2**22
# Rows whose counts round up to the same multiple of this keep the layout's order, which has like rows side by side.
COUNT_STEP = 16


@dataclass(frozen=True)
class RowWiseConfig:
    """How the kernel cuts its work; every size is a power of two.

    Attributes:
        rows: query rows of a program.
        cols: columns of a row read in one step.
        slots: softmax states of a row; `cols // slots` columns go to a slot in one step.
        width: neighbouring elements of a key read by one load of the program; 16 bytes go to a thread.
        num_warps: warps of a program.
    """

    rows: int = 1
    cols: int = 16
    slots: int = 8
    width: int = 32
    num_warps: int = 1

    def __post_init__(self) -> None:
        limits = {"rows": (1, 16), "cols": (1, 256), "slots": (1, 256), "width": (8, 128), "num_warps": (1, 16)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ArgumentError(f"{name} is a power of two between {least} and {most}, got {value!r}")
        if self.cols < self.slots:
            raise ArgumentError(f"cols is a multiple of slots, got {self.cols} and {self.slots}")


def default_config(head_dim: int, max_count: int, itemsize: int = 2) -> RowWiseConfig:
    """A config for the wider of head_dim and value width, the longest row in columns, and bytes of an input element.

    A thread holds 8 to 32 elements of a key and of the result. The lanes of a warp that are left take other rows, which
    leaves nothing to merge, or, the more columns a row has, columns of the same row; very long rows get several warps.
    """
    lanes = 2  # 16 bytes each: a whole sector
    while lanes * 24 < head_dim and lanes < 8:
        lanes *= 2
    groups = 32 // lanes
    slots = 1
    while slots * 64 < max_count and slots < 4 * groups:
        slots *= 2
    # Columns a state has in flight, kept to what 128 registers hold.
    unroll = 4 if head_dim <= lanes * 16 else 2
    if itemsize > 2:
        unroll //= 2
    while unroll > 1 and unroll * slots >= 2 * max_count:
        unroll //= 2
    rows, warps = max(1, groups // slots), max(1, slots // groups)
    return RowWiseConfig(rows, slots * unroll, slots, lanes * 16 // itemsize, warps)


@dataclass(frozen=True, eq=False)
class RowLists:
    """The kept columns of every row.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        rows: int32 `[P * q_len]`, the query row at each position of a pattern.
        row_ptr: int32 `[P * q_len + 1]`, where the columns of each position start in `columns`.
        columns: int32, ascending within a row.
        most: the largest count of a row.
        config: how the kernel cuts its work; None for `default_config`.
    """

    pattern_of: Tensor
    rows: Tensor
    row_ptr: Tensor
    columns: Tensor
    most: int
    config: RowWiseConfig | None = None


def prepare(layout: Layout) -> RowLists:
    """The kept columns of every row, rows with like counts side by side and the longest first.

    Memory beyond the result is one strip of row blocks, never `q_len x kv_len`. Synchronises; done once per plan.

    Raises:
        LayoutError: the mask keeps 2**31 scores or more, which int32 pointers cannot count.
    """
    device, patterns, q_len = layout.device, layout.patterns, layout.q_len
    padded = layout.row_blocks * layout.config.block_m
    strips = [_strip(layout, blocks) for blocks in _strips(layout)]
    counts = torch.cat([counts for counts, _ in strips]).view(patterns, padded)
    # Stable: rows of one class stay neighbours, as the layout's order has rows with like columns side by side.
    classes = (counts[:, :q_len] + COUNT_STEP - 1) // COUNT_STEP
    order = classes.argsort(dim=1, descending=True, stable=True)
    sorted_counts = counts.gather(1, order).flatten()
    row_ptr = torch.nn.functional.pad(sorted_counts.cumsum(0), (1, 0))
    total, most = int(row_ptr[-1]), int(counts.max())
    if total >= 2**31:
        raise LayoutError([f"row-wise attention takes fewer than 2**31 kept scores, this mask keeps {total}"])
    starts = torch.zeros(patterns, padded, dtype=torch.int64, device=device)
    starts.scatter_(1, order, row_ptr[:-1].view(patterns, q_len))
    columns = torch.empty(total, dtype=torch.int32, device=device)
    first = 0
    for strip_counts, strip_columns in strips:
        last = first + len(strip_counts)
        before = strip_counts.cumsum(0) - strip_counts
        shift = starts.view(-1)[first:last] - before
        kept = len(strip_columns)
        places = torch.repeat_interleave(shift, strip_counts, output_size=kept) + torch.arange(kept, device=device)
        columns[places] = strip_columns
        first = last
    rows = layout.rows().gather(1, order)
    return RowLists(layout.pattern_of, rows.flatten().int(), row_ptr.int(), columns, most)


def _strips(layout: Layout) -> list[range]:
    """Row blocks of all patterns in runs of at most `STRIP_SCORES` scores (always one row block at least)."""
    pointers = layout.row_block_ptr.tolist()
    tiles = STRIP_SCORES // (layout.config.block_m * layout.config.block_n)
    out, start = [], 0
    for stop in range(1, len(pointers)):
        if stop + 1 == len(pointers) or pointers[stop + 1] - pointers[start] > tiles:
            out.append(range(start, stop))
            start = stop
    return out


def _strip(layout: Layout, blocks: range) -> tuple[Tensor, Tensor]:
    """Counts int64 `[len(blocks) * block_m]` and sorted columns int32 of the rows of these row blocks."""
    block_m, device = layout.config.block_m, layout.device
    pointers = layout.row_block_ptr[blocks.start : blocks.stop + 1].long()
    first, last = pointers[[0, -1]].tolist()
    tiles = torch.arange(first, last, device=device)
    block = torch.repeat_interleave(torch.arange(len(blocks), device=device), pointers.diff(), output_size=len(tiles))
    columns = layout.tile_columns(tiles)
    exists = layout.rows().view(-1, block_m)[blocks.start : blocks.stop] >= 0
    keep = layout.tile_keep(tiles) & (columns >= 0)[:, None, :] & exists[block][:, :, None]
    tile, row, within = keep.nonzero(as_tuple=True)
    positions = block[tile] * block_m + row
    keys = (positions * layout.kv_len + columns[tile, within]).sort().values
    counts = torch.bincount(positions, minlength=len(blocks) * block_m)
    return counts, (keys % layout.kv_len).int()
