"""What layouts are built from: the mask of one batch entry and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stof.masks import Index, Mask
from stof.masks.bounds import Interval, TileBounds


@dataclass(frozen=True, eq=False)
class HeadMask:
    """The mask of one batch entry and head between given lengths.

    Attributes:
        mask: of all batch entries and heads.
        q_len, kv_len: lengths in tokens.
        b, h: batch entry and head.
        order: int64 `[q_len]`, which original row stands at each position, on the device; None where rows keep theirs.
        device: where to evaluate it.
    """

    mask: Mask
    q_len: int
    kv_len: int
    b: int
    h: int
    order: Tensor | None
    device: torch.device

    def row_blocks(self, block_m: int) -> int:
        return -(-self.q_len // block_m)

    @property
    def is_device_independent(self) -> bool:
        """Whether the mask holds no tensors or functions, so that any device can compute its bounds."""
        return "<" not in self.mask.key

    def index(self, q: Tensor | Interval, kv: Tensor | Interval) -> Index:
        """Coordinates of queries `[T, 1, Q, 1]` and keys `[T, 1, 1, K]`, T being 1 or a number of rectangles."""
        b, h = (torch.tensor(number, device=q.device).view(1, 1, 1, 1) for number in (self.b, self.h))
        return Index(b, h, q, kv, self.q_len, self.kv_len)  # type: ignore[arg-type]

    def tile_bounds(self, q: Interval, kv: Interval) -> TileBounds:
        """Bounds of the rectangles that these ranges span, on their device."""
        bounds = self.mask.tile_bounds(self.index(q, kv))
        return TileBounds(bounds.empty.to(q.device), bounds.full.to(q.device))

    def evaluate(self, q: Tensor, kv: Tensor) -> Tensor:
        """bool `[T, Q, K]`: scores of T rectangles of original rows `[T, Q]` and keys `[T, K]`.

        Positions that do not exist (below 0 or past the end) keep nothing.

        Raises:
            MaskFunctionError: the function raises, or it does not take several rectangles at once.
        """
        exists = [(x >= 0) & (x < length) for x, length in ((q, self.q_len), (kv, self.kv_len))]
        q, kv = q.clamp(0, self.q_len - 1), kv.clamp(0, self.kv_len - 1)
        keep = self.mask.evaluate(self.index(q[:, None, :, None], kv[:, None, None, :]))
        keep = keep.expand(len(q), 1, q.shape[1], kv.shape[1])[:, 0]
        return keep & exists[0][:, :, None] & exists[1][:, None, :]
