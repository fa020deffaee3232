"""The host's part of building a layout on the device: three kernels, and one wait for how much they found.

Contiguous tiles of masks given as programs (`stof.masks.program`) or as a dense tensor. The results are those of
`stof.layout.build`, bit for bit; what has no program is left to it.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from stof.errors import KernelError
from stof.layout.bits import words
from stof.layout.config import LayoutConfig
from stof.layout.layout import Layout
from stof.masks.base import Mask, numbered
from stof.masks.program import Programs, programs_of
from stof.masks.tensors import DenseMask

# Tiles that are all classified, one program each; of larger problems, squares of tiles are ruled out first elsewhere.
MOST_TILES = 2**20
# Scores of a dense mask, and of others, that a program of four warps holds at once: more take too many registers.
_SCORES_READ, _SCORES_RUN = 2**13, 2**10
# Tiles whose bitmaps are numbered at once, and rows of blocks that are drawn.
_NUMBERED, _DRAWN = 2**12, 2**7

# Devices whose Triton does not compile the kernels, or has none.
_without: set[torch.device] = set()


@dataclass(frozen=True, eq=False)
class _Source:
    """What the kernels read.

    Attributes:
        tensor: programs, int32; or bytes of a dense mask `[.., Sq, Skv]`, as they are or four as one int32.
        entries: int32 `[P]`, which (batch, head) entry of a dense mask each of several patterns is; else None.
        strides: of batch, heads, queries and keys of a dense mask.
        heads: entries of a dense mask in one batch entry.
        patterns: masks there are.
    """

    tensor: Tensor
    entries: Tensor | None
    strides: tuple[int, ...]
    heads: int
    patterns: int


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
    if config.slab is not None or device in _without:
        return None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    which = _patterns(mask, q_len, kv_len, mask_dims)
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            while which and tiles * (max(which) + 1) <= MOST_TILES:
                source = _source(mask, q_len, kv_len, mask_dims[1], which, device)
                if source is None:
                    return None
                build = _Build(source, q_len, kv_len, config)
                total, distinct, clash, *identities = build.classify()
                if clash:
                    return None
                alike = numbered(list(zip(identities[::2], identities[1::2], strict=True))).tolist()
                if alike == list(range(source.patterns)) or source.patterns == 1:
                    return build.write(total, distinct, _pattern_of(which, mask_dims, device), partial_cost)
                which = [alike[n] for n in which]  # masks told apart may keep the same scores
    except (KernelError, ImportError) as error:
        _without.add(device)
        warnings.warn(f"stof: layouts are built by torch from now on, which is slower: {error}", stacklevel=3)
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
    return _on(device, which).view(mask_dims)


def _on(device: torch.device, numbers: list[int]) -> Tensor:
    """int32, without waiting for what the device does."""
    return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def _source(
    mask: Mask, q_len: int, kv_len: int, mask_heads: int, which: list[int], device: torch.device
) -> _Source | None:
    """What the kernels read of the first entry of each pattern."""
    entries = [which.index(n) for n in range(max(which) + 1)]
    if not isinstance(mask, DenseMask):
        programs = programs_of(mask, q_len, kv_len, [divmod(entry, mask_heads) for entry in entries])
        if programs is None:
            return None
        numbers = _with_draws(programs, device)
        return _Source(numbers, None, (0, 0, 0, 0), 1, len(entries))
    keep = mask.keep
    if keep.device != device:
        return None
    if keep.ndim < 4:
        keep = keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape))
    strides = keep.stride()
    if max(map(abs, strides)) >= 2**31:
        return None
    aligned = strides[3] == 1 and not (kv_len % 4 or keep.data_ptr() % 16 or any(n % 16 for n in strides[:3]))
    if aligned:
        keep, strides = keep.view(torch.int32), (*(n // 4 for n in strides[:3]), 1)
    else:
        keep = keep.view(torch.uint8)
    places = _on(device, entries) if len(entries) > 1 else None
    return _Source(keep, places, strides, keep.shape[1], len(entries))


def _with_draws(programs: Programs, device: torch.device) -> Tensor:
    """Programs on the device, followed by the tables that it fills."""
    if not programs.draws:
        return _on(device, programs.numbers)

    from stof.layout.device.launch import launch
    from stof.layout.device.programs import draw_blocks

    numbers = torch.empty(programs.length, dtype=torch.int32, device=device)
    numbers[: len(programs.numbers)].copy_(_on(device, programs.numbers))
    for draw in programs.draws:
        launch(draw_blocks, -(-draw.rows // _DRAWN), (numbers,), tuple(draw), (_DRAWN,), num_warps=4, device=device)
    return numbers


class _Build:
    """The kernels' calls for one problem."""

    def __init__(self, source: _Source, q_len: int, kv_len: int, config: LayoutConfig) -> None:
        from stof.layout.device import kernels

        self.source, self.q_len, self.kv_len, self.config = source, q_len, kv_len, config
        self.device = source.tensor.device
        row_blocks, columns = -(-q_len // config.block_m), -(-kv_len // config.block_n)
        self.blocks = source.patterns * row_blocks
        self.tiles = self.blocks * columns
        slots = 1 << (2 * self.tiles - 1).bit_length()
        self.sizes = (row_blocks, columns, source.patterns, slots)
        self.numbers = (*source.strides, source.heads, q_len, kv_len, *self.sizes)
        kind = kernels.PROGRAM
        if source.tensor.ndim > 1:
            kind = kernels.BYTES if source.tensor.dtype == torch.uint8 else kernels.QUADS
        scores = _SCORES_READ if kind == kernels.QUADS else _SCORES_RUN
        self.rows = min(config.block_m & -config.block_m, max(1, scores // config.block_n))
        self.constants = (int(kind), config.block_m, config.block_n, self.rows)
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
