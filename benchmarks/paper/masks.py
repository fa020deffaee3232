"""The masks of the paper's experiments, and neighbourhoods on a grid with tokens in two orders.

Where the paper leaves a number open it is chosen here: windows are as wide as a row block of 32 (128 as well), random
blocks that would leave the matrix are moved back to its edge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.mask_formats import MaskMod, WrittenMask
from stof import masks
from stof.masks import Mask

# Rows and columns of a block, keys of a window before the query, and tokens of a global range.
BLOCK = 32
# Share of the scores of a random block that BigBird keeps.
RANDOM_SHARE = 0.1
# Rows and columns of a token's neighbourhood.
KERNEL = 13


def global_positions(length: int) -> list[int]:
    """Longformer's global tokens: the first 32, and 32 from the middle of the sequence on."""
    return sorted({p for start in (0, length // 2) for p in range(start, min(start + BLOCK, length))})


@functools.cache
def random_scores(length: int, device: torch.device) -> Tensor:
    """BigBird's random scores, bool `[S, S]`, the same on every device.

    In each 32 x 32 block of the diagonal, shifted by -1, 0 or 1 blocks at random, about a tenth of the scores.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    keep = torch.zeros(length, length, dtype=torch.bool, device="cpu")
    blocks = -(-length // BLOCK)
    shifts = torch.randint(-1, 2, (blocks,), generator=generator, device="cpu").tolist()
    for block, shift in enumerate(shifts):
        row, column = BLOCK * block, BLOCK * min(max(block + shift, 0), blocks - 1)
        drawn = torch.rand(BLOCK, BLOCK, generator=generator, device="cpu") < RANDOM_SHARE
        place = keep[row : row + BLOCK, column : column + BLOCK]
        place.copy_(drawn[: place.shape[0], : place.shape[1]])
    return keep.to(device)


def _longformer_mod(length: int, device: torch.device) -> MaskMod:
    del device
    middle = length // 2

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = ((q - k) <= BLOCK) & ((k - q) <= BLOCK)
        rows = (q < BLOCK) | ((q >= middle) & (q < middle + BLOCK))
        columns = (k < BLOCK) | ((k >= middle) & (k < middle + BLOCK))
        return near | rows | columns

    return mod


def _bigbird_mod(length: int, device: torch.device) -> MaskMod:
    scores = random_scores(length, device)
    return lambda b, h, q, k: ((q - k).abs() <= BLOCK) | (q < BLOCK) | (k < BLOCK) | scores[q, k]


def _bigbird(length: int, device: torch.device) -> Mask:
    return masks.longformer(BLOCK, BLOCK) | masks.from_dense(random_scores(length, device))


def _sliding(name: str, window: int) -> WrittenMask:
    return WrittenMask(
        name,
        lambda s: masks.sliding_window(window),
        dense_like=False,
        window=(window, 0),
        mod=lambda s, d: lambda b, h, q, k: (q >= k) & (q - k <= window),
    )


def paper_masks(device: torch.device) -> dict[str, WrittenMask]:
    """Masks of figures 9 to 12 by name; tables they read lie on `device`."""
    listed = (
        WrittenMask(
            "causal",
            lambda s: masks.causal(),
            dense_like=True,
            causal=True,
            window=(None, 0),
            mod=lambda s, d: lambda b, h, q, k: q >= k,
        ),
        _sliding("sliding 32", BLOCK),
        _sliding("sliding 128", 128),
        WrittenMask(
            "dilated",
            lambda s: masks.dilated_window(BLOCK, dilation=2),
            dense_like=False,
            mod=lambda s, d: lambda b, h, q, k: (q >= k) & (q - k <= BLOCK) & ((q - k) % 2 == 0),
        ),
        WrittenMask(
            "longformer",
            functools.cache(lambda s: masks.longformer(BLOCK, global_positions(s))),
            dense_like=False,
            mod=_longformer_mod,
        ),
        WrittenMask("bigbird", functools.cache(lambda s: _bigbird(s, device)), dense_like=False, mod=_bigbird_mod),
    )
    return {mask.name: mask for mask in listed}


def z_order(height: int, width: int) -> Tensor:
    """Tokens of a row-major grid in Z order: int64 `[height * width]`, the token at each place."""
    token = torch.arange(height * width, device="cpu")
    y, x = token // width, token % width
    code = torch.zeros_like(token)
    for bit in range(max(height, width).bit_length()):
        code |= ((x >> bit) & 1) << (2 * bit) | ((y >> bit) & 1) << (2 * bit + 1)
    return code.argsort()


def neighborhoods(height: int, width: int, device: torch.device) -> tuple[WrittenMask, WrittenMask]:
    """13 x 13 neighbourhoods of a grid: tokens in row-major order, and queries and keys in Z order."""
    order = z_order(height, width).to(device)
    plain = masks.neighborhood_2d(height, width, KERNEL)
    return (
        _neighborhood("rows", height, width, lambda s: plain, torch.arange(height * width, device=device)),
        _neighborhood("Z order", height, width, lambda s: masks.reordered(plain, order, order), order),
    )


def _neighborhood(order: str, height: int, width: int, mask: Callable[[int], Mask], token: Tensor) -> WrittenMask:
    y, x = token // width, token % width
    reach = KERNEL // 2

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((y[q] - y[k]).abs() <= reach) & ((x[q] - x[k]).abs() <= reach)

    return WrittenMask(
        f"neighborhood {height}x{width}, {order}", functools.cache(mask), dense_like=False, mod=lambda s, d: mod
    )
