"""Closed-form bounds of a mask on whole tiles, by interval arithmetic.

A mask's rule combines positions by arithmetic, comparisons and `& | ~`. Run on `Interval`s instead of tensors of
positions, the same code tells for many tiles at once which are certainly empty and which certainly full: `TileBounds`.
Tables that are looked up at a range have a range of entries, so masks of documents or padding in tensors are known
where these are constant, or ascend, along a tile. Code that looks at single positions (control flow, floats) fails on a
range; nothing is known of its tiles then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stof.masks.tables import extremes


class _TorchFunctions:
    """Makes the functions of torch that masks use work on ranges and bounds."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if function is torch.div and options.pop("rounding_mode", None) != "floor":
            return NotImplemented
        return NotImplemented if options or function not in _FUNCTIONS else _FUNCTIONS[function](*args)


# Dtypes of tables whose entries have ranges. Those of floats may hold NaN.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Interval(_TorchFunctions):
    """Integers from `low` to `high`, both included; int64 tensors that broadcast.

    Attributes:
        low, high: the ends.
        limits: the smallest number that `low`, and the largest that `high` can be, known without reading them; by
            default those of positions and of distances between them.
        dtype: of the tensor that the range stands for. A rule may compute numbers that it cannot hold, which then wrap
            around: such a range raises `OverflowError`.
    """

    low: Tensor
    high: Tensor
    limits: tuple[int, int] = (-(2**31), 2**31 - 1)
    dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        info = torch.iinfo(self.dtype)
        if self.limits[0] < info.min or self.limits[1] > info.max:
            raise OverflowError(f"numbers from {self.limits[0]} to {self.limits[1]} in {self.dtype}")

    @staticmethod
    def of(value: object) -> Interval:
        """A range, or the numbers of a tensor as ranges of one number each."""
        if isinstance(value, Interval):
            return value
        value = _integers(value)
        return Interval(value, value, (int(value.min()), int(value.max())), value.dtype)

    @property
    def device(self) -> torch.device:
        return self.low.device

    def _number(self, value: object) -> Interval:
        """A number, as PyTorch makes it one of this dtype, as a range."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"no range of {type(value).__name__}")
        # On the CPU it goes with ranges on any device, whichever device is the default one.
        number = torch.tensor(value, device="cpu")
        return Interval(number, number, (value, value), self.dtype)

    def _operand(self, other: object) -> Interval:
        return self._number(other) if isinstance(other, int) else Interval.of(other)

    def _ends(self, other: object) -> tuple[Tensor, Tensor]:
        """Both ends of what this range is compared with; tensors need not be read."""
        if isinstance(other, Tensor):
            return _integers(other), other
        other = self._operand(other)
        return other.low, other.high

    def _divisor(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= torch.iinfo(self.dtype).max:
            raise TypeError("ranges are divided by a positive int")
        return value

    def __add__(self, other: object) -> Interval:
        other = self._operand(other)
        limits = self.limits[0] + other.limits[0], self.limits[1] + other.limits[1]
        dtype = torch.promote_types(self.dtype, other.dtype)
        return Interval(self.low + other.low, self.high + other.high, limits, dtype)

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, (-self.limits[1], -self.limits[0]), self.dtype)

    def __sub__(self, other: object) -> Interval:
        return self + -self._operand(other)

    def __rsub__(self, other: object) -> Interval:
        return -self + other

    def __mul__(self, other: object) -> Interval:
        factor = self._number(other).limits[0]
        a, b = self.low * factor, self.high * factor
        low, high = (limit * factor for limit in self.limits)
        return Interval(a, b, (low, high), self.dtype) if factor >= 0 else Interval(b, a, (high, low), self.dtype)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Interval:
        size = self._divisor(other)
        limits = self.limits[0] // size, self.limits[1] // size
        return Interval(_floor(self.low, size), _floor(self.high, size), limits, self.dtype)

    def __mod__(self, other: object) -> Interval:
        size = self._divisor(other)
        # Within one period the remainders are a range too; across its end they may be anything.
        within = _floor(self.low, size) == _floor(self.high, size)
        low, high = torch.remainder(self.low, size), torch.remainder(self.high, size)
        low, high = torch.where(within, low, 0), torch.where(within, high, size - 1)
        return Interval(low, high, (0, size - 1), self.dtype)

    def __abs__(self) -> Interval:
        nearest = torch.maximum(self.low, -self.high).clamp(min=0)
        low, high = self.limits
        return Interval(nearest, torch.maximum(self.high, -self.low), (0, max(high, -low)), self.dtype)

    abs = __abs__

    def clamp(self, min: int | None = None, max: int | None = None) -> Interval:
        low, high = self.limits
        for bound in (min, max):
            if bound is not None:  # which a range may lie beyond, and then becomes
                number = self._number(bound).limits[0]
                low, high = (number if number < low else low), (number if number > high else high)
        return Interval(self.low.clamp(min, max), self.high.clamp(min, max), (low, high), self.dtype)

    def __le__(self, other: object) -> TileBounds:
        low, high = self._ends(other)
        return TileBounds(self.low > high, self.high <= low)

    def __lt__(self, other: object) -> TileBounds:
        low, high = self._ends(other)
        return TileBounds(self.low >= high, self.high < low)

    def __ge__(self, other: object) -> TileBounds:
        return ~(self < other)

    def __gt__(self, other: object) -> TileBounds:
        return ~(self <= other)

    def __eq__(self, other: object) -> TileBounds:  # type: ignore[override]
        return (self <= other) & (self >= other)

    def __ne__(self, other: object) -> TileBounds:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a range has no truth value")


@dataclass(frozen=True, eq=False)
class TileBounds(_TorchFunctions):
    """Which tiles certainly keep no score, and which certainly keep all; bool, broadcastable."""

    empty: Tensor
    full: Tensor

    @staticmethod
    def unknown(device: torch.device) -> TileBounds:
        """Bounds of tiles that may keep any scores."""
        no = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        return TileBounds(no, no)

    @staticmethod
    def of(value: object) -> TileBounds:
        if isinstance(value, TileBounds):
            return value
        if isinstance(value, bool):
            value = torch.tensor(value, device="cpu")
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            return TileBounds(~value, value)
        raise TypeError(f"{type(value).__name__} is no bound of a tile")

    def __and__(self, other: object) -> TileBounds:
        other = TileBounds.of(other)
        return TileBounds(self.empty | other.empty, self.full & other.full)

    __rand__ = __and__

    def __or__(self, other: object) -> TileBounds:
        other = TileBounds.of(other)
        return TileBounds(self.empty & other.empty, self.full | other.full)

    __ror__ = __or__

    def __invert__(self) -> TileBounds:
        return TileBounds(self.full, self.empty)

    def __eq__(self, other: object) -> TileBounds:  # type: ignore[override]
        other = TileBounds.of(other)
        return (self & other) | (~self & ~other)

    def __ne__(self, other: object) -> TileBounds:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("the bounds of a tile have no truth value")


def bounds_of_blocks(taken: Tensor, q: Interval, kv: Interval) -> TileBounds:
    """Bounds of rectangles of a table of blocks that are taken, bool `[rows, columns]`, by its running sums."""
    sums = torch.nn.functional.pad(taken.cumsum(0, dtype=torch.int32).cumsum(1, dtype=torch.int32), (1, 0, 1, 0))
    inside = sums[q.high + 1, kv.high + 1] - sums[q.low, kv.high + 1] - sums[q.high + 1, kv.low] + sums[q.low, kv.low]
    return TileBounds(inside == 0, inside == (q.high - q.low + 1) * (kv.high - kv.low + 1))


def _integers(value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"no range of {value.dtype if isinstance(value, Tensor) else type(value).__name__}")
    return value


def _floor(value: Tensor, divisor: int) -> Tensor:
    return torch.div(value, divisor, rounding_mode="floor")


def _isin(numbers: Interval, values: Tensor) -> TileBounds:
    values = values.unique()  # sorted
    last = torch.searchsorted(values, numbers.high.contiguous(), right=True)
    count = last - torch.searchsorted(values, numbers.low.contiguous())
    return TileBounds(count == 0, count == numbers.high - numbers.low + 1)


def _entries(table: object, items: Any) -> Interval | TileBounds:
    """What a table holds at ranges of positions in one of its dimensions, and at single ones in the others."""
    picks: list[Any] = list(items) if isinstance(items, tuple) else [items]
    dims = [dim for dim, pick in enumerate(picks) if isinstance(pick, Interval)]
    if not isinstance(table, Tensor) or len(picks) != table.ndim or len(dims) != 1:
        raise TypeError("a range is a position in one dimension of a table, single positions are those in all others")
    (dim,) = dims
    at = picks.pop(dim)
    if at.dtype not in (torch.int64, torch.int32) or int(at.low.min()) < 0 or int(at.high.max()) >= table.shape[dim]:
        raise IndexError("a range of positions that a table does not have, or that count from its end")
    if table.dtype not in (*_INTEGERS, torch.bool):
        raise TypeError(f"no range of {table.dtype}")
    for pick in picks:
        if isinstance(pick, bool) or not isinstance(pick, int):
            _integers(pick)
    rows = table.movedim(dim, -1)[tuple(picks)] if picks else table
    low, high = extremes(rows, at.low, at.high)
    if table.dtype == torch.bool:
        return TileBounds(high == 0, low == 1)
    return Interval(low, high, (int(low.min()), int(high.max())), table.dtype)


def _where(condition: object, one: object, other: object) -> Interval | TileBounds:
    """`one` where the condition certainly holds, `other` where it certainly does not, else both."""
    condition = TileBounds.of(condition)
    ranges = [x for x in (one, other) if isinstance(x, Interval)]
    if not ranges:
        one, other = TileBounds.of(one), TileBounds.of(other)
        return (condition & one) | (~condition & other) | (one & other)
    a, b = (ranges[0]._operand(x) for x in (one, other))
    low = torch.where(condition.empty, b.low, torch.where(condition.full, a.low, torch.minimum(a.low, b.low)))
    high = torch.where(condition.empty, b.high, torch.where(condition.full, a.high, torch.maximum(a.high, b.high)))
    limits = min(a.limits[0], b.limits[0]), max(a.limits[1], b.limits[1])
    return Interval(low, high, limits, torch.promote_types(a.dtype, b.dtype))


def _flipped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison whose range may stand on either side."""
    return lambda a, b: function(Interval.of(a), b)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.div: lambda a, b: a // b,
    torch.floor_divide: lambda a, b: a // b,
    torch.remainder: lambda a, b: a % b,
    torch.abs: abs,
    torch.isin: _isin,
    torch.where: _where,
    Tensor.__getitem__: _entries,
    torch.logical_and: lambda a, b: TileBounds.of(a) & b,
    torch.logical_or: lambda a, b: TileBounds.of(a) | b,
    torch.logical_not: lambda a: ~TileBounds.of(a),
    torch.bitwise_and: lambda a, b: TileBounds.of(a) & b,
    torch.bitwise_or: lambda a, b: TileBounds.of(a) | b,
}
for _names, _operation in (
    (("add", "__radd__"), lambda a, b: Interval.of(a) + b),
    (("sub", "__sub__"), lambda a, b: Interval.of(a) - b),
    (("le", "__le__"), _flipped(lambda a, b: a <= b)),
    (("lt", "__lt__"), _flipped(lambda a, b: a < b)),
    (("ge", "__ge__"), _flipped(lambda a, b: a >= b)),
    (("gt", "__gt__"), _flipped(lambda a, b: a > b)),
    (("eq", "__eq__"), _flipped(lambda a, b: a == b)),
    (("ne", "__ne__"), _flipped(lambda a, b: a != b)),
    (("__and__",), lambda a, b: TileBounds.of(a) & b),
    (("__or__",), lambda a, b: TileBounds.of(a) | b),
    (("__add__",), lambda a, b: Interval.of(a) + b),
):
    for _name in _names:
        for _owner in (torch, Tensor):
            if hasattr(_owner, _name):
                _FUNCTIONS[getattr(_owner, _name)] = _operation
