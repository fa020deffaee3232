"""Whether a layout can be held, told before anything of its size is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stof.errors import TooLargeError
from stof.layout.config import LayoutConfig
from stof.layout.head_mask import HeadMask
from stof.masks.bounds import Interval

# Layouts of fewer tiles always fit: 2 GB at most.
_SMALL = 2**20
# Rectangles whose bounds are computed to count tiles.
_RECTANGLES = 2**14
# Scores evaluated at once that always fit, and the bytes that each of them takes at least: a bool, its copies with
# rows and columns added, and the columns picked from it.
_SMALL_STRIP, _BYTES_OF_SCORE = 2**28, 5
# Tiles and row blocks are numbered in 32 bits, and so are words of bitmaps, of which a row has 4 in kernels.
_MOST_NUMBERS = 2**31 - 1
_WORDS = 4
# Words of all bitmaps: kernels compute their offsets in 32 bits, and a few bitmaps are added to those of the layout.
MOST_WORDS = 2**31 - 2**12
_ADVICE = (
    "plan fewer queries at a time (`mask.with_query_offset(first)` is the mask of those from `first` on), fewer keys, "
    "or a mask that keeps fewer of them"
)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device; of a host, or of its container, as far as it tells."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    limits = []
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" where there is no limit
    except (OSError, ValueError, AttributeError):
        pass  # another system
    return min(limits, default=2**63 - 1)


def check_tiles(head_mask: HeadMask, config: LayoutConfig) -> None:
    """Raise where tiles that a mask certainly has take more memory than there is.

    Raises:
        TooLargeError: they do.
    """
    row_blocks, tile_columns = head_mask.row_blocks(config.block_m), -(-head_mask.kv_len // config.block_n)
    if row_blocks * tile_columns <= _SMALL:
        return
    tiles = _tiles_at_least(head_mask, config)
    # int64 numbers that a build takes: 8 and twice the columns for each tile, 4 for each row block.
    needed = tiles * 8 * (8 + 2 * config.slabs_per_tile) + row_blocks * 32
    if needed > available_bytes(head_mask.device) or max(tiles, row_blocks) > _MOST_NUMBERS:
        what = f"the layout of {head_mask.q_len:,} queries and {head_mask.kv_len:,} keys has at least {tiles:,} tiles"
        raise _too_large(what, needed, head_mask.device)


def check_strip(head_mask: HeadMask, rows: int, columns: int) -> None:
    """Raise where some rows and columns of a mask cannot be evaluated at once.

    Raises:
        TooLargeError: they take more memory than there is.
    """
    needed = rows * columns * _BYTES_OF_SCORE
    if rows * columns > _SMALL_STRIP and needed > available_bytes(head_mask.device):
        tiles = -(-rows * columns // LayoutConfig().block_m // LayoutConfig().block_n)
        what = f"{rows} queries, which are evaluated at once, may see {columns:,} keys in {tiles:,} tiles"
        raise _too_large(what, needed, head_mask.device)


def check_numbers(config: LayoutConfig, tiles: int, bitmaps: int, device: torch.device) -> None:
    """Raise where the tiles of all masks, or the words of their bitmaps, cannot be numbered in 32 bits.

    Raises:
        TooLargeError: they cannot.
    """
    words = bitmaps * config.block_m * _WORDS
    if max(tiles, words) > _MOST_NUMBERS:
        what = f"the layout has {tiles:,} tiles and {bitmaps:,} bitmaps, which 32 bits cannot number"
        raise _too_large(what, 8 * tiles + 4 * words, device)


@contextmanager
def allocator_errors() -> Iterator[None]:
    """Say what failed where PyTorch finds no memory on the host, which it reports as a bare RuntimeError.

    Raises:
        TooLargeError: in the place of that error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise TooLargeError(f"the plan takes more memory than there is; {_ADVICE}. PyTorch says: {error}") from error


def _tiles_at_least(head_mask: HeadMask, config: LayoutConfig) -> int:
    """Tiles of large rectangles that keep every score; as many scores take as many tiles in any row order."""
    rows, columns = head_mask.row_blocks(config.block_m), -(-head_mask.kv_len // config.block_n)
    down = min(rows, max(round(_RECTANGLES**0.5), _RECTANGLES // columns))
    q, q_stop = _cut(rows, down, head_mask.device)
    kv, kv_stop = _cut(columns, _RECTANGLES // down, head_mask.device)
    q_range, kv_range = (
        Interval((first * size).view(shape), (stop * size).clamp(max=length).view(shape) - 1)
        for first, stop, size, length, shape in (
            (q, q_stop, config.block_m, head_mask.q_len, (1, 1, -1, 1)),
            (kv, kv_stop, config.block_n, head_mask.kv_len, (1, 1, 1, -1)),
        )
    )
    full = head_mask.tile_bounds(q_range, kv_range).full.expand(1, 1, len(q), len(kv))[0, 0]
    return int(((q_stop - q)[:, None] * (kv_stop - kv))[full].sum())


def _cut(count: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last + 1 index of at most so many nearly equal parts of `count` items."""
    size = -(-count // min(count, parts))
    first = torch.arange(0, count, size, device=device)
    return first, (first + size).clamp(max=count)


def _too_large(what: str, needed: int, device: torch.device) -> TooLargeError:
    free = available_bytes(device) / 1e9
    return TooLargeError(
        f"{what}: this takes at least {needed / 1e9:,.1f} GB on {device}, where {free:,.1f} GB are free; {_ADVICE}"
    )
