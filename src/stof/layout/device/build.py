"""The host's part of building a layout on the device: three kernels, and one wait for how much they found.

Contiguous tiles of masks given as programs (`stof.masks.program`) or as a dense tensor. The results are those of
`stof.layout.build`, bit for bit; what has no program is left to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stof.layout.bits import words
from stof.layout.config import LayoutConfig
from stof.layout.device.source import Source, on_device, put, source_of
from stof.layout.layout import Layout
from stof.masks.base import Mask, numbered
from stof.masks.program import programs_of
from stof.masks.tensors import DenseMask

# Tiles that are all classified, one program each; of larger problems, squares of tiles are ruled out first elsewhere.
MOST_TILES = 2**20
# Tiles whose bitmaps are numbered at once.
_NUMBERED = 2**12


def device_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    mask_dims: tuple[int, int],
    partial_cost: int,
    device: torch.device,
) -> Layout | None:
    """The layout of a mask; None where these kernels do not serve it.

    Args:
        mask, q_len, kv_len: as for `build_layout`, already checked.
        config: block sizes and gathering.
        mask_dims: as `Mask.dims` gives them.
        partial_cost: of a partial tile, in hundredths of a full one.
        device: where the layout is to be.
    """
    if config.slab is not None:
        return None
    return on_device(device, lambda device: _layout(mask, q_len, kv_len, config, mask_dims, partial_cost, device))


def _layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    mask_dims: tuple[int, int],
    partial_cost: int,
    device: torch.device,
) -> Layout | None:
    which = _patterns(mask, q_len, kv_len, mask_dims)
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    while which and tiles * (max(which) + 1) <= MOST_TILES:
        entries = [which.index(n) for n in range(max(which) + 1)]
        source = source_of(mask, q_len, kv_len, mask_dims[1], entries, device)
        if source is None:
            return None
        build = _Build(source, q_len, kv_len, config)
        total, distinct, clash, *identities = build.classify()
        if clash:
            return None
        alike = numbered(list(zip(identities[::2], identities[1::2], strict=True))).tolist()
        if source.patterns == 1 or alike == list(range(source.patterns)):
            return build.write(total, distinct, _pattern_of(which, mask_dims, device), partial_cost)
        which = [alike[n] for n in which]  # masks told apart may keep the same scores
    return None


def _patterns(mask: Mask, q_len: int, kv_len: int, mask_dims: tuple[int, int]) -> list[int]:
    """Number of the pattern of each batch entry and head, counted from 0 as they appear; empty without programs."""
    count = mask_dims[0] * mask_dims[1]
    if count == 1:
        return [0]
    if isinstance(mask, DenseMask):
        return list(range(count))  # the kernels tell which are equal
    if programs_of(mask, q_len, kv_len, [(0, 0)]) is None:
        return []
    return numbered(mask.numbers(*mask_dims).expand(mask_dims).flatten().tolist()).tolist()


def _pattern_of(which: list[int], mask_dims: tuple[int, int], device: torch.device) -> Tensor:
    if max(which) == 0:
        return torch.zeros(mask_dims, dtype=torch.int32, device=device)
    return put(device, which).view(mask_dims)


class _Build:
    """The kernels' calls for one problem."""

    def __init__(self, source: Source, q_len: int, kv_len: int, config: LayoutConfig) -> None:
        self.source, self.q_len, self.kv_len, self.config = source, q_len, kv_len, config
        self.device = source.tensor.device
        row_blocks, columns = -(-q_len // config.block_m), -(-kv_len // config.block_n)
        self.blocks = source.patterns * row_blocks
        self.tiles = self.blocks * columns
        slots = 1 << (2 * self.tiles - 1).bit_length()
        self.sizes = (row_blocks, columns, source.patterns, slots)
        self.numbers = (*source.strides, source.heads, q_len, kv_len, *self.sizes)
        self.rows = source.rows_at_once(config.block_m, config.block_n)
        self.constants = (source.kind, config.block_m, config.block_n, self.rows)
        # Keys (64 bits) and first tiles of slots, partial and full tiles of row blocks, codes of tiles.
        self.known = torch.zeros(3 * slots + 2 * self.blocks + self.tiles, dtype=torch.int32, device=self.device)
        # Hashes (64 bits) of tiles, numbers of slots, owners of bitmaps.
        self.scratch = self.empty(3 * self.tiles + slots)
        entries = self.known if source.entries is None else source.entries
        self.tensors = (source.tensor, entries, self.known, self.scratch)

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def classify(self) -> list[int]:
        """Tiles, bitmaps, whether hashes clash, and two numbers that identify each of several patterns."""
        from stof.layout.device import kernels
        from stof.layout.device.launch import launch

        several = self.source.patterns if self.source.patterns > 1 else 0
        totals = self.empty(3 + 2 * several, dtype=torch.int64)
        launch(
            kernels.classify_tiles, self.tiles, self.tensors, self.numbers, self.constants, num_warps=4,
            device=self.device,
        )  # fmt: skip
        launch(
            kernels.number_bitmaps, 1, (self.known, self.scratch, totals), self.sizes, (_NUMBERED,), num_warps=8,
            device=self.device,
        )  # fmt: skip
        return totals.tolist()

    def write(self, total: int, distinct: int, pattern_of: Tensor, partial_cost: int) -> Layout:
        """The layout of so many tiles and bitmaps."""
        from stof.layout.device import kernels
        from stof.layout.device.launch import launch

        config = self.config
        layout = Layout(
            q_len=self.q_len,
            kv_len=self.kv_len,
            config=config,
            pattern_of=pattern_of,
            row_block_ptr=self.empty(self.blocks + 1),
            partial_count=self.empty(self.blocks),
            tile_base=self.empty(total),
            gathered=self.empty(0, 1),
            tile_bitmap=self.empty(total),
            bitmaps=self.empty(distinct, config.block_m, words(config.block_n)),
            cost=self.empty(self.blocks, dtype=torch.float32),
            order=self.empty(self.blocks),
        )
        out = (
            layout.row_block_ptr, layout.partial_count, layout.tile_base, layout.tile_bitmap, layout.bitmaps,
            layout.cost, layout.order,
        )  # fmt: skip
        launch(
            kernels.write_layout, self.blocks + distinct * (config.block_m // self.rows), (*self.tensors, *out),
            (*self.numbers, partial_cost), self.constants, num_warps=4, device=self.device,
        )  # fmt: skip
        return layout
