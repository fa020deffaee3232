"""The grid's masks as FlashAttention-4 mask functions; imported only where its wheel is.

The arguments are one-element vectors of the kernel's language, so constants must be vectors too, and the functions
must be written out with a decorator each: the compiler reads their source.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.mask_formats import random_blocks
from stof.testing.mask_grid import NEIGHBORHOOD, Shape, document_ends, grid_sides, window_of

cutlass: Any = importlib.import_module("cutlass")
cute: Any = importlib.import_module("cutlass.cute")
utils: Any = importlib.import_module("flash_attn.cute.utils")

# A kernel may look up rows past the last query, up to one tile of so many.
_TILE_ROWS = 192


def _document_starts(length: int, device: torch.device) -> Tensor:
    """First token of each token's document, int32 `[length + _TILE_ROWS]`."""
    ends = torch.tensor(document_ends(length, length // 8), dtype=torch.int32)
    return F.pad(torch.repeat_interleave(ends[:-1], ends.diff()), (0, _TILE_ROWS)).to(device)


def mask_mod(name: str, shape: Shape, device: torch.device) -> tuple[Callable[..., Any], list[Tensor] | None]:
    """The mask function of a grid mask and the tensors it reads.

    Raises:
        KeyError: the mask has no such form.
    """
    if name == "bigbird":
        return _bigbird(window_of(shape.q_len)), [_random_starts(shape, device)]
    if name == "longformer":
        return _longformer(window_of(shape.q_len)), None
    if name == "documents":
        return documents, [_document_starts(shape.q_len, device)]
    if name == "neighborhood":
        return _neighborhood(grid_sides(shape.q_len)[1], NEIGHBORHOOD // 2), None
    return {"causal": causal, "window512": window512, "strided": strided, "dilated": dilated}[name], None


def _random_starts(shape: Shape, device: torch.device) -> Tensor:
    """First key of each random block, int32 `[row blocks + 8, 3]`.

    The kernel may look up rows past the last query, up to one tile of 192; the table is padded for them.
    """
    chosen = random_blocks(shape.q_len, shape.kv_len, device) * 64
    missing = 3 - chosen.shape[1]
    return F.pad(chosen, (0, missing, 0, 8), value=-64).to(torch.int32).contiguous()


@cute.jit
def causal(batch, head, row, column, seqlen_info, aux_tensors):
    return row >= column


@cute.jit
def window512(batch, head, row, column, seqlen_info, aux_tensors):
    return (row >= column) & (row - column < utils.scalar_to_ssa(512, cutlass.Int32))


@cute.jit
def strided(batch, head, row, column, seqlen_info, aux_tensors):
    near = row - column < utils.scalar_to_ssa(128, cutlass.Int32)
    place = column & utils.scalar_to_ssa(127, cutlass.Int32)
    return (row >= column) & (near | (place >= utils.scalar_to_ssa(120, cutlass.Int32)))


@cute.jit
def dilated(batch, head, row, column, seqlen_info, aux_tensors):
    distance = row - column
    near = (row >= column) & (distance < utils.scalar_to_ssa(2048, cutlass.Int32))
    step = distance & utils.scalar_to_ssa(15, cutlass.Int32)
    return near & (step == utils.scalar_to_ssa(0, cutlass.Int32))


@cute.jit
def documents(batch, head, row, column, seqlen_info, aux_tensors):
    start = utils.scalar_to_ssa(aux_tensors[0][row[0]], cutlass.Int32)
    return (row >= column) & (column >= start)


def _neighborhood(width: int, reach: int):
    @cute.jit
    def neighborhood(batch, head, row, column, seqlen_info, aux_tensors):
        size = utils.scalar_to_ssa(width, cutlass.Int32)
        most = utils.scalar_to_ssa(reach, cutlass.Int32)
        row_down, column_down = row // size, column // size
        down = row_down - column_down
        across = (row - row_down * size) - (column - column_down * size)
        return (down <= most) & (-down <= most) & (across <= most) & (-across <= most)

    return neighborhood


def _longformer(w: int):
    @cute.jit
    def longformer(batch, head, row, column, seqlen_info, aux_tensors):
        width = utils.scalar_to_ssa(w, cutlass.Int32)
        near = (row - column <= width) & (column - row <= width)
        return near | (row < width) | (column < width)

    return longformer


def _bigbird(w: int):
    @cute.jit
    def bigbird(batch, head, row, column, seqlen_info, aux_tensors):
        width = utils.scalar_to_ssa(w, cutlass.Int32)
        near = (row - column <= width) & (column - row <= width)
        starts = aux_tensors[0]
        row_block = row // utils.scalar_to_ssa(64, cutlass.Int32)
        start = column & utils.scalar_to_ssa(-64, cutlass.Int32)
        first = start == utils.scalar_to_ssa(starts[row_block[0], 0], cutlass.Int32)
        second = start == utils.scalar_to_ssa(starts[row_block[0], 1], cutlass.Int32)
        third = start == utils.scalar_to_ssa(starts[row_block[0], 2], cutlass.Int32)
        return near | (row < width) | (column < width) | first | second | third

    return bigbird
