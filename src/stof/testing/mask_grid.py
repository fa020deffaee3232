"""The masks and shapes of the benchmark grid."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stof import masks
from stof.errors import ArgumentError, shown
from stof.masks import Mask
from stof.masks.index import Index

# `(left, right)` in FlashAttention's sense, aligned to the last query and key; None is unbounded.
Window = tuple[int | None, int | None]

# Rows and columns of the neighbourhood that a token of a grid sees.
NEIGHBORHOOD = 13


@dataclass(frozen=True)
class Shape:
    """One attention problem: `[batch, heads, q_len, head_dim]` queries, `kv_heads` key heads of `kv_len`."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int

    @staticmethod
    def parse(text: str) -> Shape:
        """`B,H,D,S` or `B,H,Hkv,D,Sq,Skv`."""
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if any(not 0 < size < 2**31 for size in sizes):
            sizes = []
        if len(sizes) == 4:
            batch, heads, head_dim, length = sizes
            return Shape(batch, heads, heads, head_dim, length, length)
        if len(sizes) == 6:
            return Shape(*sizes)
        raise ArgumentError(
            f"a shape is B,H,D,S or B,H,Hkv,D,Sq,Skv in numbers from 1 to {2**31 - 1}, got {shown(text)}"
        )

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads}/{self.kv_heads} D{self.head_dim} S{self.q_len}x{self.kv_len}"


@dataclass(frozen=True)
class GridMask:
    """One mask of the grid.

    Attributes:
        name: name in tables and JSON.
        mask: the mask, for a number of queries.
        dense_like: class for the geometric means (else sparse).
        causal: `is_causal=True` computes exactly this mask where `q_len == kv_len`.
        unmasked: no mask at all computes exactly this mask.
        window: FlashAttention's `window_size` that computes exactly this mask where `q_len == kv_len`.
        at_end: the queries stand at the end of the cache, so `window` holds for any lengths.
    """

    name: str
    mask: Callable[[int], Mask]
    dense_like: bool
    causal: bool = False
    unmasked: bool = False
    window: Window | None = None
    at_end: bool = False

    def dense(self, shape: Shape, device: torch.device, rows: Tensor | None = None) -> Tensor:
        """The mask as bool `[B or 1, H or 1, R, kv_len]` at the query positions `rows` (int64 `[R]`; all by default).

        Evaluated 1024 rows at a time: the int64 positions of a whole `S x S` rectangle would need 2 GB at S = 16384.
        """
        rows = torch.arange(shape.q_len, device=device) if rows is None else rows
        mask, columns = self.mask(shape.q_len), torch.arange(shape.kv_len, device=device)
        batch, heads = mask.dims(shape.batch, shape.heads, device)
        where = {"b": torch.arange(batch, device=device), "h": torch.arange(heads, device=device)}
        out = torch.empty(batch, heads, len(rows), shape.kv_len, dtype=torch.bool, device=device)
        for start in range(0, len(rows), 1024):
            strip = slice(start, start + 1024)
            index = Index.make(rows[strip], columns, q_len=shape.q_len, kv_len=shape.kv_len, **where)
            out[:, :, strip] = mask.evaluate(index)
        return out


def window_of(length: int) -> int:
    """`w = 16 * floor(sqrt(S) / 16)`, the half window and number of global tokens at length S, at least 16."""
    return max(16, 16 * int(math.sqrt(length) // 16))


GRID: dict[str, GridMask] = {
    grid.name: grid
    for grid in (
        GridMask("full", lambda s: masks.full(), dense_like=True, unmasked=True, window=(None, None)),
        GridMask("causal", lambda s: masks.causal(), dense_like=True, causal=True, window=(None, 0)),
        GridMask("window512", lambda s: masks.sliding_window(511), dense_like=True, window=(511, 0)),
        GridMask("longformer", lambda s: masks.longformer(window_of(s), window_of(s)), dense_like=False),
        GridMask("bigbird", lambda s: masks.bigbird(window_of(s), window_of(s)), dense_like=False),
        GridMask("strided", lambda s: masks.strided(128, 128, 8), dense_like=False),
        GridMask("dilated", lambda s: masks.dilated_window(2047, dilation=16), dense_like=False),
    )
}


def document_ends(length: int, typical: int) -> list[int]:
    """Cumulative lengths of packed documents, from 0: log-normal around `typical` tokens, drawn with seed 0."""
    normal = torch.randn(1 + length // 16, generator=torch.Generator().manual_seed(0), device="cpu")
    ends = (typical * normal.exp()).long().clamp(min=16).cumsum(0)
    return [0, *ends[ends < length].tolist(), length]


def grid_sides(length: int) -> tuple[int, int]:
    """Rows and columns of the grid that is nearest to a square of `length` tokens."""
    rows = next(side for side in range(math.isqrt(length), 0, -1) if length % side == 0)
    return rows, length // rows


def _documents(length: int) -> Mask:
    return masks.documents(cu_seqlens=document_ends(length, length // 8)) & masks.causal()


# Masks of as many keys as queries.
SQUARE: dict[str, GridMask] = {
    grid.name: grid
    for grid in (
        GridMask("documents", _documents, dense_like=False),
        GridMask("neighborhood", lambda s: masks.neighborhood_2d(*grid_sides(s), NEIGHBORHOOD), dense_like=False),
    )
}


def grid_mask(name: str) -> GridMask:
    """The grid's mask of that name, one of `SQUARE`, or `random2%` and the like: so many scores, drawn with seed 0.

    Raises:
        ArgumentError: no such mask; lists those there are.
    """
    random = re.fullmatch(r"random(\d+(?:\.\d+)?)%", name)
    if random is not None and 0 < float(random[1]) <= 100:
        return GridMask(name, lambda s: random_mask(s, float(random[1]) / 100), dense_like=False)
    known = GRID | SQUARE
    if name not in known:
        raise ArgumentError(f"unknown benchmark mask {name!r}; there are {', '.join(known)}, and random2% and the like")
    return known[name]


@functools.lru_cache(maxsize=4)
def random_mask(length: int, share: float) -> Mask:
    """A dense mask `[length, length]` that keeps each score with probability `share`, drawn with seed 0 on the CPU."""
    scores = torch.rand(length, length, generator=torch.Generator().manual_seed(0), device="cpu")
    return masks.from_dense(scores < share)


def decode_masks(shape: Shape, window: int) -> list[GridMask]:
    """What the queries at the end of a cache see: its last `window` keys counting themselves, and everything."""
    offset = shape.kv_len - shape.q_len
    return [
        GridMask(
            f"decode-window{window}",
            lambda s: masks.sliding_window(window - 1).with_query_offset(offset),
            dense_like=False,
            window=(window - 1, 0),
            at_end=True,
        ),
        GridMask(
            "decode-dense",
            lambda s: masks.full(),
            dense_like=True,
            unmasked=True,
            window=(None, None),
            at_end=True,
        ),
    ]
