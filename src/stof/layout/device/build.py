"""The host's part of building a layout on the device: a few kernels, and one wait for how much they found.

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

# Each tile is looked at; of larger problems, `stof.layout.tiles` rules out squares of tiles first.
MOST_TILES = 2**20
# Tiles that one program rules out, and tiles whose bitmaps are numbered at once.
_RULED_OUT, _NUMBERED = 128, 2**12
# Programs that share the queued tiles: as many as a large GPU runs at once, with some to spare.
_RESIDENT = 1024


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
    """The same, with this device as the current one."""
    which = _patterns(mask, q_len, kv_len, mask_dims)
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    while which and tiles * (max(which) + 1) <= MOST_TILES:
        entries = [which.index(n) for n in range(max(which) + 1)]
        source = source_of(mask, q_len, kv_len, mask_dims[1], entries, device)
        if source is None:
            return None
        build = _Build(source, q_len, kv_len, config)
        totals = build.classify()
        # The device is busy: what does not depend on its answer is made meanwhile.
        rows, pattern_of = _Rows(build), _pattern_of(which, mask_dims, device)
        total, distinct, clash, *identities = totals.tolist()
        if clash:
            return None
        alike = numbered(list(zip(identities[::2], identities[1::2], strict=True))).tolist()
        if source.patterns == 1 or alike == list(range(source.patterns)):
            return build.write(total, distinct, rows, pattern_of, partial_cost)
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
        self.row_blocks, self.columns = -(-q_len // config.block_m), -(-kv_len // config.block_n)
        self.blocks = source.patterns * self.row_blocks
        self.tiles = self.blocks * self.columns
        slots = 1 << (2 * self.tiles - 1).bit_length()
        self.sizes = (self.row_blocks, self.columns, source.patterns, slots)
        self.numbers = (*source.strides, source.heads, q_len, kv_len, *self.sizes)
        self.rows = source.rows_at_once(config.block_m, config.block_n)
        self.pieces = config.block_m // self.rows
        # See `kernels._rooms`.
        known = torch.zeros(3 * slots + 6 * self.tiles + 2 * self.blocks + 1, dtype=torch.int32, device=self.device)
        scratch = self.empty(2 * self.tiles + slots)
        self.tensors = (source.tensor, known if source.entries is None else source.entries, known, scratch)

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def constants(self, rows: int) -> tuple[int, ...]:
        return (self.source.kind, self.config.block_m, self.config.block_n, rows)

    def classify(self) -> Tensor:
        """Tiles, bitmaps, whether hashes clash, and two numbers that identify each of several patterns: int64."""
        from stof.layout.device import kernels, reading
        from stof.layout.device.launch import launch

        programs = self.tiles * self.pieces
        if self.source.kind == reading.PROGRAM:
            programs = min(programs, _RESIDENT)
            launch(
                kernels.rule_out_tiles, self.blocks * -(-self.columns // _RULED_OUT), self.tensors, self.numbers,
                self.constants(_RULED_OUT), num_warps=_RULED_OUT // 32, device=self.device,
            )  # fmt: skip
        launch(
            kernels.classify_tiles, programs, self.tensors, self.numbers, self.constants(self.rows),
            num_warps=self.source.num_warps, device=self.device,
        )  # fmt: skip
        totals = self.empty(3 + 2 * self.source.patterns, dtype=torch.int64)
        launch(
            kernels.number_bitmaps, 1, (*self.tensors[2:], totals), self.sizes, (_NUMBERED,), num_warps=8,
            device=self.device,
        )  # fmt: skip
        return totals

    def write(self, total: int, distinct: int, rows: _Rows, pattern_of: Tensor, partial_cost: int) -> Layout:
        """The layout of so many tiles and bitmaps."""
        from stof.layout.device import kernels
        from stof.layout.device.launch import launch

        block_m, block_n = self.config.block_m, self.config.block_n
        layout = Layout(
            q_len=self.q_len,
            kv_len=self.kv_len,
            config=self.config,
            pattern_of=pattern_of,
            row_block_ptr=rows.pointers,
            partial_count=rows.partial_count,
            tile_base=self.empty(total),
            gathered=rows.gathered,
            tile_bitmap=self.empty(total),
            bitmaps=self.empty(distinct, block_m, words(block_n)),
            cost=rows.cost,
            order=rows.order,
        )
        out = (
            layout.row_block_ptr, layout.partial_count, layout.tile_base, layout.tile_bitmap, layout.bitmaps,
            layout.cost, layout.order,
        )  # fmt: skip
        launch(
            kernels.write_layout, self.blocks + distinct * self.pieces, (*self.tensors, *out),
            (*self.numbers, partial_cost), self.constants(self.rows), num_warps=self.source.num_warps,
            device=self.device,
        )  # fmt: skip
        return layout


class _Rows:
    """Tensors of a layout whose sizes are known before its tiles are."""

    def __init__(self, build: _Build) -> None:
        self.pointers = build.empty(build.blocks + 1)
        self.partial_count, self.order = build.empty(build.blocks), build.empty(build.blocks)
        self.cost = build.empty(build.blocks, dtype=torch.float32)
        self.gathered = build.empty(0, 1)
