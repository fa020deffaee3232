"""Dropout of attention weights: which stay follows from a seed and the position alone, whatever the tiling.

A weight after the softmax is multiplied by `keep(b, h, i, j) / (1 - p)`. `keep` compares one word of Philox-4x32-10
with an integer, so that all implementations keep the same weights, bit for bit: the key is the seed, the counter
`(i, j, b * H + h, offset)`. The Triton kernels compute the same in `stof.kernels.triton.dropout_mask`.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Weights whose words are computed at once: their int64 temporaries stay in the L2 cache of a CPU.
_AT_ONCE = 2**16


class Dropout(NamedTuple):
    """Dropout of one call.

    Attributes:
        p: the probability that a weight becomes 0, above 0 and below 1.
        seed: int64 `[2]` on the device of the call: the key of the generator, and an offset of which the lower 32 bits
            are read.
    """

    p: float
    seed: Tensor

    @property
    def threshold(self) -> int:
        """A weight is dropped if its random word is less."""
        return threshold_of(self.p)

    @property
    def scale(self) -> float:
        """The factor of weights that stay."""
        return scale_of(self.p)


def threshold_of(p: float) -> int:
    """`p` as a share of the 32-bit integers."""
    return int(p * 2**32)


def scale_of(p: float) -> float:
    """`1 / (1 - p)`, 1 without dropout."""
    return 1.0 / (1.0 - p)


def draw_seed(device: torch.device) -> Tensor:
    """A seed for `Dropout` from PyTorch's default generator of a device, which `torch.manual_seed` seeds.

    It is a tensor: compiled code, activation checkpointing and CUDA graphs handle its draw as they do any other.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """The first word of Philox-4x32-10, as int64 from 0 to 2**32 - 1.

    Args:
        key: int64 `[]`, both words of the key.
        c0, c1, c2, c3: words of the counter, int64 from 0 to 2**32 - 1, broadcast. Dimensions of size 1 in some of them
            save the first rounds for all elements.
    """
    low, high = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        # Products wrap around in int64, whose bits are those of an unsigned product. The upper halves of c1 and c3
        # hold anything: they are cleared with those of what they are combined with.
        products = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = _mixed(products[1], c1, low)
        c2 = _mixed(products[0], c3, high)
        c1, c3 = products[1], products[0]
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return c0


def _mixed(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """The upper word of a product, combined with another word and one of the key."""
    return ((product >> 32) ^ word).bitwise_xor_(key).bitwise_and_(_WORD)


def kept_weights(dropout: Dropout, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Which weights stay.

    Args:
        dropout: of the call.
        heads: int64, `b * H + h` of batch entry b and query head h, see `head_numbers`.
        rows, columns: int64, query and key.

    Returns:
        bool, of the shape that the three broadcast to.
    """
    key, offset = dropout.seed.unbind()
    offset, threshold = offset & _WORD, dropout.threshold
    shape = torch.broadcast_shapes(heads.shape, rows.shape, columns.shape)
    by_rows = rows.ndim > 1 and all(x.ndim < 2 or x.shape[-2] == 1 for x in (heads, columns))
    if rows.device.type != "cpu" or not by_rows or math.prod(shape) <= _AT_ONCE:
        return philox(key, rows, columns, heads, offset) >= threshold
    kept = torch.empty(shape, dtype=torch.bool, device=rows.device)
    some = max(1, _AT_ONCE * shape[-2] // math.prod(shape))
    for part, of_rows in zip(kept.split(some, -2), rows.split(some, -2), strict=True):
        torch.ge(philox(key, of_rows, columns, heads, offset), threshold, out=part)
    return kept


def head_numbers(batch: int, heads: int, device: torch.device) -> Tensor:
    """`b * H + h`, int64 `[B, H]`."""
    return torch.arange(batch * heads, device=device).view(batch, heads)


def dense_kept_weights(dropout: Dropout, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Which weights of a call stay, bool `[B, H, Sq, Skv]`."""
    device = dropout.seed.device
    rows, columns = torch.arange(q_len, device=device), torch.arange(kv_len, device=device)
    numbers = head_numbers(batch, heads, device)
    return kept_weights(dropout, numbers[:, :, None, None], rows[:, None], columns)
