"""Masks as values, and what is made of several: `&`, `|`, `~`, a query offset, one mask for each head."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError, shown
from stof.masks.base import BaseMask, numbered
from stof.masks.bounds import TileBounds
from stof.masks.index import Index

if TYPE_CHECKING:
    from typing_extensions import Self

# Levels of masks made of others. Python calls at most 1000 functions within each other, and copying a mask takes seven
# for each level.
DEEPEST = 100


def _agreed(sizes: Sequence[int], what: str) -> int:
    """The one size above 1 that all parts of an expression agree on, else 1."""
    bound = {size for size in sizes if size != 1}
    if len(bound) > 1:
        raise ShapeError(f"masks bound to different {what} cannot be combined: {sorted(bound)}")
    return bound.pop() if bound else 1


class Mask(BaseMask):
    """What may attend to what: `keep[b, h, i, j]` is true when query `i` sees key `j`.

    Masks are immutable values. They compose with `&` (both keep), `|` (either keeps) and `~` (inverted);
    two masks built the same way are equal and hash alike, which is what plans are cached by. A mask knows
    no lengths: the same value serves every `q_len` and `kv_len` that its own data allow.
    """

    @property
    def allows_negative_queries(self) -> bool:
        """Whether the mask says what a query before position 0 sees; a table would be read from its end."""
        return False

    def with_query_offset(self, offset: int) -> Mask:
        """The mask seen by queries that start at position `offset` (a KV cache holding `offset` keys).

        Query `i` of the call is treated as position `i + offset`; keys keep their positions. So
        `causal().with_query_offset(kv_len - q_len)` is causal attention aligned at the lower right corner, also with
        more queries than keys: the first queries then see no key, their output is 0 and their LSE -inf.

        Positions below 0 belong to no document and are no global tokens; all else of named patterns is as their
        formulas say.

        Raises:
            MaskError: an offset below 0 of a mask that is no named pattern, or of `neighborhood_2d`.
        """
        return self._with_offset(_offset(offset))

    def _with_offset(self, offset: int) -> Mask:
        if offset < 0 and not self.allows_negative_queries:
            raise MaskError(
                f"{shown(self)} does not say what queries before position 0 see, so its query offset is 0 or more, got "
                f"{offset}; give the offset to the named patterns in a mask alone, and subtract it in a function"
            )
        return self if offset == 0 else QueryOffset(self, offset)

    def __and__(self, other: Mask) -> Mask:
        return And.of(self, _combined(other))

    def __or__(self, other: Mask) -> Mask:
        return Or.of(self, _combined(other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskError("a mask has no truth value; compose masks with & | ~ instead of and / or / not")


def _offset(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) < value < 2**31:
        raise MaskError(f"a query offset is an int between -2**31 + 1 and 2**31 - 1, got {shown(value)}")
    return value


def _combined(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise TypeError(
        f"a mask is combined with masks, got {type(other).__name__}; stof.masks.from_dense makes one of a bool tensor, "
        "from_function of a function, parse of text"
    )


class Composite(Mask):
    """A mask made of others, the base of all below.

    What the parts decide together is computed once, because every call asks for it. (`functools.cached_property` takes
    a lock in Python 3.11, which Dynamo cannot trace.)
    """

    masks: tuple[Mask, ...]
    batch: int = 1
    heads: int = 1
    depends_on_sizes: bool = False
    depth: int = 1

    # Asked anew each time: a mask function may only be told once it was called at positions that it takes.
    @property
    def depends_on_batch(self) -> bool:
        return any(mask.depends_on_batch for mask in self.masks)

    @property
    def depends_on_heads(self) -> bool:
        return any(mask.depends_on_heads for mask in self.masks)

    @property
    def varies(self) -> bool:
        return any(mask.varies for mask in self.masks)

    @property
    def allows_negative_queries(self) -> bool:
        return all(mask.allows_negative_queries for mask in self.masks)

    def __post_init__(self) -> None:
        depth = 1 + max(mask.depth if isinstance(mask, Composite) else 0 for mask in self.masks)
        if depth > DEEPEST:
            raise MaskError(
                f"a mask is combined in at most {DEEPEST} levels, this one in {depth}; a chain of one operator "
                "(a | b | c) is one level, and masks.from_dense(mask.to_dense(q_len, kv_len)) makes one mask of all"
            )
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "batch", _agreed([mask.batch for mask in self.masks], "batch sizes"))
        object.__setattr__(self, "heads", _agreed([mask.heads for mask in self.masks], "numbers of heads"))
        object.__setattr__(self, "depends_on_sizes", any(mask.depends_on_sizes for mask in self.masks))
        super().__post_init__()

    def check(self, q_len: int, kv_len: int) -> None:
        for mask in self.masks:
            mask.check(q_len, kv_len)

    def _reads_others(self) -> bool:
        return any(mask.may_change for mask in self.masks)

    def frozen(self) -> Self:
        return self._with_parts([mask.frozen() for mask in self.masks]) if self.may_change else self

    def _with_parts(self, masks: Sequence[Mask]) -> Self:
        """The same mask of other parts."""
        return replace(self, masks=tuple(masks))  # type: ignore[type-var]  # subclasses are dataclasses

    def copies(self) -> list[Tensor]:
        return [tensor for mask in self.masks for tensor in mask.copies()]

    def changed(self) -> bool:
        return any(mask.changed() for mask in self.masks)

    @property
    def grows(self) -> bool:
        return all(mask.grows for mask in self.masks)

    @property
    def row_orders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(order for mask in self.masks for order in mask.row_orders))

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        own = super().dims(batch, heads, device)
        if not self.depends_on_sizes:
            return own
        parts = [mask.dims(batch, heads, device) for mask in self.masks]
        return max(part[0] for part in parts), max(part[1] for part in parts)

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        parts = torch.broadcast_tensors(*(mask.pattern_ids(mask_batch, mask_heads) for mask in self.masks))
        return numbered(list(zip(*(part.flatten().tolist() for part in parts), strict=True))).view(parts[0].shape)


@dataclass(frozen=True, eq=False, repr=False)
class Associative(Composite):
    """An operator that does not care how its operands are grouped."""

    masks: tuple[Mask, ...]

    @classmethod
    def of(cls, *masks: Mask) -> Self:
        """Combine masks; the operands of those that are of this class themselves join the others."""
        return cls(tuple(part for mask in masks for part in (mask.masks if isinstance(mask, cls) else (mask,))))


@dataclass(frozen=True, eq=False, repr=False)
class And(Associative):
    """Kept where every part keeps."""

    @property
    def has_monotonic_ranges(self) -> bool:
        return all(mask.has_monotonic_ranges for mask in self.masks)

    def tile_bounds(self, index: Index) -> TileBounds:
        return functools.reduce(operator.and_, (mask.tile_bounds(index) for mask in self.masks))

    def evaluate(self, index: Index) -> Tensor:
        out = self.masks[0].evaluate(index)
        for mask in self.masks[1:]:
            out = out & mask.evaluate(index)
        return out

    def __repr__(self) -> str:
        return " & ".join(f"({m.key})" if isinstance(m, Or) else m.key for m in self.masks)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Associative):
    """Kept where any part keeps."""

    def tile_bounds(self, index: Index) -> TileBounds:
        return functools.reduce(operator.or_, (mask.tile_bounds(index) for mask in self.masks))

    def evaluate(self, index: Index) -> Tensor:
        out = self.masks[0].evaluate(index)
        for mask in self.masks[1:]:
            out = out | mask.evaluate(index)
        return out

    def __repr__(self) -> str:
        return " | ".join(m.key for m in self.masks)


@dataclass(frozen=True, eq=False, repr=False)
class Wrapped(Composite):
    """A mask that changes one other mask."""

    mask: Mask

    @property
    def masks(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return (self.mask,)

    def _with_parts(self, masks: Sequence[Mask]) -> Self:
        return replace(self, mask=masks[0])

    def _operand(self) -> str:
        """The inner mask's repr, in parentheses where a postfix or prefix operator needs them."""
        return f"({self.mask.key})" if isinstance(self.mask, And | Or) else self.mask.key


@dataclass(frozen=True, eq=False, repr=False)
class Not(Wrapped):
    """Kept where the inner mask drops."""

    def tile_bounds(self, index: Index) -> TileBounds:
        return ~self.mask.tile_bounds(index)

    def __invert__(self) -> Mask:
        return self.mask

    def evaluate(self, index: Index) -> Tensor:
        return ~self.mask.evaluate(index)

    def __repr__(self) -> str:
        return f"~{self._operand()}"


@dataclass(frozen=True, eq=False, repr=False)
class QueryOffset(Wrapped):
    """The inner mask with query positions moved by `offset` (tokens already in the KV cache)."""

    offset: int

    @property
    def varies(self) -> bool:
        return True  # in each step of decoding

    def _with_offset(self, offset: int) -> Mask:
        return self if offset == 0 else self.mask.with_query_offset(self.offset + offset)

    @property
    def has_monotonic_ranges(self) -> bool:
        return self.mask.has_monotonic_ranges

    def tile_bounds(self, index: Index) -> TileBounds:
        return self.mask.tile_bounds(index.shifted(self.offset))

    def check(self, q_len: int, kv_len: int) -> None:
        self.mask.check(q_len + self.offset, kv_len)

    def evaluate(self, index: Index) -> Tensor:
        return self.mask.evaluate(index.shifted(self.offset))

    def __repr__(self) -> str:
        inner = f"({self.mask.key})" if isinstance(self.mask, And | Or | Not) else self.mask.key
        return f"{inner}.with_query_offset({self.offset})"


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
        own = [mask.pattern_ids(mask_batch, 1).expand(self.batch, 1).flatten().tolist() for mask in self.masks]
        pairs = [(mask, column[b]) for b in range(self.batch) for mask, column in zip(self.masks, own, strict=True)]
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
        shape = torch.broadcast_shapes(*(row.shape for row in rows.values()))
        return torch.cat([rows[place].expand(shape) for place in range(len(rows))], dim=1)

    def __repr__(self) -> str:
        return f"per_head([{', '.join(mask.key for mask in self.masks)}])"
