"""Which tensors the block-wise kernels read as they are, and copies of those that they cannot read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rows of tiles that are copied to shared memory begin and end at multiples of 16 bytes. Copies of less than 4 bytes to
# shared memory are not asynchronous: Triton then puts K and V at one shared memory address, where the assembler (ptxas
# 12.8, sm_90) takes the matrix descriptor of one for that of the other. Copies of 4 bytes, as of float32, are
# asynchronous.
_ROW_UNITS = {torch.float16: 8, torch.bfloat16: 8}


class Strides(NamedTuple):
    """Of a `[B, H, S, D]` tensor, whose rows are contiguous."""

    b: int
    h: int
    s: int


class BiasStrides(NamedTuple):
    """Of a bias, 0 in dimensions that it broadcasts."""

    b: int
    h: int
    q: int
    k: int

    @classmethod
    def of(cls, bias: Tensor | None) -> BiasStrides:
        if bias is None:
            return cls(0, 0, 0, 0)
        return cls(*[0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)])


def row_unit(x: Tensor) -> int:
    """Elements of which rows of a tile are multiples."""
    return _ROW_UNITS.get(x.dtype, 1)


def row_strides(x: Tensor, unit: int = 1) -> Strides:
    """In units of so many elements, 0 where a dimension has one entry."""
    return Strides(*[0 if size == 1 else n // unit for size, n in zip(x.shape[:3], x.stride()[:3], strict=True)])


def rows_fit(x: Tensor, unit: int) -> bool:
    """Whether kernels can read a tensor: its rows are contiguous, and whole units (elements)."""
    return (x.stride(3) == 1 or x.shape[3] == 1) and not any(n % unit for n in (x.shape[3], *row_strides(x)))


def padded_rows(x: Tensor, unit: int) -> Tensor:
    """The tensor if its rows are whole aligned units; else a contiguous copy, its rows padded with zeros to `unit`s."""
    width = x.shape[3]
    if rows_fit(x, unit) and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_zeros(*x.shape[:3], -(-width // unit) * unit)
    copy[..., :width] = x
    return copy


def needs_int64_offsets(*tensors: Tensor | None) -> bool:
    """Whether offsets within one (batch, head) pass 2^31 elements; between them they are 64-bit anyway."""
    return any(t is not None and t.stride(2) * t.shape[2] + t.stride(3) * t.shape[3] >= 2**31 for t in tensors)
