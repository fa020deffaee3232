"""Masks as values, and what is made of others: `&`, `|`, `~`, a mask at other positions, a transposed mask."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from stof.errors import MaskError, ShapeError, shown
from stof.masks.base import BaseMask, numbered
from stof.masks.bounds import TileBounds
from stof.masks.index import Index, swapped

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

    # Whether distances are those within documents (`AlignedDocuments`), not between positions of the call.
    positions_of_documents: ClassVar[bool] = False

    @property
    def allows_negative_queries(self) -> bool:
        """Whether the mask says what a query before position 0 sees; a table would be read from its end."""
        return False

    @property
    def allows_negative_keys(self) -> bool:
        """Whether the mask says which queries see a key before position 0."""
        return False

    def with_query_offset(self, offset: int) -> Mask:
        """The mask seen by queries that start at position `offset` (a KV cache holding `offset` keys).

        Query `i` of the call is treated as position `i + offset`; keys keep their positions: `placed(mask, offset)`. So
        `causal().with_query_offset(kv_len - q_len)` is causal attention aligned at the lower right corner, also with
        more queries than keys: the first queries then see no key, their output is 0 and their LSE -inf.

        Raises:
            MaskError: an offset below 0 of a mask that is no named mask, or of `neighborhood_2d`.
        """
        return placed(self, offset)

    def as_tensor(self, q_len: int, kv_len: int) -> Tensor | None:
        """Bool `[B | 1, H | 1, q_len, kv_len]`, a view of the tensor that the mask is; None for masks made otherwise.

        Args:
            q_len, kv_len: lengths that `check` accepts.
        """
        del q_len, kv_len
        return None

    def __and__(self, other: Mask) -> Mask:
        if _is_traced(other):
            return other.__rand__(self)  # type: ignore[attr-defined]
        return And.of(self, _combined(other))

    def __or__(self, other: Mask) -> Mask:
        if _is_traced(other):
            return other.__ror__(self)  # type: ignore[attr-defined]
        return Or.of(self, _combined(other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskError("a mask has no truth value; compose masks with & | ~ instead of and / or / not")


def _is_traced(other: object) -> bool:
    """Whether this is an `Intersection` of compiled code. Dynamo of PyTorch 2.11 knows no `NotImplemented` here."""
    return isinstance(other, tuple) and hasattr(other, "__rand__")


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
    deepest: ClassVar[int] = DEEPEST

    # Not stored: whether a mask function uses an index is known only after it was traced at positions that it accepts.
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
    def positions_of_documents(self) -> bool:  # type: ignore[override]
        return any(mask.positions_of_documents for mask in self.masks)

    @property
    def allows_negative_queries(self) -> bool:
        return all(mask.allows_negative_queries for mask in self.masks)

    @property
    def allows_negative_keys(self) -> bool:
        return all(mask.allows_negative_keys for mask in self.masks)

    def __post_init__(self) -> None:
        depth = 1 + max(mask.depth if isinstance(mask, Composite) else 0 for mask in self.masks)
        if depth > self.deepest:
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

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(order for mask in self.masks for order in mask.row_orders(q_len, kv_len)))

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        own = super().dims(batch, heads, device)
        if not self.depends_on_sizes:
            return own
        parts = [mask.dims(batch, heads, device) for mask in self.masks]
        return max(part[0] for part in parts), max(part[1] for part in parts)

    def pattern_ids(self, mask_batch: int, mask_heads: int) -> Tensor:
        if mask_batch == mask_heads == 1:
            return super().pattern_ids(1, 1)
        several = [mask for mask in self.masks if (mask.batch, mask.heads) != (1, 1) or mask.depends_on_sizes]
        ids = [mask.pattern_ids(mask_batch, mask_heads) for mask in several]
        if len(ids) < 2:  # the other masks have one pattern
            return ids[0] if ids else super().pattern_ids(mask_batch, mask_heads)
        parts = torch.broadcast_tensors(*ids)
        return numbered(list(zip(*(part.flatten().tolist() for part in parts), strict=True))).view(parts[0].shape)


@dataclass(frozen=True, eq=False, repr=False)
class Associative(Composite):
    """An operator that does not care how its operands are grouped."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if self.positions_of_documents:
            raise MaskError(
                "documents with kv_cu_seqlens take no other mask by & or |, because its positions would be those "
                "of the packed row; give documents(..., within=mask), whose positions are those in each document"
            )
        super().__post_init__()

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
class Placed(Wrapped):
    """The inner mask for queries and keys that begin at these positions; see `placed`.

    Attributes:
        q_len, kv_len: lengths of the inner mask; None where its last query or key is the call's.
    """

    q_offset: int
    kv_offset: int
    q_len: int | None = None
    kv_len: int | None = None

    @property
    def varies(self) -> bool:
        return True  # in each step of decoding

    @property
    def has_monotonic_ranges(self) -> bool:
        return self.mask.has_monotonic_ranges

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        return self.mask.row_orders(*self._lengths(q_len, kv_len))

    def _lengths(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """Lengths of the inner mask, for a call of these lengths."""
        ends = q_len + self.q_offset, kv_len + self.kv_offset
        return ends[0] if self.q_len is None else self.q_len, ends[1] if self.kv_len is None else self.kv_len

    def _moved(self, index: Index) -> Index:
        q_len, kv_len = self._lengths(index.q_len, index.kv_len)
        return replace(index.shifted(self.q_offset, self.kv_offset), q_len=q_len, kv_len=kv_len)

    def tile_bounds(self, index: Index) -> TileBounds:
        return self.mask.tile_bounds(self._moved(index))

    def check(self, q_len: int, kv_len: int) -> None:
        lengths = self._lengths(q_len, kv_len)
        ends = q_len + self.q_offset, kv_len + self.kv_offset
        for name, end, length in zip(("queries", "keys"), ends, lengths, strict=True):
            if end > length:
                raise ShapeError(f"the placed mask has {length} {name}, the call ends at position {end}")
        self.mask.check(*lengths)

    def as_tensor(self, q_len: int, kv_len: int) -> Tensor | None:
        keep = self.mask.as_tensor(*self._lengths(q_len, kv_len))
        if keep is None:
            return None
        return keep[..., self.q_offset : self.q_offset + q_len, self.kv_offset : self.kv_offset + kv_len]

    def evaluate(self, index: Index) -> Tensor:
        return self.mask.evaluate(self._moved(index))

    def __repr__(self) -> str:
        names = ["q_offset", "kv_offset"] if self.kv_offset else ["q_offset"]
        names += [name for name in ("q_len", "kv_len") if getattr(self, name) is not None]
        if names != ["q_offset"]:
            options = ", ".join(f"{name}={getattr(self, name)}" for name in names)
            return f"placed({self.mask.key}, {options})"
        inner = f"({self.mask.key})" if isinstance(self.mask, And | Or | Not) else self.mask.key
        return f"{inner}.with_query_offset({self.q_offset})"


@dataclass(frozen=True, eq=False, repr=False)
class Transposed(Wrapped):
    """The inner mask with queries and keys swapped; see `transposed`."""

    deepest = DEEPEST + 2  # every mask has a transpose, and so have ranges of it

    @property
    def allows_negative_queries(self) -> bool:
        return self.mask.allows_negative_keys

    @property
    def allows_negative_keys(self) -> bool:
        return self.mask.allows_negative_queries

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        # Keys that lie as queries do, in a stride or a grid, suit the same orders.
        return self.mask.row_orders(kv_len, q_len)

    @property
    def has_monotonic_ranges(self) -> bool:
        # Where both ends of the ranges ascend with the query, a key is seen by a range of queries, whose ends ascend.
        return self.mask.has_monotonic_ranges

    def tile_bounds(self, index: Index) -> TileBounds:
        bounds = self.mask.tile_bounds(index.transposed())
        return TileBounds(swapped(bounds.empty), swapped(bounds.full))

    def check(self, q_len: int, kv_len: int) -> None:
        self.mask.check(kv_len, q_len)

    def as_tensor(self, q_len: int, kv_len: int) -> Tensor | None:
        keep = self.mask.as_tensor(kv_len, q_len)
        return None if keep is None else keep.mT

    def evaluate(self, index: Index) -> Tensor:
        return swapped(self.mask.evaluate(index.transposed()))

    def __repr__(self) -> str:
        return f"transposed({self.mask.key})"


def placed(
    mask: Mask, q_offset: int = 0, kv_offset: int = 0, *, q_len: int | None = None, kv_len: int | None = None
) -> Mask:
    """A part of a mask: query `i` and key `j` are query `i + q_offset` and key `j + kv_offset` of `mask`.

    A KV cache has a `q_offset`; a cache that dropped its first keys, or a shard of a sequence, has both.
    `mask.with_query_offset(n)` is `placed(mask, n)`.

    By default the part ends where the call ends: `mask` is asked as for `q_len + q_offset` queries and
    `kv_len + kv_offset` keys of the call. Masks that know their lengths (of a tensor, `documents`, `neighborhood_2d`)
    refuse others, and `random_blocks` draws from that many keys. Of a part that ends earlier, say how long `mask` is by
    `q_len` and `kv_len`.

    Offsets below 0 reach before the first query or key. Named masks say what is kept there: positions below 0 belong
    to no document, are no global or sink tokens and in no prefix, and `padding` drops them as keys; all else is as
    their formulas say. Other masks raise.

    Args:
        mask: the mask to take a part of.
        q_offset, kv_offset: position of the call's first query and key.
        q_len, kv_len: queries and keys of `mask`; default the position where the call ends.

    Raises:
        MaskError: an offset or length that is no int, or an offset below 0 of a mask that has no scores there: of a
            tensor, function or `BlockMask`, made at run time, reordered, or of `neighborhood_2d`; keys of
            `random_blocks`.
        ShapeError: when used, a call that ends after `mask`.
    """
    _combined(mask)
    for name, offset in (("query", q_offset), ("key", kv_offset)):
        if isinstance(offset, bool) or not isinstance(offset, int) or not -(2**31) < offset < 2**31:
            raise MaskError(f"a {name} offset is an int between -2**31 + 1 and 2**31 - 1, got {shown(offset)}")
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length is not None and (type(length) is not int or not 0 < length < 2**31):
            raise MaskError(f"{name} is an int between 1 and 2**31 - 1 or None, got {shown(length)}")
    if q_offset == kv_offset == 0 and q_len is None and kv_len is None:
        return mask
    if isinstance(mask, Placed):
        lengths = [
            inner if inner is not None or length is None else length + offset
            for inner, length, offset in ((mask.q_len, q_len, mask.q_offset), (mask.kv_len, kv_len, mask.kv_offset))
        ]
        offsets = mask.q_offset + q_offset, mask.kv_offset + kv_offset
        return placed(mask.mask, *offsets, q_len=lengths[0], kv_len=lengths[1])
    if isinstance(mask, Transposed):
        return transposed(placed(mask.mask, kv_offset, q_offset, q_len=kv_len, kv_len=q_len))
    for what, offset, is_allowed in (
        ("queries", q_offset, mask.allows_negative_queries),
        ("keys", kv_offset, mask.allows_negative_keys),
    ):
        if offset < 0 and not is_allowed:
            raise MaskError(
                f"{shown(mask)} has no {what} before position 0, so the offset of its {what} is 0 or more, got "
                f"{offset}; give the offset to the named masks in a mask alone, and subtract it in a function"
            )
    return Placed(mask, q_offset, kv_offset, q_len, kv_len)


def transposed(mask: Mask) -> Mask:
    """The mask with queries and keys swapped: query `i` sees key `j` where query `j` of `mask` sees key `i`.

    Batch entries and heads stay. It is a mask for `kv_len` queries and `q_len` keys: what gradients of keys and values
    are computed by. `transposed(transposed(mask))` is `mask`.
    """
    return mask.mask if isinstance(mask, Transposed) else Transposed(_combined(mask))
