"""Mask functions translated to masks of tests and tables, for which kernels have programs (`stof.masks.gpu_program`).

The function is called once, with stand-ins for `q_idx` and `kv_idx` that hold all positions. What depends on queries
alone, or on keys alone, is computed as usual, tables of any form among it. Only what brings queries and keys together
has to be of a known form: a difference of positions (also modulo a constant), or of grid rows or columns, compared with
numbers; entries of one table that are equal or, if the table ascends, in order; entries of a bool table at a block of
queries and a block of keys; and truth values combined.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stof.masks.compose import Mask
from stof.masks.position_tests import UNBOUNDED, ChosenBlocks, Listed, PositionTest
from stof.masks.rules import Causal, Documents, Full
from stof.masks.single_calls import MaskFunction

# Up to this number of runs of tokens, each becomes a test; more are looked up in a table.
_FEW_RUNS = 4
# Limits of block tables: the smallest block in tokens, and the most key blocks listed for one block of queries, each of
# which adds work.
_SMALLEST_BLOCK, _MOST_CHOSEN = 8, 128
# Bytes of a table on a GPU that may be copied to the host.
_LARGEST_TABLE = 2**24
# Stays beyond 32 bits with any constant added.
_INFINITE = 2**62


class NotTranslatableError(Exception):
    """The function does something that has no translation; the message says what."""


def translated(fn: MaskFunction, b: int, h: int, q_len: int, kv_len: int) -> Mask:
    """The mask of a function for one batch entry and head. Nothing runs on a GPU but copies of tables to the host.

    Args:
        fn: a function of elementwise operators and tables (`stof.masks.elementwise`).
        b, h: batch entry and head.
        q_len, kv_len: positions there are.

    Raises:
        NotTranslatableError: the function is of another form, or raises.
    """
    # 1-D, as the positions are: tensors without dimensions follow other rules of type promotion.
    batch, head = torch.tensor([b], device="cpu"), torch.tensor([h], device="cpu")
    q, kv = (_Axis(of_keys, torch.arange(n, device="cpu")) for of_keys, n in ((False, q_len), (True, kv_len)))
    try:
        return _mask(fn(batch, head, q, kv))  # type: ignore[arg-type]
    except NotTranslatableError:
        raise
    except Exception as error:
        raise NotTranslatableError(f"{type(error).__name__}: {error}") from error


class _Value:
    """A stand-in for a tensor that depends on positions."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _applied(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_") and not name.startswith("_"):
            raise NotTranslatableError(f"writes to a tensor in place ({name})")
        function = getattr(Tensor, name)  # raises AttributeError
        if not callable(function):
            raise NotTranslatableError(f"reads .{name} of an index")
        return functools.partial(_applied_method, function, self)

    def __bool__(self) -> bool:
        raise NotTranslatableError("decides in Python")

    __hash__ = None  # type: ignore[assignment]


def _applied_method(function: Callable[..., Any], value: _Value, *args: Any, **kwargs: Any) -> Any:
    return _applied(function, (value, *args), kwargs)


for _dunder in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "truediv", "neg", "abs", "and",
    "rand", "or", "ror", "xor", "rxor", "invert", "lt", "le", "gt", "ge", "eq", "ne", "rshift", "lshift", "pow",
):  # fmt: skip
    _function = getattr(Tensor, f"__{_dunder}__")
    setattr(_Value, f"__{_dunder}__", functools.partialmethod(lambda s, f, *a: _applied(f, (s, *a), {}), _function))


def _in_place(value: _Value, other: object) -> Any:
    raise NotTranslatableError("writes to a tensor in place")


# Without `__iadd__`, `x += y` would bind x to a new object, and other references to the old one would not change.
for _dunder in ("add", "sub", "mul", "floordiv", "mod", "truediv", "and", "or", "xor", "rshift", "lshift", "pow"):
    setattr(_Value, f"__i{_dunder}__", _in_place)


@dataclass(eq=False)
class _Axis(_Value):
    """What depends on queries alone, or on keys alone: its value at each position `[n]`, on the host."""

    of_keys: bool
    values: Tensor

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


@dataclass(eq=False)
class _Sum(_Value):
    """The number `q[i] + kv[j] + constant` of query i and key j; int64, or None where it does not depend on them.

    Attributes:
        most: no `q[i] + kv[j]` is further from 0.
    """

    q: Tensor | None
    kv: Tensor | None
    constant: int
    most: int

    def times(self, factor: int) -> _Sum:
        q, kv = (None if x is None else x * factor for x in (self.q, self.kv))
        return _Sum(q, kv, self.constant * factor, self.most * abs(factor))

    def exact(self) -> _Sum:
        """Return itself; refuse numbers that may not fit in 32 bits, in which the function may compute."""
        if self.most + abs(self.constant) >= 2**30:
            raise NotTranslatableError("arithmetic that 32 bits may not hold")
        return self

    def plus(self, other: _Sum) -> _Sum:
        q, kv = (
            one if two is None else two if one is None else one + two
            for one, two in ((self.q, other.q), (self.kv, other.kv))
        )
        return _Sum(q, kv, self.constant + other.constant, self.most + other.most)

    @functools.cached_property
    def shift(self) -> int | None:
        """The c for which this is `i - j + c`; None if there is none."""
        if self.q is None or self.kv is None:
            return None
        first, second = _offset(self.q), _offset(-self.kv)
        return None if first is None or second is None else first - second + self.constant


@dataclass(eq=False)
class _Absolute(_Value):
    """The absolute value of a sum."""

    of: _Sum


@dataclass(eq=False)
class _Quotient(_Value):
    """A sum divided by `size`, rounded down."""

    of: _Sum
    size: int


@dataclass(eq=False)
class _Remainder(_Value):
    """`(i - j + shift) mod size` of query i and key j."""

    shift: int
    size: int


@dataclass(eq=False)
class _Kept(_Value):
    """A truth value that depends on the query and the key."""

    mask: Mask


_Any: TypeAlias = Any  # a `_Value`, a number or a tensor of one element


def _applied(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function of torch returns for stand-ins."""
    called = getattr(function, "__name__", "")
    if "out" in kwargs or (called.endswith("_") and not called.endswith("__")):
        raise NotTranslatableError("writes to a tensor in place")
    values = [x for x in _leaves((args, kwargs)) if isinstance(x, _Value)]
    if all(isinstance(x, _Axis) and x.of_keys == values[0].of_keys for x in values):
        first = values[0]
        assert isinstance(first, _Axis)
        out = function(*_plain(args), **_plain(kwargs))
        if not isinstance(out, Tensor) or out.shape != first.values.shape:
            raise NotTranslatableError(f"{_name(function)} is not elementwise")
        if out.is_floating_point() and _name(function) not in _EXACT:
            raise NotTranslatableError(
                f"{_name(function)} of floating-point numbers, which a GPU may round differently"
            )
        return _Axis(first.of_keys, out)
    name = _name(function)
    if name == "div" and kwargs == {"rounding_mode": "floor"}:
        name, kwargs = "floor_divide", {}
    if function is Tensor.where:
        args = args[1], args[0], *args[2:]
    if kwargs or name not in _TOGETHER:
        raise NotTranslatableError(f"{name} of queries and keys together")
    return _TOGETHER[name](*args)


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", str(function)).strip("_")
    return _ALIASES.get(name, name)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    return [value]


def _on_host(table: Tensor) -> Tensor:
    """A tensor that a function reads, as it is now: the function may write to it before it reads it again."""
    if table.device.type != "cpu" and table.nbytes > _LARGEST_TABLE:
        raise NotTranslatableError(f"reads a table of more than {_LARGEST_TABLE >> 20} MiB on {table.device}")
    return table.cpu()


def _plain(value: Any) -> Any:
    """The same with tensors on the host in place of stand-ins and of tensors elsewhere."""
    if isinstance(value, _Axis):
        return value.values
    if isinstance(value, Tensor):
        return _on_host(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(one) for one in value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _sum(value: _Any) -> _Sum:
    """A number as a sum."""
    if isinstance(value, _Sum):
        return value
    if isinstance(value, _Axis):
        numbers, most = _exact(value.values)
        return _Sum(None, numbers, 0, most) if value.of_keys else _Sum(numbers, None, 0, most)
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in (torch.int64, torch.int32):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > UNBOUNDED:
        raise NotTranslatableError("arithmetic with something else than integers")
    return _Sum(None, None, value, 0)


def _exact(numbers: Tensor) -> tuple[Tensor, int]:
    """Return numbers as int64 and their largest absolute value; others than integers below 2**29 are refused."""
    if numbers.dtype not in (torch.int64, torch.int32):
        raise NotTranslatableError(f"arithmetic of queries and keys in {numbers.dtype}")
    most = max(int(numbers.max()), -int(numbers.min()))
    if most >= 2**29:
        raise NotTranslatableError("arithmetic with numbers of 2**29 and more")
    return numbers.long(), most


def _offset(numbers: Tensor) -> int | None:
    """The c for which position i has the number i + c; None if there is none."""
    held = numbers.numpy()
    return int(held[0]) if held[-1] - held[0] == len(held) - 1 and (np.diff(held) == 1).all() else None


def _between(value: _Any, low: int, high: int) -> _Value:
    """The mask of `low <= value <= high`."""
    if isinstance(value, _Remainder):
        return _Kept(
            PositionTest("distance_remainder", max(low, 0), min(high, value.size - 1), value.size, value.shift)
        )
    if isinstance(value, _Quotient):
        return _between(value.of, low * value.size, high * value.size + value.size - 1)
    if isinstance(value, _Absolute):
        inside = _truth(_between(value.of, -high, high))
        return _Kept(inside if low <= 0 else inside & ~_truth(_between(value.of, 1 - low, low - 1)))
    total = _sum(value)
    low, high = _bounded(low - total.constant, high - total.constant)
    assert total.q is not None
    assert total.kv is not None
    both = _Sum(total.q, total.kv, 0, total.most)
    if both.shift is None:
        negated = both.times(-1)  # of `j - i`
        if negated.shift is None:
            return _Kept(_of_table(total.q, -total.kv, low, high))
        both, low, high = negated, -high, -low
    shift = both.shift
    assert shift is not None
    if (low - shift, high) == (0, UNBOUNDED):  # `high` was clamped: there is no upper bound
        return _Kept(Causal())
    return _Kept(PositionTest("distance", *_bounded(low - shift, high - shift)))


def _bounded(low: int, high: int) -> tuple[int, int]:
    """Bounds within 32 bits; no number that is tested is larger."""
    return max(-UNBOUNDED, min(UNBOUNDED, low)), max(-UNBOUNDED, min(UNBOUNDED, high))


def _of_table(q: Tensor, kv: Tensor, low: int, high: int) -> Mask:
    """The mask of `low <= table[i] - table[j] <= high`."""
    table, other = (q, kv) if len(q) >= len(kv) else (kv, q)
    if not torch.equal(table[: len(other)], other):
        raise NotTranslatableError("compares a number of the query with another one of the key")
    if (low, high) == (0, 0):
        return _same(table)
    numbers = (table - table[0]).numpy()
    positions = np.arange(len(numbers))
    if (changes := np.diff(numbers).nonzero()[0]).size:
        size = int(changes[0]) + 1
        if np.array_equal(numbers, positions // size):
            return PositionTest("grid_row", low, high, size)
        falls = (np.diff(numbers) < 0).nonzero()[0]
        size = int(falls[0]) + 1 if falls.size else len(numbers)
        if np.array_equal(numbers, positions % size):
            return PositionTest("grid_column", low, high, size)
        if not falls.size and (low, high) in _ORDERED:
            return _ORDERED[low, high](_same(table))
    raise NotTranslatableError("a difference of numbers that are no rows or columns of a grid")


# For a table that ascends, by the bounds `(low, high)` of `table[i] - table[j]`: a function that builds the mask, given
# the mask of `table[i] == table[j]`.
_ORDERED: dict[tuple[int, int], Callable[[Mask], Mask]] = {
    (0, UNBOUNDED): lambda same: Causal() | same,
    (1, UNBOUNDED): lambda same: Causal() & ~same,
    (-UNBOUNDED, 0): lambda same: ~Causal() | same,
    (-UNBOUNDED, -1): lambda same: ~(Causal() | same),
}


def _same(table: Tensor) -> Mask:
    """The mask of `table[i] == table[j]`."""
    numbers = table.numpy()
    # Entries that are distinct within a period are equal where the distance is a multiple of it.
    again = (numbers[1:] == numbers[0]).nonzero()[0]
    period = int(again[0]) + 1 if again.size else len(numbers)
    is_periodic = 1 < period < len(numbers) and np.array_equal(numbers[period:], numbers[:-period])
    if is_periodic and len(np.unique(numbers[:period])) == period:
        return PositionTest("distance_remainder", 0, 0, period)
    starts = np.concatenate([[0], np.diff(numbers).nonzero()[0] + 1])
    ids = np.unique(numbers[starts], return_inverse=True)[1].tolist()
    lengths = np.diff(starts, append=len(numbers)).tolist()
    return Documents((tuple(zip(ids, lengths, strict=True)),))


def _truth(value: _Any) -> Mask:
    """A truth value as a mask."""
    if isinstance(value, _Kept):
        return value.mask
    if isinstance(value, _Axis) and value.dtype == torch.bool:
        return _listed(value.of_keys, value.values.numpy())
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype == torch.bool:
        value = bool(value)
    if not isinstance(value, bool):
        raise NotTranslatableError("a number as a truth value")
    return Full() if value else ~Full()


def _mask(value: object) -> Mask:
    """The result of a function as a mask."""
    if isinstance(value, bool):
        raise NotTranslatableError("returns no tensor")
    return _truth(value)


def _listed(of_keys: bool, held: np.ndarray) -> Mask:
    """The mask of some queries, or keys, by a truth value at each position."""
    if not held.any():
        return ~Full()
    if held.all():
        return Full()
    edges = np.diff(held.astype(np.int8), prepend=0, append=0)
    runs = list(zip(edges.nonzero()[0][::2].tolist(), edges.nonzero()[0][1::2].tolist(), strict=True))
    tested = "key" if of_keys else "query"
    if len(runs) <= _FEW_RUNS:
        tests: list[Mask] = [PositionTest(tested, first, end - 1) for first, end in runs]
        return functools.reduce(operator.or_, tests)
    (first, end), (second, _) = runs[:2]
    period, positions = second - first, np.arange(len(held))
    first, end = first % period, first % period + end - first
    if end <= period and np.array_equal(held, (positions % period >= first) & (positions % period < end)):
        return PositionTest(f"{tested}_remainder", first, end - 1, period)
    return Listed(of_keys, tuple(held.nonzero()[0].tolist()))


def _looked_up(table: _Any, items: _Any) -> _Kept:
    """An entry of a bool table at a block of queries and a block of keys, and at single positions in its other dims."""
    picks = list(items) if isinstance(items, tuple) else [items]
    axes = [pick for pick in picks if isinstance(pick, _Value)]
    is_pair = len(axes) == 2 and all(isinstance(axis, _Axis) for axis in axes)
    if not isinstance(table, Tensor) or table.dtype != torch.bool or len(picks) != table.ndim or not is_pair:
        raise NotTranslatableError("looks up queries and keys together in another form than a bool table of blocks")
    table = _on_host(table)
    dims = [dim for dim, pick in enumerate(picks) if isinstance(pick, _Axis)]
    fixed = [_constant(pick) for pick in picks if not isinstance(pick, _Axis)]  # refuses truth values: they are masks
    chosen = table.movedim(dims, (-2, -1))[tuple(fixed)]
    if axes[0].of_keys:
        chosen, axes = chosen.T, axes[::-1]
    sizes = [_block_size(axis.values) for axis in axes]
    # A single block may be as long as a multiple of the other axis's blocks, which the tables keep then.
    size = math.gcd(*filter(None, sizes)) if any(sizes) else max(len(axis.values) for axis in axes)
    if size < _SMALLEST_BLOCK:
        raise NotTranslatableError(f"a table of blocks of fewer than {_SMALLEST_BLOCK} tokens")
    blocks = [axis.values[::size] for axis in axes]
    chosen = chosen[blocks[0]][:, blocks[1]]
    # The True or the False entries are listed, whichever are fewer in the whole table.
    is_mostly = 2 * int(chosen.sum()) > chosen.numel()
    if int((chosen ^ is_mostly).sum(1).max()) > _MOST_CHOSEN:
        raise NotTranslatableError(
            f"a block table in which a block of queries lists more than {_MOST_CHOSEN} key blocks"
        )
    mask = ChosenBlocks(size, tuple([tuple(row.nonzero()[0].tolist()) for row in (chosen ^ is_mostly).numpy()]))
    return _Kept(~mask if is_mostly else mask)


def _block_size(numbers: Tensor) -> int:
    """The n for which position i has the number `i // n`; 0 where all numbers are 0: there is a single block."""
    held = _exact(numbers)[0].numpy()
    changes = np.diff(held).nonzero()[0]
    size = int(changes[0]) + 1 if changes.size else len(held)
    if not np.array_equal(held, np.arange(len(held)) // size):
        raise NotTranslatableError("looks up in a table of blocks by numbers that are no quotients of positions")
    return size if changes.size else 0


def _constant(value: _Any) -> int:
    number = _sum(value)
    if number.q is not None or number.kv is not None:
        raise NotTranslatableError("a product or quotient of a query and a key")
    return number.constant


def _multiplied(one: _Any, other: _Any) -> _Value:
    number, factor = (one, other) if isinstance(one, _Value) else (other, one)
    return _sum(number).times(_constant(factor)).exact()


def _remainder(value: _Any, size: _Any) -> _Value:
    total, divisor = _sum(value), _constant(size)
    if total.shift is None or divisor < 1:
        raise NotTranslatableError("a remainder of something else than a distance")
    return _Remainder(total.shift, divisor)


def _quotient(value: _Any, size: _Any) -> _Value:
    divisor = _constant(size)
    if divisor < 1:
        raise NotTranslatableError("division by a number below 1")
    return _Quotient(_sum(value), divisor)


def _compared(low: int, high: int) -> Callable[[_Any, _Any], _Value]:
    """Return a function that builds the mask of `low <= one - other <= high`."""

    def compared(one: _Any, other: _Any) -> _Value:
        for value, number, ends in ((one, other, (low, high)), (other, one, (-high, -low))):
            if isinstance(value, (_Absolute, _Remainder, _Quotient)):
                constant = _constant(number)
                return _between(value, ends[0] + constant, ends[1] + constant)
        return _between(_sum(one).plus(_sum(other).times(-1)), low, high)

    return compared


def _is_truth(value: _Any) -> bool:
    return isinstance(value, (_Kept, bool)) or (isinstance(value, (_Axis, Tensor)) and value.dtype == torch.bool)


def _equal(one: _Any, other: _Any) -> _Value:
    if _is_truth(one) and _is_truth(other):
        return _not(_exclusive(one, other))
    if isinstance(one, _Axis) and isinstance(other, _Axis) and one.dtype == other.dtype:  # numbers of any size
        long, short = sorted((one.values, other.values), key=len, reverse=True)
        if not long.is_floating_point() and torch.equal(long[: len(short)], short):
            return _Kept(_same(long))
    return _compared(0, 0)(one, other)


def _not(value: _Any) -> _Kept:
    return _Kept(~_truth(value))


def _exclusive(one: _Any, other: _Any) -> _Kept:
    a, b = _truth(one), _truth(other)
    return _Kept((a & ~b) | (~a & b))


def _chosen(condition: _Any, one: _Any, other: _Any) -> _Kept:
    where, a, b = _truth(condition), _truth(one), _truth(other)
    return _Kept((where & a) | (~where & b))


# Functions whose floating-point results are the same on the host, where they are computed here, and on a GPU.
_EXACT = frozenset((
    "getitem", "add", "sub", "rsub", "mul", "div", "truediv", "rtruediv", "neg", "abs", "to", "float", "double",
    "where", "floor", "ceil", "trunc", "clamp", "minimum", "maximum",
))  # fmt: skip
# Functions of what depends on queries and keys, by name. Python passes the operands of reversed operators swapped.
_TOGETHER: dict[str, Callable[..., _Value]] = {
    "add": lambda one, other: _sum(one).plus(_sum(other)).exact(),
    "sub": lambda one, other: _sum(one).plus(_sum(other).times(-1)).exact(),
    "rsub": lambda one, other: _sum(other).plus(_sum(one).times(-1)).exact(),
    "neg": lambda value: _sum(value).times(-1),
    "mul": _multiplied,
    "abs": lambda value: _Absolute(_sum(value)),
    "remainder": _remainder,
    "floor_divide": _quotient,
    "ge": _compared(0, _INFINITE),
    "gt": _compared(1, _INFINITE),
    "le": _compared(-_INFINITE, 0),
    "lt": _compared(-_INFINITE, -1),
    "eq": _equal,
    "ne": lambda one, other: _not(_equal(one, other)),
    "and": lambda one, other: _Kept(_truth(one) & _truth(other)),
    "or": lambda one, other: _Kept(_truth(one) | _truth(other)),
    "xor": _exclusive,
    "not": _not,
    "where": _chosen,
    "getitem": _looked_up,
}
_ALIASES = {
    "radd": "add", "subtract": "sub", "negative": "neg", "rmul": "mul", "multiply": "mul", "absolute": "abs",
    "mod": "remainder", "floordiv": "floor_divide",
    "greater_equal": "ge", "greater": "gt", "less_equal": "le", "less": "lt", "not_equal": "ne",
    "bitwise_and": "and", "logical_and": "and", "rand": "and", "bitwise_or": "or", "logical_or": "or", "ror": "or",
    "bitwise_xor": "xor", "logical_xor": "xor", "rxor": "xor",
    "invert": "not", "bitwise_not": "not", "logical_not": "not",
}  # fmt: skip
