"""Mask functions of the forms that public code has: libraries of masks, training, models of video, graphs, papers.

Each is written anew for a few tokens, with tables as those programs make them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTH, BATCH, HEADS = 96, 2, 4
_G = torch.Generator().manual_seed(7)


def _ids(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


DOC = _ids(20, 5, 31, 40)
DOCS = torch.stack([_ids(30, 30, 36), _ids(10, 80, 6)])
PADDED = torch.stack([_ids(30, 30, 30, 6), _ids(50, 20, 20, 6)]) + 1
PADDED[PADDED == 4] = -1
OFFSETS = torch.tensor([0, 20, 25, 56, 96])
LENGTHS = torch.tensor([60, 91])
PREFIX = torch.tensor([10, 33])
PREFIX_OF_DOC = torch.tensor([4, 2, 10, 7])
WINDOWS = torch.tensor([4, 16, 40, 96])
IMAGE = (torch.arange(LENGTH) % 30 > 12) & (torch.arange(LENGTH) % 30 < 24)
IMAGE_ID = torch.where(IMAGE, torch.arange(LENGTH) // 30, -1)
VALID = torch.rand(BATCH, LENGTH, generator=_G) < 0.8
GLOBAL = torch.rand(LENGTH, generator=_G) < 0.05
BLOCKS = torch.rand(HEADS, 6, 6, generator=_G) < 0.4
DENSE = torch.rand(LENGTH, LENGTH, generator=_G) < 0.3
FRAME = torch.arange(LENGTH) // 16
TIME = torch.rand(LENGTH, generator=_G).sort().values
LEVEL = torch.tensor([0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]).repeat_interleave(6)
ROLE = torch.randint(0, 3, (LENGTH,), generator=_G)
START = OFFSETS[DOC]
W, H = 12, 8
WV, HV = 6, 4
HALF = LENGTH // 2


def _natten(k: int) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = (q % W).clamp(k // 2, W - 1 - k // 2)
        y = (q // W).clamp(k // 2, H - 1 - k // 2)
        return ((x - kv % W).abs() <= k // 2) & ((y - kv // W).abs() <= k // 2)

    return mask


def _diffusion(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Noisy tokens first, then clean ones (block diffusion)."""
    noisy_q, noisy_kv = q < HALF, kv < HALF
    block_q = torch.where(noisy_q, q // 8, (q - HALF) // 8)
    block_kv = torch.where(noisy_kv, kv // 8, (kv - HALF) // 8)
    own = (block_q == block_kv) & (noisy_q == noisy_kv)
    offset = (block_q > block_kv) & ~noisy_kv & noisy_q
    causal = (block_q >= block_kv) & ~noisy_kv & ~noisy_q
    return own | offset | causal


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "full": lambda b, h, q, kv: q >= 0,
    "causal": lambda b, h, q, kv: q >= kv,
    "causal from the cache's end": lambda b, h, q, kv: q + 0 >= kv - 0,
    "reversed causal": lambda b, h, q, kv: q <= kv,
    "strictly causal": lambda b, h, q, kv: q > kv,
    "sliding window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 16),
    "two-sided window": lambda b, h, q, kv: (q - kv).abs() <= 8,
    "window by torch.abs": lambda b, h, q, kv: torch.abs(kv - q) < 9,
    "window by logical_and": lambda b, h, q, kv: torch.logical_and(q >= kv, q - kv < 12),
    "window of each head": lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOWS[h]),
    "window of even heads": lambda b, h, q, kv: (q >= kv) & ((q - kv < 10) | (h % 2 == 1)),
    "exponential windows": lambda b, h, q, kv: (q >= kv) & (q - kv < 2 ** (h + 2)),
    "sinks and window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 16) | (kv < 4)),
    "prefix": lambda b, h, q, kv: (kv < 24) | (q >= kv),
    "prefix of each sequence": lambda b, h, q, kv: (kv < PREFIX[b]) | (q >= kv),
    "padding": lambda b, h, q, kv: kv < LENGTHS[b],
    "padding of both": lambda b, h, q, kv: (kv < LENGTHS[b]) & (q < LENGTHS[b]),
    "left padding": lambda b, h, q, kv: (kv >= LENGTH - LENGTHS[b]) & (q >= kv),
    "padding by a bool table": lambda b, h, q, kv: VALID[b, kv] & (q >= kv),
    "padding of both by a bool table": lambda b, h, q, kv: VALID[b, q] & VALID[b, kv],
    "documents": lambda b, h, q, kv: DOC[q] == DOC[kv],
    "causal documents": lambda b, h, q, kv: (DOC[q] == DOC[kv]) & (q >= kv),
    "documents of each sequence": lambda b, h, q, kv: (DOCS[b, q] == DOCS[b, kv]) & (q >= kv),
    "documents and padding": lambda b, h, q, kv: (PADDED[b, q] == PADDED[b, kv]) & (PADDED[b, q] > 0) & (q >= kv),
    "documents and window": lambda b, h, q, kv: (DOC[q] == DOC[kv]) & (q >= kv) & (q - kv < 12),
    "jagged by searchsorted": lambda b, h, q, kv: (
        torch.searchsorted(OFFSETS, q, right=True) == torch.searchsorted(OFFSETS, kv, right=True)
    ),
    "jagged by bucketize": lambda b, h, q, kv: torch.bucketize(q, OFFSETS) == torch.bucketize(kv, OFFSETS),
    "positions within documents": lambda b, h, q, kv: (DOC[q] == DOC[kv]) & (q - START[q] >= kv - START[kv]),
    "prefix of each document": lambda b, h, q, kv: (
        (DOC[q] == DOC[kv]) & ((kv - START[kv] < PREFIX_OF_DOC[DOC[kv]]) | (q >= kv))
    ),
    "answers that share a question": lambda b, h, q, kv: (q >= kv) & ((DOC[q] == DOC[kv]) | (DOC[kv] == 0)),
    "chunks": lambda b, h, q, kv: (q // 16 == kv // 16) & (q >= kv),
    "chunks from an offset": lambda b, h, q, kv: ((q + 5) // 16 == (kv + 5) // 16) & (q >= kv),
    "block causal": lambda b, h, q, kv: q // 16 >= kv // 16,
    "block causal by torch.div": lambda b, h, q, kv: (
        torch.div(q, 16, rounding_mode="floor") >= torch.div(kv, 16, rounding_mode="floor")
    ),
    "previous block": lambda b, h, q, kv: (q // 16 - kv // 16 <= 1) & (q >= kv),
    "block diffusion": _diffusion,
    "dilated": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0),
    "dilated window": lambda b, h, q, kv: ((q - kv).abs() <= 16) & ((q - kv) % 4 == 0),
    "strided": lambda b, h, q, kv: (q >= kv) & ((q - kv < 8) | ((q - kv) % 8 == 0)),
    "fixed": lambda b, h, q, kv: (q >= kv) & ((q // 8 == kv // 8) | (kv % 8 >= 6)),
    "dilation of each head": lambda b, h, q, kv: (q >= kv) & ((q - kv) % (h + 1) == 0),
    "global tokens": lambda b, h, q, kv: ((q - kv).abs() <= 6) | (q < 4) | (kv < 4),
    "global tokens by a table": lambda b, h, q, kv: ((q - kv).abs() <= 6) | GLOBAL[q] | GLOBAL[kv],
    "global tokens by isin": lambda b, h, q, kv: (q >= kv) & torch.isin(kv, torch.tensor([0, 7, 50])) | (q == kv),
    "images see themselves": lambda b, h, q, kv: (q >= kv) | ((IMAGE_ID[q] == IMAGE_ID[kv]) & (IMAGE_ID[q] >= 0)),
    "text and image": lambda b, h, q, kv: (q >= kv) | (IMAGE[q] & IMAGE[kv]),
    "frames": lambda b, h, q, kv: FRAME[q] >= FRAME[kv],
    "frames in a window": lambda b, h, q, kv: (FRAME[q] - FRAME[kv] <= 2) & (FRAME[q] >= FRAME[kv]),
    "frame and first frame": lambda b, h, q, kv: (FRAME[q] == FRAME[kv]) | (kv < 16),
    "neighbourhood": lambda b, h, q, kv: ((q // W - kv // W).abs() <= 2) & ((q % W - kv % W).abs() <= 2),
    "axial": lambda b, h, q, kv: (q // W == kv // W) | (q % W == kv % W),
    "clamped neighbourhood": _natten(3),
    "three-dimensional neighbourhood": lambda b, h, q, kv: (
        ((q // (WV * HV) - kv // (WV * HV)).abs() <= 1)
        & (((q // WV) % HV - (kv // WV) % HV).abs() <= 1)
        & ((q % WV - kv % WV).abs() <= 1)
    ),
    "windows of a grid": lambda b, h, q, kv: ((q // W) // 4 * 3 + (q % W) // 4) == ((kv // W) // 4 * 3 + (kv % W) // 4),
    "next scales": lambda b, h, q, kv: LEVEL[q] >= LEVEL[kv],
    "same role": lambda b, h, q, kv: (ROLE[q] == ROLE[kv]) | (ROLE[kv] == 0),
    "block table": lambda b, h, q, kv: BLOCKS[h, q // 16, kv // 16] & (q >= kv),
    "adjacency matrix": lambda b, h, q, kv: DENSE[q, kv],
    "times": lambda b, h, q, kv: (TIME[q] >= TIME[kv]) & (TIME[q] - TIME[kv] < 0.3),
    "by torch.where": lambda b, h, q, kv: torch.where(h < 2, q >= kv, (q - kv).abs() < 9),
    "exclusive or": lambda b, h, q, kv: (q >= kv) ^ ((kv < 5) & (q > 50)),
    "multi-token prediction": lambda b, h, q, kv: torch.where(q < HALF, q >= kv, (q - HALF >= kv) | (q == kv)),
}
# Those without a program: tables of a query and a key, floats, and numbers of the query compared with other ones of the
# key, or with ones that neither ascend nor are rows or columns of a grid.
WITHOUT_PROGRAM = {
    "adjacency matrix",
    "block diffusion",
    "clamped neighbourhood",
    "positions within documents",
    "three-dimensional neighbourhood",
    "times",
}
