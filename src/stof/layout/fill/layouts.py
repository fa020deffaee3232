"""Layouts written by the kernels that fill tile lists; masks that these do not serve are left to torch.

Contiguous tiles of masks given as programs (`stof.masks.gpu_program`) or as a dense tensor. The results are those of
`stof.layout.builders.build`, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof.layout.bitmaps import words
from stof.layout.config import LayoutConfig
from stof.layout.fill.mask_input import on_device, source_of
from stof.layout.fill.tiles import TileFill
from stof.layout.layout import Layout
from stof.masks import Mask
from stof.masks.base import numbered
from stof.masks.gpu_program import programs_of

# The table of bitmaps has room for each tile to differ. Larger problems are left to `stof.layout.builders.closed_form`.
MOST_TILES = 2**20
# Tiles of a row block that one thread block counts: 4 of a mask given as a program, 16 where the mask has at least
# `_MANY` tiles, which pays for compiling a second kernel; 1 of a dense mask, whose tiles are all read.
_TOGETHER, _TOGETHER_OF_MANY, _READ = 4, 16, 1
_MANY = 2**17
# Tiles that one thread block writes, of programs and of dense masks.
_WRITTEN = {True: 16, False: 4}


@on_device
def device_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    mask_dims: tuple[int, int],
    *,
    device: torch.device,
) -> Layout | None:
    """The layout of a mask; None where these kernels do not serve it.

    Args:
        mask, q_len, kv_len: as for `build_layout`, already checked.
        config: block sizes and gathering.
        mask_dims: as `Mask.dims` gives them.
        device: where the layout is to be.
    """
    if config.slab is not None:
        return None
    which = pattern_numbers(mask, q_len, kv_len, mask_dims)
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    while which and tiles * (max(which) + 1) <= MOST_TILES:
        entries = [which.index(n) for n in range(max(which) + 1)]
        source = source_of(mask, q_len, kv_len, mask_dims[1], entries, device)
        if source is None:
            return None
        build = LayoutFill(source, mask_dims, which, (q_len, kv_len), config.block_m, config.block_n, device)
        # While the device computes, the host prepares what does not depend on the results.
        rows = build.row_tensors()
        total, distinct, clash, *identities = build.results()
        if clash:
            return None
        quads = [tuple(identities[n : n + 4]) for n in range(0, 4 * source.patterns, 4)]
        alike = [0] if source.patterns == 1 else numbered(quads).tolist()
        if alike == list(range(source.patterns)):
            return build.layout(total, distinct, rows, config)
        which = [alike[n] for n in which]  # masks told apart may keep the same scores
    return None


def pattern_numbers(mask: Mask, q_len: int, kv_len: int, mask_dims: tuple[int, int]) -> list[int]:
    """Number of the pattern of each batch entry and head, counted from 0 as they appear; empty without programs."""
    count = mask_dims[0] * mask_dims[1]
    if count == 1:
        return [0]
    if mask.as_tensor(q_len, kv_len) is not None:
        return list(range(count))  # the kernels tell which are equal
    if programs_of(mask, q_len, kv_len, [(0, 0)]) is None:
        return []
    return numbered(mask.pattern_ids(*mask_dims).expand(mask_dims).flatten().tolist()).tolist()


class LayoutFill(TileFill):
    """The same tiles as a layout."""

    _as_layout = True

    def _groups(self) -> tuple[int, int]:
        counted = _TOGETHER if self._blocks * self._columns <= _MANY else _TOGETHER_OF_MANY
        return counted if self._is_program else _READ, _WRITTEN[self._is_program]

    def results(self) -> list[int]:
        """Tiles, bitmaps, how many hashes clash, and four numbers that identify each of several patterns."""
        patterns = self._source.patterns
        self._mailbox.wait(3 if patterns == 1 else 0, self._device)
        total, distinct, clash, *identities = self._mailbox.read(3 + 4 * patterns)
        return [total - 1, distinct - 1, clash - 1, *identities]

    def layout(self, tiles: int, distinct: int, rows: tuple[Tensor, Tensor, Tensor], config: LayoutConfig) -> Layout:
        """The layout of so many tiles and bitmaps; `rows` are of `row_tensors`."""
        shapes = (tiles,), (tiles,), (distinct, config.block_m, words(config.block_n))
        base, tile_bitmap, bitmaps = of_tiles = self._empty(shapes)
        self._write(self._source, rows, of_tiles, 1)
        q_len, kv_len = self._sized[1:3]
        return Layout(q_len, kv_len, config, *rows, base, base.new_empty(0, 1), tile_bitmap, bitmaps)
