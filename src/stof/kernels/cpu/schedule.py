"""A layout rearranged for the CPU kernel: per row block, sorted columns and row-major mask bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from stof.kernels.common import pattern_ranges
from stof.kernels.cpu.columns import Array, KeptColumns, Tiles
from stof.layout.layout import Layout

# Figures are milliseconds on 2 cores (AVX-512), fp32, S = 4096, H = 12, D = 64: benchmarks/attention/cpu_constants.py.

# Masked steps are padded: matmuls of 575 columns are slower than of 576 (causal window of 512: 47.8 against 45.2).
COLUMN_MULTIPLE = 16

# Neighbouring row blocks, 1024 rows and then 256 of them, run the columns that all of them keep in full as one call
# without a mask, and merge it with the rest by log-sum-exp. PyTorch's fused attention works on 256 query rows at a time
# from 768 rows on, on 64 from 192 on, else on 32: taller calls read keys less often from shared caches. A causal mask
# takes 158.0 so, 158.5 with 1024 rows alone, 166.1 with 512 alone, and `is_causal=True` 160.5 in the same run.
SHARED_ROWS = (1024, 256)
SHARED_COLUMNS = 384

# Neighbouring row blocks without shared full columns run as one masked call (of 1024 rows, at least `TALL_ROWS`) on the
# union of their columns, if that is at most `TALL_WORK` times the scores of separate calls: scattered masks. Random 5 %
# at 512 tokens takes 6.4 ms so, 9.7 in separate calls, and SDPA with the dense mask 6.7.
TALL_ROWS, TALL_WORK = 128, 1.6

# Above this many keys, tensors with one element per key leave out long ranges of keys that no tile contains. A range is
# a multiple of `SPAN` keys.
COMPACTED_FROM = 2**20
SPAN = 256

# Bounds the temporaries of one batch: output rows, and gathered key columns. Bigbird at 512 tokens takes 5.7 ms with
# 512 columns, 7.0 with 1024; longformer at 4096 tokens 62.7 and 58.8.
MAX_ROWS = 2048
MAX_GATHERED_COLUMNS = 512

# Tiles of a layout whose columns are held while its schedule is made: 2 KB each.
MOST_HELD_TILES = 2**15

# Fields of one step. A step is one attention call over some rows and columns of one pattern.
(
    PATTERN,
    ROW_START,
    ROW_STOP,
    FIRST_COLUMN,
    COLUMN_OFFSET,
    COLUMNS,
    MASK_OFFSET,
    EMPTY_ROWS,
    MERGE,
    GROUP,
) = range(10)
FIELDS = 10

Step = list[int]


@dataclass(frozen=True, eq=False)
class Schedule:
    """What the CPU kernel walks. All tensors are on the CPU.

    Attributes:
        steps: int64 `[steps, 10]`, run in this order: pattern; first and last + 1 row position; first column if the
            columns are contiguous, else -1; offset in `columns` otherwise; number of columns (0: these rows keep
            nothing); offset in `mask_bytes` or -1 when every score counts; whether some row keeps nothing;
            whether to merge with what an earlier step wrote to these rows; number of the batch it belongs to
            (`group_steps`), whose steps follow each other.
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

    @cached_property
    def batches_of(self) -> dict[int, list[list[Step]]]:
        """The steps of each pattern, batch by batch: every call walks them."""
        batches: dict[int, list[list[Step]]] = {}
        for _, members in itertools.groupby(self.steps.tolist(), key=lambda step: step[GROUP]):
            steps = list(members)
            batches.setdefault(steps[0][PATTERN], []).append(steps)
        return batches

    @cached_property
    def _ranges(self) -> dict[tuple[int, int, int], list[tuple[slice, slice, int]]]:
        return {}

    def ranges(self, batch: int, heads: int, group: int) -> list[tuple[slice, slice, int]]:
        """`pattern_ranges` of a call, computed once for its sizes."""
        sizes = (batch, heads, group)
        if sizes not in self._ranges:
            self._ranges[sizes] = pattern_ranges(self.pattern_of.expand(batch, heads).tolist(), group)
        return self._ranges[sizes]

    @cached_property
    def merges(self) -> bool:
        """Whether rows are merged from several steps."""
        return bool(self.steps[:, MERGE].any())

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether some row keeps nothing."""
        return bool((self.steps[:, EMPTY_ROWS].bool() | (self.steps[:, COLUMNS] == 0)).any())

    def tensors(self) -> list[Tensor]:
        return [self.steps, self.columns, self.mask_bytes, self.pattern_of, self.rows]


# Calls and gradients under one plan read the same.
_SCHEDULES: WeakKeyDictionary[Layout, Schedule] = WeakKeyDictionary()


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout, made once."""
    schedule = _SCHEDULES.get(layout)
    if schedule is None:
        schedule = _SCHEDULES[layout] = make_schedule(layout)
    return schedule


def make_schedule(layout: Layout) -> Schedule:
    """Derive the schedule; a loop over row blocks."""
    layout, spans = _compacted(layout.to("cpu"))
    writer = _Writer(None if spans is None else spans.numpy())
    tiles = Tiles(layout)
    # Columns of many tiles are found twice, to bound memory.
    every = tiles.kept_columns(range(layout.patterns * layout.row_blocks)) if layout.tiles <= MOST_HELD_TILES else None

    def of(blocks: range) -> KeptColumns:
        return tiles.kept_columns(blocks) if every is None else every.part(blocks)

    for pattern in range(layout.patterns):
        first = pattern * layout.row_blocks
        parts = _parts(range(first, first + layout.row_blocks), SHARED_ROWS[0], layout.config.block_m)
        used = np.zeros(layout.kv_len, dtype=bool)
        for blocks in parts:
            used[of(blocks).columns] = True
        for blocks in parts:
            _add_blocks(writer, of(blocks), used)
    steps, columns = writer.finish()
    rows = torch.empty(0, dtype=torch.int64, device="cpu") if layout.row_order is None else layout.row_order.long()
    masks = np.concatenate(writer.masks) if writer.masks else np.empty(0, dtype=np.uint8)
    return Schedule(
        steps=torch.tensor(steps, dtype=torch.int64, device="cpu").view(-1, FIELDS),
        columns=torch.from_numpy(columns),
        mask_bytes=torch.from_numpy(masks),
        pattern_of=layout.pattern_of,
        rows=rows,
    )


def _compacted(layout: Layout) -> tuple[Layout, Tensor | None]:
    """The layout without ranges of unused keys, and the original position at which each span of its keys begins.

    Columns keep their order, and neighbours stay neighbours: one unused span stands for each range that is left out.
    """
    if layout.kv_len <= COMPACTED_FROM:
        return layout, None
    starts = torch.cat([layout.tile_base[layout.tile_base >= 0], layout.gathered[layout.gathered >= 0]]).long()
    last = (layout.kv_len - 1) // SPAN  # ends where the keys end
    # A tile or slab begins in one span and ends in the same or the next one.
    ends = torch.cat([starts, starts + layout.config.block_n - 1]).clamp(max=layout.kv_len - 1)
    used = torch.div(ends, SPAN, rounding_mode="floor").unique()
    # The span before each one separates it from the range before.
    held = torch.cat([used, (used - 1).clamp(min=0), torch.tensor([last], device="cpu")]).unique()

    def mapped(columns: Tensor) -> Tensor:
        span = torch.div(columns.clamp(min=0), SPAN, rounding_mode="floor").long()
        number = torch.searchsorted(held, span)
        return torch.where(columns < 0, columns, number * SPAN + torch.remainder(columns, SPAN)).int()

    kv_len = (len(held) - 1) * SPAN + layout.kv_len - last * SPAN
    compacted = replace(layout, kv_len=kv_len, tile_base=mapped(layout.tile_base), gathered=mapped(layout.gathered))
    return compacted, held * SPAN


def _padded(columns: Array, used: Array) -> tuple[Array, int]:
    """Columns of a step with a mask, a multiple of `COLUMN_MULTIPLE` of them, and how many new ones come first.

    Contiguous columns grow at their ends, but only into columns that other rows keep: the rest of the cache may be
    uninitialised, and NaN times a weight of 0 is NaN. Scattered columns repeat their first one, at the end.
    """
    missing = -len(columns) % COLUMN_MULTIPLE
    if not missing:
        return columns, 0
    first, last = int(columns[0]), int(columns[-1]) + 1
    if last - first != len(columns):
        return np.concatenate([columns, columns[:1].repeat(missing)]), 0
    left = min(missing, first)
    right = missing - left
    if last + right > len(used) or not used[first - left : last + right].all():
        return columns, 0
    return np.arange(first - left, last + right), left


def _add_blocks(writer: _Writer, kept: KeptColumns, used: Array) -> None:
    """Steps of neighbouring row blocks: columns that all of them share, those that some share, then the rest."""
    everywhere = _shared_columns(kept, None)
    if everywhere is not None:
        writer.add(kept.pattern, kept.rows, everywhere.nonzero()[0], None, merge=False)
    elif _add_tall(writer, kept, used):
        return
    for blocks in _parts(kept.blocks, SHARED_ROWS[1], kept.tiles.layout.config.block_m):
        part = kept.part(blocks)
        shared, taken = _shared_columns(part, everywhere), everywhere
        if shared is not None:
            writer.add(part.pattern, part.rows, shared.nonzero()[0], None, merge=everywhere is not None)
            taken = shared if everywhere is None else everywhere | shared
        _add_rest(writer, part, used, taken)


def _add_rest(writer: _Writer, kept: KeptColumns, used: Array, taken: Array | None) -> None:
    """A step for each row block, without the columns `taken` by earlier ones."""
    rest = kept if taken is None else kept.without(taken)
    block_m, (first_row, stop_row) = rest.tiles.layout.config.block_m, rest.rows
    bitmaps, slots = rest.tiles.tile_bitmap[rest.tile], rest.slot.astype(np.int16)
    partial = np.concatenate([[0], (~rest.all_rows).cumsum()])[rest.bounds]
    keep: Array | None = None
    for n, (start, stop) in enumerate(itertools.pairwise(rest.bounds.tolist())):
        if start == stop and taken is not None:
            continue
        rows = first_row + n * block_m, min(first_row + (n + 1) * block_m, stop_row)
        columns, mask = rest.columns[start:stop], None
        if partial[n] < partial[n + 1]:
            columns, left = _padded(columns, used)
            # Windows and documents have few masks.
            key = bitmaps[start:stop].tobytes(), slots[start:stop].tobytes(), rows[1] - rows[0], left, len(columns)
            mask = writer.known.get(key)
            if mask is None:
                keep = rest.keep() if keep is None else keep
                scores = np.zeros((rows[1] - rows[0], len(columns)), dtype=bool)
                scores[:, left : left + stop - start] = keep[start:stop, : len(scores)].T
                mask = writer.known[key] = writer.add_mask(scores)
        writer.add(rest.pattern, rows, columns, mask, merge=taken is not None)


def _add_tall(writer: _Writer, kept: KeptColumns, used: Array) -> bool:
    """One step for all row blocks, on the union of their columns, where that is little more work."""
    first_row, stop_row = kept.rows
    if stop_row - first_row < TALL_ROWS:
        return False
    union = np.zeros(len(used), dtype=bool)
    union[kept.columns] = True
    columns = union.nonzero()[0]
    if not len(columns) or len(columns) * len(kept.blocks) > TALL_WORK * len(kept.columns):
        return False
    block_m, (padded, left) = kept.tiles.layout.config.block_m, _padded(columns, used)
    keep = np.zeros((len(kept.blocks) * block_m, len(padded)), dtype=bool)
    for n, block in enumerate(kept.blocks):
        part = kept.part(range(block, block + 1))
        if len(part.columns):
            keep[n * block_m : (n + 1) * block_m, left + columns.searchsorted(part.columns)] = part.keep().T
    writer.add(kept.pattern, kept.rows, padded, writer.add_mask(keep[: stop_row - first_row]), merge=False)
    return True


def _parts(blocks: range, rows: int, block_m: int) -> list[range]:
    """`blocks` cut into runs of at most `rows` rows."""
    step = max(1, rows // block_m)
    return [range(n, min(n + step, blocks.stop)) for n in range(blocks.start, blocks.stop, step)]


def _shared_columns(kept: KeptColumns, taken: Array | None) -> Array | None:
    """Bool `[kv_len]`, columns that every row block keeps in full and that are not taken; None when too few to pay."""
    blocks = len(kept.blocks)
    if blocks < 2:
        return None
    columns = kept.columns[kept.all_rows]
    if len(columns) < blocks * SHARED_COLUMNS:
        return None
    shared: Array = np.bincount(columns, minlength=kept.tiles.layout.kv_len) == blocks
    if taken is not None:
        shared &= ~taken
    return shared if shared.sum() >= SHARED_COLUMNS else None


class _Writer:
    """Collects steps; shares equal masks. `spans` as of `_compacted`, to write original columns.

    Attributes:
        masks: packed.
        known: where a mask begins and whether some row keeps nothing, by the bitmaps and slots of its columns, so that
            equal ones need not be unpacked.
    """

    def __init__(self, spans: Array | None) -> None:
        self._spans = spans
        self.masks: list[Array] = []
        self.known: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self._steps: dict[int, list[Step]] = {}
        self._columns: list[Array] = []
        self._mask_offset = 0
        self._seen: dict[bytes, int] = {}

    def add(
        self, pattern: int, rows: tuple[int, int], columns: Array, mask: tuple[int, bool] | None, *, merge: bool
    ) -> None:
        if self._spans is not None:
            columns = self._spans[columns // SPAN] + columns % SPAN
        count = len(columns)
        first, number = int(columns[0]) if count else 0, 0
        if count and int(columns[-1]) - first + 1 != count:
            first, number = -1, len(self._columns)  # `finish` puts the offset in its place
            self._columns.append(columns)
        offset, empty = (-1, False) if mask is None else mask
        step = [pattern, *rows, first, number, count, offset, int(empty), int(merge), 0]
        self._steps.setdefault(pattern, []).append(step)

    def finish(self) -> tuple[list[Step], Array]:
        """Steps in the order to run them, and the gathered columns in that order."""
        out: list[Step] = []
        columns = [np.empty(0, dtype=np.int64)]
        offset = group = 0
        for steps in self._steps.values():
            for batch in group_steps(steps):
                for step in batch:
                    step[GROUP] = group
                    if step[FIRST_COLUMN] < 0:
                        columns.append(self._columns[step[COLUMN_OFFSET]])
                        step[COLUMN_OFFSET] = offset
                        offset += step[COLUMNS]
                out += batch
                group += 1
        return out, np.concatenate(columns)

    def add_mask(self, keep: Array) -> tuple[int, bool]:
        """Pack the mask of a step, bool `[rows, columns]`: where it begins, and whether some row keeps nothing."""
        packed = np.packbits(keep, axis=1, bitorder="little").reshape(-1)
        key = packed.tobytes()
        if key not in self._seen:
            self._seen[key] = self._mask_offset
            self.masks.append(packed)
            self._mask_offset += len(packed)
        return self._seen[key], not keep.any(1).all()


def group_steps(steps: list[Step]) -> list[list[Step]]:
    """Steps of one pattern in the order to run them: writes first, then merges; each inner list is one batch.

    Steps of a batch have equal heights, widths and kind; their rows are evenly spaced and, where they are contiguous,
    so are their columns.
    """
    batches: list[list[Step]] = []
    alike: dict[tuple[object, ...], list[Step]] = {}
    for step in sorted(steps, key=lambda step: (step[MERGE], step[ROW_START])):
        contiguous = step[FIRST_COLUMN] >= 0
        height = step[ROW_STOP] - step[ROW_START]
        # Gathered steps may have a mask each; contiguous ones share one, as windows and documents do.
        mask = step[MASK_OFFSET] if contiguous else step[MASK_OFFSET] >= 0
        key = (step[MERGE], height, step[COLUMNS], contiguous, mask, step[EMPTY_ROWS])
        held = alike.get(key)
        if held is not None and step[COLUMNS] and _continues(held, step, contiguous, height):
            held.append(step)
        else:
            alike[key] = [step]
            batches.append(alike[key])
    return batches


def _continues(held: list[Step], step: Step, contiguous: bool, height: int) -> bool:
    size = len(held) + 1
    if size * height > MAX_ROWS or (not contiguous and size * step[COLUMNS] > MAX_GATHERED_COLUMNS):
        return False
    if len(held) == 1:
        return step[ROW_START] - held[0][ROW_START] >= height and step[FIRST_COLUMN] >= held[0][FIRST_COLUMN]
    return all(step[n] - held[-1][n] == held[1][n] - held[0][n] for n in (ROW_START, FIRST_COLUMN))
