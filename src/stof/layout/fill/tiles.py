"""The host's part of filling tiles on the device: a kernel that counts, one wait, and a kernel that writes.

The kernels serve masks with a program (`stof.masks.gpu_program`) and bool tensors. They write tile lists, or a layout
(`stof.layout.fill.layouts`). Other lists are made of a `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stof.layout.fill.input_forms import PROGRAM
from stof.layout.fill.mask_input import Source, source_of
from stof.layout.limits import MOST_WORDS
from stof.masks import Mask
from stof.masks.gpu_program import Op

# Tiles of a row block that one thread block handles, of programs and of bool tensors: to count them, and to write them.
COUNTED = {True: 128, False: 1}
WRITTEN = {True: 64, False: 4}
# Warps of `find_unseen_keys`.
SEARCHERS = 8
# Most tiles, empty ones included: their codes take a byte each.
_MOST_TILES = 2**26
# Most columns that are listed: 1 GB, and offsets of 32 bits.
_MOST_COLUMNS = 2**28
# Numbers that the host waits for.
_RESULTS = 3
# Tiles past the end, which kernels load ahead.
SPARE_TILES = 3
# The bitmap of full tiles.
EVERYTHING = 1


@dataclass(frozen=True, eq=False)
class FilledTiles:
    """Tiles in the order in which kernels read them: `P` patterns with `R` row blocks each, `T` tiles.

    Attributes:
        pattern_of: int32 `[mask_batch, mask_heads]`.
        row_block_ptr: int32 `[P * R + 1]`, tiles of row block n are `ptr[n] : ptr[n + 1]`, partial ones first.
        partial_count: int32 `[P * R]`.
        columns: int32 `[T + 3 or more, width]`. Of width 1: the first column of each tile, which may be below 0. Else
            every column; those that no query of the pattern sees are replaced by the last one that some query sees.
        tile_bitmap: int32 `[T + 3 or more]`, row of `bitmaps`.
        bitmaps: int32 `[n, block_m, 4]`: nothing, `EVERYTHING`, those of partial tiles; bit `2 j + b` of word `q` is
            column `8 j + 2 q + b`.
        state: int32, see `count_kernels.state_pointers`: codes of all tiles, and where partial tiles begin.
        seen_words: an argument of `state_pointers`; there are no slots.
        tiles: T, or how many there is room for.
        row_blocks: R.
    """

    pattern_of: Tensor
    row_block_ptr: Tensor
    partial_count: Tensor
    columns: Tensor
    tile_bitmap: Tensor
    bitmaps: Tensor
    state: Tensor
    seen_words: int
    tiles: int
    row_blocks: int

    @property
    def unseen(self) -> Tensor:
        """int32 `[P]`, keys from the first one on that no query sees."""
        blocks = len(self.partial_count)
        return self.state[2 * blocks :][: blocks // self.row_blocks]


class TileFill:
    """The tiles of one mask in one tile size, counted and written as lists on the device.

    The device counts while the host continues.

    Args:
        source: what the kernels read.
        sizes: leading sizes of the mask.
        which: the pattern of each batch entry and head.
        lengths: q_len and kv_len.
        block_m, block_n: sizes of tiles.
        device: where the lists are.
        room: as for `Source.prepared`.
    """

    # Whether a `Layout` is written.
    _as_layout: ClassVar[bool] = False

    def __init__(
        self,
        source: Source,
        sizes: tuple[int, int],
        which: list[int],
        lengths: tuple[int, int],
        block_m: int,
        block_n: int,
        device: torch.device,
        room: int = 0,
    ) -> None:
        self._source, self._which, self._sizes, self._device = source, which, sizes, device
        self._block_m, self._block_n = block_m, block_n
        self._row_blocks, self._columns = -(-lengths[0] // block_m), -(-lengths[1] // block_n)
        self._blocks = source.patterns * self._row_blocks
        self._is_program = source.kind == PROGRAM
        self._counted_together, self._written_together = self._groups()
        tiles, patterns = self._blocks * self._columns, source.patterns
        # See `count_kernels.state_pointers`.
        seen_words = 0 if self._is_program or self._as_layout else self._columns * (block_n // 32)
        slots = 1 << (2 * tiles - 1).bit_length() if self._as_layout else 0
        zeros = 7 * slots + 2 * self._blocks + patterns * (2 + seen_words) + 2
        rest = 2 * self._blocks + -(-tiles // 4) + (2 * tiles + slots if self._as_layout else 0)
        results = _RESULTS + (4 * patterns if self._as_layout else 0)
        self._room, self._prepared = room, source.prepared(zeros, rest, results, device, room)
        self._state, self._mailbox = self._prepared.state, self._prepared.mailbox
        self._sized = (source.heads, *lengths, self._row_blocks, self._columns, patterns, self._prepared.first)
        self._table = (seen_words, slots)
        self._count()

    def _groups(self) -> tuple[int, int]:
        """Tiles of a row block that one thread block counts, and that it writes."""
        return COUNTED[self._is_program], WRITTEN[self._is_program]

    def _count(self) -> None:
        from stof.layout.fill import count_kernels
        from stof.runtime.launch import launch

        source, group, device = self._source, self._counted_together, self._device
        _, q_len, kv_len, _, _, _, first = self._sized
        if self._is_program and not self._as_layout:
            programs = source.patterns * -(-kv_len // count_kernels.KEYS)
            sizes = (self._blocks, source.patterns, first, q_len, kv_len)
            launch(
                count_kernels.find_unseen_keys, programs, (self._state,), sizes, (), device=device, num_warps=SEARCHERS
            )
        groups = -(-self._columns // group)
        tensors = (self._state if source.dense is None else source.dense, self._state, self._mailbox.tensor)
        tile = (0, 0, 0)
        if self._as_layout or not self._is_program:  # tiles are read
            tile = (self._block_m, self._block_n, source.rows_at_once(self._block_m, self._block_n))
        launch(
            count_kernels.count_tiles, self._blocks * groups, tensors,
            (*source.strides, *self._sized, groups, *self._table, self._block_m, self._block_n),
            (source.kind, *tile, group, self._as_layout), device=device,
        )  # fmt: skip

    def refill(self, mask: Mask) -> bool:
        """Take another mask of one pattern and these lengths for `run_again`, for a fill with `room`.

        The counts of the last one must have been read: kernels have read its program by then.

        Returns:
            Whether there is room for its program. If not, the mask of before stays.
        """
        assert self._room, "other builds may have the mailbox"
        _, q_len, kv_len, *_ = self._sized
        source = _source_of(mask, q_len, kv_len, self._sizes[1], [0], self._device)
        numbers = [] if source is None else source.programs.numbers
        fits = source is not None and _is_one_program(self._source) and _is_one_program(source)
        fits = fits and len(numbers) <= self._prepared.room
        self._mailbox.put(self._prepared.results, numbers if fits else [])
        return fits

    def run_again(self, lists: FilledTiles) -> None:
        """Count the tiles of the mask of the last `refill`, and write them into lists that this fill made.

        As part of a CUDA graph, for the mask that `refill` has taken when it is replayed.
        """
        self._prepared.write()
        self._count()
        self._write_lists(lists)

    def counts(self) -> tuple[int, int] | None:
        """Wait for the numbers of tiles and of partial ones.

        Returns:
            None if a key after the first unseen one is seen, or if there are too many tiles.
        """
        self._mailbox.wait(_RESULTS, self._device)
        tiles, partial, later_seen = (number - 1 for number in self._mailbox.read(_RESULTS))
        return None if later_seen or self._too_many(tiles, partial) else (tiles, partial)

    def max_counts(self) -> tuple[int, int] | None:
        """As `counts`, without a wait: the numbers of tiles if every tile is partial."""
        tiles = self._blocks * self._columns
        return None if self._too_many(tiles, tiles) else (tiles, tiles)

    def _too_many(self, tiles: int, partial: int) -> bool:
        return (partial + 2) * self._block_m * 4 >= MOST_WORDS or tiles * self._block_n >= _MOST_COLUMNS

    def of_row_blocks(self) -> Tensor:
        """Partial and full tiles of every row block, int32 `[2, P, R]` on the CPU; waits for the device."""
        return self._state[: 2 * self._blocks].cpu().view(2, self._source.patterns, self._row_blocks)

    def write(self, tiles: int, partial: int, every_column: bool) -> FilledTiles:
        """Write the lists.

        Args:
            tiles, partial: of `counts` or `max_counts`.
            every_column: whether `FilledTiles.columns` lists every column of a tile.
        """
        width = self._block_n if every_column else 1
        shapes = (tiles + SPARE_TILES, width), (tiles + SPARE_TILES,), (partial + 2, self._block_m, 4)
        rows = self.row_tensors()
        columns, tile_bitmap, bitmaps = self._empty(shapes)
        seen_words, _ = self._table
        lists = FilledTiles(*rows, columns, tile_bitmap, bitmaps, self._state, seen_words, tiles, self._row_blocks)
        self._write_lists(lists)
        return lists

    def _write_lists(self, lists: FilledTiles) -> None:
        rows = (lists.pattern_of, lists.row_block_ptr, lists.partial_count)
        # Tiles that are moved to the seen keys may begin at any column.
        self._write(
            self._source.in_bytes(), rows, (lists.columns, lists.tile_bitmap, lists.bitmaps), lists.columns.shape[1]
        )

    def row_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """`pattern_of`, `row_block_ptr` and `partial_count`, for the kernel to write."""
        row_block_ptr = torch.empty(self._blocks + 1, dtype=torch.int32, device=self._device)
        partial_count = torch.empty(self._blocks, dtype=torch.int32, device=self._device)
        if self._source.patterns == 1:
            return torch.empty(self._sizes, dtype=torch.int32, device=self._device), row_block_ptr, partial_count
        numbers = torch.tensor(self._which, dtype=torch.int32, device="cpu").view(self._sizes)
        return numbers.to(self._device, non_blocking=True), row_block_ptr, partial_count

    def _empty(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=torch.int32, device=self._device) for shape in shapes)

    def _write(self, source: Source, rows: tuple[Tensor, ...], of_tiles: tuple[Tensor, ...], width: int) -> None:
        """Write `rows`, which are of `row_tensors`, and the columns, bitmap numbers and bitmaps of tiles."""
        from stof.layout.fill import write_kernels
        from stof.runtime.launch import launch

        group = self._written_together
        groups = -(-self._columns // group)
        at_once = source.rows_at_once(self._block_m, self._block_n)
        launch(
            write_kernels.write_tiles, self._blocks * groups + 1,
            (self._state if source.dense is None else source.dense, self._state, *rows, *of_tiles),
            (*source.strides, *self._sized, groups, *self._table, rows[0].numel()),
            (source.kind, self._block_m, self._block_n, at_once, group, width, self._as_layout), device=self._device,
        )  # fmt: skip


def state_size(patterns: int, row_blocks: int, columns: int) -> int:
    """The length of a state, int32, without a table of bitmaps and words of seen keys; see `state_pointers`."""
    blocks = patterns * row_blocks
    return 4 * blocks + 2 * patterns + 2 + -(-blocks * columns // 4)


def start_fill(
    mask: Mask,
    q_len: int,
    kv_len: int,
    mask_dims: tuple[int, int],
    which: list[int],
    block_m: int,
    block_n: int,
    device: torch.device,
    room: int = 0,
) -> TileFill | None:
    """Begin to fill the tiles of a mask; None where the kernels do not serve it.

    Args:
        mask, q_len, kv_len: as for `build_layout`, already checked.
        mask_dims: as `Mask.dims` gives them.
        which: the pattern of each batch entry and head, as `pattern_numbers` gives them.
        block_m, block_n: sizes of tiles, powers of two; `block_n` is 32, 64 or 128.
        device: where the lists are to be, and where the mask's tensors are.
        room: as for `Source.prepared`.
    """
    if not which or block_n % 32:
        return None
    patterns = max(which) + 1
    if patterns * -(-q_len // block_m) * -(-kv_len // block_n) > _MOST_TILES:
        return None
    entries = [which.index(n) for n in range(patterns)]
    source = _source_of(mask, q_len, kv_len, mask_dims[1], entries, device)
    if source is None:
        return None
    return TileFill(source, mask_dims, which, (q_len, kv_len), block_m, block_n, device, room)


def _source_of(
    mask: Mask, q_len: int, kv_len: int, mask_heads: int, entries: list[int], device: torch.device
) -> Source | None:
    """As `source_of`, without masks that these kernels do not serve."""
    source = source_of(mask, q_len, kv_len, mask_heads, entries, device)
    return None if source is None or (source.kind == PROGRAM and _maps_ranges(source)) else source


def _is_one_program(source: Source) -> bool:
    """Whether the mask is one program, all of whose numbers come from the host."""
    return source.kind == PROGRAM and source.patterns == 1 and not source.programs.draws


def _maps_ranges(source: Source) -> bool:
    """Whether programs begin by mapping positions: their keys are looked at in aligned words only."""
    numbers = source.programs.numbers
    return numbers[numbers[0]] > 0 and numbers[numbers[0] + 1] >= Op.QUERY_IN_RANGES
