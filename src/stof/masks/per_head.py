"""One mask for each query head, and the masks of some heads, or batch entries, of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError
from stof.masks.base import numbered
from stof.masks.bounds import TileBounds
from stof.masks.compose import Composite, Mask, Wrapped
from stof.masks.index import Index


@dataclass(frozen=True, eq=False, repr=False)
class PerHead(Composite):
    """One mask per query head: head `h` uses `masks[h]`."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        bound = [repr(mask) for mask in self.masks if mask.heads != 1]
        if bound:
            raise MaskError(f"per_head() takes masks that do not depend on the head, got {bound}")
        super().__post_init__()
        object.__setattr__(self, "heads", len(self.masks))

    @property
    def depends_on_heads(self) -> bool:
        return True

    def tile_bounds(self, index: Index) -> TileBounds:
        return self.masks[int(index.h)].tile_bounds(index)

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        Mask.dims(self, batch, heads, device)
        return max(mask.dims(batch, 1, device)[0] for mask in self.masks), len(self.masks)

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        if self.depends_on_sizes:  # a function may look at the head
            return Mask.pattern_ids(self, mask_batch, mask_heads)
        ids = [mask.pattern_ids(mask_batch, 1).expand(self.batch, 1).flatten().tolist() for mask in self.masks]
        pairs = [(mask, column[b]) for b in range(self.batch) for mask, column in zip(self.masks, ids, strict=True)]
        return numbered(pairs).view(self.batch, len(self.masks))

    def evaluate(self, index: Index) -> Tensor:
        # Layouts are built one head at a time: only masks of the heads that are asked about are evaluated.
        places: dict[Mask, list[int]] = {}
        for place, h in enumerate(index.h.flatten().tolist()):
            places.setdefault(self.masks[h], []).append(place)
        rows: dict[int, Tensor] = {}
        for mask, chosen in places.items():
            kept = mask.evaluate(replace(index, h=index.h[:, chosen]))
            rows |= zip(chosen, kept.expand(-1, len(chosen), -1, -1).split(1, dim=1), strict=True)
        shape = np.broadcast_shapes(*(row.shape for row in rows.values()))  # torch.broadcast_shapes imports sympy
        return torch.cat([rows[place].expand(shape) for place in range(len(rows))], dim=1)

    def __repr__(self) -> str:
        return f"per_head([{', '.join(mask.key for mask in self.masks)}])"


@dataclass(frozen=True, eq=False, repr=False)
class EntryRange(Wrapped):
    """The inner mask for some of its batch entries or query heads; see `for_batch` and `for_heads`.

    Attributes:
        dim: 0 for batch entries, 1 for heads.
        first, count, total: which, and of how many.
    """

    dim: int
    first: int
    count: int
    total: int

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = (self.mask.batch, self.mask.heads)[self.dim]
        if bound not in (1, self.total):
            what = ("batch size", "number of heads")[self.dim]
            raise ShapeError(f"the mask is bound to a {what} of {bound}, the inputs have {self.total}")
        if bound != 1:
            object.__setattr__(self, ("batch", "heads")[self.dim], self.count)

    def _moved(self, index: Index) -> Index:
        return replace(index, h=index.h + self.first) if self.dim else replace(index, b=index.b + self.first)

    def _resized(self, batch: int, heads: int, size: int) -> tuple[int, int]:
        """The sizes of a mask, with `size` in this dimension unless all of its entries are alike."""
        if self.dim:
            return batch, size if heads != 1 else 1
        return size if batch != 1 else 1, heads

    def _narrowed(self, x: Tensor) -> Tensor:
        return x if x.shape[self.dim] == 1 else x.narrow(self.dim, self.first, self.count)

    def tile_bounds(self, index: Index) -> TileBounds:
        return self.mask.tile_bounds(self._moved(index))

    def evaluate(self, index: Index) -> Tensor:
        return self.mask.evaluate(self._moved(index))

    def as_tensor(self, q_len: int, kv_len: int) -> Tensor | None:
        keep = self.mask.as_tensor(q_len, kv_len)
        return keep if keep is None else self._narrowed(keep)

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        size = (batch, heads)[self.dim]
        if size != self.count:
            what = ("batch entries", "heads")[self.dim]
            raise ShapeError(f"the mask is that of {self.count} of {self.total} {what}, the inputs have {size}")
        sizes = (batch, self.total) if self.dim else (self.total, heads)
        return self._resized(*self.mask.dims(*sizes, device), self.count)

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        return self._narrowed(self.mask.pattern_ids(*self._resized(mask_batch, mask_heads, self.total)))

    def __repr__(self) -> str:
        name = ("for_batch", "for_heads")[self.dim]
        return f"{name}({self.mask.key}, first={self.first}, count={self.count}, total={self.total})"


def for_batch(mask: Mask, first: int, count: int, total: int) -> Mask:
    """The mask of `count` batch entries from `first` on, out of `total`: those that one rank computes.

    Raises:
        ShapeError: the mask is bound to another batch size.
    """
    return EntryRange(mask, 0, first, count, total) if count < total and mask.depends_on_batch else mask


def for_heads(mask: Mask, first: int, count: int, total: int) -> Mask:
    """The mask of `count` query heads from `first` on, out of `total`: the heads that one rank computes.

    Raises:
        ShapeError: the mask is bound to another number of heads.
    """
    return EntryRange(mask, 1, first, count, total) if count < total and mask.depends_on_heads else mask
