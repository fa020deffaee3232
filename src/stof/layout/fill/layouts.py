"""The host's part of building a layout on the device: a few kernels, and one wait for how much they found.

Contiguous tiles of masks given as programs (`stof.masks.gpu_program`) or as a dense tensor. The results are those of
`stof.layout.builders.build`, bit for bit; masks without a program are left to it.
"""

from __future__ import annotations

import torch

from stof.layout.bitmaps import words
from stof.layout.fill.mask_input import Source, on_device, source_of, triton_modules
from stof.layout.config import LayoutConfig
from stof.layout.layout import Layout
from stof.masks import Mask
from stof.masks.base import numbered
from stof.masks.gpu_program import programs_of

# Each tile is looked at; of larger problems, `stof.layout.builders.closed_form` rules out squares of tiles first.
MOST_TILES = 2**20
# Tiles of a row block that one thread block classifies: 4 of a mask given as a program, 16 where the mask has at least
# `_MANY` tiles, which pays for compiling a second kernel; 1 of a dense mask, whose tiles are all read.
_TOGETHER, _TOGETHER_OF_MANY, _READ = 4, 16, 1
_MANY = 2**17
# Tiles whose bitmaps are numbered at once: few enough that their registers do not lower the kernel's occupancy.
_NUMBERED = 2**9
# Warps of the kernel that writes.
_WRITERS = 8


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
        build = _Build(source, q_len, kv_len, config, device)
        build.classify()
        # While the device computes, the host prepares what does not depend on the results.
        rows = _Rows(build, which, mask_dims)
        total, distinct, clash, *identities = build.results()
        if clash:
            return None
        quads = [tuple(identities[n : n + 4]) for n in range(0, 4 * source.patterns, 4)]
        alike = [0] if source.patterns == 1 else numbered(quads).tolist()
        if alike == list(range(source.patterns)):
            return build.write(total, distinct, rows)
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


class _Build:
    """The kernels' calls for one problem."""

    def __init__(self, source: Source, q_len: int, kv_len: int, config: LayoutConfig, device: torch.device) -> None:
        self.source, self.q_len, self.kv_len, self.config, self.device = source, q_len, kv_len, config, device
        self.row_blocks, self.columns = -(-q_len // config.block_m), -(-kv_len // config.block_n)
        self.blocks = source.patterns * self.row_blocks
        tiles = self.blocks * self.columns
        slots = 1 << (2 * tiles - 1).bit_length()
        # See `build_kernels._state_pointers`.
        zeros, rest = 6 * slots + 2 * self.blocks + 2, 5 * tiles + slots
        self.state, self.mailbox, first = source.prepared(zeros, rest, 3 + 4 * source.patterns, device)
        self.tensors = (self.state if source.dense is None else source.dense, self.state)
        sizes = (self.row_blocks, self.columns, source.patterns, first, first + source.programs.first, slots)
        self.numbers = (*source.strides, source.heads, q_len, kv_len, *sizes)
        rows = source.rows_at_once(config.block_m, config.block_n)
        self.constants = (source.kind, config.block_m, config.block_n, rows)

    def classify(self) -> None:
        kernels, _, launching = triton_modules()
        group = _TOGETHER if self.blocks * self.columns <= _MANY else _TOGETHER_OF_MANY
        if self.source.dense is not None:
            group = _READ
        launching.launch(
            kernels.classify_tiles, self.blocks * -(-self.columns // group), (*self.tensors, self.mailbox.tensor),
            self.numbers, (*self.constants, group, _NUMBERED), device=self.device,
        )  # fmt: skip

    def results(self) -> list[int]:
        """Tiles, bitmaps, how many hashes clash, and four numbers that identify each of several patterns."""
        self.mailbox.wait(3 if self.source.patterns == 1 else 0, self.device)
        total, distinct, clash, *identities = self.mailbox.read(3 + 4 * self.source.patterns)
        return [total - 1, distinct - 1, clash - 1, *identities]

    def write(self, total: int, distinct: int, rows: _Rows) -> Layout:
        """The layout of so many tiles and bitmaps."""
        kernels, _, launching = triton_modules()
        block_m, block_n = self.config.block_m, self.config.block_n
        base = torch.empty(total, dtype=torch.int32, device=self.device)
        tile_bitmap = torch.empty(total, dtype=torch.int32, device=self.device)
        bitmaps = torch.empty((distinct, block_m, words(block_n)), dtype=torch.int32, device=self.device)
        out = (rows.pattern_of, rows.pointers, rows.partial_count, base, tile_bitmap, bitmaps)
        launching.launch(
            kernels.write_layout, self.blocks + distinct, (*self.tensors, *out),
            (*self.numbers, rows.pattern_of.numel()), self.constants, num_warps=_WRITERS,
            device=self.device,
        )  # fmt: skip
        return Layout(
            q_len=self.q_len,
            kv_len=self.kv_len,
            config=self.config,
            pattern_of=rows.pattern_of,
            row_block_ptr=rows.pointers,
            partial_count=rows.partial_count,
            tile_base=base,
            gathered=rows.gathered,
            tile_bitmap=tile_bitmap,
            bitmaps=bitmaps,
        )


class _Rows:
    """Tensors of a layout whose sizes are known before its tiles are; `write_layout` fills them."""

    def __init__(self, build: _Build, which: list[int], mask_dims: tuple[int, int]) -> None:
        blocks, device = build.blocks, build.device
        self.pointers = torch.empty(blocks + 1, dtype=torch.int32, device=device)
        self.partial_count = torch.empty(blocks, dtype=torch.int32, device=device)
        self.gathered = torch.empty((0, 1), dtype=torch.int32, device=device)
        if build.source.patterns == 1:
            self.pattern_of = torch.empty(mask_dims, dtype=torch.int32, device=device)
        else:
            numbers = torch.tensor(which, dtype=torch.int32, device="cpu").view(mask_dims)
            self.pattern_of = numbers.to(device, non_blocking=True)
