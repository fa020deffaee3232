"""How a mask function may be called: on broadcast index tensors, or once for each score under `torch.vmap`.

FlexAttention defines a `mask_mod` by single calls: `b`, `h`, `q_idx` and `kv_idx` are tensors without dimensions, and
the result is one bool. Calling the function once on index tensors that broadcast against each other is much faster, and
gives the same result if every operator works element by element. `traits_of` traces the function to find out.
`single_calls.under_vmap` evaluates any function as it is defined.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stof.errors import MaskFunctionError
from stof.masks.single_calls import DECIDES, Indexing, MaskFunction, check_promotion, check_result, under_vmap
from stof.masks.snapshots import copy_of, same_bits
from stof.runtime.private import DispatchMode, is_mutable, storage_id

_aten = torch.ops.aten
# Operators that are elementwise although PyTorch does not tag them `pointwise`.
_UNTAGGED = {
    _aten._to_copy, _aten.alias, _aten.clone, _aten.detach, _aten.floor_divide, _aten.rsub,
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like,
}  # fmt: skip
# Operators that take from a tensor only its dtype and device.
_NEW = {_aten.new_empty, _aten.new_empty_strided, _aten.new_full, _aten.new_ones, _aten.new_zeros}
# Operators that look each element up in a table of one dimension: positions of the elements and of the table.
_LOOKUPS = {_aten.isin.Tensor_Tensor: (0, 1), _aten.bucketize.Tensor: (0, 1), _aten.searchsorted.Tensor: (1, 0)}
# Operators that are known not to be composite. Inside a custom operator PyTorch passes composite operators, such as
# `__and__`, undecomposed; elsewhere it passes their parts.
_NOT_COMPOSITE: set[Any] = set()


@dataclass(frozen=True, eq=False)
class Record:
    """What a mask function did in a call for one score: functions that do the same compute the same mask.

    Python code of a function sees no values of indices (`_refuse_reads`). So the operators that it runs, their
    constants and the tensors that it reads decide all scores, wherever they come from: closures, globals, attributes.

    Attributes:
        operations: each operator that depends on an index, in order, with its constants.
        tensors: copies of the other tensors that the operators read, in the order of their first use.
        number: names the record in keys of masks; random.
    """

    operations: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    number: int = field(default_factory=lambda: secrets.randbits(60))


@dataclass(frozen=True)
class Traits:
    """What tracing a mask function tells.

    Attributes:
        obstacle: why the function may not be called on broadcast tensors; None if it may.
        used: which of the four indices reach the result, by their positions; may name too many, never too few.
        elements: for each set of indices, the most elements of a tensor in a single call that depends on these; bounds
            the memory of `under_vmap`.
        record: of the single call.
    """

    obstacle: str | None
    used: frozenset[int]
    elements: dict[frozenset[int], int]
    record: Record


def traits_of(
    fn: MaskFunction, at: Sequence[Tensor], alike: Callable[[tuple[str, ...]], Traits | None] = lambda operations: None
) -> Traits:
    """Trace a mask function in a single call, then in a call on broadcast tensors.

    Args:
        fn: the function; what it raises in the single call is raised.
        at: four int64 tensors without dimensions, the score to trace at.
        alike: returns the traits of a function with the same code and the same numbers in it, given the operations of
            its record, if one was traced: they differ in the tensors that they read, on which only the record depends.

    Raises:
        MaskFunctionError: the function returns anything but one bool in a tensor, or reads an index in Python.
    """
    trace, keep = _traced_once(fn, at, None)
    record = trace.record()
    like = alike(record.operations)
    if like is not None:
        return replace(like, record=record)
    _refuse_reads(fn, at, trace.elements)
    obstacle: str | None
    wide = tuple(index.expand([2 if n == d else 1 for d in range(4)]).clone() for n, index in enumerate(at))
    wide_trace = _Trace(wide, broadcast=True)
    try:
        with torch.no_grad(), wide_trace:
            result = fn(*wide)
    except Exception as error:  # single calls are valid, so this only says that broadcast ones are not
        obstacle = wide_trace.obstacle or f"{type(error).__name__} on broadcast indices"
    else:
        obstacle = wide_trace.obstacle
        if obstacle is None and not wide_trace.is_element(result):
            obstacle = f"a result of shape {list(result.shape)} that does not come from the indices"
    return Traits(obstacle, trace.used_by(keep), trace.elements, record)


def record_of(fn: MaskFunction, at: Sequence[Tensor], last: Record) -> Record:
    """The record of a single call; `last` itself if the function did the same."""
    trace, _ = _traced_once(fn, at, last)
    return trace.record()


def _traced_once(fn: MaskFunction, at: Sequence[Tensor], last: Record | None) -> tuple[_Trace, Tensor]:
    single = tuple(index.clone() for index in at)
    trace = _Trace(single, broadcast=False, last=last)
    with torch.no_grad(), trace, Indexing():
        keep = fn(*single)
    check_result(fn, keep)
    trace.note_result(keep)
    return trace, keep


def _refuse_reads(fn: MaskFunction, at: Sequence[Tensor], elements: dict[frozenset[int], int]) -> None:
    """Raise if Python code reads an index: with all four of them batched, `torch.vmap` has no value to give.

    Each is batched as two copies of one position, because others may be invalid for this function.
    """
    twice = [index.expand([2 if n == d else 1 for d in range(4)]) for n, index in enumerate(at)]
    try:
        under_vmap(fn, (twice[0], twice[1], twice[2], twice[3]), elements)
    except MaskFunctionError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"it fails under torch.vmap, where no value of an index decides in Python: {error}"
        ) from error


class _ObstacleError(Exception):
    """An operator that is not elementwise: tracing ends."""


class _Trace(DispatchMode):
    """Follows tensors that depend on the indices through all operators.

    Args:
        indices: the four index tensors.
        broadcast: whether they are broadcast: then stop at the first operator that is not elementwise.
        last: an earlier record, to which the tensors that are read are compared.
    """

    def __init__(self, indices: Sequence[Tensor], broadcast: bool, last: Record | None = None) -> None:
        super().__init__()
        self._last = last
        self._operations: list[str] = []
        self._read: list[Tensor] = []  # copies
        self._read_numbers: dict[int, int] = {}
        self.obstacle: str | None = None
        self.elements: dict[frozenset[int], int] = {}
        self._broadcast = broadcast
        # Indices that tensors depend on, by storage, because views share it; and the number of each storage in records.
        self._used: dict[int, frozenset[int]] = {}
        self._slots: dict[int, int] = {}
        self._held: list[Tensor] = []  # keeps storages and tensors, and so their addresses, in use
        for n, index in enumerate(indices):
            self._note(index, frozenset([n]))
        self._indices = set(self._used)

    def record(self) -> Record:
        """What the function did; `last` if it did the same."""
        last = self._last
        operations, read = tuple(self._operations), tuple(self._read)
        if last is None or last.operations != operations or len(last.tensors) != len(read):
            return Record(operations, read)
        return last if all(map(operator.is_, read, last.tensors)) else Record(operations, read)

    def note_result(self, keep: Tensor) -> None:
        """Record which tensor the function returned."""
        self._operations.append(self._described(keep))

    def _described(self, value: Any) -> str:
        """A text for an argument of an operator; arguments with the same text have the same value.

        `%n` is a tensor of the n-th storage that depends on an index, `^n` the n-th of those read besides.
        """
        if isinstance(value, Tensor):
            strided = _is_strided(value)
            at = f"{tuple(value.shape)}{value.stride()}{value.dtype}" if strided else str(value.layout)
            if self.tracks(value):
                return f"%{self._slots[_storage(value)]}+{value.storage_offset() if strided else 0}{at}"
            return f"^{self._number_of(value)}{at}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(self._described, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{name}={self._described(one)}' for name, one in value.items())}}}"
        return repr(value)

    def _number_of(self, value: Tensor) -> int:
        """The position of a tensor that is read in the list of their copies."""
        number = self._read_numbers.get(id(value))
        if number is None:
            number = self._read_numbers[id(value)] = len(self._read)
            before = () if self._last is None else self._last.tensors[number : number + 1]
            same = [copy for copy in before if same_bits(value, copy)]
            # A sparse tensor never equals its copy.
            self._read.append(same[0] if same else copy_of(value) if _is_strided(value) else value)
            self._held.append(value)
        return number

    def used_by(self, result: Tensor) -> frozenset[int]:
        return self._used.get(_storage(result), frozenset())

    def is_element(self, result: Tensor) -> bool:
        """Whether a tensor of the broadcast call has one value for each score."""
        return result.ndim <= 4 and (self.tracks(result) or result.numel() == 1)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _NOT_COMPOSITE and hasattr(func, "decompose"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            _NOT_COMPOSITE.add(func)
        packet = getattr(func, "overloadpacket", None)
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        tracked = [x for x in tensors if self.tracks(x)]
        if not tracked or packet in _NEW:
            if is_mutable(func):
                self._read_numbers.clear()  # what is read again may have other values
            return func(*args, **kwargs)
        if not self._broadcast:
            if _pointwise(func) or func in _LOOKUPS:
                check_promotion(str(func), tensors, tracked)
            self._operations.append(f"{func}{self._described(args)}{self._described(kwargs) if kwargs else ''}")
            if func.namespace not in ("aten", "prims"):
                raise RuntimeError(
                    f"it calls {func}, which may read more than it is given; use PyTorch's own operators"
                )
            for x in tensors if is_mutable(func) else ():
                if not self.tracks(x) and _is_strided(x):  # all of its memory will depend on an index from now on
                    self._operations.append(self._described(x.new_empty(0).set_(x.untyped_storage())))
        elif not self._elementwise(func, args, kwargs, tensors):
            self.obstacle = str(func)
            raise _ObstacleError
        out = func(*args, **kwargs)
        results = [out] if isinstance(out, Tensor) else list(_leaves(out))
        if not all(isinstance(x, Tensor) for x in results):
            raise RuntimeError(DECIDES)
        # Those two depend on an index's shape alone.
        of_values = packet not in (_aten.zeros_like, _aten.ones_like)
        used = frozenset[int]().union(*(self.used_by(x) for x in tracked)) if of_values else frozenset[int]()
        for x in (*results, *(tensors if is_mutable(func) else ())):
            self._note(x, used | self.used_by(x))
        return out

    def _note(self, x: Tensor, used: frozenset[int]) -> None:
        self._held.append(x)
        self._used[_storage(x)] = used
        self._slots.setdefault(_storage(x), len(self._slots))
        self.elements[used] = max(self.elements.get(used, 1), x.numel())

    def tracks(self, x: Tensor) -> bool:
        """Whether a tensor depends on the indices."""
        return _storage(x) in self._used

    def _elementwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
        """Whether each element of the result is what a single call computes."""
        if func is _aten.index.Tensor:
            return self._table(*args)
        if func in _LOOKUPS:
            values, table = (args[n] for n in _LOOKUPS[func])
            return self.tracks(values) and not self.tracks(table) and table.ndim == 1
        if not _pointwise(func):
            return False
        if is_mutable(func) and ("out" in kwargs or not self.tracks(args[0]) or _storage(args[0]) in self._indices):
            return False
        return all(self.tracks(x) or _single(x) for x in tensors)

    def _table(self, table: Tensor, picks: Sequence[Tensor | None]) -> bool:
        """Whether indexing takes single entries out of a table that does not depend on the indices."""
        return (
            not self.tracks(table)
            and len(picks) == table.ndim
            and all(x is not None and x.dtype in (torch.int64, torch.int32) for x in picks)
            and all(self.tracks(x) or _single(x) for x in picks if x is not None)
        )


def _pointwise(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags and (
        torch.Tag.pointwise in tags or getattr(func, "overloadpacket", None) in _UNTAGGED
    )


def _leaves(value: Any) -> Iterator[Any]:
    """What is in nested lists, tuples and dicts, as operators take it; `pytree` takes twice as long."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _is_strided(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def _storage(x: Tensor) -> int:
    return storage_id(x) if x.layout == torch.strided else id(x)


def _single(x: Tensor) -> bool:
    return x.numel() == 1 and x.ndim <= 4
