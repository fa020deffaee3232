"""Closed-form bounds of a mask on whole tiles, by interval arithmetic.

A mask's rule combines positions by arithmetic, comparisons and `& | ~`. Run on `Range`s instead of tensors of
positions, the same code tells for many tiles at once which are certainly empty and which certainly full: `TileBounds`.
Code that looks at single positions (tables, control flow) fails on a range; nothing is known of its tiles then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Number = int | Tensor


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


@dataclass(frozen=True, eq=False)
class Range(_TorchFunctions):
    """Integers from `low` to `high`, both included; int64 tensors that broadcast."""

    low: Tensor
    high: Tensor

    @staticmethod
    def of(value: object) -> Range:
        """A range, or a single number as one."""
        if isinstance(value, Range):
            return value
        if isinstance(value, bool) or not isinstance(value, int | Tensor):
            raise TypeError(f"no range of {type(value).__name__}")
        # A number on the CPU goes with ranges on any device, whichever device is the default one.
        number = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        if number.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"no range of {number.dtype}")
        return Range(number, number)

    @property
    def device(self) -> torch.device:
        return self.low.device

    def __add__(self, other: object) -> Range:
        other = Range.of(other)
        return Range(self.low + other.low, self.high + other.high)

    __radd__ = __add__

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __sub__(self, other: object) -> Range:
        return self + -Range.of(other)

    def __rsub__(self, other: object) -> Range:
        return -self + other

    def __mul__(self, factor: object) -> Range:
        if isinstance(factor, bool) or not isinstance(factor, int):
            raise TypeError("ranges are multiplied by an int")
        a, b = self.low * factor, self.high * factor
        return Range(a, b) if factor >= 0 else Range(b, a)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: object) -> Range:
        size = _positive(divisor)
        return Range(_floor(self.low, size), _floor(self.high, size))

    def __mod__(self, divisor: object) -> Range:
        size = _positive(divisor)
        # Within one period the remainders are a range too; across its end they may be anything.
        within = _floor(self.low, size) == _floor(self.high, size)
        low, high = torch.remainder(self.low, size), torch.remainder(self.high, size)
        return Range(torch.where(within, low, 0), torch.where(within, high, size - 1))

    def __abs__(self) -> Range:
        nearest = torch.maximum(self.low, -self.high).clamp(min=0)
        return Range(nearest, torch.maximum(self.high, -self.low))

    abs = __abs__

    def clamp(self, min: int | None = None, max: int | None = None) -> Range:
        return Range(self.low.clamp(min, max), self.high.clamp(min, max))

    def __le__(self, other: object) -> TileBounds:
        other = Range.of(other)
        return TileBounds(self.low > other.high, self.high <= other.low)

    def __lt__(self, other: object) -> TileBounds:
        other = Range.of(other)
        return TileBounds(self.low >= other.high, self.high < other.low)

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


def _positive(divisor: object) -> int:
    if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
        raise TypeError("ranges are divided by a positive int")
    return divisor


def _floor(value: Tensor, divisor: int) -> Tensor:
    return torch.div(value, divisor, rounding_mode="floor")


def _isin(numbers: Range, values: Tensor) -> TileBounds:
    values = values.unique()  # sorted
    last = torch.searchsorted(values, numbers.high.contiguous(), right=True)
    count = last - torch.searchsorted(values, numbers.low.contiguous())
    return TileBounds(count == 0, count == numbers.high - numbers.low + 1)


def _flipped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison whose range may stand on either side."""
    return lambda a, b: function(Range.of(a), b)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.div: lambda a, b: a // b,
    torch.floor_divide: lambda a, b: a // b,
    torch.remainder: lambda a, b: a % b,
    torch.abs: abs,
    torch.isin: _isin,
    torch.logical_and: lambda a, b: TileBounds.of(a) & b,
    torch.logical_or: lambda a, b: TileBounds.of(a) | b,
    torch.logical_not: lambda a: ~TileBounds.of(a),
    torch.bitwise_and: lambda a, b: TileBounds.of(a) & b,
    torch.bitwise_or: lambda a, b: TileBounds.of(a) | b,
}
for _names, _operation in (
    (("add", "__radd__"), lambda a, b: Range.of(a) + b),
    (("sub", "__sub__"), lambda a, b: Range.of(a) - b),
    (("le", "__le__"), _flipped(lambda a, b: a <= b)),
    (("lt", "__lt__"), _flipped(lambda a, b: a < b)),
    (("ge", "__ge__"), _flipped(lambda a, b: a >= b)),
    (("gt", "__gt__"), _flipped(lambda a, b: a > b)),
    (("eq", "__eq__"), _flipped(lambda a, b: a == b)),
    (("ne", "__ne__"), _flipped(lambda a, b: a != b)),
    (("__and__",), lambda a, b: TileBounds.of(a) & b),
    (("__or__",), lambda a, b: TileBounds.of(a) | b),
    (("__add__",), lambda a, b: Range.of(a) + b),
):
    for _name in _names:
        for _owner in (torch, Tensor):
            if hasattr(_owner, _name):
                _FUNCTIONS[getattr(_owner, _name)] = _operation
