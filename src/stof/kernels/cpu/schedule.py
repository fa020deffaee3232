"""A layout rearranged for the CPU kernel: per row block, sorted columns and row-major mask bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.layout.layout import Layout

# Neighbouring row blocks, up to this many rows, run the columns that all of them keep in full as one call without
# a mask, and merge it with the rest by log-sum-exp. PyTorch's fused attention takes 1.36 ns a score and head at
# 512 rows, 1.52 at 64, and 0.06 more with a mask (2 cores, fp32, D = 64); merging costs about 35 us a row block,
# which pays from 300 shared columns on at 12 heads.
SHARED_ROWS = 512
SHARED_COLUMNS = 512

# Fields of one step. A step is one attention call over some rows and columns of one pattern.
PATTERN, ROW_START, ROW_STOP, FIRST_COLUMN, COLUMN_OFFSET, COLUMNS, MASK_OFFSET, EMPTY_ROWS, MERGE = range(9)


@dataclass(frozen=True, eq=False)
class Schedule:
    """What the CPU kernel walks. All tensors are on the CPU.

    Attributes:
        steps: int64 `[steps, 9]`, run in this order: pattern; first and last + 1 row position; first column if the
            columns are contiguous, else -1; offset in `columns` otherwise; number of columns (0: these rows keep
            nothing); offset in `mask_bytes` or -1 when every score counts; whether some row keeps nothing;
            whether to merge with what an earlier step wrote to these rows.
        columns: int64, columns of the steps that gather.
        mask_bytes: uint8, per masked step `[rows, ceil(columns / 8)]`, lowest bit first; equal ones are shared.
        pattern_of: int32 `[mask_batch, mask_heads]`.
        rows: int64 `[P, q_len]`, original row at each position; empty `[0]` when rows keep their order.
    """

    steps: Tensor
    columns: Tensor
    mask_bytes: Tensor
    pattern_of: Tensor
    rows: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.steps, self.columns, self.mask_bytes, self.pattern_of, self.rows]


def make_schedule(layout: Layout) -> Schedule:
    """Derive the schedule; a loop over row blocks, done once per plan."""
    layout = layout.to("cpu")
    writer = _Writer()
    together = max(1, SHARED_ROWS // layout.config.block_m)
    for pattern in range(layout.patterns):
        for block in range(0, layout.row_blocks, together):
            _add_blocks(writer, layout, pattern, range(block, min(block + together, layout.row_blocks)))
    rows = torch.empty(0, dtype=torch.int64, device="cpu") if layout.row_order is None else layout.row_order.long()
    return Schedule(
        steps=torch.tensor(writer.steps, dtype=torch.int64, device="cpu").view(-1, 9),
        columns=torch.cat(writer.columns) if writer.columns else torch.empty(0, dtype=torch.int64, device="cpu"),
        mask_bytes=torch.cat(writer.masks) if writer.masks else torch.empty(0, dtype=torch.uint8, device="cpu"),
        pattern_of=layout.pattern_of,
        rows=rows,
    )


def _add_blocks(writer: _Writer, layout: Layout, pattern: int, blocks: range) -> None:
    """Steps of neighbouring row blocks: the columns all of them keep in full, then each one's rest."""
    block_m = layout.config.block_m
    shared = _shared_columns(layout, pattern, blocks)
    if shared is not None:
        rows = (blocks.start * block_m, min(blocks.stop * block_m, layout.q_len))
        writer.add(pattern, rows, shared.nonzero()[:, 0], None, merge=False)
    for block in blocks:
        number = pattern * layout.row_blocks + block
        first, last = layout.row_block_ptr[number : number + 2].tolist()
        rows = (block * block_m, min((block + 1) * block_m, layout.q_len))
        columns, keep = _gathered(layout, first, last, rows[1] - rows[0])
        if shared is not None:
            rest = ~shared[columns]
            columns, keep = columns[rest], None if keep is None else keep[:, rest]
        if len(columns) or shared is None:
            writer.add(pattern, rows, columns, keep, merge=shared is not None)


def _shared_columns(layout: Layout, pattern: int, blocks: range) -> Tensor | None:
    """Bool `[kv_len]`, columns in full tiles of every one of these row blocks; None when too few to pay."""
    start = pattern * layout.row_blocks
    pointers = layout.row_block_ptr[start + blocks.start : start + blocks.stop + 1].tolist()
    partial = layout.partial_count[start + blocks.start : start + blocks.stop].tolist()
    fewest = min(pointers[n + 1] - pointers[n] - partial[n] for n in range(len(blocks)))
    if fewest * layout.config.block_n < SHARED_COLUMNS:
        return None
    counts = torch.zeros(layout.kv_len, dtype=torch.int64, device="cpu")
    for n, held in enumerate(partial):
        tiles = torch.arange(pointers[n] + held, pointers[n + 1], device="cpu")
        counts[layout.tile_columns(tiles).flatten()] += 1
    shared = counts == len(blocks)
    return shared if int(shared.sum()) >= SHARED_COLUMNS else None


def _gathered(layout: Layout, first: int, last: int, rows: int) -> tuple[Tensor, Tensor | None]:
    """Sorted columns of tiles `first..last` and their bool mask `[rows, n]` (None: all kept)."""
    tiles = torch.arange(first, last, device="cpu")
    columns = layout.tile_columns(tiles).flatten()
    masked = bool((layout.tile_bitmap[first:last] >= 0).any())
    columns, position = columns.sort()
    skip = int((columns < 0).sum())
    columns, position = columns[skip:], position[skip:]
    if not masked:
        return columns, None
    keep = layout.tile_keep(tiles)[:, :rows].transpose(0, 1).flatten(1)
    return columns, keep[:, position]


class _Writer:
    """Collects steps; shares equal masks."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.columns: list[Tensor] = []
        self.masks: list[Tensor] = []
        self._column_offset = 0
        self._mask_offset = 0
        self._seen: dict[bytes, int] = {}

    def add(self, pattern: int, rows: tuple[int, int], columns: Tensor, keep: Tensor | None, *, merge: bool) -> None:
        count = len(columns)
        first, offset = int(columns[0]) if count else 0, 0
        if count and int(columns[-1]) - first + 1 != count:
            first, offset = -1, self._column_offset
            self.columns.append(columns)
            self._column_offset += count
        mask, empty = -1, 0
        if keep is not None and not bool(keep.all()):
            mask = self._add_mask(keep)
            empty = int(not bool(keep.any(1).all()))
        self.steps.append([pattern, *rows, first, offset, count, mask, empty, int(merge)])

    def _add_mask(self, keep: Tensor) -> int:
        padded = torch.nn.functional.pad(keep, (0, -keep.shape[1] % 8))
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device="cpu")
        packed = (padded.view(len(keep), -1, 8) * weights).sum(-1, dtype=torch.uint8).flatten()
        key = packed.numpy().tobytes()
        if key not in self._seen:
            self._seen[key] = self._mask_offset
            self.masks.append(packed)
            self._mask_offset += len(packed)
        return self._seen[key]
