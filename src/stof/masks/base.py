"""Masks as values: the expression tree (`&`, `|`, `~`) and what every mask can do."""

from __future__ import annotations

import functools
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stof.errors import MaskError, ShapeError
from stof.masks.bounds import Kept
from stof.masks.index import Index

# Masks holding functions or tensors that are alive in this process, so that a compiled graph can name one by key.
_ALIVE: WeakValueDictionary[str, Mask] = WeakValueDictionary()


# Key ranges `[start, stop)`; None for anywhere.
Spans = list[tuple[int, int]] | None


def joined_spans(parts: list[Spans]) -> Spans:
    """All ranges of all parts; anywhere when one of them is."""
    out: list[tuple[int, int]] = []
    for part in parts:
        if part is None:
            return None
        out += part
    return out


class Mask(ABC):
    """What may attend to what: `keep[b, h, i, j]` is true when query `i` sees key `j`.

    Masks are immutable values. They compose with `&` (both keep), `|` (either keeps) and `~` (inverted);
    two masks built the same way are equal and hash alike, which is what plans are cached by. A mask knows
    no lengths: the same value serves every `q_len` and `kv_len` that its own data allow.

    Attributes:
        key: the repr, which identifies the value: it is what equality and hashing use.
    """

    key: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", repr(self))  # the dataclasses are frozen
        if "<" in self.key:  # text alone cannot rebuild it
            first = _ALIVE.setdefault(self.key, self)
            if first is not self:
                # Equal masks keep the first of them alive, so that its key is found while any of them lives.
                object.__setattr__(self, "_first", first)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # a copy holds other tensors and functions, so its key is another one

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Mask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    @abstractmethod
    def __repr__(self) -> str: ...

    @abstractmethod
    def evaluate(self, index: Index) -> Tensor:
        """Bool tensor broadcastable to `[B, H, Q, K]`, true where the score is kept.

        A leading dimension larger than 1 means that the mask depends on the batch (or head) index, or that `index`
        holds several rectangles.
        """

    def spans(self, first: int, last: int, kv_len: int) -> Spans:
        """Key ranges `[start, stop)` outside which queries `first` to `last` see nothing, in any sequence or head.

        None says nothing is known: anywhere. Ranges may overlap and stick out; building evaluates nothing outside them.
        """
        del first, last, kv_len
        return None

    def over(self, index: Index) -> Kept:
        """What is kept of whole rectangles: `index` holds `Range`s of queries and keys, and one sequence and head.

        By default the rule itself is run on the ranges; where it looks at single positions the answer is unknown.
        """
        try:
            return Kept.of(self.evaluate(index))
        except Exception:  # whatever a user's function raises on what is no tensor; evaluating it will say so again
            return Kept.unknown(index.device)

    def check(self, q_len: int, kv_len: int) -> None:
        """Raise `ShapeError` when this mask's own data do not fit the lengths."""
        del q_len, kv_len  # most masks hold no data that could disagree

    @property
    def batch(self) -> int:
        """Batch size this mask is bound to, 1 when it is the same for every sequence."""
        return 1

    @property
    def heads(self) -> int:
        """Number of query heads this mask is bound to, 1 when it is the same for every head."""
        return 1

    @property
    def versions(self) -> tuple[int, ...] | None:
        """In-place versions of the tensors held; None when changes cannot be seen, so plans are not cached."""
        return ()

    @property
    def binds_late(self) -> bool:
        """Whether `dims` must be asked with the sizes of a call (functions; named patterns know)."""
        return False

    @property
    def grows(self) -> bool:
        """Whether a score is kept or not regardless of how long the sequences are."""
        return True

    @property
    def row_orders(self) -> tuple[str, ...]:
        """Row permutations worth trying, as `stof.layout.orders.named_order` spells them."""
        return ()

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        """`(mask_batch, mask_heads)`, each 1 or the full size, for a call with `batch` and `heads`.

        Raises:
            ShapeError: the mask is bound to another batch size or number of heads.
        """
        del device
        for name, own, given in (("batch size", self.batch, batch), ("number of heads", self.heads, heads)):
            if own not in (1, given):
                raise ShapeError(
                    f"the mask is bound to a {name} of {own}, the inputs have {given}; "
                    f"give a mask for {given} (or one that does not depend on it)"
                )
        return self.batch, self.heads

    def numbers(self, mask_batch: int, mask_heads: int) -> Tensor:
        """Which batch entries and heads share a mask, as far as that is cheap to tell.

        Args:
            mask_batch, mask_heads: as `dims` gave them.

        Returns:
            int64 `[mask_batch | 1, mask_heads | 1]` on the CPU, equal where the mask is the same; different numbers
            promise nothing.
        """
        batch, heads = (mask_batch, mask_heads) if self.binds_late else (self.batch, self.heads)
        return torch.arange(batch * heads, device="cpu").view(batch, heads)

    def to_dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Exact dense form: bool `[mask_batch, mask_heads, q_len, kv_len]`; for tests and pictures.

        Memory grows with `q_len * kv_len`. `batch` and `heads` matter only to masks that depend on them.
        """
        kv_len = q_len if kv_len is None else kv_len
        check_lengths(q_len, kv_len)
        self.check(q_len, kv_len)
        batch = self.batch if batch is None else batch
        heads = self.heads if heads is None else heads
        check_sizes(batch, heads)
        mask_batch, mask_heads = self.dims(batch, heads, device)
        index = Index.make(
            torch.arange(q_len, device=device),
            torch.arange(kv_len, device=device),
            q_len=q_len,
            kv_len=kv_len,
            b=torch.arange(mask_batch, device=device),
            h=torch.arange(mask_heads, device=device),
        )
        return self.evaluate(index).expand(mask_batch, mask_heads, q_len, kv_len).contiguous()

    def with_query_offset(self, offset: int) -> Mask:
        """The mask seen by queries that start at position `offset` (a KV cache holding `offset` keys).

        Query `i` of the call is treated as position `i + offset`; keys keep their positions.
        """
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 2**31:
            raise MaskError(f"a query offset is an int between 0 and 2**31 - 1, got {offset!r}")
        return self if offset == 0 else QueryOffset(self, offset)

    def __and__(self, other: Mask) -> Mask:
        return And(_flatten(And, (self, other))) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(_flatten(Or, (self, other))) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return self.mask if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise MaskError("a mask has no truth value; compose masks with & | ~ instead of and / or / not")


def check_lengths(q_len: int, kv_len: int) -> None:
    """Raise `ShapeError` unless both lengths are positive and rows and columns fit int32 indices."""
    for name, value in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ShapeError(f"{name} is an int, got {type(value).__name__} {value!r}")
        if not 0 < value < 2**31:
            raise ShapeError(f"{name} is between 1 and 2**31 - 1, got {value}")


def check_sizes(batch: int, heads: int) -> None:
    """Raise `ShapeError` unless both counts are positive."""
    for name, value in (("batch", batch), ("heads", heads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError(f"{name} is an int >= 1, got {value!r}")


def numbered(values: Sequence[object]) -> Tensor:
    """int64 `[len(values)]` on the CPU: equal values get equal numbers, counted from 0."""
    seen: dict[object, int] = {}
    return torch.tensor([seen.setdefault(value, len(seen)) for value in values], dtype=torch.int64, device="cpu")


def _flatten(kind: type[And] | type[Or], masks: Sequence[Mask]) -> tuple[Mask, ...]:
    out: list[Mask] = []
    for mask in masks:
        out.extend(mask.masks if isinstance(mask, kind) else (mask,))
    return tuple(out)


def _agreed(sizes: Sequence[int], what: str) -> int:
    """The one size above 1 that all parts of an expression agree on, else 1."""
    bound = {size for size in sizes if size != 1}
    if len(bound) > 1:
        raise ShapeError(f"masks bound to different {what} cannot be combined: {sorted(bound)}")
    return bound.pop() if bound else 1


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Mask):
    """Several masks combined; the base of `And`, `Or` and `Stack`."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        _agreed([mask.batch for mask in self.masks], "batch sizes")
        _agreed([mask.heads for mask in self.masks], "numbers of heads")
        super().__post_init__()

    def check(self, q_len: int, kv_len: int) -> None:
        for mask in self.masks:
            mask.check(q_len, kv_len)

    @property
    def batch(self) -> int:
        return _agreed([mask.batch for mask in self.masks], "batch sizes")

    @property
    def heads(self) -> int:
        return _agreed([mask.heads for mask in self.masks], "numbers of heads")

    @property
    def versions(self) -> tuple[int, ...] | None:
        parts = [mask.versions for mask in self.masks]
        return None if None in parts else tuple(itertools.chain.from_iterable(p for p in parts if p))

    @property
    def binds_late(self) -> bool:
        return any(mask.binds_late for mask in self.masks)

    @property
    def grows(self) -> bool:
        return all(mask.grows for mask in self.masks)

    @property
    def row_orders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(order for mask in self.masks for order in mask.row_orders))

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        super().dims(batch, heads, device)
        parts = [mask.dims(batch, heads, device) for mask in self.masks]
        return max(part[0] for part in parts), max(part[1] for part in parts)

    def numbers(self, mask_batch: int, mask_heads: int) -> Tensor:
        parts = torch.broadcast_tensors(*(mask.numbers(mask_batch, mask_heads) for mask in self.masks))
        return numbered(list(zip(*(part.flatten().tolist() for part in parts), strict=True))).view(parts[0].shape)


@dataclass(frozen=True, eq=False, repr=False)
class And(Composite):
    """Kept where every part keeps."""

    def spans(self, first: int, last: int, kv_len: int) -> Spans:
        found: Spans = None
        for mask in self.masks:
            own = mask.spans(first, last, kv_len)
            if own is not None and found is not None:
                pairs = ((max(a, c), min(b, d)) for a, b in found for c, d in own)
                own = [(low, high) for low, high in pairs if low < high]
            found = found if own is None else own
        return found

    def over(self, index: Index) -> Kept:
        return functools.reduce(operator.and_, (mask.over(index) for mask in self.masks))

    def evaluate(self, index: Index) -> Tensor:
        out = self.masks[0].evaluate(index)
        for mask in self.masks[1:]:
            out = out & mask.evaluate(index)
        return out

    def __repr__(self) -> str:
        return " & ".join(f"({m!r})" if isinstance(m, Or) else repr(m) for m in self.masks)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Composite):
    """Kept where any part keeps."""

    def spans(self, first: int, last: int, kv_len: int) -> Spans:
        return joined_spans([mask.spans(first, last, kv_len) for mask in self.masks])

    def over(self, index: Index) -> Kept:
        return functools.reduce(operator.or_, (mask.over(index) for mask in self.masks))

    def evaluate(self, index: Index) -> Tensor:
        out = self.masks[0].evaluate(index)
        for mask in self.masks[1:]:
            out = out | mask.evaluate(index)
        return out

    def __repr__(self) -> str:
        return " | ".join(repr(m) for m in self.masks)


@dataclass(frozen=True, eq=False, repr=False)
class Wrapped(Mask):
    """A mask that changes one other mask; the base of `Not` and `QueryOffset`."""

    mask: Mask

    def check(self, q_len: int, kv_len: int) -> None:
        self.mask.check(q_len, kv_len)

    @property
    def batch(self) -> int:
        return self.mask.batch

    @property
    def heads(self) -> int:
        return self.mask.heads

    @property
    def versions(self) -> tuple[int, ...] | None:
        return self.mask.versions

    @property
    def binds_late(self) -> bool:
        return self.mask.binds_late

    @property
    def grows(self) -> bool:
        return self.mask.grows

    @property
    def row_orders(self) -> tuple[str, ...]:
        return self.mask.row_orders

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        return self.mask.dims(batch, heads, device)

    def numbers(self, mask_batch: int, mask_heads: int) -> Tensor:
        return self.mask.numbers(mask_batch, mask_heads)

    def _operand(self) -> str:
        """The inner mask's repr, in parentheses where a postfix or prefix operator needs them."""
        text = repr(self.mask)
        return f"({text})" if isinstance(self.mask, And | Or) else text


@dataclass(frozen=True, eq=False, repr=False)
class Not(Wrapped):
    """Kept where the inner mask drops."""

    def over(self, index: Index) -> Kept:
        return ~self.mask.over(index)

    def evaluate(self, index: Index) -> Tensor:
        return ~self.mask.evaluate(index)

    def __repr__(self) -> str:
        return f"~{self._operand()}"


@dataclass(frozen=True, eq=False, repr=False)
class QueryOffset(Wrapped):
    """The inner mask with query positions moved by `offset` (tokens already in the KV cache)."""

    offset: int

    def spans(self, first: int, last: int, kv_len: int) -> Spans:
        return self.mask.spans(first + self.offset, last + self.offset, kv_len)

    def over(self, index: Index) -> Kept:
        return self.mask.over(index.shifted(self.offset))

    def check(self, q_len: int, kv_len: int) -> None:
        self.mask.check(q_len + self.offset, kv_len)

    def evaluate(self, index: Index) -> Tensor:
        return self.mask.evaluate(index.shifted(self.offset))

    def __repr__(self) -> str:
        inner = f"({self.mask!r})" if isinstance(self.mask, And | Or | Not) else repr(self.mask)
        return f"{inner}.with_query_offset({self.offset})"


@dataclass(frozen=True, eq=False, repr=False)
class PerHead(Composite):
    """One mask per query head: head `h` uses `masks[h]`."""

    def __post_init__(self) -> None:
        bound = [repr(mask) for mask in self.masks if mask.heads != 1]
        if bound:
            raise MaskError(f"per_head() takes masks that do not depend on the head, got {bound}")
        super().__post_init__()

    @property
    def heads(self) -> int:
        return len(self.masks)

    def spans(self, first: int, last: int, kv_len: int) -> Spans:
        return joined_spans([mask.spans(first, last, kv_len) for mask in dict.fromkeys(self.masks)])

    def over(self, index: Index) -> Kept:
        return self.masks[int(index.h)].over(index)

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        Mask.dims(self, batch, heads, device)
        return max(mask.dims(batch, 1, device)[0] for mask in self.masks), len(self.masks)

    def numbers(self, mask_batch: int, mask_heads: int) -> Tensor:
        if self.binds_late:  # a function may look at the head
            return Mask.numbers(self, mask_batch, mask_heads)
        own = [mask.numbers(mask_batch, 1).expand(self.batch, 1).flatten().tolist() for mask in self.masks]
        pairs = [(mask, column[b]) for b in range(self.batch) for mask, column in zip(self.masks, own, strict=True)]
        return numbered(pairs).view(self.batch, len(self.masks))

    def evaluate(self, index: Index) -> Tensor:
        kept = {mask: mask.evaluate(index) for mask in dict.fromkeys(self.masks)}
        sizes = [(t.shape[0], 1, *t.shape[2:]) for t in kept.values()]
        shape = torch.broadcast_shapes(*sizes, index.q.shape, index.kv.shape)
        rows = []
        for place, h in enumerate(index.h.flatten().tolist()):
            own = kept[self.masks[h]]
            own = own if own.shape[1] == 1 else own[:, place : place + 1]  # a function that looks at the head
            rows.append(own.expand(shape[0], 1, *shape[2:]))
        return torch.cat(rows, dim=1)

    def __repr__(self) -> str:
        return f"per_head([{', '.join(map(repr, self.masks))}])"


_NUMBERS = WeakIdKeyDictionary()
_COUNTER = itertools.count(1)


def identity(value: object) -> int:
    """A number for an object that has no value of its own (a tensor, a function), the same while it lives."""
    try:
        number = _NUMBERS.get(value)
        if number is None:
            number = _NUMBERS.setdefault(value, next(_COUNTER))
    except TypeError:
        raise MaskError(
            f"{type(value).__name__} objects cannot be told apart over time (no weak references); wrap it in a function"
        ) from None
    return int(number)


def find_mask(key: str) -> Mask | None:
    """The living mask with this key."""
    return _ALIVE.get(key)
