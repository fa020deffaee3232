"""The host's part of building a layout on the device: three kernels, and one wait for how much they found.

Contiguous tiles of one mask, given as a program (`stof.masks.program`) or a dense tensor. The results are those of
`stof.layout.build`, bit for bit; what has no program is left to it.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import Tensor

from stof.errors import KernelError
from stof.layout.bits import words
from stof.layout.config import LayoutConfig
from stof.layout.layout import Layout
from stof.masks.base import Mask
from stof.masks.program import program_of
from stof.masks.tensors import DenseMask

# Tiles that are all classified, one program each; of larger problems, squares of tiles are ruled out first elsewhere.
MOST_TILES = 2**20
# Scores of a dense mask, and of others, that a program of four warps holds at once: more take too many registers.
_SCORES_READ, _SCORES_RUN = 2**13, 2**10
# Bitmaps numbered at once.
_NUMBERED = 2**12


# Devices whose Triton does not compile the kernels, or has none.
_without: set[torch.device] = set()


def device_layout(
    mask: Mask,
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    numbers: list[list[int]],
    partial_cost: int,
    device: torch.device,
) -> Layout | None:
    """The layout of a mask; None where these kernels do not serve it.

    Args:
        mask, q_len, kv_len: as for `build_layout`, already checked.
        config: block sizes and gathering.
        numbers: of each batch entry and head, as `Mask.numbers` gives them.
        partial_cost: of a partial tile, in hundredths of a full one.
        device: where the layout is to be.
    """
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    alike = len({number for row in numbers for number in row}) == 1
    if config.slab is not None or tiles > MOST_TILES or not alike or device in _without:
        return None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    source = _source(mask, q_len, kv_len, device)
    if source is None:
        return None
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return _built(source, q_len, kv_len, config, (len(numbers), len(numbers[0])), partial_cost)
    except (KernelError, ImportError) as error:
        _without.add(device)
        warnings.warn(f"stof: layouts are built by torch from now on, which is slower: {error}", stacklevel=3)
        return None


def _built(
    source: tuple[Tensor, int, int],
    q_len: int,
    kv_len: int,
    config: LayoutConfig,
    mask_dims: tuple[int, int],
    partial_cost: int,
) -> Layout | None:
    """Three kernels; None when two bitmaps share the first half of their hash."""
    from stof.layout.device import kernels
    from stof.layout.device.launch import launch

    tensor, stride_q, stride_k = source
    device = tensor.device
    row_blocks, columns = -(-q_len // config.block_m), -(-kv_len // config.block_n)
    tiles = row_blocks * columns
    kind = int(kernels.PROGRAM)
    if tensor.ndim > 1:
        kind = int(kernels.BYTES if tensor.dtype == torch.uint8 else kernels.QUADS)
    slots = 1 << (2 * tiles - 1).bit_length()
    scores = _SCORES_READ if kind == kernels.QUADS else _SCORES_RUN
    rows = min(config.block_m & -config.block_m, max(1, scores // config.block_n))
    constants = (kind, config.block_m, config.block_n, rows)
    numbers = (stride_q, stride_k, q_len, kv_len, columns, tiles, row_blocks, slots)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # Keys (64 bits) and first tiles of slots, partial and full tiles of row blocks, codes of tiles.
    known = torch.zeros(3 * slots + 2 * row_blocks + tiles, dtype=torch.int32, device=device)
    # Hashes (64 bits) of tiles, numbers of slots, owners of bitmaps.
    scratch, totals = empty(3 * tiles + slots), empty(3)
    launch(kernels.classify_tiles, tiles, (tensor, known, scratch), numbers, constants, num_warps=4, device=device)
    launch(
        kernels.number_bitmaps, 1, (known, scratch, totals), (tiles, row_blocks, slots), (_NUMBERED,), num_warps=8,
        device=device,
    )  # fmt: skip
    found, distinct, clash = totals.tolist()
    if clash:
        return None
    layout = Layout(
        q_len=q_len,
        kv_len=kv_len,
        config=config,
        pattern_of=torch.zeros(mask_dims, dtype=torch.int32, device=device),
        row_block_ptr=empty(row_blocks + 1),
        partial_count=empty(row_blocks),
        tile_base=empty(found),
        gathered=empty(0, 1),
        tile_bitmap=empty(found),
        bitmaps=empty(distinct, config.block_m, words(config.block_n)),
        cost=empty(row_blocks, dtype=torch.float32),
        order=empty(row_blocks),
    )
    out = (
        layout.row_block_ptr, layout.partial_count, layout.tile_base, layout.tile_bitmap, layout.bitmaps,
        layout.cost, layout.order,
    )  # fmt: skip
    launch(
        kernels.write_layout, row_blocks + distinct * (config.block_m // rows), (tensor, known, scratch, *out),
        (*numbers, partial_cost), constants, num_warps=4, device=device,
    )  # fmt: skip
    return layout


def _source(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, int, int] | None:
    """What the kernels read, and strides of its rows and columns: a program, a dense mask's bytes, or four as one.

    Of the first sequence and head, which all others are like.
    """
    if not isinstance(mask, DenseMask):
        program = program_of(mask, q_len, kv_len, 0, 0)
        if program is None:
            return None
        return torch.tensor(program, dtype=torch.int32, device="cpu").to(device, non_blocking=True), 0, 0
    keep = mask.keep
    if keep.device != device:
        return None
    while keep.ndim > 2:
        keep = keep[0]
    stride_q, stride_k = keep.stride()
    if max(abs(stride_q), abs(stride_k)) >= 2**31:
        return None
    if stride_k == 1 and stride_q % 16 == 0 and kv_len % 4 == 0 and keep.data_ptr() % 16 == 0:
        return keep.view(torch.int32), stride_q // 4, 1
    return keep.view(torch.uint8), stride_q, stride_k
