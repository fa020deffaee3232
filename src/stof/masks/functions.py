"""Masks made from a user's function `(b, h, q_idx, kv_idx) -> bool`."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stof.errors import MaskError, MaskFunctionError, ShapeError
from stof.masks import translate
from stof.masks.bounds import Interval, TileBounds
from stof.masks.compose import Mask
from stof.masks.elementwise import Record, Traits, record_of, traits_of
from stof.masks.index import Index
from stof.masks.single_calls import Indices, MaskFunction, function_name, shape_of, under_vmap
from stof.masks.snapshots import identity, same_bits
from stof.runtime.memory import in_capture
from stof.runtime.private import past_modes

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

# Scores that are compared with single calls: of 16 rectangles of 5 queries and 6 keys, for up to 2 heads.
_RECTANGLES, _QUERIES, _KEYS = 16, 5, 6
# Queries, and keys, at which a translation is compared with the function.
_COMPARED = 64
# Translations that one mask keeps.
_MOST_TRANSLATIONS = 16


@dataclass
class _Calling:
    """How functions with one code, equal numbers in it and equal operations are called.

    Attributes:
        elementwise: whether to call them on broadcast tensors; else under vmap.
        compared: logarithms of the lengths at which calls on broadcast tensors were compared with single calls.
    """

    elementwise: bool
    compared: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class _Known:
    """What is known of a mask function.

    Attributes:
        code: the function's `__code__` when it was traced; tools that reload modules replace it.
        traits: found by tracing it.
        at: the score it was traced at.
        calling: how it is called on tensors.
        closed_form: whether to run it on ranges.
        compared: as in `calling`, of calls on ranges: bounds of its own tables decide these.
        translated: batch entries, heads and lengths at which a translation was compared with the function.
        read: `_read_by` the function when it was traced.
        copies: of the tensors in `read`; None where it was not told which of the record's tensors they are.
    """

    code: CodeType | None
    traits: Traits
    at: list[Tensor]
    calling: _Calling
    closed_form: bool
    read: _Read | None = None
    copies: list[Tensor] | None = None
    compared: set[tuple[int, int]] = field(default_factory=set)
    translated: set[tuple[int, int, int, int]] = field(default_factory=set)


# By function.
_KNOWN = WeakIdKeyDictionary()
# By code, numbers and operations: functions that differ in their tensors alone are traced as a whole once.
_ALIKE: dict[Any, tuple[Traits, _Calling]] = {}
_MOST_ALIKE = 1024


def forget_functions() -> None:
    """Trace and compare every mask function again at its next use: what it reads may have changed."""
    _KNOWN.clear()
    _ALIKE.clear()


@dataclass(frozen=True, eq=False, repr=False)
class FunctionMask(Mask):
    """A user's `(b, h, q_idx, kv_idx) -> bool` function.

    It means what it returns for single scores. It is called on broadcast index tensors where that is the same, else
    under `torch.vmap`.

    Attributes:
        record: what the function did when the mask was frozen, else None.
        name: part of the key.
    """

    fn: MaskFunction
    q_len: int | None = None
    kv_len: int | None = None
    record: Record | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
        state = "" if self.record is None else f".{self.record.number}"
        if not reads_state(self.fn):  # only another code object changes what it does
            state = f".{identity(self.fn.__code__)} {torch.get_default_dtype()}"
        object.__setattr__(self, "name", f"{name} #{identity(self.fn)}{state}")  # the dataclass is frozen
        super().__post_init__()

    def _reads_others(self) -> bool:
        return self.record is None and reads_state(self.fn)

    def frozen(self) -> Self:
        if not self.may_change:
            return self
        record = current_record(self.fn)
        last: Self | None = self.__dict__.get("_last_frozen")
        if last is None or last.record is not record:
            last = replace(self, record=record)
            object.__setattr__(self, "_last_frozen", last)  # the dataclass is frozen
        return last

    def copies(self) -> list[Tensor]:
        return [] if self.record is None else list(self.record.tensors)

    def changed(self) -> bool:
        if self.record is None or not self.record.operations:  # a function that cannot be traced is planned anew
            return False
        return current_record(self.fn, self.record) is not self.record

    def check(self, q_len: int, kv_len: int) -> None:
        for name, planned, called in (("q_len", self.q_len, q_len), ("kv_len", self.kv_len, kv_len)):
            if planned is not None and planned != called:
                raise ShapeError(f"the mask was made for {name} {planned}, the call has {called}")

    depends_on_sizes = True

    @property
    def depends_on_batch(self) -> bool:
        """Whether the result may depend on the batch entry; True when that cannot be told."""
        return self._uses(0)

    @property
    def depends_on_heads(self) -> bool:
        """Whether the result may depend on the query head; True when that cannot be told."""
        return self._uses(1)

    def _uses(self, index: int, device: torch.device | str = "cpu") -> bool:
        known = _known(self.fn, device)
        return known is None or index in known.traits.used

    def dims(self, batch: int, heads: int, device: torch.device | str = "cpu") -> tuple[int, int]:
        return batch if self._uses(0, device) else 1, heads if self._uses(1, device) else 1

    def tile_bounds(self, index: Index) -> TileBounds:
        try:
            if self._compared(index).closed_form:
                return TileBounds.of(self.fn(index.b, index.h, index.q, index.kv))
        except Exception:  # the function takes tensors only; as a tensor it may be right
            return TileBounds.unknown(index.device)
        return TileBounds.unknown(index.device)

    def evaluate(self, index: Index) -> Tensor:
        known = self._compared(index)
        at = (index.b, index.h, index.q, index.kv)
        with _errors_of(self.fn):
            keep = self.fn(*at) if known.calling.elementwise else under_vmap(self.fn, at, known.traits.elements)
        sizes = shape_of(at)
        fits = keep.ndim <= 4 and all(
            kept in (1, size) for kept, size in zip(reversed(keep.shape), reversed(sizes), strict=False)
        )
        if not fits or keep.dtype != torch.bool:
            raise MaskFunctionError(
                f"the mask function {function_name(self.fn)} returned {keep.dtype} {list(keep.shape)} for "
                f"{list(sizes)} scores, and a bool before; where what it reads changes, pass a new function"
            )
        return keep.view((1,) * (4 - keep.ndim) + tuple(keep.shape))

    def row_orders(self, q_len: int, kv_len: int) -> tuple[str, ...]:
        """Those of the translation for the first batch entry and head."""
        mask = self.translated(0, 0, q_len, kv_len)
        return () if mask is None else mask.row_orders(q_len, kv_len)

    def translated(self, b: int, h: int, q_len: int, kv_len: int) -> Mask | None:
        """The mask of a batch entry and head as tests and tables (`stof.masks.translate`); None where it has no such.

        A frozen mask keeps its translations.

        Raises:
            MaskError: what the function of a frozen mask reads was changed.
        """
        if self.may_change:
            return self._translated(b, h, q_len, kv_len)
        kept: dict[tuple[int, int, int, int], Mask | None] = self.__dict__.setdefault("_translations", {})
        key = (b, h, q_len, kv_len)
        if key in kept:
            return kept[key]
        mask = self._translated(*key)
        if len(kept) >= _MOST_TRANSLATIONS:  # lengths may change in every step
            kept.clear()
        kept[key] = mask
        return mask

    @past_modes
    def _translated(self, b: int, h: int, q_len: int, kv_len: int) -> Mask | None:
        known = _known(self.fn)
        if known is None or not known.calling.elementwise or type(self) is not FunctionMask:  # block masks keep less
            return None
        try:
            mask = translate.translated(self.fn, b, h, q_len, kv_len)
        except translate.NotTranslatableError as error:
            _say_untranslated(getattr(self.fn, "__qualname__", function_name(self.fn)), str(error))
            return None
        self.refuse_changed()  # meanwhile
        if (b, h, q_len, kv_len) not in known.translated:
            tables = known.traits.record.tensors
            places = [table.device for table in tables] or [known.at[0].device]
            device = next((place for place in places if place.type != "cpu"), places[0])
            expected, kept = (
                each.evaluate(_some_scores(b, h, q_len, kv_len, place)).cpu()
                for each, place in ((self, device), (mask, torch.device("cpu")))
            )
            if not torch.equal(*torch.broadcast_tensors(expected, kept)):  # a fault of ours
                _say_untranslated(self.name, f"{mask} keeps other scores; please report this")
                return None
            known.translated.add((b, h, q_len, kv_len))
        return mask

    @past_modes
    def _compared(self, index: Index) -> _Known:
        """What is known of the function, after comparing some random scores with single calls.

        `index` holds tensors or ranges of queries and keys. Scores are compared at first, and again for lengths of
        another power of two.
        """
        known = _known_before(self.fn)
        ranges = isinstance(index.q, Interval)
        key = (index.q_len.bit_length(), index.kv_len.bit_length())
        if known is not None and key in (known.compared if ranges else known.calling.compared):
            return known
        at = _samples(index)
        known = _traced(self.fn, [x.flatten()[0] for x in at])
        with _errors_of(self.fn):
            expected = under_vmap(self.fn, at, known.traits.elements)
        calling = known.calling
        if calling.elementwise and not self._broadcast_agrees(at, expected):
            calling.elementwise = known.closed_form = False
            _warn_slow(self.fn, "another result on broadcast indices")
        if ranges:
            known.closed_form = known.closed_form and calling.elementwise and self._ranges_agree(at, expected)
            known.compared.add(key)
        calling.compared.add(key)
        return known

    def _broadcast_agrees(self, at: Indices, expected: Tensor) -> bool:
        try:
            return torch.equal(self.fn(*at).expand_as(expected), expected)
        except Exception:  # single calls are valid, so this only says that broadcast ones are not
            return False

    def _ranges_agree(self, at: Indices, expected: Tensor) -> bool:
        """Whether what the function says of rectangles, if anything, is true of the scores in them."""
        rows, columns = (Interval(x.amin((2, 3), True), x.amax((2, 3), True)) for x in at[2:])
        try:
            kept = TileBounds.of(self.fn(at[0], at[1], rows, columns))  # type: ignore[arg-type]
        except Exception:  # no closed form
            return False
        return not bool(((kept.empty & expected) | (kept.full & ~expected)).any())

    def __repr__(self) -> str:
        return f"from_function(<{self.name}>)"


def _code_of(fn: MaskFunction) -> CodeType | None:
    return getattr(fn, "__code__", None)


def _known_before(fn: MaskFunction) -> _Known | None:
    """What is known of a function, if it was traced."""
    known: _Known | None = _KNOWN.get(fn)
    if known is not None and known.code is not _code_of(fn):
        _KNOWN.pop(fn, None)
        return None
    return known


def _known(fn: MaskFunction, device: torch.device | str = "cpu") -> _Known | None:
    """What is known of a function, traced at score 0 if nothing is; None where that raises."""
    return _known_before(fn) or _traced_anew(fn, _scores(device))


def _traced_anew(fn: MaskFunction, scores: Iterable[list[Tensor]]) -> _Known | None:
    """Trace a function for the calling thread, at the first of some scores where that works; None if it never does.

    The trace is returned itself: another thread, for which the function does something else, may replace it in
    `_KNOWN` at any time.
    """
    for at in scores:
        with contextlib.suppress(Exception):  # evaluating the function will raise the same error
            _KNOWN[fn] = known = _trace(fn, at)
            return known
    _KNOWN.pop(fn, None)
    return None


def _scores(device: torch.device | str) -> Iterator[list[Tensor]]:
    """Score 0 as indices on a device, and on others: the tensors that a function reads may be there."""
    places = [torch.device(device), torch.device("cpu"), torch.accelerator.current_accelerator(True)]
    for place in dict.fromkeys(places):
        if place is not None:
            yield [torch.zeros((), dtype=torch.int64, device=place)] * 4


def _traced(fn: MaskFunction, at: list[Tensor]) -> _Known:
    """What is known of a function, traced at one score if nothing is."""
    known = _known_before(fn)
    if known is None:
        _KNOWN[fn] = known = _trace(fn, at)
    return known


@past_modes
def _trace(fn: MaskFunction, at: list[Tensor]) -> _Known:
    """Trace a function at one score."""
    read = _read_by(fn)

    def alike(operations: tuple[str, ...]) -> tuple[Traits, _Calling] | None:
        return None if read is None else _ALIKE.get((fn.__code__, read.numbers, operations))

    def traits_alike(operations: tuple[str, ...]) -> Traits | None:
        other = alike(operations)
        return other and other[0]

    with _errors_of(fn):
        traits = traits_of(fn, at, traits_alike)
    elementwise = traits.obstacle is None
    if not elementwise:
        _warn_slow(fn, traits.obstacle or "")
    calling = _Calling(elementwise)
    if read is None or read != _read_by(fn):  # in the latter case another thread changed it meanwhile
        return _Known(_code_of(fn), traits, at, calling, elementwise)
    operations = traits.record.operations
    if len(_ALIKE) >= _MOST_ALIKE:
        _ALIKE.clear()
    without_tensors = replace(traits, record=Record(operations, ()))
    _, calling = _ALIKE.setdefault((fn.__code__, read.numbers, operations), (without_tensors, calling))
    copies: list[Tensor] | None = None
    if not in_capture():  # comparing waits for a GPU
        same = [next((copy for copy in traits.record.tensors if same_bits(x, copy)), None) for x in read.tensors]
        copies = None if None in same else [copy for copy in same if copy is not None]
    return _Known(fn.__code__, traits, at, calling, elementwise, read, copies)


@past_modes
def current_record(fn: MaskFunction, last: Record | None = None) -> Record:
    """What a function does now.

    If it does the same as in `last`, or else as when it was last traced, that record itself is returned, so that
    callers can compare with `is`. During a capture of a CUDA graph nothing is checked: `last` is returned, and the
    owner of the graph checks it afterwards.
    """
    known = _known_before(fn)
    fresh = known is None
    if known is None:
        known = _traced_anew(fn, _scores("cpu"))
    if known is None:
        return Record((), ())  # nobody knows what it does: equal to no other
    present = known.traits.record
    if last is None:
        last = present
        if fresh:
            return present
    if in_capture() or not reads_state(fn):
        return last
    if _reads_the_same(fn, known):
        return last if last is present or _do_the_same(present, last) else present
    record = None
    with contextlib.suppress(Exception):  # it fails at the old score now (a table shrank), and is traced anew
        if (record := record_of(fn, known.at, last)) is last:
            return last
        if _do_the_same(record, known.traits.record):
            return known.traits.record
    trace = _traced_anew(fn, [known.at] if record is not None else _scores(known.at[0].device))
    return Record((), ()) if trace is None else trace.traits.record


def _do_the_same(a: Record, b: Record) -> bool:
    same = a.operations == b.operations and len(a.tensors) == len(b.tensors)
    return same and all(same_bits(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))


def reads_state(fn: MaskFunction) -> bool:
    """Whether a function may read more than its arguments and `torch`: what else it reads may change."""
    state = _state_of(fn)
    return state is None or any(state[1:])


def _reads_the_same(fn: MaskFunction, known: _Known) -> bool:
    """Whether a function can be told to do what it did when it was traced, from what it reads."""
    if known.read is None or known.copies is None:
        return False
    now = _read_by(fn)
    return known.read == now and all(map(same_bits, now.tensors, known.copies))


# The default dtype; then globals, closure variables and defaults, each by its name, type and text.
State = tuple[Any, ...]


def _state_of(fn: MaskFunction) -> State | None:
    """What decides the result of a function besides its arguments and `torch`; None if it may read more than numbers.

    Functions with the same code and the same state do the same.
    """
    read = _read_by(fn)
    return None if read is None or read.tensors else read.numbers


class _Read:
    """What decides the result of a function besides its arguments and `torch`.

    Attributes:
        numbers: as `State`, with tensors by their type alone.
        tensors: those among them, in order.
    """

    def __init__(self, numbers: State, tensors: list[Tensor]) -> None:
        self.numbers, self.tensors = numbers, tensors

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same numbers and the same tensor objects."""
        return (
            isinstance(other, _Read)
            and self.numbers == other.numbers
            and all(map(operator.is_, self.tensors, other.tensors))
        )

    __hash__ = None  # type: ignore[assignment]


def _read_by(fn: MaskFunction) -> _Read | None:
    """What a function reads; None if it may read more than numbers and the values of tensors."""
    if type(fn) is not FunctionType:
        return None
    names = _globals_of(fn.__code__)
    if names is None:
        return None
    variables = fn.__globals__
    read: dict[Any, object] = {}
    for name, attribute in names:
        if name not in variables:
            if name not in _STATELESS or name not in vars(builtins):
                return None
        elif variables[name] is not torch:
            read[name] = variables[name]
        elif not _is_constant(attribute):
            return None
    try:
        cells = {n: cell.cell_contents for n, cell in enumerate(fn.__closure__ or ())}
    except ValueError:  # a variable without a value
        return None
    defaults: dict[Any, object] = {**dict(enumerate(fn.__defaults__ or ())), **(fn.__kwdefaults__ or {})}
    every = [value for values in (read, cells, defaults) for value in values.values()]
    tensors = [value for value in every if type(value) is Tensor]
    if not all(type(value) in _NUMBERS or type(value) is Tensor for value in every):
        return None
    if tensors and (not _attributes_of(fn.__code__) <= _OF_VALUES or any(map(vars, tensors))):
        return None
    texts = (
        tuple([(name, type(value), _text_of(value)) for name, value in values.items()])
        for values in (read, cells, defaults)
    )
    return _Read((torch.get_default_dtype(), *texts), tensors)


def _text_of(value: object) -> str:
    """All of a number; of a tensor what is known without its values."""
    if type(value) is not Tensor:
        return repr(value)
    strides = value.stride() if value.layout == torch.strided and not value.is_nested else ()
    return f"{value.shape} {strides} {value.dtype} {value.device} {value.layout} {value.requires_grad}"


# Attributes that depend on a tensor's values, sizes, dtype and device alone.
_OF_VALUES = {
    "shape", "ndim", "dtype", "device", "size", "dim", "numel", "to", "long", "int", "bool", "float", "abs", "clamp",
    "sum", "any", "all", "min", "max", "amin", "amax", "item", "tolist", "eq", "ne", "lt", "le", "gt", "ge", "where",
    "logical_and", "logical_or", "logical_not", "logical_xor", "unsqueeze", "squeeze", "view", "reshape", "flatten",
}  # fmt: skip


# Types whose values cannot change, and are told by their texts.
_NUMBERS = {bool, int, float, str, type(None)}
# Builtins that always do the same.
_STATELESS = {"abs", "bool", "float", "int", "len", "max", "min", "range", "reversed", "sum", "tuple", "zip"}
# Instructions that read globals and builtins, their attributes, and those that change what the next call reads.
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_STORES = {"STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_NAME", "DELETE_DEREF"}


def _is_constant(attribute: str) -> bool:
    """Whether an attribute of `torch` does the same in every call: an operator, a dtype, or `torch.inf`.

    Operators are static methods of a class: they have no `__self__`. Builtins that read flags have their module.
    """
    value = getattr(torch, attribute, None)
    operator = type(value) is BuiltinFunctionType and value.__self__ is None
    return operator or isinstance(value, torch.dtype) or attribute in ("inf", "nan", "pi", "e")


@functools.lru_cache(maxsize=1024)
def _attributes_of(code: CodeType) -> set[str]:
    """Names of all attributes that a function's code reads, but for those of `torch`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    of_torch = {n + 1 for n, step in enumerate(steps) if step.opname in _LOADS and step.argval == "torch"}
    return {step.argval for n, step in enumerate(steps) if step.opname in _ATTRIBUTES and n not in of_torch}


@functools.lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[tuple[str, str], ...] | None:
    """Names of globals and builtins that a function's code reads; None if it does more than read.

    That is an import, an assignment to a variable that outlives the call, an inner function, or an operator that is not
    PyTorch's own.

    Returns:
        Pairs of a name and the attribute that is read of it, "" if it is read in another way.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    inner = any(isinstance(constant, CodeType) for constant in code.co_consts)
    more = any(step.opname.startswith("IMPORT") or step.opname in _STORES for step in steps)
    if inner or more or code.co_cellvars or {"ops", "_C"} & set(code.co_names):
        return None
    reads = [(step.argval, following) for step, following in itertools.pairwise(steps) if step.opname in _LOADS]
    return tuple(
        {(name, following.argval if following.opname in _ATTRIBUTES else ""): None for name, following in reads}
    )


def _warn_slow(fn: MaskFunction, reason: str) -> None:
    _warn_once(getattr(fn, "__qualname__", function_name(fn)), reason)


@functools.lru_cache(maxsize=256)  # functions are often made anew for each call
def _warn_once(name: str, reason: str) -> None:
    _log.warning(
        "the mask function %s is evaluated score by score under torch.vmap, which is slower (%s); write it with "
        "elementwise operators, and index tables in all their dimensions at once, as in table[b, q_idx]",
        name,
        reason,
    )


@contextmanager
def _errors_of(fn: MaskFunction) -> Iterator[None]:
    """Turn what a mask function raises into a `MaskFunctionError`."""
    try:
        yield
    except MaskFunctionError:
        raise
    except Exception as error:
        raise MaskFunctionError(
            f"the mask function {function_name(fn)} raised {type(error).__name__}: {error}. It is called for single "
            "scores: b, h, q_idx and kv_idx are int64 tensors without dimensions, also under torch.vmap. Combine them "
            "with operators of tensors (& | ~ and torch.where, not and / or / if / int())"
        ) from error


@functools.lru_cache(maxsize=256)
def _say_untranslated(name: str, reason: str) -> None:
    _log.info("the mask function %s has no program for kernels, and is evaluated for all scores (%s)", name, reason)


def _some_scores(b: int, h: int, q_len: int, kv_len: int, device: torch.device) -> Index:
    """Scores of some queries and keys of a batch entry and head."""
    batch, head = (torch.tensor([number], device=device) for number in (b, h))
    q, kv = (_some_positions(n).to(device) for n in (q_len, kv_len))
    return Index.make(q, kv, q_len=q_len, kv_len=kv_len, b=batch, h=head)


def _some_positions(n: int) -> Tensor:
    """Some positions of n, the first and last ones among them."""
    if n <= _COMPARED:
        return torch.arange(n, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0x570F)
    chosen = torch.randint(n, (_COMPARED,), generator=generator, device="cpu")
    chosen[:4] = torch.tensor([0, 1, n - 2, n - 1], device="cpu")
    return chosen


def _samples(index: Index) -> Indices:
    """Indices of some scores, drawn from those of `index`: several rectangles of queries and keys."""
    generator = torch.Generator("cpu").manual_seed(0x570F)

    def chosen(values: Tensor, *shape: int) -> Tensor:
        flat = values.flatten()
        return flat[torch.randint(len(flat), shape, generator=generator, device="cpu").to(flat.device)]

    def positions(values: Tensor | Interval, count: int) -> Tensor:
        if isinstance(values, Tensor):
            return chosen(values, _RECTANGLES, count)
        # Both ends of some ranges, and positions in between.
        which = chosen(torch.arange(values.low.numel(), device=values.device), _RECTANGLES, 1)
        low, high = values.low.flatten()[which], values.high.flatten()[which]
        part = torch.rand(_RECTANGLES, count, generator=generator, dtype=torch.float64, device="cpu")
        part[:, 0], part[:, 1] = 0, 1
        return low + ((high - low) * part.to(low.device)).round().long()

    return (
        chosen(index.b, _RECTANGLES, 1, 1, 1),
        chosen(index.h, 1, 2 if index.h.numel() > 1 else 1, 1, 1),
        positions(index.q, _QUERIES).view(_RECTANGLES, 1, _QUERIES, 1),
        positions(index.kv, _KEYS).view(_RECTANGLES, 1, 1, _KEYS),
    )


def from_function(fn: MaskFunction) -> Mask:
    """A mask from a function `(b, h, q_idx, kv_idx) -> bool tensor`, e.g. FlexAttention's `mask_mod`.

    The function says of one score whether it is kept, given four int64 tensors without dimensions. Functions of
    elementwise operators and of tables indexed in all their dimensions are evaluated fast, on many scores at once; all
    others under `torch.vmap`, which a log message says. Tensors that the function reads must be on the device the plan
    is built on. Each call checks whether the function still does what it did, whatever it reads; a plan keeps what it
    did when the plan was made.

    Raises:
        MaskFunctionError: when evaluated, if the function raises, decides in Python (`if`, `and`, `int()`) on an index,
            or returns something other than one bool in a tensor.
    """
    if not callable(fn):
        raise MaskError(f"from_function() takes a function (b, h, q_idx, kv_idx), got {type(fn).__name__}")
    return FunctionMask(fn)
