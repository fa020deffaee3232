"""A layout rearranged for the CPU kernel: per row block, sorted columns and row-major mask bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from stof.kernels.common import pattern_ranges
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
        for _, members in groupby(self.steps.tolist(), key=lambda step: step[GROUP]):
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


def make_schedule(layout: Layout) -> Schedule:
    """Derive the schedule; a loop over row blocks, done once per plan."""
    layout, spans = _compacted(layout.to("cpu"))
    writer = _Writer(spans)
    live = layout.tile_live()
    for pattern in range(layout.patterns):
        used = _used_columns(layout, pattern, live)
        for blocks in _parts(range(layout.row_blocks), SHARED_ROWS[0], layout.config.block_m):
            _add_blocks(writer, layout, pattern, blocks, used, None, 0)
    steps, columns = writer.finish()
    rows = torch.empty(0, dtype=torch.int64, device="cpu") if layout.row_order is None else layout.row_order.long()
    return Schedule(
        steps=torch.tensor(steps, dtype=torch.int64, device="cpu").view(-1, FIELDS),
        columns=columns,
        mask_bytes=torch.cat(writer.masks) if writer.masks else torch.empty(0, dtype=torch.uint8, device="cpu"),
        pattern_of=layout.pattern_of,
        rows=rows,
    )


def _compacted(layout: Layout) -> tuple[Layout, Tensor | None]:
    """The layout between fewer keys, and where each span of its keys begins among the original ones.

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


def _used_columns(layout: Layout, pattern: int, live: Tensor) -> Tensor:
    """Bool `[kv_len]`: columns that some row of the pattern keeps; `live` are those of tiles."""
    first, last = layout.row_block_ptr[[pattern * layout.row_blocks, (pattern + 1) * layout.row_blocks]].tolist()
    tiles = torch.arange(first, last, device="cpu")
    used = torch.zeros(layout.kv_len + 1, dtype=torch.bool, device="cpu")
    used[layout.tile_columns(tiles)[live[first:last]]] = True  # -1 is the spare column
    return used[:-1]


def _padded(columns: Tensor, keep: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Columns and mask of one step with the number of columns rounded up to a multiple of `COLUMN_MULTIPLE`.

    Contiguous columns grow at their ends, but only into columns that other rows keep: the rest of the cache may be
    uninitialised, and NaN times a weight of 0 is NaN. Scattered columns repeat their first one.
    """
    missing = -len(columns) % COLUMN_MULTIPLE
    first, last = int(columns[0]), int(columns[-1]) + 1
    if not missing:
        return columns, keep
    if last - first == len(columns):
        left = min(missing, first)
        right = missing - left
        if last + right > len(used) or not bool(used[first - left : last + right].all()):
            return columns, keep
        grown = torch.arange(first - left, last + right, device="cpu")
        return grown, torch.nn.functional.pad(keep, (left, right))
    return torch.cat([columns, columns[:1].expand(missing)]), torch.nn.functional.pad(keep, (0, missing))


def _add_blocks(
    writer: _Writer, layout: Layout, pattern: int, blocks: range, used: Tensor, taken: Tensor | None, level: int
) -> None:
    """Steps of neighbouring row blocks without the columns `taken` by earlier ones: shared columns, then the rest."""
    block_m = layout.config.block_m
    if level < len(SHARED_ROWS):
        shared = _shared_columns(layout, pattern, blocks, taken)
        if shared is not None:
            rows = (blocks.start * block_m, min(blocks.stop * block_m, layout.q_len))
            writer.add(pattern, rows, shared.nonzero()[:, 0], None, merge=taken is not None)
            taken = shared if taken is None else taken | shared
        elif level == 0 and _add_tall(writer, layout, pattern, blocks, used):
            return
        for part in _parts(blocks, SHARED_ROWS[level + 1] if level + 1 < len(SHARED_ROWS) else block_m, block_m):
            _add_blocks(writer, layout, pattern, part, used, taken, level + 1)
        return
    number = pattern * layout.row_blocks + blocks.start
    first, last = layout.row_block_ptr[number : number + 2].tolist()
    rows = (blocks.start * block_m, min(blocks.stop * block_m, layout.q_len))
    wanted = used if taken is None else used & ~taken
    columns, keep = _gathered(layout, first, last, rows[1] - rows[0], wanted)
    if keep is not None and bool(keep.all()):
        keep = None
    if keep is not None:
        columns, keep = _padded(columns, keep, used)
    if len(columns) or taken is None:
        writer.add(pattern, rows, columns, keep, merge=taken is not None)


def _add_tall(writer: _Writer, layout: Layout, pattern: int, blocks: range, used: Tensor) -> bool:
    """One step for all these row blocks, on the union of their columns, where that is little more work."""
    block_m = layout.config.block_m
    first_row, stop_row = blocks.start * block_m, min(blocks.stop * block_m, layout.q_len)
    if stop_row - first_row < TALL_ROWS:
        return False
    start = pattern * layout.row_blocks
    pointers = layout.row_block_ptr[start + blocks.start : start + blocks.stop + 1].tolist()
    tiles = torch.arange(pointers[0], pointers[-1], device="cpu")
    columns = layout.tile_columns(tiles)
    valid = (columns >= 0) & used[columns.clamp(min=0)]
    union = columns[valid].unique()
    # A column is in one tile of a row block at most.
    if not len(union) or len(union) * len(blocks) > TALL_WORK * int(valid.sum()):
        return False
    keep = torch.zeros(stop_row - first_row, len(union), dtype=torch.bool, device="cpu")
    for number, block in enumerate(blocks):
        rows = slice(block * block_m - first_row, min((block + 1) * block_m, layout.q_len) - first_row)
        kept_columns, kept = _gathered(layout, pointers[number], pointers[number + 1], rows.stop - rows.start, used)
        keep[rows, torch.searchsorted(union, kept_columns)] = True if kept is None else kept
    writer.add(pattern, (first_row, stop_row), *_padded(union, keep, used), merge=False)
    return True


def _parts(blocks: range, rows: int, block_m: int) -> list[range]:
    """`blocks` cut into runs of at most `rows` rows."""
    step = max(1, rows // block_m)
    return [range(n, min(n + step, blocks.stop)) for n in range(blocks.start, blocks.stop, step)]


def _shared_columns(layout: Layout, pattern: int, blocks: range, taken: Tensor | None) -> Tensor | None:
    """Bool `[kv_len]`, columns that every one of these row blocks keeps in full; None when too few to pay.

    Partial tiles count only if they have fewer than `block_n` columns, as the last one of a full mask may.
    """
    start = pattern * layout.row_blocks
    pointers = layout.row_block_ptr[start + blocks.start : start + blocks.stop + 1].tolist()
    partial = layout.partial_count[start + blocks.start : start + blocks.stop].tolist()
    fewest = min(pointers[n + 1] - pointers[n] - partial[n] for n in range(len(blocks)))
    if len(blocks) < 2 or fewest * layout.config.block_n < SHARED_COLUMNS:
        return None
    counts = torch.zeros(layout.kv_len, dtype=torch.int64, device="cpu")
    for n, held in enumerate(partial):
        tiles = torch.arange(pointers[n] + held, pointers[n + 1], device="cpu")
        counts[layout.tile_columns(tiles).flatten()] += 1
        tiles = torch.arange(pointers[n], pointers[n] + held, device="cpu")
        columns = layout.tile_columns(tiles)
        short = (columns < 0).any(1)
        rows = layout.q_len - blocks[n] * layout.config.block_m
        kept = layout.tile_keep(tiles[short])[:, :rows].all(1)
        counts[columns[short][kept & (columns[short] >= 0)]] += 1
    shared = counts == len(blocks)
    if taken is not None:
        shared &= ~taken
    return shared if int(shared.sum()) >= SHARED_COLUMNS else None


def _gathered(layout: Layout, first: int, last: int, rows: int, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sorted columns of tiles `first..last`, those `wanted`, and their bool mask `[rows, n]` (None: all kept)."""
    tiles = torch.arange(first, last, device="cpu")
    columns = layout.tile_columns(tiles)
    here = (columns >= 0) & wanted[columns.clamp(min=0)]
    # Most tiles of a long causal row have been computed with their neighbours: their bits are not looked at.
    some = here.any(1)
    tiles, columns, here = tiles[some], columns[some].flatten(), here[some].flatten()
    masked = bool((layout.tile_bitmap[tiles] >= 0).any())
    place = here.nonzero()[:, 0]
    columns, order = columns[place].sort()
    if not masked:
        return columns, None
    keep = layout.tile_keep(tiles)[:, :rows].transpose(0, 1).flatten(1)
    return columns, keep[:, place[order]]


class _Writer:
    """Collects steps; shares equal masks. `spans` as of `_compacted`, to write original columns."""

    def __init__(self, spans: Tensor | None) -> None:
        self._spans = spans
        self.masks: list[Tensor] = []
        self._steps: dict[int, list[Step]] = {}
        self._columns: list[Tensor] = []
        self._mask_offset = 0
        self._seen: dict[bytes, int] = {}

    def add(self, pattern: int, rows: tuple[int, int], columns: Tensor, keep: Tensor | None, *, merge: bool) -> None:
        if self._spans is not None:
            columns = self._spans[torch.div(columns, SPAN, rounding_mode="floor")] + torch.remainder(columns, SPAN)
        count = len(columns)
        first, number = int(columns[0]) if count else 0, 0
        if count and int(columns[-1]) - first + 1 != count:
            first, number = -1, len(self._columns)
            self._columns.append(columns)
        mask, empty = -1, 0
        if keep is not None:
            mask = self._add_mask(keep)
            empty = int(not bool(keep.any(1).all()))
        step = [pattern, *rows, first, number, count, mask, empty, int(merge), 0]
        self._steps.setdefault(pattern, []).append(step)

    def finish(self) -> tuple[list[Step], Tensor]:
        """Steps in the order to run them, and the gathered columns in that order."""
        out: list[Step] = []
        columns = [torch.empty(0, dtype=torch.int64, device="cpu")]
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
        return out, torch.cat(columns)

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
    return sorted(batches, key=lambda batch: batch[0][MERGE])


def _continues(held: list[Step], step: Step, contiguous: bool, height: int) -> bool:
    size = len(held) + 1
    if size * height > MAX_ROWS or (not contiguous and size * step[COLUMNS] > MAX_GATHERED_COLUMNS):
        return False
    if len(held) == 1:
        return step[ROW_START] - held[0][ROW_START] >= height and step[FIRST_COLUMN] >= held[0][FIRST_COLUMN]
    return all(step[n] - held[-1][n] == held[1][n] - held[0][n] for n in (ROW_START, FIRST_COLUMN))
